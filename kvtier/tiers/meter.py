"""The outermost wrapper of a lower tier: counters, latencies, the purges it owes, and the way to its optional verbs."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import cast

from kvtier.clock import Clock
from kvtier.cost_line import Bound
from kvtier.events import Notify
from kvtier.identity.keys import BlockKey, Scope, tenant_of
from kvtier.spans import span
from kvtier.tiers.breaker import Breaker, Health
from kvtier.tiers.guard import Guarded, OptionalVerbs, Wrapper
from kvtier.tiers.protocol import (
    Describing,
    Loaded,
    Miss,
    Notebook,
    Pinning,
    PurgeLogging,
    Resizable,
    Retaining,
    Sealed,
    Stored,
    Target,
)
from kvtier.tiers.read_cost import ReadCost
from kvtier.tiers.residence import Residence
from kvtier.times import Mono, Wall

_GONE = frozenset({Miss.ABSENT, Miss.EXPIRED, Miss.EVICTED, Miss.PURGED, Miss.CORRUPT, Miss.MISMATCH})


class Latency:
    """Durations, in seconds: the last SAMPLES_MAX of them, and a histogram of all."""

    SAMPLES_MAX = 1024
    BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    """Upper bounds of the histogram's buckets; the last bucket has none."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=self.SAMPLES_MAX)
        self._counts = [0] * (len(self.BOUNDS_S) + 1)
        self._sums = [0.0] * (len(self.BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)
        place = bisect_left(self.BOUNDS_S, seconds)
        self._counts[place] += 1
        self._sums[place] += seconds

    def buckets(self) -> list[tuple[int, float]]:
        """Per bucket, how many durations it has and their sum."""
        return list(zip(self._counts, self._sums, strict=True))

    def quantile_ms(self, q: float) -> float:
        """Milliseconds; 0 before the first sample."""
        ordered = sorted(self._samples)
        return 1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


class Metered(Wrapper):
    """Counts blocks by outcome, bytes, and latency per call; estimates what a read costs.

    Nothing is found here of a tenant with a purge that the tier owes, and nothing at all while it is `stale`: it may be
    what a purge covers.

    `retaining`, `pinning`, `notebook` and `describing` give the tier's verbs as its guard asks them: see `Guarded.ask`.
    """

    inner: Guarded

    def __init__(self, inner: Guarded, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock
        self.owed: dict[Scope, Wall] = {}
        """Purges that the tier has not confirmed: tenant → mark. See `kvtier.manager.purge`."""
        self.overdue = 0
        """G2's slots of reads that nobody waits for any more, and that have not ended."""
        self.stale = False
        """Whether it is to be emptied, since it may have missed purges that nobody can name."""
        self.loaded = 0
        self.misses: Counter[Miss] = Counter()
        self.stored: Counter[Stored] = Counter()
        self.read_bytes = 0
        self.written_bytes = 0
        self.read_latency = Latency()
        self.write_latency = Latency()
        self.read_cost = ReadCost()
        self._residence: Residence | None = None

    @property
    def breaker(self) -> Breaker:
        """Takes the tier out of service."""
        return self.inner.breaker

    @property
    def unanswered(self) -> Mapping[str, int]:
        """Calls without an answer in time, by verb."""
        return self.inner.unanswered

    @property
    def health(self) -> Health:
        return self.inner.breaker.health

    def healthy(self) -> bool:
        """Whether the breaker is closed."""
        return self.health is Health.WELL

    @property
    def resting(self) -> bool:
        """Whether the breaker is open, and it is too early for a probe."""
        return self.inner.breaker.resting

    def retaining(self) -> Retaining | None:
        """The tier, if it can exempt blocks from eviction."""
        return cast(Retaining, OptionalVerbs(self.inner)) if self._can(Retaining) else None

    def pinning(self) -> Pinning | None:
        """The tier, if it keeps named pins."""
        return cast(Pinning, OptionalVerbs(self.inner)) if self._can(Pinning) else None

    def notebook(self) -> Notebook | None:
        """The tier, if it stores notes."""
        return cast(Notebook, OptionalVerbs(self.inner)) if self._can(Notebook) else None

    def describing(self) -> Describing | None:
        """The tier, if it keeps what blocks hold."""
        return cast(Describing, OptionalVerbs(self.inner)) if self._can(Describing) else None

    def resizable(self) -> Resizable | None:
        """The tier, if it can have another capacity while it is in use."""
        return cast(Resizable, OptionalVerbs(self.inner)) if self._can(Resizable) else None

    def purge_log(self) -> PurgeLogging | None:
        """The tier's purge log, if it has one: asked without the guard, since it does no I/O."""
        found: PurgeLogging | None = getattr(self.inner.inner, "purge_log", None)
        return found

    def _can(self, protocol: type) -> bool:
        """Whether the tier has every verb of an optional protocol. By `hasattr`, so that a wrapper may offer them."""
        return all(hasattr(self.inner.inner, verb) for verb in vars(protocol) if not verb.startswith("_"))

    def subscribe(self, notify: Notify | None) -> None:
        """Call `notify` for blocks that become durable here, and for those that a read finds, or finds gone: a tier
        that outlives its process has many that nobody was told of."""
        self._residence = residence = None if notify is None else Residence(notify)
        super().subscribe(None if residence is None else residence.gone)

    def names_removals(self) -> bool:
        """Whether subscribers are told of every block that this process takes out of the tier, by its name."""
        return hasattr(self.inner.inner, "subscribe")

    async def announce(self, keys: Sequence[BlockKey], deadline: Mono, before: Callable[[int], object]) -> int:
        """Tell the subscriber of those of a chain's consecutive blocks that are here, up to the first that is not.
        Returns how many they are; where there are some, calls `before` with that first."""
        residence = self._residence
        if residence is None:
            return 0
        with residence.verb() as removed:
            found = await self.lookup(keys, range(len(keys)), deadline)
            here = next((place for place, miss in enumerate(found) if miss is not None), len(found))
            if here:
                before(here)
                residence.found(keys[:here], removed)
        return here

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        return self._not_owed(chain, wanted, self.inner.peek(chain, wanted))

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        return self._not_owed(chain, wanted, await self.inner.lookup(chain, wanted, deadline))

    def _not_owed(
        self, chain: Sequence[BlockKey], wanted: Sequence[int], answers: list[Miss | None]
    ) -> list[Miss | None]:
        if not self.behind:
            return answers
        return [
            Miss.PURGED if miss is None and self._owes(chain[index]) else miss
            for index, miss in zip(wanted, answers, strict=True)
        ]

    @property
    def behind(self) -> bool:
        """Whether the tier may have blocks that were purged."""
        return self.stale or bool(self.owed)

    def _owes(self, key: BlockKey) -> bool:
        return self.stale or tenant_of(key) in self.owed

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        residence = None if keys is None or self.names_removals() else self._residence
        try:
            return await self.inner.evict(keys)
        finally:
            if residence is not None and keys is not None:
                residence.gone(keys)

    async def empty(self) -> int:
        """`evict` of all. Raises TierError where it is not done."""
        return await self.inner.empty()

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        if self.behind and any(self._owes(chain[target.index]) for target in targets):  # they were found before
            self.misses[Miss.PURGED] += len(targets)
            return [Miss.PURGED] * len(targets)
        began, loaded = self._clock.monotonic(), 0
        residence = self._residence
        self.read_cost.began()
        try:
            with (
                span("kv.transfer", tier=self.name, direction="read", blocks=len(targets)) as told,
                nullcontext(set[BlockKey]()) if residence is None else residence.verb() as removed,
            ):
                results = await self.inner.read(chain, targets, deadline)
                misses = [result for result in results if isinstance(result, Miss)]
                loaded = len(results) - len(misses)
                told(verified=loaded, corrupt=misses.count(Miss.CORRUPT), bytes=loaded * self.block_bytes)
                if residence is not None:
                    pairs = [(chain[target.index], result) for target, result in zip(targets, results, strict=True)]
                    residence.found([key for key, result in pairs if isinstance(result, Loaded)], removed)
                    residence.gone([key for key, result in pairs if isinstance(result, Miss) and result in _GONE])
        finally:
            ended = self._clock.monotonic()
            self.read_cost.ended(loaded, began, ended)
        self.loaded += loaded
        self.read_bytes += loaded * self.block_bytes
        self.misses.update(misses)
        self.read_latency.add(ended - began)
        return results

    def estimate(self) -> Bound | None:
        """The least seconds that reads cost lately; None while there were too few."""
        return self.read_cost.estimate(self._clock.monotonic())

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        began = self._clock.monotonic()
        residence = self._residence
        with (
            span("kv.transfer", tier=self.name, direction="write", blocks=len(blocks)) as told,
            nullcontext(set[BlockKey]()) if residence is None else residence.verb() as removed,
        ):
            results = await self.inner.write(blocks, deadline)
            told(stored=results.count(Stored.STORED))
            if residence is not None:
                pairs = zip(blocks, results, strict=True)
                residence.found([block.key for block, result in pairs if result.durable], removed)
        self.write_latency.add(self._clock.monotonic() - began)
        self.stored.update(results)
        self.written_bytes += self.block_bytes * results.count(Stored.STORED)
        return results
