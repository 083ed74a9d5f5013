"""The process that works for a cache's G3: a DiskTier whose callers are in another process (`client.py`).

    python -P -m kvtier.tiers.disk.worker.server SOCKET LIFE ARENA…      descriptors, inherited

What reads, checks and writes blocks then never takes the interpreter lock of an engine. LIFE is a pidfd of the cache's
process: when that ends, or the socket does, so does this one. It owns its reservations in the store, so that nobody
takes a slot that it may still write to, whatever became of the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from kvtier.tiers.disk.worker.shared_arena import ArenaSpan, Window
from kvtier.tiers.protocol import Sealed, Target, Usage

CLOSE_S = 5.0
"""For the last flush when the cache's process is gone."""


class Server:
    """Serves one tier over one socket until that ends. On one event loop."""

    def __init__(self, reader: asyncio.StreamReader, send: Callable[[bytes], None], window: Window) -> None:
        self._reader = reader
        self._send = send
        self._window = window
        self._clock = RelayedClock(SystemClock())
        self._tier: DiskTier | None = None
        self._tasks: dict[int, asyncio.Task[Any]] = {}

    async def serve(self) -> None:
        """Answer until the cache is gone, or has closed its tier."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                order = protocol.orders.decode(await protocol.next_body(self._reader))
                if isinstance(order, protocol.Cancel):
                    if (task := self._tasks.get(order.number)) is not None:
                        task.cancel()
                    continue
                self._clock.set(order.time)
                task = asyncio.create_task(self._do(order.verb, order.arguments))
                self._tasks[order.number] = task
                task.add_done_callback(partial(self._report, order))
        await self.close()

    async def close(self) -> None:
        """Let go of the store as far as CLOSE_S allows."""
        if self._tier is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._tier.close(self._clock.monotonic() + CLOSE_S)

    def _report(self, call: protocol.Call, done: asyncio.Task[Any]) -> None:
        """Every call is answered, however it ended: its caller waits for that before it uses its memory again."""
        del self._tasks[call.number]
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        report: protocol.Report
        if error is None:
            report = protocol.Answer(call.number, protocol.packed(done.result()), self._usage())
        elif isinstance(error, errors.TierError):
            text = str(error).removeprefix(f"{error.tier}: {error.operation}: ")
            report = protocol.Refusal(call.number, type(error).__name__, text, error.operation)
        elif isinstance(error, errors.KVTierError):
            report = protocol.Refusal(call.number, type(error).__name__, str(error))
        else:
            report = protocol.Refusal(call.number, "TierError", f"{type(error).__name__}: {error}", call.verb)
        self._send(protocol.frame(report))

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
        tier = DiskTier(paths, setup.capacity, namespace, clock=self._clock, quota=setup.quota)
        await tier.open()
        self._tier = tier
        loop = asyncio.get_running_loop()

        def left(keys: Sequence[BlockKey], _stored: bool) -> None:
            loop.call_soon_threadsafe(self._send, protocol.frame(protocol.Left(list(keys))))

        tier.subscribe(left)

    def _targets(self, spans: Sequence[Sequence[ArenaSpan]]) -> list[Target]:
        return [Target(place, self._window.pieces(some)) for place, some in enumerate(spans)]

    def _sealed(self, blocks: Sequence[protocol.Block]) -> list[Sealed]:
        return [
            Sealed(
                block.key,
                block.index,
                block.digest,
                tuple(piece.toreadonly() for piece in self._window.pieces(block.spans)),
                block.life,
                block.parent,
                block.priority,
            )
            for block in blocks
        ]

    def _usage(self) -> Usage | None:
        try:
            return self._tier.usage() if self._tier is not None else None
        except errors.KVTierError:
            return None


class _Telling(logging.Handler):
    """Hands what is to be known by operators to the process whose log they read."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        said = protocol.Said(record.levelno, self.format(record))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send, protocol.frame(said))


async def serve(sock: socket.socket, life: int, window: Window) -> NoReturn:
    """Serve until the socket ends, or the process behind the pidfd `life`; then end this one."""
    reader, writer = await asyncio.open_connection(sock=sock)
    logging.getLogger("kvtier").addHandler(_Telling(writer.write))
    loop = asyncio.get_running_loop()

    def orphaned() -> None:
        loop.remove_reader(life)
        reader.feed_eof()

    loop.add_reader(life, orphaned)
    await Server(reader, writer.write, window).serve()
    os._exit(0)  # a thread that is stuck in the device would keep the interpreter


def main() -> None:
    # A terminal's and a supervisor's signals reach the whole group: the cache decides when this process is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock, life, *arena = map(int, sys.argv[1:])
    Path("/proc/self/comm").write_text("kvtier-g3")
    window = Window.map(arena)
    for fd in arena:
        os.close(fd)
    asyncio.run(serve(socket.socket(fileno=sock), life, window))


if __name__ == "__main__":
    main()
