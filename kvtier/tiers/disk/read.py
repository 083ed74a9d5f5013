"""Blocks on their way from their slots into the caller's memory: entry, bytes, digest, and what a mismatch means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvtier import checksum
from kvtier.clock import Clock
from kvtier.errors import CorruptError
from kvtier.identity.keys import SCOPE_BYTES, BlockKey
from kvtier.retention.lifetime import FUTURE_S
from kvtier.retention.terms import Depth
from kvtier.tiers.disk.io_scheduler import Work
from kvtier.tiers.disk.records import SLOT_ALIGN, SPAN, Entry, priority_in
from kvtier.tiers.disk.slab import ShortIO
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.write import neighbours
from kvtier.tiers.disk.write_txn import renewed
from kvtier.tiers.protocol import Loaded, Miss, Target


@dataclass(slots=True)
class _Wanted:
    target: Target
    key: BlockKey
    name: bytes
    raw: bytes = b""
    entry: Entry | None = None
    result: Loaded | Miss | None = None
    suspect: bool = False


class ReadBatch:
    """One `read`. In turn: `jobs`, which run on I/O threads; `suspects`, for the writer to look at; `judge`. What was
    overtaken by a write is `pending` then, and a second turn reads it again."""

    def __init__(
        self, store: Store, namespace: bytes, chain: Sequence[BlockKey], targets: Sequence[Target], clock: Clock
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._clock = clock
        self._blocks = [_Wanted(target, chain[target.index], namespace + chain[target.index]) for target in targets]

    @property
    def pending(self) -> bool:
        """Whether there are blocks without a result."""
        return any(block.result is None for block in self._blocks)

    def results(self) -> list[Loaded | Miss]:
        """What became of each target; RACED where writes were faster twice."""
        return [block.result if block.result is not None else Miss.RACED for block in self._blocks]

    def jobs(self, deadline: float) -> list[Work]:
        """One job per run of neighbouring slots, for the pending blocks whose entries say that they can be read."""
        pending = [block for block in self._blocks if block.result is None]
        self._resolve(pending)
        readable = [block for block in pending if block.entry is not None and block.result is None]
        block_bytes = sum(map(len, readable[0].target.into)) if readable else 0
        return [partial(self._read, run, deadline) for run in neighbours(readable, _place_of, block_bytes)]

    def _resolve(self, blocks: Sequence[_Wanted]) -> None:
        """Fill in entries, or the reason why there is none to read."""
        now = self._clock.wall()
        for scope, places in by_scope([block.key for block in blocks], range(len(blocks))):
            names = [blocks[place].name for place in places]
            purged, found = self._store.index.find_in_scope(self._namespace + scope, names)
            for place, raw in zip(places, found, strict=True):
                block = blocks[place]
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
                block.result = why_not(self._store, block.name, raw, purged, now)
                if block.result is None and entry.length != sum(map(len, block.target.into)):
                    block.result = Miss.MISMATCH

    def _read(self, run: Sequence[_Wanted], deadline: float) -> None:
        """On an I/O thread: neighbouring blocks by one call."""
        if self._clock.monotonic() > deadline:
            _settle(run, Miss.LATE)
            return
        first = run[0].entry
        assert first is not None
        pieces = [piece for block in run for piece in block.target.into]
        try:
            self._store.slab.read(first.segment, first.slot * first.slot_class * SLOT_ALIGN, pieces)
        except ShortIO:
            if len(run) > 1:
                for block in run:
                    self._read([block], deadline)
            else:
                run[0].suspect = True
            return
        except OSError:
            _settle(run, Miss.ERROR)
            return
        for block in run:
            entry = block.entry
            assert entry is not None
            if checksum.matches(entry.digest, block.target.into):
                block.result = Loaded(entry.digest, entry.life, priority_in(entry.rank))
            else:
                block.suspect = True

    def suspects(self) -> list[tuple[bytes, bytes]]:
        """(name, entry as it was read) of blocks whose entry or bytes failed their check."""
        return [(block.name, block.raw) for block in self._blocks if block.suspect]

    def judge(self, verdicts: Sequence[bool] | None) -> None:
        """What the writer found of `suspects`: True, the entry was damaged and is gone; False, it is another one by
        now. None: it did not come to it in time."""
        for number, block in enumerate([block for block in self._blocks if block.suspect]):
            block.suspect = False
            if verdicts is None:
                block.result = Miss.LATE
            elif verdicts[number]:
                block.result = Miss.CORRUPT


def why_not(store: Store, name: bytes, raw: bytes, purged: float, now: float) -> Miss | None:
    """Why a block with the entry `raw` may not be served at `now`, its scope having been purged until `purged`."""
    ends, birth = SPAN.unpack_from(raw)
    if birth <= purged:
        return Miss.PURGED
    if now <= ends and birth <= now + FUTURE_S:
        return None
    try:  # it looks expired; but it may have uses that are not in the index yet
        alive = renewed(Entry.decode(name, raw).life, store.touches.of(name)).servable(Depth.G3, now)
    except CorruptError:
        alive = False
    return None if alive else Miss.EXPIRED


def by_scope(chain: Sequence[BlockKey], wanted: Sequence[int]) -> Iterator[tuple[bytes, list[int]]]:
    """Runs of `wanted` whose keys share a scope; in practice one."""
    run: list[int] = []
    scope = b""
    for place in wanted:
        if chain[place][:SCOPE_BYTES] != scope:
            if run:
                yield scope, run
            scope, run = chain[place][:SCOPE_BYTES], []
        run.append(place)
    if run:
        yield scope, run


def _settle(run: Sequence[_Wanted], result: Miss) -> None:
    for block in run:
        block.result = result


def _place_of(block: _Wanted) -> tuple[int, int]:
    assert block.entry is not None
    return block.entry.segment, block.entry.slot
