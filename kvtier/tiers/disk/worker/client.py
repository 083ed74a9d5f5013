"""G3 in a process of its own, over the same arena: what an engine's process keeps of it.

Reading, checking and writing blocks takes the interpreter lock from whoever else computes in the process, a thousand
times a second while blocks are promoted. So a DiskTier works in another process (`server.py`), and this tier
passes its verbs on. If that process ends, what it was asked for is a miss, and another one is started.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.clock import Clock
from kvtier.errors import ClosedError, TierError
from kvtier.events import Notify
from kvtier.identity.keys import BlockKey, Scope
from kvtier.identity.namespace import Namespace
from kvtier.retention.terms import Depth
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.worker import protocol
from kvtier.tiers.disk.worker.process import ServerProcess
from kvtier.tiers.disk.worker.shared_arena import ArenaSpan, Window
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Usage
from kvtier.times import Mono, Wall

log = logging.getLogger(__name__)

OPEN_S = 30.0
RESTART_FIRST_S, RESTART_LAST_S = 0.5, 30.0
HERE_S = 300.0
"""How long a block is believed to be here after it was seen. What this process's tier evicts is known at once; what
another process evicts from the same store is not."""
SEEN_MAX = 100_000


class DiskWorkerClient:
    """A `kvtier.tiers.protocol.Tier` with `Keeping` and `Notebook` for blocks in `arena`'s memory; see
    `kvtier.tiers.disk.tier.DiskTier`, whose arguments it takes. Lives on one event loop; opened when the arena is."""

    name = "g3"
    depth = Depth.G3
    stride = 1

    def __init__(
        self,
        paths: Sequence[Path],
        capacity_bytes: int,
        namespace: Namespace,
        *,
        clock: Clock,
        arena: Arena,
        quota: float = 0.0,
    ) -> None:
        self.block_bytes = namespace.block_bytes
        self._paths = [Path(path) for path in paths]
        self._setup = protocol.WorkerSetup([str(path) for path in paths], capacity_bytes, namespace.fields(), quota)
        self._clock = TrustedClock.around(clock)
        self._arena = arena
        self._window: Window | None = None
        self._pid = 0
        self._server: ServerProcess | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._usage = Usage(0, 0, capacity_bytes)
        self._seen: dict[BlockKey, Mono] = {}  # blocks that are here, oldest sight first → when
        self._told: Notify | None = None

    # Life.

    async def open(self) -> None:
        if self._window is None:
            self._window = Window(self._arena.views())
            self._pid = os.getpid()
            try:
                await self._start()
            except BaseException:
                self._window = None
                raise

    async def _start(self) -> None:
        server = await ServerProcess.start(self._arena.fds(), self._clock, self._left)
        try:
            async with asyncio.timeout(OPEN_S):
                await server.ask("open", self._setup)
        except BaseException as error:
            server.kill()
            await asyncio.wait([server.ended], timeout=RESTART_FIRST_S)
            if isinstance(error, TimeoutError):
                raise TierError("g3", "open", f"its process did not open it within {OPEN_S:.0f} s") from None
            raise
        self._server, self._usage = server, server.usage
        server.ended.add_done_callback(self._lost)

    def _lost(self, _ended: object) -> None:
        """The process is gone, and nobody had asked it to go."""
        server, self._server = self._server, None
        self._seen.clear()
        if self._window is not None and server is not None:
            log.warning("g3: its process ended (%s); another one is started", server.process.returncode)
            self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        wait_s = RESTART_FIRST_S
        while True:
            await self._clock.sleep(wait_s)
            try:
                await self._start()
            except Exception as error:  # whatever it is: G3 misses until it is over
                wait_s = min(2 * wait_s, RESTART_LAST_S)
                log.warning("g3: its process cannot be started again: %s", error)
            else:
                log.warning("g3: in use again")
                return

    async def close(self, deadline: Mono) -> None:
        self._window, server = None, self._server
        self._server = None
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        if server is not None:
            await server.close(self._left_s(deadline))

    def _running(self, verb: str) -> ServerProcess:
        if self._window is None:
            raise ClosedError("g3 is closed")
        if self._pid != os.getpid():
            raise ClosedError("g3 was opened by the process that forked this one; open it after the fork")
        if self._server is None:
            raise TierError("g3", verb, "its process ended and is not started again yet")
        return self._server

    async def _ask(self, verb: str, *arguments: object, waits: bool = False) -> Any:
        server = self._running(verb)
        try:
            return await server.ask(verb, *arguments, waits=waits)
        finally:
            self._usage = server.usage

    def _left_s(self, deadline: Mono) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    # What is known to be here.

    def _see(self, keys: Sequence[BlockKey]) -> None:
        now = self._clock.monotonic()
        for key in keys:
            self._seen.pop(key, None)
            self._seen[key] = now
        while len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    def _unsee(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._seen.pop(key, None)

    def _left(self, keys: Sequence[BlockKey]) -> None:
        self._unsee(keys)
        if self._told is not None:
            self._told(keys, False)

    def subscribe(self, told: Notify | None) -> None:
        """Have `told` hear, on the event loop, which of our blocks left for others that this tier wrote."""
        self._told = told

    # Lookups.

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        """What was seen here lately; of other blocks nothing is known without asking: LATE."""
        self._running("peek")
        since = self._clock.monotonic() - HERE_S
        return [None if self._seen.get(chain[place], since) > since else Miss.LATE for place in wanted]

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        keys = [chain[place] for place in wanted]
        answers: list[Miss | None] = await self._ask("lookup", keys, self._left_s(deadline))
        self._see([key for key, miss in zip(keys, answers, strict=True) if miss is None])
        self._unsee([key for key, miss in zip(keys, answers, strict=True) if miss is not None])
        return answers

    # Bytes.

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        keys = [chain[target.index] for target in targets]
        spans = [self._spans(target.into, "read") for target in targets]
        results: list[Loaded | Miss] = await self._ask("read", keys, spans, self._left_s(deadline), waits=True)
        pairs = list(zip(keys, results, strict=True))
        self._see([key for key, result in pairs if isinstance(result, Loaded)])
        self._unsee([key for key, result in pairs if not isinstance(result, Loaded)])
        return results

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        sent = [
            protocol.Block(b.key, b.index, b.digest, self._spans(b.pieces, "write"), b.life, b.parent, b.priority)
            for b in blocks
        ]
        results: list[Stored] = await self._ask("write", sent, self._left_s(deadline), waits=True)
        self._see([block.key for block, result in zip(blocks, results, strict=True) if result.durable])
        return results

    def _spans(self, pieces: Sequence[memoryview], verb: str) -> list[ArenaSpan]:
        self._running(verb)
        assert self._window is not None
        try:
            return self._window.spans(tuple(pieces))
        except ValueError as error:
            raise TierError("g3", verb, str(error)) from None

    # Everything else.

    def touch(self, keys: Sequence[BlockKey], now: Wall) -> None:
        self._running("touch").tell("touch", keys, now)

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        try:
            return int(await self._ask("evict", keys))
        finally:
            self._seen.clear() if keys is None else self._unsee(keys)

    async def purge(self, scope: Scope, before: Wall) -> int:
        try:
            return int(await self._ask("purge", scope, before))
        finally:
            self._seen.clear()

    async def drop_made_after(self, time: Wall) -> int:
        try:
            return int(await self._ask("drop_made_after", time))
        finally:
            self._seen.clear()

    async def tombstones(self) -> Mapping[Scope, Wall]:
        found: Mapping[Scope, Wall] = await self._ask("tombstones")
        return found

    async def retain(self, keys: Sequence[BlockKey], until: Wall, served: Wall | None = None) -> list[bool]:
        done: list[bool] = await self._ask("retain", keys, until, served)
        return done

    async def release_retained(self, keys: Sequence[BlockKey]) -> None:
        await self._ask("release_retained", keys)

    async def retained(self) -> Mapping[BlockKey, Wall]:
        found: Mapping[BlockKey, Wall] = await self._ask("retained")
        return found

    async def write_note(self, name: str, value: bytes | None) -> None:
        await self._ask("write_note", name, value)

    async def read_notes(self, prefix: str) -> Mapping[str, bytes]:
        found: Mapping[str, bytes] = await self._ask("read_notes", prefix)
        return found

    async def flush(self, deadline: Mono) -> None:
        await self._ask("flush", self._left_s(deadline))

    def usage(self) -> Usage:
        """As of the last answer."""
        return self._usage

    def check(self) -> None:
        """Reads the store as any other process may."""
        self._running("check")
        store = Store.visit(self._paths)
        try:
            store.check()
        finally:
            store.release(OPEN_S)
