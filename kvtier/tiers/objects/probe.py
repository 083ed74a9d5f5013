"""How far a chain reaches in the bucket: by the index, else by few probes.

A probe reads one object's header by its name. Strides are prefix-closed, so the end of a chain is found by a search: at
most ROUNDS_MAX rounds of parallel probes, each one round trip. A chain of which nothing is found costs UNKNOWN_MAX
probes at most. Results go into the index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

from kvtier.clock import Clock
from kvtier.identity.keys import BlockKey
from kvtier.tiers.objects.frame import COUNT_MAX
from kvtier.tiers.objects.hints import UnitHint
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.store import ABSENT_S, ObjectStore
from kvtier.tiers.objects.strides import narrow, probe_width, spread
from kvtier.tiers.protocol import Loaded, Miss, Target

ROUNDS_MAX = 3
UNKNOWN_MAX = 8


class Prober:
    """Searches a store for the strides of a chain. Lives on the tier's event loop, but for `peek`."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        """`Tier.peek` by the index. Thread-safe; no request."""
        wall_s, size = self._clock.wall(), self._store.stride
        out: list[Miss | None] = []
        known: ObjectEntry | UnitHint | None = None
        for stride, depths in groupby(wanted, lambda depth: depth // size):
            inside, first = list(depths), chain[stride * size]
            known = self._store.known(first, chain[inside[-1]], inside[-1])
            if known is not None:  # and so has all blocks before that one
                out += [self._store.miss_of(known, wall_s)] * len(inside)
                continue
            for depth in inside:
                if known is None or not known.holds(chain[depth], depth):
                    known = self._store.known(first, chain[depth], depth)
                out.append(Miss.ABSENT if known is None else self._store.miss_of(known, wall_s))
        return out

    async def search(self, chain: Sequence[BlockKey], wanted: Sequence[int], presumed: set[int]) -> None:
        """Find how far the chain's strides reach. After each round, and so also for a caller that gives up early,
        `presumed` has the strides that prefix closure vouches for. After one round, a short stride is looked for where
        the full ones end. Raises TierError."""
        size = self._store.stride
        low, high = wanted[0] // size, min(wanted[-1] // size + 1, len(chain) // size)
        end = wanted[-1] // size + 1
        while low < end and self._known(chain, low):
            low += 1
        mono_s = self._clock.monotonic()
        absent = (s for s in range(low, high) if self._store.index.absence(chain[s * size + size - 1], mono_s))
        high = next(absent, max(low, high))
        rounds = probes = 0
        while low < high and rounds < ROUNDS_MAX:
            points = spread(low, high, probe_width(rounds))
            entries = await asyncio.gather(*(self._probe(chain, s * size, s * size + size) for s in points))
            before = low
            low, high = narrow(low, high, {s: entry is not None for s, entry in zip(points, entries, strict=True)})
            presumed.update(range(before, low))
            rounds += 1
            probes += len(points)
        if low < end and rounds < 2:
            await self.short_stride(chain, low, size if low > wanted[0] // size else UNKNOWN_MAX - probes)

    async def read_stride(
        self, chain: Sequence[BlockKey], first: int, targets: Sequence[Target]
    ) -> dict[int, Loaded | Miss]:
        """Read targets of the stride that begins at depth `first`: from the object in the index, else from the full
        stride if it is there, else from the longest short one. Results by depth. Raises TierError."""
        deepest = targets[-1].index
        known = self._store.known(chain[first], chain[deepest], deepest)
        if isinstance(known, UnitHint) and known.last not in chain[first + known.blocks - 1 : first + known.blocks]:
            # Its last blocks are another chain's, if not all: the header names them.
            known = await self._store.entry_of(known, chain[deepest], deepest)
        if known is not None:
            entry = known if isinstance(known, ObjectEntry) else None
            keys = chain[first : first + known.blocks] if entry is None else entry.frame.keys
            found = await self._store.read(keys, first, entry, targets)
            return {depth: Miss.EVICTED if result is Miss.ABSENT else result for depth, result in found.items()}
        stop = first + self._store.stride
        if stop <= len(chain):
            found = await self._store.read(chain[first:stop], first, None, targets)
            if not {Miss.ABSENT, Miss.FOREIGN} & {*found.values()}:
                return found
        short = await self.short_stride(chain, first // self._store.stride)
        stop = first + short.blocks if short is not None else first
        inside = [target for target in targets if target.index < stop]
        found = await self._store.read(chain[first:stop], first, short, inside) if inside else {}
        return {at.index: found.get(at.index, self.reason(chain, at.index)) for at in targets}

    def reason(self, chain: Sequence[BlockKey], depth: int) -> Miss:
        """Why the block at `depth`, which is not in the index, cannot be had, as far as recent probes told. No
        request."""
        first = depth - depth % self._store.stride
        last = chain[min(first + self._store.stride, len(chain)) - 1]
        return self._store.index.absence(last, self._clock.monotonic()) or Miss.ABSENT

    def _known(self, chain: Sequence[BlockKey], stride: int) -> bool:
        """Whether the index has all blocks of `chain` in a stride, fit to be served."""
        first, last = stride * self._store.stride, min((stride + 1) * self._store.stride, len(chain)) - 1
        known = self._store.known(chain[first], chain[last], last)
        return known is not None and self._store.miss_of(known, self._clock.wall()) is None

    async def short_stride(self, chain: Sequence[BlockKey], stride: int, most: int = COUNT_MAX) -> ObjectEntry | None:
        """The longest short form of a stride that is not there in full, among the `most` longest; one round. Raises
        TierError."""
        first = stride * self._store.stride
        stops = range(first + 1, min(first + self._store.stride - 1, len(chain)) + 1)[-most:]
        entries = await asyncio.gather(*(self._probe(chain, first, stop) for stop in stops))
        return next((entry for entry in reversed(entries) if entry is not None), None)

    async def _probe(self, chain: Sequence[BlockKey], first: int, stop: int) -> ObjectEntry | None:
        """The object of the blocks first … stop-1, if it is there and may be served."""
        last = chain[stop - 1]
        if self._store.index.absence(last, self._clock.monotonic()) is not None:
            return None
        entry = await self._store.probe(chain[first:stop], first)
        if entry is not None and await self._store.settled_miss_of(entry) is None:
            return entry
        if self._store.index.absence(last, self._clock.monotonic()) is None:
            self._store.index.put_absent(last, self._clock.monotonic() + ABSENT_S)
        return None
