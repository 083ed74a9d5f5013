"""G3 in a worker process, over the same arena: the tier that an engine's process has.

Reading, checking and writing blocks takes the interpreter lock from the threads that compute, a thousand times a second
while blocks are promoted. So a DiskTier works in another process (`server.py`), and this tier passes its verbs on. If
that process ends, its unanswered calls are misses, and another one is started.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtier.clock import Clock
from kvtier.encryption import DataKey
from kvtier.errors import ClosedError, TierError
from kvtier.events import Notify
from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.identity.namespace import Namespace
from kvtier.retention.terms import Depth
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.supervisor import Service, Supervisor, Unwatched
from kvtier.tiers.data_keys import DataKeys, load, obtain
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.worker import protocol
from kvtier.tiers.disk.worker.process import WorkerProcess
from kvtier.tiers.disk.worker.shared_arena import ArenaSpan, MappableArena, SharedArena
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Usage
from kvtier.times import Mono, Wall

log = logging.getLogger(__name__)

OPEN_S = 30.0
END_S = 0.5
"""How long a process that did not open the store is waited for, once it was told to end."""
SEEN_S = 300.0
"""How long a block is taken to be here after it was seen. Evictions by this process's tier are known at once; those by
another process on the same store are not."""
SEEN_MAX = 100_000


class DiskWorkerClient:
    """A `kvtier.tiers.protocol.Tier` with `Retaining`, `Notebook` and `Describing` for blocks in `arena`'s memory; its
    arguments are those of `kvtier.tiers.disk.tier.DiskTier`. Used on one event loop; opened after the arena."""

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
        arena: MappableArena,
        quota: float = 0.0,
        write_budget: float = 0.0,
        keys: DataKeys | None = None,
    ) -> None:
        self.block_bytes = namespace.block_bytes
        self._paths = [Path(path) for path in paths]
        self._setup = protocol.WorkerSetup(
            [str(path) for path in paths], capacity_bytes, namespace.fields(), quota, write_budget, keys is not None
        )
        self._keys = keys
        self._clock = TrustedClock.around(clock)
        self._arena = arena
        self._shared: SharedArena | None = None
        self._pid = 0
        self._worker: WorkerProcess | None = None
        self._service: Service = Unwatched()
        self._supervisor = Supervisor(self._clock)
        self._ended_restarts: Counter[str] = Counter()  # of the threads of processes that have ended
        self._usage = Usage(0, 0, capacity_bytes)
        self._counters: dict[str, int] = {}
        self._seen: dict[BlockKey, Mono] = {}  # when blocks were seen here, oldest first
        self._notify: Notify | None = None

    # Life.

    async def open(self) -> None:
        if self._shared is None:
            self._shared = SharedArena(self._arena.views(page_locked=False))
            self._pid = os.getpid()
            try:
                await self._start()
            except BaseException:
                self._shared = None
                raise
            self._supervisor.start("g3 process", self._run, self._service)

    async def _run(self) -> None:
        """Have a process, for ever. Raises TierError when it has ended, so that another one is started."""
        if self._worker is None:
            await self._start()
            log.warning("g3: in use again")
        worker = self._worker
        assert worker is not None
        await asyncio.shield(worker.ended)
        raise TierError("g3", "process", f"it ended ({worker.process.returncode})")

    def report_to(self, service: Service) -> None:
        """Tell `service`, on the event loop, when the process keeps ending, or a thread of it failing. Call it before
        `open`."""
        self._service = service

    def restarts(self) -> Mapping[str, int]:
        """How often another process was started, and how often threads of them failed and went on."""
        now = self._worker.restarts if self._worker is not None else {}
        return self._supervisor.restarts + self._ended_restarts + Counter(now)

    async def _start(self) -> None:
        worker = await WorkerProcess.start(
            self._arena.fds(page_locked=False), self._clock, self._removed, self._service
        )
        try:
            async with asyncio.timeout(OPEN_S):
                await worker.ask("open", self._setup)
        except BaseException as error:
            worker.kill()
            await asyncio.wait([worker.ended], timeout=END_S)
            if isinstance(error, TimeoutError):
                raise TierError("g3", "open", f"its process did not open it within {OPEN_S:.0f} s") from None
            raise
        self._worker, self._usage = worker, worker.usage
        worker.ended.add_done_callback(self._lost)

    def _lost(self, _ended: object) -> None:
        """The process has ended, perhaps without being asked to."""
        worker, self._worker = self._worker, None
        self._seen.clear()
        if worker is not None:
            self._ended_restarts.update(worker.restarts)

    async def close(self, deadline: Mono) -> None:
        self._shared = None
        try:
            await self._supervisor.close(deadline)
            if self._worker is not None:
                await self._worker.close(self._left_s(deadline))
        finally:
            if self._worker is not None:  # else it has ended
                self._worker.kill()
            self._worker = None

    def _running(self, verb: str) -> WorkerProcess:
        if self._shared is None:
            raise ClosedError("g3 is closed")
        if self._pid != os.getpid():
            raise ClosedError("g3 was opened by the process that forked this one; open it after the fork")
        if self._worker is None:
            raise TierError("g3", verb, "its process ended and is not started again yet")
        return self._worker

    async def _ask(self, verb: str, *arguments: object, waits: bool = False) -> Any:
        worker = self._running(verb)
        try:
            return await worker.ask(verb, *arguments, waits=waits)
        finally:
            self._usage, self._counters = worker.usage, worker.counters

    def _left_s(self, deadline: Mono) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    # Blocks seen here.

    def _see(self, keys: Sequence[BlockKey], here: Iterable[bool]) -> None:
        mono_s = self._clock.monotonic()
        for key, is_here in zip(keys, here, strict=True):
            self._seen.pop(key, None)
            if is_here:
                self._seen[key] = mono_s
        while len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    def _removed(self, keys: Sequence[BlockKey]) -> None:
        self._see(keys, [False] * len(keys))
        if self._notify is not None:
            self._notify(keys, False)

    def subscribe(self, notify: Notify | None) -> None:
        """Have `notify` called, on the event loop, with our blocks that the tier took out, for any reason."""
        self._notify = notify

    # Lookups.

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        """None for blocks seen here within SEEN_S; LATE for the rest, which only the worker knows."""
        self._running("peek")
        since = self._clock.monotonic() - SEEN_S
        return [None if self._seen.get(chain[place], since) > since else Miss.LATE for place in wanted]

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        keys = [chain[place] for place in wanted]
        given = await self._given(keys, deadline)
        answers: list[Miss | None] = await self._ask("lookup", keys, given, self._left_s(deadline))
        self._see(keys, [miss is None for miss in answers])
        return answers

    # Bytes.

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        keys = [chain[target.index] for target in targets]
        spans = [self._spans(target.into, "read") for target in targets]
        given = await self._given(keys, deadline)
        results: list[Loaded | Miss] = await self._ask("read", keys, spans, given, self._left_s(deadline), waits=True)
        self._see(keys, [isinstance(result, Loaded) for result in results])
        return results

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        sent = [
            protocol.Block(
                b.key, b.index, b.digest, self._spans(b.pieces, "write"), b.life, b.parent, b.priority, b.position
            )
            for b in blocks
        ]
        given = await self._given([block.key for block in blocks], deadline, made=True)
        results: list[Stored] = await self._ask("write", sent, given, self._left_s(deadline), waits=True)
        durable = [block.key for block, result in zip(blocks, results, strict=True) if result.durable]
        self._see(durable, [True] * len(durable))
        return results

    async def _given(self, keys: Sequence[BlockKey], deadline: Mono, *, made: bool = False) -> list[protocol.GivenKey]:
        """The data keys of these blocks' tenants, for the worker; `made` where there is none. Raises TierError."""
        if self._keys is None:
            return []
        scopes, left_s = {scope_of_key(key) for key in keys}, self._left_s(deadline)
        found: Mapping[Scope, DataKey | Miss]
        found = await obtain(self._keys, scopes, left_s) if made else await load(self._keys, scopes, left_s)
        return [
            protocol.GivenKey(scope, key.secret, key.created)
            if isinstance(key, DataKey)
            else protocol.GivenKey(scope, b"", 0.0, key)
            for scope, key in found.items()
        ]

    def _spans(self, pieces: Sequence[memoryview], verb: str) -> list[ArenaSpan]:
        self._running(verb)
        assert self._shared is not None
        try:
            return self._shared.spans(tuple(pieces))
        except ValueError as error:
            raise TierError("g3", verb, str(error)) from None

    # Everything else.

    def touch(self, keys: Sequence[BlockKey], wall_s: Wall) -> None:
        self._running("touch").send("touch", keys, wall_s)

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        try:
            return int(await self._ask("evict", keys))
        finally:
            self._seen.clear() if keys is None else self._see(keys, [False] * len(keys))

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

    async def release_retained(self, keys: Sequence[BlockKey], untils: Sequence[Wall] | None = None) -> None:
        await self._ask("release_retained", keys, untils)

    async def retained(self) -> Mapping[BlockKey, Wall]:
        found: Mapping[BlockKey, Wall] = await self._ask("retained")
        return found

    async def write_note(self, name: str, value: bytes | None) -> None:
        await self._ask("write_note", name, value)

    async def read_notes(self, prefix: str) -> Mapping[str, bytes]:
        found: Mapping[str, bytes] = await self._ask("read_notes", prefix)
        return found

    async def write_contents(
        self, number: int, parts: Sequence[bytes], purges: int
    ) -> tuple[int, int, list[bytes] | None]:
        written: tuple[int, int, list[bytes] | None] = await self._ask("write_contents", number, parts, purges)
        return written

    async def read_contents(self, below: int) -> tuple[int, list[bytes]]:
        found: tuple[int, list[bytes]] = await self._ask("read_contents", below)
        return found

    async def flush(self, deadline: Mono) -> None:
        await self._ask("flush", self._left_s(deadline))

    async def resize(self, capacity_bytes: int, write_budget: float) -> bool:
        self._setup = msgspec.structs.replace(self._setup, capacity=capacity_bytes, write_budget=write_budget)
        return bool(await self._ask("resize", capacity_bytes, write_budget))

    def usage(self) -> Usage:
        """As of the last answer."""
        return self._usage

    def counters(self) -> dict[str, int]:
        """Those of the tier in the present process, as of the last answer."""
        return dict(self._counters)

    def check(self) -> None:
        """Opens the store in this process, as any other process may."""
        self._running("check")
        store = Store.visit(self._paths)
        try:
            store.check()
        finally:
            store.release(OPEN_S)
