"""Blocks on their way from their slots into the caller's memory: entry, bytes, digest or decryption.

A block that fails its check is looked up again in a write transaction: if its entry is another write's by now, the read
was overtaken and is repeated (RACED if that happens twice), else exactly that entry is deleted (CORRUPT).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvtier import checksum
from kvtier.clock import Clock
from kvtier.encryption import DataKey
from kvtier.errors import CorruptError, TierTimeout
from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.lifetime import FUTURE_S
from kvtier.retention.terms import Depth
from kvtier.tiers.data_keys import load
from kvtier.tiers.disk.encryption import Encryption, decrypt, key_miss_of, scope_in_name
from kvtier.tiers.disk.index import Use
from kvtier.tiers.disk.io_scheduler import Work
from kvtier.tiers.disk.records import SPAN, Entry, priority_in
from kvtier.tiers.disk.slab import ShortIO, neighbours
from kvtier.tiers.disk.slot_health import is_place_fault
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.touches import Touches, life_after
from kvtier.tiers.disk.trials import Dropped
from kvtier.tiers.protocol import Loaded, Miss, Target
from kvtier.times import Mono, Wall


@dataclass(slots=True)
class _Wanted:
    target: Target
    name: bytes
    raw: bytes = b""
    entry: Entry | None = None
    result: Loaded | Miss | None = None
    suspect: bool = False  # its entry or its bytes failed their check
    unreadable: bool = False  # its slot failed alone


class ReadBatch:
    """One `read` of blocks of `chain` into `targets`."""

    def __init__(
        self, store: Store, namespace: bytes, chain: Sequence[BlockKey], targets: Sequence[Target], clock: Clock,
        encryption: Encryption | None = None,
    ) -> None:  # fmt: skip
        self._store = store
        self._encryption = encryption
        self._keys: Mapping[Scope, DataKey | Miss] = {}
        self._clock = clock
        self._blocks = [_Wanted(target, namespace + chain[target.index]) for target in targets]

    async def run(self, deadline: Mono) -> list[Loaded | Miss]:
        """Per target, its result. When it returns or raises no thread writes to a target. Raises TierError."""
        if self._encryption is not None:
            scopes = {scope_in_name(block.name) for block in self._blocks}
            left_s = max(0.0, deadline - self._clock.monotonic())
            self._keys = await load(self._encryption.keys, scopes, left_s)
        for _ in range(2):
            with self._store.moving():
                await self._store.io.read(self._jobs(deadline)).wait()
            await self._delete_corrupt(deadline)
            await self._drop_unreadable(deadline)
            if all(block.result is not None for block in self._blocks):
                break
        return [block.result if block.result is not None else Miss.RACED for block in self._blocks]

    def _jobs(self, deadline: Mono) -> list[Work]:
        """One job per run of neighbouring slots, for the blocks without a result whose entries can be read."""
        wanted = [block for block in self._blocks if block.result is None]
        self._resolve(wanted)
        readable = [block for block in wanted if block.entry is not None and block.result is None]
        block_bytes = sum(map(len, readable[0].target.into)) if readable else 0
        return [partial(self._read, run, deadline) for run in neighbours(readable, _place_of, block_bytes)]

    def _resolve(self, blocks: Sequence[_Wanted]) -> None:
        """Fill in entries, or the reason why there is none to read."""
        wall_s = self._clock.wall()
        found = self._store.index.find([block.name for block in blocks])
        for block, (raw, purged_until) in zip(blocks, found, strict=True):
            block.entry = None
            if raw is None:
                block.result = Miss.ABSENT
                continue
            block.raw = raw
            try:
                entry = block.entry = Entry.decode(block.name, raw)
            except CorruptError:
                block.suspect = True
                continue
            block.result = miss_of(block.name, raw, purged_until, self._store.touches, wall_s)
            if block.result is None and entry.length != sum(map(len, block.target.into)):
                block.result = Miss.MISMATCH
            if block.result is None and entry.encryption is not None:
                block.result = key_miss_of(block.name, raw, self._keys)

    def _read(self, run: Sequence[_Wanted], deadline: Mono) -> None:
        """On an I/O thread: neighbouring blocks by one call."""
        try:
            self._read_run(run, deadline)
        except Exception:
            _set_results(run, Miss.ERROR)
            raise

    def _read_run(self, run: Sequence[_Wanted], deadline: Mono) -> None:
        if self._clock.monotonic() > deadline:
            _set_results(run, Miss.LATE)
            return
        try:
            self._read_slots(run)
        except ShortIO:
            if len(run) > 1:
                for block in run:
                    self._read_run([block], deadline)
            else:
                run[0].suspect = True
        except OSError as error:
            if is_place_fault(error):
                self._read_alone(run, deadline)
            else:
                _set_results(run, Miss.ERROR)

    def _read_slots(self, run: Sequence[_Wanted]) -> None:
        """Read neighbouring blocks by one call, and check them. Raises OSError."""
        first = run[0].entry
        assert first is not None
        self._store.slab.read(first.segment, first.offset, [piece for block in run for piece in block.target.into])
        self._store.health.moved(len(run))
        for block in run:
            self._check(block)

    def _read_alone(self, run: Sequence[_Wanted], deadline: Mono) -> None:
        """Slot by slot, after the run failed."""

        def read(block: _Wanted) -> None:
            if self._clock.monotonic() > deadline:
                raise TimeoutError
            self._read_slots([block])

        assert run[0].entry is not None
        outcomes = self._store.alone(run[0].entry.segment, [partial(read, block) for block in run], self._clock)
        for block, error in zip(run, outcomes or [OSError()] * len(run), strict=True):
            if error is None:
                continue
            if outcomes is not None and is_place_fault(error):
                block.unreadable = True
            else:
                block.result = Miss.LATE if isinstance(error, TimeoutError) else Miss.ERROR

    def _check(self, block: _Wanted) -> None:
        """Set the result of a block that was read, and decrypt it if it is encrypted."""
        entry, into = block.entry, block.target.into
        assert entry is not None
        digest: bytes | Miss = entry.digest
        try:
            if entry.encryption is None:
                block.suspect = not checksum.matches(entry.digest, into)
            else:
                key = self._keys[scope_in_name(block.name)]
                assert isinstance(key, DataKey)
                digest = decrypt(key, block.name, entry, into)
        except CorruptError:
            block.suspect = True
        if not block.suspect:
            loaded = partial(Loaded, life=entry.life, priority=priority_in(entry.rank))
            block.result = digest if isinstance(digest, Miss) else loaded(digest)

    async def _delete_corrupt(self, deadline: Mono) -> None:
        """Delete the suspects' entries, except those that are another write's by now."""
        suspects = [block for block in self._blocks if block.suspect]
        if not suspects:
            return
        job = self._store.submit(
            lambda txn: [txn.delete_corrupt(block.name, block.raw) for block in suspects], Use.DROP
        )
        try:
            deleted = await job.result(max(0.0, deadline - self._clock.monotonic()))
        except TierTimeout:
            _set_results(suspects, Miss.LATE)
            deleted = [False] * len(suspects)
        for block, was_deleted in zip(suspects, deleted, strict=True):
            block.suspect = False
            if was_deleted:
                block.result = Miss.CORRUPT

    async def _drop_unreadable(self, deadline: Mono) -> None:
        """Remove the blocks whose slots cannot be read, and set the slots aside until a trial."""
        blocks = [block for block in self._blocks if block.unreadable]
        if not blocks:
            return
        job = self._store.drop_unreadable([(block.name, block.raw) for block in blocks], self._clock.wall())
        try:
            outcomes = await job.result(max(0.0, deadline - self._clock.monotonic()))
        except TierTimeout:
            _set_results(blocks, Miss.LATE)
            outcomes = []
        for block in blocks:
            block.unreadable = False
        for block, outcome in zip(blocks, outcomes, strict=False):
            self._store.health.counts["unreadable_blocks"] += outcome not in (Dropped.RACED, Dropped.TOO_MANY)
            if outcome is not Dropped.RACED:
                block.result = Miss.ERROR if outcome is Dropped.TOO_MANY else Miss.CORRUPT


def miss_of(name: bytes, raw: bytes | None, purged_until: Wall, touches: Touches, wall_s: Wall) -> Miss | None:
    """Why a block with the entry `raw` may not be served; None if it may. `purged_until`: the mark of its tenant's
    purge."""
    if raw is None or len(raw) < SPAN.size:
        return Miss.ABSENT
    ends, mark, last_use = SPAN.unpack_from(raw)
    if mark <= purged_until:
        return Miss.PURGED
    if wall_s <= ends and last_use <= wall_s + FUTURE_S:
        return None
    try:  # it looks expired, or made by a clock ahead; but it may have uses that are not in the index yet
        alive = life_after(Entry.decode(name, raw).life, touches.of(name)).servable(Depth.G3, wall_s)
    except CorruptError:
        alive = False
    return None if alive else Miss.EXPIRED


def _set_results(run: Sequence[_Wanted], result: Miss) -> None:
    for block in run:
        block.result = result


def _place_of(block: _Wanted) -> tuple[int, int]:
    assert block.entry is not None
    return block.entry.segment, block.entry.slot
