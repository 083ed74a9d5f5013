"""G3: blocks on local disks, in slab segments under an LMDB index.

    write    reserve slots (transaction 1, evicting the coldest) → pwritev → fdatasync → publish (transaction 2)
    read     entry (read transaction, ended) → preadv into the caller's memory → length, name, digest

The order of a write means that whatever stops the machine in between leaves either no entry or a whole block,
and that no slot is overwritten before the commit that took it from its old block. What a read finds damaged
is looked up once more by the writer: if the entry is another one by now the read was overtaken (RACED), else
exactly that entry is deleted (CORRUPT).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from kvtier.clock import Clock
from kvtier.errors import ClosedError, ConfigError, TierError, TierFull, TierTimeout
from kvtier.events import Notify
from kvtier.identity.keys import SCOPE_BYTES, BlockKey, Scope
from kvtier.identity.namespace import Namespace
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Depth
from kvtier.retention.trusted_clock import deletion_time
from kvtier.tiers.disk.group_commit import CommitJob
from kvtier.tiers.disk.read import ReadBatch, by_scope, why_not
from kvtier.tiers.disk.records import SLOT_ALIGN, SPAN, SlotReservation, slot_class
from kvtier.tiers.disk.slab import Calls, SystemCalls
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.touches import NAMES_MAX, NAMES_PER_COMMIT_MAX
from kvtier.tiers.disk.write import WriteBatch
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Usage

T = TypeVar("T")

STREAM_BYTES_MIN = 8 << 20  # from this size on a write reserves for the next one, too,
STREAM_SHARE = 32  # unless it is more than this part of the capacity
DROP_CHUNK = 1024  # blocks per transaction in `evict` and `purge`


class DiskTier:
    """A `kvtier.tiers.protocol.Tier` over one or more local directories, shared with other processes and namespaces.

    `paths` hold the segments in turn; the first also holds the index. `capacity_bytes` bounds the slab files of
    all namespaces together and belongs to the store: who opens it while others use it takes theirs.
    """

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
        calls: Calls | None = None,
        quota: float = 0.0,
    ) -> None:
        """`quota`: the share of the capacity that one scope may hold, whatever the namespace; 0: all."""
        self.block_bytes = namespace.block_bytes
        self._paths = [Path(path) for path in paths]
        self._capacity = capacity_bytes
        self._namespace = namespace
        self._prefix = namespace.digest
        self._clock = clock
        self._quota = quota
        self._calls: Calls = calls if calls is not None else SystemCalls()
        self._slot_bytes = slot_class(namespace.block_bytes) * SLOT_ALIGN
        self._opened: Store | None = None
        self._pid = 0
        self._told: Notify | None = None

    async def open(self) -> None:
        if not self._paths:
            raise ConfigError("tiers.g3.path is empty")
        if self._capacity < self._slot_bytes:
            raise ConfigError(
                f"tiers.g3.capacity {self._capacity} is smaller than one block: "
                f"at least {self._slot_bytes} bytes are needed"
            )
        if self._opened is not None:
            return
        arguments = (self._paths, self._capacity, self.block_bytes, self._calls, self._dead_by)
        self._opened = await asyncio.to_thread(Store.attach, *arguments)
        self._pid = os.getpid()
        fields = json.dumps(self._namespace.fields(), sort_keys=True).encode()
        # Not awaited: a stopped neighbour that holds the write lock must not stop this one from reading.
        self._opened.submit(lambda ledger: ledger.register(self._prefix, fields))

    def _dead_by(self) -> float:
        """What is dead at this time may be removed; -inf while the wall clock is in doubt."""
        time = deletion_time(self._clock)
        return -inf if time is None else time

    async def close(self, deadline: float) -> None:
        if self._opened is not None:
            self.subscribe(None)
        store, self._opened = self._opened, None
        if store is not None:
            await asyncio.to_thread(store.release, max(0.1, deadline - self._clock.monotonic()))

    def subscribe(self, told: Notify | None) -> None:
        """Have `told` hear, on the writer thread, which of our blocks left for others that this process wrote."""
        if (self._told is None) != (told is None):
            (self._store.watchers.append if told is not None else self._store.watchers.remove)(self._evicted)
        self._told = told

    def _evicted(self, names: Sequence[bytes]) -> None:
        if self._told is not None:
            size = len(self._prefix)
            self._told([BlockKey(name[size:]) for name in names if name.startswith(self._prefix)], False)

    @property
    def _store(self) -> Store:
        if self._opened is None:
            raise ClosedError("g3 is closed")
        if self._pid != os.getpid():
            raise ClosedError("g3 was opened by the process that forked this one; open it after the fork")
        return self._opened

    # Lookups.

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        store = self._store
        index = store.index
        now = self._clock.wall()
        prefix, span = self._prefix, SPAN.size
        answers: list[Miss | None] = []
        for scope, indices in by_scope(chain, wanted):
            names = [prefix + chain[place] for place in indices]
            purged, found = index.find_in_scope(prefix + scope, names)
            for name, raw in zip(names, found, strict=True):
                if raw is None or len(raw) < span:
                    answers.append(Miss.ABSENT)
                else:
                    answers.append(why_not(store, name, raw, purged, now))
        return answers

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: float) -> list[Miss | None]:
        return self.peek(chain, wanted)

    # Reads.

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: float) -> list[Loaded | Miss]:
        store = self._store
        retrieval = ReadBatch(store, self._prefix, chain, targets, self._clock)
        for _ in range(2):
            with store.moving():
                await store.lanes.read(retrieval.jobs(deadline)).wait(store.lanes.cancel)
            cases = retrieval.suspects()
            if cases:
                retrieval.judge(await self._condemn(store, cases, deadline))
            if not retrieval.pending:
                break
        return retrieval.results()

    async def _condemn(
        self, store: Store, cases: Sequence[tuple[bytes, bytes]], deadline: float
    ) -> Sequence[bool] | None:
        """Delete what is damaged, unless it is another write's by now; None at the deadline."""
        try:
            return await self._transact(
                store, lambda ledger: [ledger.condemn(name, raw) for name, raw in cases], deadline
            )
        except TierTimeout:
            return None

    # Writes.

    async def write(self, blocks: Sequence[Sealed], deadline: float) -> list[Stored]:
        store = self._store
        for block in blocks:
            if sum(map(len, block.pieces)) != self.block_bytes:
                raise TierError("g3", "write", f"a block has {self.block_bytes} bytes")
        with store.moving():
            try:
                return await self._write(store, blocks, deadline)
            except TierTimeout:
                return [Stored.FAILED] * len(blocks)
            except TierFull:
                return [Stored.FULL] * len(blocks)

    async def _write(self, store: Store, blocks: Sequence[Sealed], deadline: float) -> list[Stored]:
        now = self._clock.wall()
        # Parents first: where room ends, it is the deepest that are refused.
        by_depth = sorted(range(len(blocks)), key=lambda place: blocks[place].index)

        def reserve(ledger: WriteTxn) -> list[SlotReservation | Stored]:
            share = self._share(store)
            return [self._reserve(ledger, blocks[place], now, share) for place in by_depth]

        def undo(given: Sequence[SlotReservation | Stored]) -> None:
            store.give_back([one for one in given if isinstance(one, SlotReservation)])

        ahead = self._take_ahead(store, blocks, now)
        given = ahead or await self._transact(store, reserve, deadline, undo=undo)
        results = [Stored.FAILED] * len(blocks)
        held: dict[int, SlotReservation] = {}
        for place, one in zip(by_depth, given, strict=True):
            if isinstance(one, SlotReservation):
                held[place] = one
            else:
                results[place] = one
        try:
            deposit = WriteBatch(store, blocks, held, self._clock)
            await store.lanes.write(deposit.jobs(deadline)).wait(store.lanes.cancel)
            whole = [place for place in held if place not in deposit.failed]
            if whole:
                published = await self._publish(store, [(blocks[place], held[place]) for place in whole], deadline)
                for place, outcome in zip(whole, published, strict=True):
                    results[place] = outcome
                    del held[place]
            for place, outcome in deposit.failed.items():
                results[place] = outcome
        finally:
            store.give_back(list(held.values()))
        return results

    def _share(self, store: Store) -> int:
        """Bytes that a scope may hold: at least a block; 0: any."""
        return max(self._slot_bytes, int(self._quota * store.geometry.capacity)) if self._quota else 0

    def _reserve(self, ledger: WriteTxn, block: Sealed, now: float, share: int) -> SlotReservation | Stored:
        name, parent = self._prefix + block.key, self._parent_of(block)
        return ledger.reserve(name, self.block_bytes, block.life, now, parent, share, block.priority)

    def _parent_of(self, block: Sealed) -> bytes | None:
        return None if block.parent is None else self._prefix + block.parent

    def _take_ahead(self, store: Store, blocks: Sequence[Sealed], now: float) -> Sequence[SlotReservation | Stored]:
        """Slots that the publishing of an earlier write kept for this one, if nothing keeps its blocks out: a stream of
        writes then commits once per write, not twice. Empty if a transaction must decide.

        A block whose parent comes with it is looked for by that: where the parent is not, it is not. One that is there
        all the same is found when it is published.
        """
        if not self._streams(store, len(blocks)):
            return []
        coming = {block.key for block in blocks}
        heads = [place for place, block in enumerate(blocks) if block.parent not in coming]
        purged: dict[bytes, float] = {}
        for scope, places in by_scope([block.key for block in blocks], heads):
            names = [self._prefix + blocks[place].key for place in places]
            purged[scope], found = store.index.find_in_scope(self._prefix + scope, names)
            if found.count(None) < len(found):
                return []
        for block in blocks:
            if not block.life.servable(Depth.G3, now) or block.life.born <= purged.get(block.key[:SCOPE_BYTES], inf):
                return []
        return store.stock.take(slot_class(self.block_bytes), len(blocks), store.tick)

    def _streams(self, store: Store, count: int) -> bool:
        """Whether a write is so large that more like it will come, and small beside the store."""
        return STREAM_BYTES_MIN <= count * self._slot_bytes <= store.geometry.capacity // STREAM_SHARE

    async def _publish(
        self, store: Store, written: Sequence[tuple[Sealed, SlotReservation]], deadline: float
    ) -> list[Stored]:
        now = self._clock.wall()
        share = self._share(store)
        count = len(written) if self._streams(store, len(written)) and store.stock.wants(len(written)) else 0

        def publish(ledger: WriteTxn) -> tuple[list[Stored], list[SlotReservation]]:
            outcomes = [
                ledger.publish(
                    one,
                    self._prefix + block.key,
                    self.block_bytes,
                    block.index,
                    block.digest,
                    block.life,
                    now,
                    self._parent_of(block),
                    share,
                    block.priority,
                )
                for block, one in written
            ]
            return outcomes, ledger.reserve_ahead(slot_class(self.block_bytes), count)

        def undo(result: tuple[list[Stored], list[SlotReservation]]) -> None:
            store.give_back(result[1])

        outcomes, ahead = await self._transact(store, publish, deadline, undo=undo)
        store.stock.add(ahead)
        return outcomes

    # Everything else.

    def touch(self, keys: Sequence[BlockKey], now: float) -> None:
        prefix = self._prefix
        self._store.touches.record([prefix + key for key in keys], now)

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        store = self._store
        if keys is None:
            return await self._drop_all(store, self._prefix, lambda _life: True)
        count = 0
        for start in range(0, len(keys), DROP_CHUNK):
            names = [self._prefix + key for key in keys[start : start + DROP_CHUNK]]
            count += await self._transact(store, partial(_drop, names=names), None)
        return count

    async def purge(self, scope: Scope, before: float) -> int:
        store = self._store
        scoped = self._prefix + scope
        await self._transact(store, lambda ledger: ledger.bury(scoped, before), None)
        return await self._drop_all(store, scoped, lambda life: life.born <= before)

    async def drop_made_after(self, time: float) -> int:
        return await self._drop_all(self._store, self._prefix, lambda life: max(life.born, life.last_use) > time)

    async def _drop_all(self, store: Store, prefix: bytes, doomed: Callable[[Lifetime], bool]) -> int:
        count = 0
        start: bytes | None = prefix
        while start is not None:
            dropped, start = await self._transact(
                store, partial(_drop_range, start=start, prefix=prefix, doomed=doomed), None
            )
            count += dropped
        return count

    async def tombstones(self) -> Mapping[Scope, float]:
        return {Scope(scope): until for scope, until in self._store.index.tombstones(self._prefix)}

    # What must stay, and what the manager wants to find again.

    async def retain(self, keys: Sequence[BlockKey], until: float, served: float | None = None) -> list[bool]:
        now, done = self._clock.wall(), list[bool]()
        for start in range(0, len(keys), DROP_CHUNK):
            names = [self._prefix + key for key in keys[start : start + DROP_CHUNK]]
            work = partial(_keep, names=names, until=until, served=served, now=now)
            done += await self._transact(self._store, work, None)
        return done

    async def release_retained(self, keys: Sequence[BlockKey]) -> None:
        for start in range(0, len(keys), DROP_CHUNK):
            names = [self._prefix + key for key in keys[start : start + DROP_CHUNK]]
            await self._transact(self._store, partial(_let_go, names=names), None)

    async def retained(self) -> Mapping[BlockKey, float]:
        return {BlockKey(key): until for key, until in self._store.index.kept(self._prefix).items()}

    async def write_note(self, name: str, value: bytes | None) -> None:
        full = self._prefix + name.encode("ascii")
        await self._transact(self._store, lambda ledger: ledger.write_note(full, value), None)

    async def read_notes(self, prefix: str) -> Mapping[str, bytes]:
        found = self._store.index.notes(self._prefix + prefix.encode("ascii"))
        return {name[len(self._prefix) :].decode("ascii", "replace"): value for name, value in found.items()}

    async def flush(self, deadline: float) -> None:
        store = self._store
        await self._transact(store, lambda ledger: None, deadline)
        for _ in range(NAMES_MAX // NAMES_PER_COMMIT_MAX):
            if not store.touches:
                break
            await self._transact(store, lambda ledger: None, deadline)

    def usage(self) -> Usage:
        store = self._store
        blocks, size = store.index.usage()
        return Usage(blocks, size, store.geometry.capacity, store.evictions)

    def check(self) -> None:
        check_store(self._store)

    async def _transact(
        self,
        store: Store,
        work: Callable[[WriteTxn], T],
        deadline: float | None,
        *,
        undo: Callable[[T], None] = lambda _: None,
    ) -> T:
        """Run `work` in the writer's next transaction. Raises TierTimeout at the deadline; `undo` is called with the
        result if there is one after that, or after a cancellation."""
        job = store.submit(work)
        future = asyncio.wrap_future(job.future)
        future.add_done_callback(_retrieve)
        timeout = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
        try:
            await asyncio.wait({future}, timeout=timeout)
        except asyncio.CancelledError:
            _abandon(job, undo)
            raise
        if not future.done():
            _abandon(job, undo)
            raise TierTimeout("g3", "commit", "the index was not to be had within the deadline")
        result: T = future.result()
        return result


def check_store(store: Store) -> None:
    """Assert that the index is consistent and the files are within the capacity."""
    store.index.check()
    files = [path.lstat() for part in store.parts for path in (part / "slab").iterdir()]
    sizes = {(status.st_dev, status.st_ino): status.st_size for status in files}.values()
    assert sum(sizes) <= store.geometry.capacity, f"slab files have {sum(sizes)} bytes"


def _drop(ledger: WriteTxn, names: Sequence[bytes]) -> int:
    return sum(map(ledger.drop, names))


def _keep(ledger: WriteTxn, names: Sequence[bytes], until: float, served: float | None, now: float) -> list[bool]:
    return [ledger.retain(name, until, served, now) for name in names]


def _let_go(ledger: WriteTxn, names: Sequence[bytes]) -> None:
    for name in names:
        ledger.release_retained(name)


def _drop_range(
    ledger: WriteTxn, start: bytes, prefix: bytes, doomed: Callable[[Lifetime], bool]
) -> tuple[int, bytes | None]:
    return ledger.drop_range(start, prefix, DROP_CHUNK, lambda _name, entry: doomed(entry.life))


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Take note of an exception that nobody may wait for any more."""
    if not future.cancelled():
        future.exception()


def _abandon(job: CommitJob, undo: Callable[[Any], None]) -> None:
    if not job.future.cancel():
        job.future.add_done_callback(lambda done: undo(done.result()) if done.exception() is None else None)
