"""One incarnation of the process that works for a cache's G3 (`server.py`): started, asked, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvtier import errors
from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.tiers.disk.worker import protocol
from kvtier.tiers.protocol import Usage

log = logging.getLogger(__name__)

CANCEL_S = 1.0
"""A cancelled read or write that is not over then ends the process: only that makes its memory safe to use again."""
UNSENT_BYTES_MAX = 8 << 20
"""More than this that the process has not taken yet: what needs no answer is left out."""


class ServerProcess:
    """On the event loop it was started on. All calls that it owes an answer fail with TierError when it has ended, and
    not before: until then it may write to the arena."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        clock: TrustedClock,
        left: Callable[[Sequence[BlockKey]], None],
    ) -> None:
        """Use `start`. Raises OSError."""
        self.usage = Usage(0, 0)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.process = process
        self._writer = writer
        self._clock = clock
        self._left = left
        self._calls = 0
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._bury)
        self._listening = asyncio.create_task(self._listen(reader))

    @classmethod
    async def start(
        cls, arena: Sequence[int], clock: TrustedClock, left: Callable[[Sequence[BlockKey]], None]
    ) -> ServerProcess:
        """A new process over the memory behind the descriptors `arena`. `left` hears which blocks of its tier went for
        others. Raises TierError where no process can be started."""
        try:
            process, sock = _spawn(arena)
            reader, writer = await asyncio.open_connection(sock=sock)
            return cls(process, reader, writer, clock, left)
        except OSError as error:
            raise TierError("g3", "open", f"its process cannot be started: {error}") from None

    async def ask(self, verb: str, *arguments: object, waits: bool = False) -> Any:
        """The answer to a call. A cancelled one is raised at once, with `waits` when nothing of it is under way.

        Raises what the tier raises; TierError if the process ends.
        """
        number, answer = self._post(verb, arguments)
        try:
            return await asyncio.shield(answer) if waits else await answer
        except asyncio.CancelledError:
            self._send(protocol.Cancel(number))
            if waits:
                await self._over(answer)
            raise
        finally:
            if answer.done():
                self._waiting.pop(number, None)

    async def _over(self, answer: asyncio.Future[Any]) -> None:
        """Until a cancelled call is answered for, whoever else cancels."""
        asyncio.get_running_loop().call_later(CANCEL_S, lambda: None if answer.done() else self.kill())
        while not answer.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([answer])
        answer.exception()

    def tell(self, verb: str, *arguments: object) -> None:
        """A call whose answer nobody waits for."""
        if self._writer.transport.get_write_buffer_size() < UNSENT_BYTES_MAX:
            self._post(verb, arguments)

    def _post(self, verb: str, arguments: tuple[object, ...]) -> tuple[int, asyncio.Future[Any]]:
        if self.ended.done():
            raise TierError("g3", verb, "its process has ended")
        self._calls += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._calls] = verb, answer
        self._send(protocol.Call(self._calls, verb, self._clock.read(), protocol.packed(arguments)))
        return self._calls, answer

    def _send(self, order: protocol.Order) -> None:
        if not self._writer.is_closing():
            self._writer.write(protocol.frame(order))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(protocol.reports.decode(await protocol.next_body(reader)))
        except (EOFError, OSError):
            self.kill()
        except Exception:
            log.exception("g3: what its process says is not understood; it is ended")
            self.kill()

    def _take(self, report: protocol.Report) -> None:
        if isinstance(report, protocol.Left):
            self._left(report.keys)
        elif isinstance(report, protocol.Said):
            log.log(report.level, "%s", report.text)
        else:
            verb, answer = self._waiting.get(report.number, ("", None))
            if answer is None or answer.done():
                return
            if isinstance(report, protocol.Refusal):
                _fail(answer, _error(report))
            else:
                answer.set_result(protocol.verbs()[verb].result.decode(report.result))
                self.usage = report.usage or self.usage
            del self._waiting[report.number]

    def kill(self) -> None:
        """End it at once. It has ended when `ended` is done: no thread of it is in the kernel any more."""
        if not self.ended.done():
            self.process.kill()

    async def close(self, timeout_s: float) -> None:
        """Let it close its tier and end, within `timeout_s` if it can, else kill it and wait a moment for that."""
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(errors.KVTierError):
                    await self.ask("close", timeout_s)
                self._listening.cancel()
                self._writer.close()
                await asyncio.shield(self.ended)
        except TimeoutError:
            self.kill()
            await asyncio.wait([self.ended], timeout=CANCEL_S)

    def _bury(self) -> None:
        """The process, and every thread of it, has ended."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.process.wait()
        self._listening.cancel()
        self._writer.close()
        for verb, answer in self._waiting.values():
            if not answer.done():
                _fail(answer, TierError("g3", verb, f"its process ended ({self.process.returncode})"))
        self._waiting.clear()
        self.ended.set_result(None)


def _spawn(arena: Sequence[int]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, and our end of its socket. Raises OSError."""
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as failed:
        life = os.pidfd_open(os.getpid())
        theirs.callback(os.close, life)
        ours, its = socket.socketpair()
        theirs.callback(its.close)
        failed.callback(ours.close)
        fds = (its.fileno(), life, *arena)
        command = [sys.executable, "-P", "-m", "kvtier.tiers.disk.worker.server", *map(str, fds)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=fds)
        failed.pop_all()
        return process, ours


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    answer.set_exception(error)
    answer.exception()  # taken note of: whoever waits hears of it, and perhaps nobody does


def _error(refusal: protocol.Refusal) -> errors.KVTierError:
    kind = getattr(errors, refusal.error, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.KVTierError)):
        kind = TierError
    return kind("g3", refusal.operation, refusal.text) if issubclass(kind, TierError) else kind(refusal.text)
