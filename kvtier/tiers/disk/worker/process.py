"""One G3 worker process (`server.py`), as the cache's process has it: started, asked, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtier import errors
from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.supervisor import Service
from kvtier.tiers.disk.worker import protocol
from kvtier.tiers.protocol import Usage

log = logging.getLogger(__name__)

CANCEL_S = 1.0
"""After so long a cancelled read or write ends the process: only that makes its memory safe to use again."""
UNSENT_BYTES_MAX = 8 << 20
"""Beyond this in the socket's buffer, calls without an answer are dropped."""


class WorkerProcess:
    """Used on the event loop it was started on. Unanswered calls fail with TierError when it has ended, and not before:
    until then it may write to the arena."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        clock: TrustedClock,
        removed: Callable[[Sequence[BlockKey]], None],
        service: Service,
    ) -> None:
        """Use `start`. Raises OSError."""
        self.usage = Usage(0, 0)
        self.counters: dict[str, int] = {}
        self.restarts: Mapping[str, int] = {}
        """Of its threads, as of the last answer."""
        self._service = service
        self._closing = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.process = process
        self._writer = writer
        self._clock = clock
        self._removed = removed
        self._calls = 0
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)
        self._listening = asyncio.create_task(self._listen(reader))

    @classmethod
    async def start(
        cls,
        arena: Sequence[int],
        clock: TrustedClock,
        removed: Callable[[Sequence[BlockKey]], None],
        service: Service,
    ) -> WorkerProcess:
        """A new process over the memory behind the descriptors `arena`. `removed` is called with blocks that its tier
        took out, `service` hears of a thread of it that keeps failing. Raises TierError where no process can be
        started."""
        try:
            process, sock = _spawn(arena)
            reader, writer = await asyncio.open_connection(sock=sock)
            return cls(process, reader, writer, clock, removed, service)
        except OSError as error:
            raise TierError("g3", "open", f"its process cannot be started: {error}") from None

    async def ask(self, verb: str, *arguments: object, waits: bool = False) -> Any:
        """The answer to a call. A cancellation is raised at once; with `waits`, once nothing of the call is under way.

        Raises what the tier raises; TierError if the process ends.
        """
        number, answer = self._post(verb, arguments)
        try:
            return await asyncio.shield(answer) if waits else await answer
        except asyncio.CancelledError:
            self._write(protocol.frame(protocol.Cancel(number)))
            if waits:
                await self._over(answer)
            raise
        finally:
            if answer.done():
                self._waiting.pop(number, None)

    async def _over(self, answer: asyncio.Future[Any]) -> None:
        """Until a cancelled call is answered, however often the caller is cancelled again."""
        asyncio.get_running_loop().call_later(CANCEL_S, lambda: None if answer.done() else self.kill())
        while not answer.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([answer])
        answer.exception()

    def send(self, verb: str, *arguments: object) -> None:
        """A call whose answer is not awaited. Dropped if the process has not taken UNSENT_BYTES_MAX yet."""
        if self._writer.transport.get_write_buffer_size() < UNSENT_BYTES_MAX:
            self._post(verb, arguments)

    def _post(self, verb: str, arguments: tuple[object, ...]) -> tuple[int, asyncio.Future[Any]]:
        if self.ended.done():
            raise TierError("g3", verb, "its process has ended")
        self._calls += 1
        call = protocol.frame(protocol.Call(self._calls, verb, self._clock.read(), protocol.packed(arguments)))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._calls] = verb, answer
        self._write(call)
        return self._calls, answer

    def _write(self, framed: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(framed)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Take its messages, for ever. Without this nobody would hear of an answer: then the process is ended."""
        try:
            while True:
                self._take(protocol.replies.decode(await protocol.next_body(reader)))
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("g3: a message of its process is not understood; it is ended")
        finally:
            if not self._closing:
                self.kill()

    def _take(self, reply: protocol.Reply) -> None:
        if isinstance(reply, protocol.Removed):
            self._removed(reply.keys)
        elif isinstance(reply, protocol.Outage):
            self._service.trip(reply.reason)
        elif isinstance(reply, protocol.LogLine):
            log.log(reply.level, "%s", reply.text)
        else:
            verb, answer = self._waiting.get(reply.number, ("", None))
            if answer is None or answer.done():
                return
            if isinstance(reply, protocol.Refusal):
                _fail(answer, _error(reply))
            else:
                answer.set_result(protocol.verbs()[verb].result.decode(reply.result))
                self.usage = reply.usage or self.usage
                self.counters = reply.counters or self.counters
                self.restarts = reply.restarts
            del self._waiting[reply.number]

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
                self._closing = True
                self._listening.cancel()
                self._writer.close()
                await asyncio.shield(self.ended)
        except TimeoutError:
            self.kill()
            await asyncio.wait([self.ended], timeout=CANCEL_S)

    def _on_exit(self) -> None:
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
        parent = os.pidfd_open(os.getpid())
        theirs.callback(os.close, parent)
        ours, its = socket.socketpair()
        theirs.callback(its.close)
        failed.callback(ours.close)
        fds = (its.fileno(), parent, *arena)
        command = [sys.executable, "-P", "-m", "kvtier.tiers.disk.worker.server", *map(str, fds)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=fds)
        failed.pop_all()
        return process, ours


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    answer.set_exception(error)
    answer.exception()  # marks it as retrieved: its caller may have been cancelled


def _error(refusal: protocol.Refusal) -> errors.KVTierError:
    kind = getattr(errors, refusal.error, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.KVTierError)):
        kind = TierError
    return kind("g3", refusal.operation, refusal.text) if issubclass(kind, TierError) else kind(refusal.text)
