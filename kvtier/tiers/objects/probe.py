"""How far a chain reaches in the bucket: by what this replica knows, else by few probes.

A probe reads one unit's header by its name. Units are prefix-closed, so the end of a chain is found by a search in
√n steps: ROUNDS_MAX rounds of parallel probes, each one round trip. Finds go into the index, which answers next time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvtier.clock import Clock
from kvtier.identity.keys import BlockKey
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.objects.strides import narrow, probe_width, spread
from kvtier.tiers.protocol import Miss

ABSENT_S = 5.0
"""How long a probe's "not there" is believed."""

ROUNDS_MAX = 2


class Prober:
    """Looks for units in a store. Lives on the tier's event loop, but for `peek`."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        """What the index says. Thread-safe; no request."""
        now, size = self._clock.wall(), self._store.stride
        out: list[Miss | None] = []
        unit: ObjectEntry | None = None
        verdict: Miss | None = None
        for depth in wanted:
            if unit is None or not unit.holds(chain[depth], depth):
                unit = self._store.index.find(chain[depth - depth % size], chain[depth], depth)
                verdict = Miss.ABSENT if unit is None else self._store.why_not(unit, now)
            out.append(verdict)
        return out

    async def discover(self, chain: Sequence[BlockKey], wanted: Sequence[int], presumed: set[int]) -> None:
        """Find how far the chain's strides reach; `presumed` takes those that prefix closure vouches for. After one
        round, a tail is looked for where the strides end. Raises TierError."""
        size = self._store.stride
        low, high = wanted[0] // size, min(wanted[-1] // size + 1, len(chain) // size)
        end = wanted[-1] // size + 1
        while low < end and self._known(chain, low):
            low += 1
        now = self._clock.monotonic()
        absent = (s for s in range(low, high) if self._store.index.missing(chain[s * size + size - 1], now))
        high = next(absent, max(low, high))
        width, rounds = probe_width(high - low), 0
        while low < high and rounds < ROUNDS_MAX:
            points = spread(low, high, width)
            answers = await asyncio.gather(*(self._probe(chain, s * size, s * size + size) for s in points))
            before = low
            low, high = narrow(low, high, dict(zip(points, (isinstance(a, ObjectEntry) for a in answers), strict=True)))
            presumed.update(range(before, low))
            rounds += 1
        if low < end and rounds < ROUNDS_MAX:
            await self.tail(chain, low)

    def _known(self, chain: Sequence[BlockKey], stride: int) -> bool:
        """Whether the index has all that `chain` names of a stride, fit to be served."""
        first, last = stride * self._store.stride, min((stride + 1) * self._store.stride, len(chain)) - 1
        unit = self._store.index.find(chain[first], chain[last], last)
        return unit is not None and self._store.why_not(unit, self._clock.wall()) is None

    async def tail(self, chain: Sequence[BlockKey], stride: int) -> ObjectEntry | None:
        """The longest tail of a stride whose full unit is not there; one round. Raises TierError."""
        first = stride * self._store.stride
        stops = range(first + 1, min(first + self._store.stride - 1, len(chain)) + 1)
        answers = await asyncio.gather(*(self._probe(chain, first, stop) for stop in stops))
        return next((unit for unit in reversed(answers) if isinstance(unit, ObjectEntry)), None)

    async def _probe(self, chain: Sequence[BlockKey], first: int, stop: int) -> ObjectEntry | Miss:
        """Ask the server for the unit of the blocks first … stop-1."""
        last = chain[stop - 1]
        if self._store.index.missing(last, self._clock.monotonic()):
            return Miss.ABSENT
        unit = await self._store.header(chain[first:stop], first)
        why_not = self._store.why_not(unit, self._clock.wall()) if unit is not None else Miss.ABSENT
        if unit is None or why_not is not None:
            self._store.index.miss(last, self._clock.monotonic() + ABSENT_S)
        return unit if unit is not None and why_not is None else why_not or Miss.ABSENT
