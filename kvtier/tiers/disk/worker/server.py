"""A G3 worker process: a DiskTier whose callers are in another process (`client.py`).

    python -P -m kvtier.tiers.disk.worker.server SOCKET PARENT ARENA…      descriptors, inherited

Reading, checking and writing blocks then never takes the interpreter lock of an engine. PARENT is a pidfd of the
cache's process: when that ends, or the socket does, so does this one. It owns its reservations in the store, so a slot
that it may still write to is not taken from it when the cache's process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from kvtier import errors
from kvtier.clock import SystemClock
from kvtier.identity.keys import BlockKey
from kvtier.identity.namespace import Namespace
from kvtier.retention.trusted_clock import RelayedClock
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.worker import protocol
from kvtier.tiers.disk.worker.given_keys import GivenKeys
from kvtier.tiers.disk.worker.shared_arena import ArenaSpan, SharedArena
from kvtier.tiers.protocol import Pieces, Sealed, Target, Usage

CLOSE_S = 5.0
"""For the last flush when the cache's process has ended."""


class Server:
    """Serves one tier over one socket, until the socket ends. On one event loop."""

    def __init__(self, reader: asyncio.StreamReader, send: Callable[[bytes], None], arena: SharedArena) -> None:
        self._reader = reader
        self._send = send
        self._arena = arena
        self._clock = RelayedClock(SystemClock())
        self._tier: DiskTier | None = None
        self._keys = GivenKeys()
        self._tasks: dict[int, asyncio.Task[Any]] = {}

    async def serve(self) -> None:
        """Answer until the cache's process has ended, or has closed its tier."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                request = protocol.requests.decode(await protocol.next_body(self._reader))
                if isinstance(request, protocol.Cancel):
                    if (task := self._tasks.get(request.number)) is not None:
                        task.cancel()
                    continue
                self._clock.set(request.time)
                task = asyncio.create_task(self._do(request.verb, request.arguments))
                self._tasks[request.number] = task
                task.add_done_callback(partial(self._reply, request))
        await self.close()

    async def close(self) -> None:
        """Close the tier, within CLOSE_S."""
        if self._tier is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._tier.close(self._clock.monotonic() + CLOSE_S)

    def _reply(self, call: protocol.Call, done: asyncio.Task[Any]) -> None:
        """Answer a call, however it ended: its caller waits for that before it uses its memory again."""
        del self._tasks[call.number]
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            restarts = dict(self._tier.restarts()) if self._tier is not None else {}
            answer = protocol.Answer(
                call.number, protocol.packed(done.result()), self._usage(), self._counters(), restarts
            )
            try:
                self._send(protocol.frame(answer))
            except errors.TierError as too_long:
                error = too_long
        if error is not None:
            self._send(protocol.frame(_refusal(call, error)))

    async def _do(self, verb: str, packed: msgspec.Raw) -> Any:
        arguments: tuple[Any, ...] = protocol.verbs()[verb].arguments.decode(packed)
        if verb == "open":
            return await self._open(*arguments)
        tier = self._tier
        if tier is None:
            raise errors.ClosedError("g3 is closed")
        if verb in ("lookup", "read", "write", "flush", "close"):
            *rest, left_s = arguments
            deadline = self._clock.monotonic() + left_s
            if rest:
                self._keys.give(rest[-1])
            if verb == "lookup":
                return await tier.lookup(rest[0], range(len(rest[0])), deadline)
            if verb == "read":
                return await tier.read(rest[0], self._targets(rest[1]), deadline)
            if verb == "write":
                return await tier.write(self._sealed(rest[0]), deadline)
            return await getattr(tier, verb)(deadline)
        result = getattr(tier, verb)(*arguments)
        return await result if asyncio.iscoroutine(result) else result

    async def _open(self, setup: protocol.WorkerSetup) -> None:
        namespace = Namespace.parse(setup.namespace)
        paths = [Path(path) for path in setup.paths]
        tier = DiskTier(
            paths, setup.capacity, namespace, clock=self._clock, quota=setup.quota, write_budget=setup.write_budget,
            keys=self._keys if setup.encrypted else None,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        tier.report_to(_Outages(lambda message: loop.call_soon_threadsafe(self._send, message)))
        await tier.open()
        self._tier = tier

        def removed(keys: Sequence[BlockKey], _stored: bool) -> None:
            loop.call_soon_threadsafe(self._send, protocol.frame(protocol.Removed(list(keys))))

        tier.subscribe(removed)

    def _targets(self, spans: Sequence[Sequence[ArenaSpan]]) -> list[Target]:
        return [Target(place, self._arena.pieces(some)) for place, some in enumerate(spans)]

    def _sealed(self, blocks: Sequence[protocol.Block]) -> list[Sealed]:
        return [
            Sealed(b.key, b.index, b.digest, self._readonly(b.spans), b.life, b.parent, b.priority, b.position)
            for b in blocks
        ]

    def _readonly(self, spans: Sequence[ArenaSpan]) -> Pieces:
        return tuple(piece.toreadonly() for piece in self._arena.pieces(spans))

    def _counters(self) -> dict[str, int] | None:
        try:
            return self._tier.counters() if self._tier is not None else None
        except errors.KVTierError:
            return None

    def _usage(self) -> Usage | None:
        try:
            return self._tier.usage() if self._tier is not None else None
        except errors.KVTierError:
            return None


def _refusal(call: protocol.Call, error: BaseException) -> protocol.Refusal:
    if isinstance(error, errors.TierError):
        text = str(error).removeprefix(f"{error.tier}: {error.operation}: ")
        return protocol.Refusal(call.number, type(error).__name__, text, error.operation)
    if isinstance(error, errors.KVTierError):
        return protocol.Refusal(call.number, type(error).__name__, str(error))
    return protocol.Refusal(call.number, "TierError", f"{type(error).__name__}: {error}", call.verb)


class _Outages:
    """Tells the cache's process, from any thread, when a thread of the store keeps failing."""

    def __init__(self, send: Callable[[bytes], object]) -> None:
        self._send = send

    def trip(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._send(protocol.frame(protocol.Outage(reason)))

    def succeeded(self) -> None: ...


class _LogForwarder(logging.Handler):
    """Sends warnings to the cache's process, whose log operators read."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        line = protocol.LogLine(record.levelno, self.format(record))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send, protocol.frame(line))


async def serve(sock: socket.socket, parent: int, arena: SharedArena) -> NoReturn:
    """Serve until the socket ends, or the process behind the pidfd `parent`; then end this one."""
    reader, writer = await asyncio.open_connection(sock=sock)
    logging.getLogger("kvtier").addHandler(_LogForwarder(writer.write))
    loop = asyncio.get_running_loop()

    def orphaned() -> None:
        loop.remove_reader(parent)
        reader.feed_eof()

    loop.add_reader(parent, orphaned)
    await Server(reader, writer.write, arena).serve()
    os._exit(0)  # a thread that is stuck in the device would keep the interpreter


def main() -> None:
    # A terminal's and a supervisor's signals reach the whole group: the cache ends this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock, parent, *fds = map(int, sys.argv[1:])
    Path("/proc/self/comm").write_text("kvtier-g3")
    arena = SharedArena.map(fds)
    for fd in fds:
        os.close(fd)
    gc.freeze()  # looking through all modules takes a dozen milliseconds, in whatever thread, and below the write lock
    asyncio.run(serve(socket.socket(fileno=sock), parent, arena))


if __name__ == "__main__":
    main()
