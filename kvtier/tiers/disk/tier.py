"""G3: blocks on local disks, in slab segments under an LMDB index.

    write    reserve slots (transaction 1, evicting the coldest) → pwritev → fdatasync → publish (transaction 2)
    read     entry (read transaction, ended) → preadv into the caller's memory → length, name, digest

By the order of a write there is either no entry or a whole block wherever the machine stops, and no slot is
overwritten before the commit that took it from its old block.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvtier.clock import Clock
from kvtier.encryption import DataKey
from kvtier.errors import ClosedError, ConfigError, TierError, TierFull, TierTimeout
from kvtier.events import Notify
from kvtier.identity.keys import TENANT_BYTES, BlockKey, Scope, scope_of_key, tenant_of
from kvtier.identity.namespace import Namespace
from kvtier.retention.marks import is_ahead
from kvtier.retention.terms import Depth
from kvtier.retention.trusted_clock import expired_by
from kvtier.supervisor import Service, Unwatched
from kvtier.tiers.data_keys import DataKeys, load
from kvtier.tiers.disk.budget import COMMIT_BYTES
from kvtier.tiers.disk.contents import ContentRing, pages_for
from kvtier.tiers.disk.encryption import Encryption, key_miss_of, scope_in_name
from kvtier.tiers.disk.group_commit import BLOCKS_PER_JOB_MAX
from kvtier.tiers.disk.index import Use
from kvtier.tiers.disk.own_thread import on_own_thread, outcome
from kvtier.tiers.disk.read import ReadBatch, miss_of
from kvtier.tiers.disk.records import SLOT_ALIGN, Entry, is_encrypted, slot_class
from kvtier.tiers.disk.slab import Calls, SystemCalls
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.touches import NAMES_MAX, NAMES_PER_COMMIT_MAX
from kvtier.tiers.disk.write import WriteBatch
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Usage
from kvtier.times import Mono, Wall

log = logging.getLogger(__name__)

T = TypeVar("T")

PEEK_FAULTS_MAX = 8  # pages of the index that `peek` waits for


class DiskTier:
    """A `kvtier.tiers.protocol.Tier` with `Retaining`, `Notebook` and `Describing` on local disks, shared with other
    processes and namespaces.

    `paths` hold the segments in turn; the first also holds the index. `capacity_bytes` bounds the slab files of all
    namespaces together and belongs to the store: while other processes use the store, theirs counts.
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
        write_budget: float = 0.0,
        keys: DataKeys | None = None,
    ) -> None:
        """`quota`: the share of the capacity that one scope may hold, whatever the namespace; 0: all. `write_budget`:
        bytes that all processes may write to the directory in a day; 0: any. `keys`: blocks are encrypted with these;
        without them they are written plain, and encrypted ones are misses."""
        self.block_bytes = namespace.block_bytes
        self._paths = [Path(path) for path in paths]
        self._capacity_bytes = capacity_bytes
        self._namespace = namespace
        self._prefix = namespace.digest
        self._clock = clock
        self._quota = quota
        self._write_budget = write_budget
        self._encryption = None if keys is None else Encryption(keys)
        self._calls: Calls = calls if calls is not None else SystemCalls()
        self._opened: Store | None = None
        self._pid = 0
        self._notify: Notify | None = None
        self._ring: ContentRing | None = None
        self._service: Service = Unwatched()

    async def open(self) -> None:
        if not self._paths:
            raise ConfigError("tiers.g3.path is empty")
        if self._opened is not None:
            return
        arguments = (self._paths, self._capacity_bytes, self.block_bytes, self._calls, self._expired_by)
        attaching = on_own_thread("kvtier-g3-open", lambda: Store.attach(*arguments))
        try:
            store = await outcome(attaching)
        except asyncio.CancelledError:
            attaching.add_done_callback(_release_late)
            raise
        try:
            store.limit_writes(self, self._write_budget, self._clock.monotonic)
            fields = json.dumps(self._namespace.fields(), sort_keys=True).encode()
            # Not awaited: a stopped process that holds the write lock must not keep this one from reading.
            store.submit(lambda txn: txn.register(self._prefix, fields))
        except BaseException:
            store.limit_writes(self, 0.0, self._clock.monotonic)
            store.release_soon()
            raise
        store.services.append(self._service)
        self._opened, self._pid = store, os.getpid()
        if self._encryption is not None:  # what was described while blocks were not encrypted
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._contents().remove)

    def _expired_by(self) -> Wall:
        """Blocks that are expired at this time may be removed; -inf while the wall clock is in doubt."""
        return expired_by(self._clock)

    async def close(self, deadline: Mono) -> None:
        if self._opened is not None:
            self.subscribe(None)
        store, self._opened = self._opened, None
        if store is not None:
            store.services.remove(self._service)
            store.limit_writes(self, 0.0, self._clock.monotonic)
            closing = store.release_soon()  # now: it must not hang on a thread to spare, or on who cancels this
            try:
                await outcome(closing, max(0.1, self._left_s(deadline)))
            except TimeoutError:
                store.warn_of_close()

    def report_to(self, service: Service) -> None:
        """Tell `service`, on its thread, when a thread of the store keeps failing."""
        if self._opened is not None:
            services = self._opened.services
            services[services.index(self._service)] = service
        self._service = service

    def restarts(self) -> Mapping[str, int]:
        """How often threads of the store failed and went on, by thread."""
        return self._opened.failures.restarts if self._opened is not None else {}

    def subscribe(self, notify: Notify | None) -> None:
        """Have `notify` called, on the writer thread, with our blocks that this process took out, for any reason."""
        if (self._notify is None) != (notify is None):
            subscribers = self._store.subscribers
            (subscribers.append if notify is not None else subscribers.remove)(self._removed)
        self._notify = notify

    def _removed(self, names: Sequence[bytes]) -> None:
        if self._notify is not None:
            size = len(self._prefix)
            self._notify([BlockKey(name[size:]) for name in names if name.startswith(self._prefix)], False)

    @property
    def _store(self) -> Store:
        if self._opened is None:
            raise ClosedError("g3 is closed")
        if self._pid != os.getpid():
            raise ClosedError("g3 was opened by the process that forked this one; open it after the fork")
        return self._opened

    def _left_s(self, deadline: Mono) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    # Blocks.

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        return self._find(chain, wanted, PEEK_FAULTS_MAX)

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        found = self.peek(chain, wanted)
        if Miss.LATE in found:
            start, keys = found.index(Miss.LATE), None
            if self._encryption is not None:
                scopes = {scope_of_key(chain[place]) for place in wanted[start:]}
                keys = await load(self._encryption.keys, scopes, self._left_s(deadline))
            asking = asyncio.to_thread(self._find, chain, wanted[start:], keys=keys)
            with contextlib.suppress(TimeoutError):
                found[start:] = await asyncio.wait_for(asking, self._left_s(deadline))
        return found

    def _find(
        self, chain: Sequence[BlockKey], wanted: Sequence[int], faults_max: int | None = None,
        keys: Mapping[Scope, DataKey | Miss] | None = None,
    ) -> list[Miss | None]:  # fmt: skip
        """LATE from where on the index would have to be read from the device, beyond `faults_max` pages, and, without
        `keys`, where one would have to be asked for."""
        store, prefix, wall_s = self._store, self._prefix, self._clock.wall()
        names = [prefix + chain[place] for place in wanted]
        found = store.index.find(names, faults_max=faults_max)
        if keys is None and self._encryption is not None and any(raw and is_encrypted(raw) for raw, _ in found):
            keys = {scope: self._encryption.keys.peek(scope) for scope in {scope_in_name(name) for name in names}}
        answers: list[Miss | None] = [
            miss_of(name, raw, purged_until, store.touches, wall_s) or key_miss_of(name, raw or b"", keys or {})
            for name, (raw, purged_until) in zip(names, found, strict=False)
        ]
        return answers + [Miss.LATE] * (len(names) - len(found))

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        return await ReadBatch(self._store, self._prefix, chain, targets, self._clock, self._encryption).run(deadline)

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        for block in blocks:
            if sum(map(len, block.pieces)) != self.block_bytes:
                raise TierError("g3", "write", f"a block has {self.block_bytes} bytes")
        store = self._store
        share_bytes = 0
        if self._quota:  # a scope may hold a block at least
            slot_bytes = slot_class(self.block_bytes) * SLOT_ALIGN
            share_bytes = max(slot_bytes, int(self._quota * store.geometry.capacity))
        batch = WriteBatch(store, self._prefix, blocks, self._clock, share_bytes, self._encryption)
        with store.moving():
            try:
                return await batch.run(deadline)
            except TierTimeout:
                return [Stored.FAILED] * len(blocks)
            except TierFull:
                return [Stored.FULL] * len(blocks)

    def touch(self, keys: Sequence[BlockKey], wall_s: Wall) -> None:
        prefix = self._prefix
        self._store.touches.record([prefix + key for key in keys], wall_s)

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        store = self._store
        if keys is None:
            return await self._drop_all(store, self._prefix, lambda _life: True)
        count = 0
        for names in self._names(keys):
            count += await store.submit(partial(WriteTxn.drop_all, names=names), Use.DROP, len(names)).result()
        return count

    async def purge(self, scope: Scope, before: Wall) -> int:
        store = self._store
        scoped = self._prefix + tenant_of(scope)
        index = store.index
        if index.is_purged(scoped, before):
            return 0
        try:
            await asyncio.to_thread(self._contents().purge, scope)  # first: a purge that is in force is not repeated
            await asyncio.to_thread(index.purges.record, scoped, before)  # in force from here on
        except OSError as error:
            raise TierError("g3", "purge", str(error)) from error
        try:
            await store.submit(lambda txn: None, Use.PURGE).result()
            prefix = scoped[: len(self._prefix) + TENANT_BYTES]
            now = self._clock.wall()
            return await self._drop_all(store, prefix, lambda entry: entry.mark <= before or is_ahead(entry.mark, now))
        except TierFull:  # they are misses; the background removes them when the index has space again
            return 0

    async def drop_made_after(self, time: Wall) -> int:
        return await self._drop_all(
            self._store, self._prefix, lambda entry: max(entry.life.born, entry.life.last_use) > time
        )

    async def _drop_all(self, store: Store, prefix: bytes, matching: Callable[[Entry], bool]) -> int:
        """Drop the blocks whose names begin with `prefix` and that are `matching`. Returns how many."""

        def drop(txn: WriteTxn) -> tuple[int, bytes | None]:
            return txn.drop_range(start, prefix, BLOCKS_PER_JOB_MAX, lambda _name, entry: matching(entry))

        count = 0
        following: bytes | None = prefix
        while following is not None:
            start = following
            dropped, following = await store.submit(drop, Use.DROP, BLOCKS_PER_JOB_MAX).result()
            count += dropped
        return count

    def _names(self, keys: Sequence[BlockKey]) -> Iterator[list[bytes]]:
        """Full names of the keys, in lists of one transaction each."""
        for start in range(0, len(keys), BLOCKS_PER_JOB_MAX):
            yield [self._prefix + key for key in keys[start : start + BLOCKS_PER_JOB_MAX]]

    async def tombstones(self) -> Mapping[Scope, Wall]:
        found = await asyncio.to_thread(self._store.index.tombstones, self._prefix)
        return {Scope(scope): until for scope, until in found}

    # Retained blocks and saved state.

    async def retain(self, keys: Sequence[BlockKey], until: Wall, served: Wall | None = None) -> list[bool]:
        retain = partial(WriteTxn.retain, until=until, served=served, wall_s=self._clock.wall())
        done = list[bool]()
        for names in self._names(keys):
            done += await self._store.submit(partial(retain, names=names), blocks=len(names)).result()
        return done

    async def release_retained(self, keys: Sequence[BlockKey], untils: Sequence[Wall] | None = None) -> None:
        rest = untils
        for names in self._names(keys):
            release = partial(WriteTxn.release_retained, names=names, untils=rest and rest[: len(names)])
            await self._store.submit(release, Use.DROP, len(names)).result()
            rest = rest and rest[len(names) :]

    async def retained(self) -> Mapping[BlockKey, Wall]:
        found = await asyncio.to_thread(self._store.index.retained, self._prefix)
        return {BlockKey(key): until for key, until in found.items()}

    async def write_note(self, name: str, value: bytes | None) -> None:
        full = self._prefix + name.encode("ascii")
        await self._store.submit(lambda txn: txn.write_note(full, value)).result()

    async def read_notes(self, prefix: str) -> Mapping[str, bytes]:
        found = await asyncio.to_thread(self._store.index.read_notes, self._prefix + prefix.encode("ascii"))
        return {name[len(self._prefix) :].decode("ascii", "replace"): value for name, value in found.items()}

    async def write_contents(
        self, number: int, parts: Sequence[bytes], purges: int
    ) -> tuple[int, int, list[bytes] | None]:
        return await self._of_contents(lambda ring: ring.write(number, parts, purges), (0, 0, None))

    async def read_contents(self, below: int) -> tuple[int, list[bytes]]:
        return await self._of_contents(lambda ring: ring.read(below), (0, []))

    async def _of_contents(self, verb: Callable[[ContentRing], T], fallback: T) -> T:
        """Contents are for routers alone: a fault of their file is none of the tier. Encrypted blocks have none."""
        if self._encryption is not None:
            return fallback
        try:
            return await asyncio.to_thread(verb, self._contents())
        except (OSError, TierTimeout) as error:
            log.debug("g3: what blocks hold: %s", error)
            return fallback

    def _contents(self) -> ContentRing:
        blocks = self._store.geometry.capacity // (slot_class(self.block_bytes) * SLOT_ALIGN)
        pages = pages_for(blocks, self._namespace.block_tokens)
        if self._ring is None or self._ring.pages != pages:
            self._ring = ContentRing(self._paths[0], self._prefix, pages)
        return self._ring

    # The store.

    async def flush(self, deadline: Mono) -> None:
        store = self._store
        for _ in range(1 + NAMES_MAX // NAMES_PER_COMMIT_MAX):
            await store.submit(lambda txn: None).result(self._left_s(deadline))
            if not store.reserved.has_returned and not (store.touches and store.may_write(COMMIT_BYTES)):
                break

    async def resize(self, capacity_bytes: int, write_budget: float) -> bool:
        """See `kvtier.tiers.protocol.Resizable`. A smaller capacity holds from the next start on."""
        self._capacity_bytes, self._write_budget = capacity_bytes, write_budget
        store = self._store
        store.limit_writes(self, write_budget, self._clock.monotonic)
        store.growth.want(capacity_bytes)
        if store.geometry.capacity >= capacity_bytes:
            return True
        grown = await store.submit(lambda txn: txn.geometry.capacity, Use.DROP).result() >= capacity_bytes
        if not grown and store.growth.why_not:
            raise TierError("g3", "resize", store.growth.why_not)
        return grown

    def usage(self) -> Usage:
        store = self._store
        blocks, size = store.index.usage()
        balance = store.index.balance()
        budget = int(self._write_budget)
        return Usage(
            blocks, size, store.geometry.capacity, store.evictions, balance.written, balance.stored, budget,
            store.volumes.why_full(),
        )  # fmt: skip

    def counters(self) -> dict[str, int]:
        """Slots set aside for bad places and taken back into use, unreadable blocks dropped, blocks relocated, and how
        often a volume was found full, since open."""
        return {**self._store.health.counts, **self._store.idle.counts, **self._store.volumes.counts}

    def check(self) -> None:
        self._store.check()


def _release_late(attaching: Future[Store]) -> None:
    """Give back a store that nobody waits for any more. On the thread that opened it."""
    if attaching.exception() is None:
        attaching.result().release_soon()
