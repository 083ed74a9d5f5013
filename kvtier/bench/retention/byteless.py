"""Tiers without bytes, for the simulator to put under the real manager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kvtier.checksum import DIGEST_BYTES
from kvtier.clock import Clock
from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.lifetime import Lifetime, Stamp
from kvtier.retention.terms import Depth
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Usage
from kvtier.times import Mono, Wall

BLOCK_BYTES = 4096
"""Size of an empty block to a manager that counts bytes."""

_DIGEST = bytes(DIGEST_BYTES)


class EmptyArena(Arena):
    """G2's slots without bytes."""

    def __init__(self, slots: int) -> None:
        super().__init__(1, 1, slots * BLOCK_BYTES)
        self.slots = slots

    def open(self, *_: object, **__: object) -> None:
        """Nothing to allocate."""

    def pieces(self, slot: int) -> tuple[memoryview, ...]:
        return ()


@dataclass(slots=True)
class _Entry:
    index: int
    stamps: tuple[Stamp, ...]
    last_use: Wall

    @property
    def life(self) -> Lifetime:
        return Lifetime(self.last_use, self.stamps)


class EmptyTier:
    """A `kvtier.tiers.protocol.Tier` of `capacity` blocks without bytes, which takes no time.

    Evicts by (last use, -depth) as G3 does. `written` counts blocks that were not here before.
    """

    block_bytes = BLOCK_BYTES

    def __init__(self, name: str, depth: Depth, stride: int, capacity: int, clock: Clock) -> None:
        self.name = name
        self.depth = depth
        self.stride = stride
        self.written = 0
        self._capacity = capacity
        self._clock = clock
        self._entries: dict[BlockKey, _Entry] = {}
        self._uses: dict[float, list[BlockKey]] = {}  # by time; a key used again since is skipped
        self._times: list[float] = []  # heap of the keys of `_uses`
        self._coldest: tuple[float, list[BlockKey]] | None = None  # of those, sorted by depth
        self._evictions = 0

    async def open(self) -> None:
        """Nothing to attach to."""

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        return [self._why_not(chain[index]) for index in wanted]

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        answers: list[Miss | None] = []
        for index in wanted:
            answers.append(self._why_not(chain[index]))
            if answers[-1] is not None:
                break
        return answers + [Miss.ABSENT] * (len(wanted) - len(answers))

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        return [
            self._why_not(chain[target.index]) or Loaded(_DIGEST, self._entries[chain[target.index]].life)
            for target in targets
        ]

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        now = self._clock.wall()
        return [self._write_one(block, now) for block in blocks]

    def touch(self, keys: Sequence[BlockKey], wall_s: Wall) -> None:
        entries = self._entries
        here = [key for key in keys if (entry := entries.get(key)) is not None and entry.last_use < wall_s]
        for key in here:
            entries[key].last_use = wall_s
        self._record_use(here, wall_s)

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        matching = list(self._entries) if keys is None else [key for key in keys if key in self._entries]
        for key in matching:
            del self._entries[key]
        return len(matching)

    async def purge(self, scope: Scope, before: Wall) -> int:
        """A trace purges nothing."""
        return 0

    async def tombstones(self) -> Mapping[Scope, Wall]:
        return {}

    async def flush(self, deadline: Mono) -> None:
        """Nothing is buffered."""

    def usage(self) -> Usage:
        count = len(self._entries)
        return Usage(count, count * BLOCK_BYTES, self._capacity * BLOCK_BYTES, self._evictions)

    def check(self) -> None:
        assert len(self._entries) <= self._capacity, "more blocks than the capacity"

    async def close(self, deadline: Mono) -> None:
        """Nothing to release."""

    def _why_not(self, key: BlockKey) -> Miss | None:
        entry = self._entries.get(key)
        if entry is None:
            return Miss.ABSENT
        return None if entry.life.servable(self.depth, self._clock.wall()) else Miss.EXPIRED

    def _write_one(self, block: Sealed, now: Wall) -> Stored:
        if not block.life.servable(self.depth, now):
            return Stored.REFUSED
        entry = self._entries.get(block.key)
        if entry is not None:
            life = entry.life.join(block.life, now)
            entry.stamps, entry.last_use = life.stamps, life.last_use
            self._record_use([block.key], life.last_use)
            return Stored.PRESENT
        if len(self._entries) >= self._capacity:
            self._evict_one()
        self._entries[block.key] = _Entry(block.index, block.life.stamps, block.life.last_use)
        self._record_use([block.key], block.life.last_use)
        self.written += 1
        return Stored.STORED

    def _record_use(self, keys: Sequence[BlockKey], now: Wall) -> None:
        if not keys:
            return
        if now not in self._uses:
            self._uses[now] = []
            heappush(self._times, now)
        self._uses[now] += keys
        if self._coldest is not None and self._coldest[0] >= now:
            self._coldest = None

    def _evict_one(self) -> None:
        """Evict the deepest block of those used longest ago."""
        while True:
            if self._coldest is None:
                when = self._times[0]
                self._uses[when] = keys = [key for key in set(self._uses[when]) if self._used(key, when)]
                keys.sort(key=lambda key: (self._entries[key].index, key))
                self._coldest = when, keys
            when, keys = self._coldest
            while keys:
                key = keys.pop()
                if self._used(key, when):
                    del self._entries[key]
                    self._evictions += 1
                    return
            del self._uses[heappop(self._times)]
            self._coldest = None

    def _used(self, key: BlockKey, when: float) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.last_use == when
