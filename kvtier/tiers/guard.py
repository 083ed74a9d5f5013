"""Decorators over a tier: what every lower tier gets, whatever it is made of.

    Metered(Guarded(tier))

`Guarded` is the one place where a tier's exceptions become misses, and where its breaker is fed. `Metered`
counts what comes back, by reason, and keeps latencies.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from kvtier.clock import Clock
from kvtier.errors import ClosedError
from kvtier.events import Notify
from kvtier.identity.keys import BlockKey, Scope
from kvtier.tiers.breaker import Breaker
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Tier, Usage

log = logging.getLogger(__name__)
T = TypeVar("T")

_GONE = frozenset({Miss.ABSENT, Miss.EXPIRED, Miss.EVICTED, Miss.PURGED, Miss.CORRUPT, Miss.MISMATCH})


class Wrapper:
    """Passes every verb on. Subclasses override what they change."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.depth = inner.depth
        self.block_bytes = inner.block_bytes
        self.stride = inner.stride

    async def open(self) -> None:
        await self.inner.open()

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        return self.inner.peek(chain, wanted)

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: float) -> list[Miss | None]:
        return await self.inner.lookup(chain, wanted, deadline)

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: float) -> list[Loaded | Miss]:
        return await self.inner.read(chain, targets, deadline)

    async def write(self, blocks: Sequence[Sealed], deadline: float) -> list[Stored]:
        return await self.inner.write(blocks, deadline)

    def touch(self, keys: Sequence[BlockKey], now: float) -> None:
        self.inner.touch(keys, now)

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        return await self.inner.evict(keys)

    async def drop_made_after(self, time: float) -> int:
        """See `kvtier.tiers.protocol.Retaining`; a tier that cannot drops nothing."""
        work = getattr(self.inner, "drop_made_after", None)
        return int(await work(time)) if work is not None else 0

    async def purge(self, scope: Scope, before: float) -> int:
        return await self.inner.purge(scope, before)

    async def tombstones(self) -> Mapping[Scope, float]:
        return await self.inner.tombstones()

    async def flush(self, deadline: float) -> None:
        await self.inner.flush(deadline)

    def subscribe(self, told: Notify | None) -> None:
        """Have `told` hear of blocks that the tier drops by itself, as far as it can say."""
        subscribe = getattr(self.inner, "subscribe", None)
        if subscribe is not None:
            subscribe(told)

    def usage(self) -> Usage:
        return self.inner.usage()

    def counters(self) -> Mapping[str, int]:
        """What only this kind of tier counts, by name; nothing for most."""
        counters: Callable[[], Mapping[str, int]] = getattr(self.inner, "counters", dict)
        return counters()

    def check(self) -> None:
        self.inner.check()

    async def close(self, deadline: float) -> None:
        await self.inner.close(deadline)


class Guarded(Wrapper):
    """Turns a sick tier into misses. Raises nothing but ClosedError and cancellation, except from `open`, `check`
    and `purge`, whose failures their caller must hear of."""

    def __init__(self, inner: Tier, clock: Clock, breaker: Breaker | None = None) -> None:
        super().__init__(inner)
        self._clock = clock
        self.breaker = breaker or Breaker(clock)

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        try:
            return self.inner.peek(chain, wanted)
        except ClosedError:
            raise
        except Exception as error:
            self._note("peek", error)
            return [Miss.ERROR] * len(wanted)

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: float) -> list[Miss | None]:
        if not self.breaker.allows():
            return [Miss.BREAKER] * len(wanted)
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                answers = await self.inner.lookup(chain, wanted, deadline)
        except ClosedError:
            raise
        except TimeoutError:
            self.breaker.failed()
            return [Miss.LATE] * len(wanted)
        except Exception as error:
            self._note("lookup", error)
            return [Miss.ERROR] * len(wanted)
        self._judge(answers)
        return answers

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: float) -> list[Loaded | Miss]:
        """Returns when nothing writes to the targets any more, however late; the breaker hears at the deadline."""
        if not self.breaker.allows():
            return [Miss.BREAKER] * len(targets)
        try:
            results = await self._overdue(self.inner.read(chain, targets, deadline), deadline)
        except ClosedError:
            raise
        except Exception as error:
            self._note("read", error)
            return [Miss.ERROR] * len(targets)
        self._judge(results)
        return results

    async def write(self, blocks: Sequence[Sealed], deadline: float) -> list[Stored]:
        if not self.breaker.allows():
            return [Stored.FAILED] * len(blocks)
        try:
            results = await self._overdue(self.inner.write(blocks, deadline), deadline)
        except ClosedError:
            raise
        except Exception as error:
            self._note("write", error)
            return [Stored.FAILED] * len(blocks)
        if Stored.FAILED in results:
            self.breaker.failed()
        else:
            self.breaker.succeeded()
        return results

    def touch(self, keys: Sequence[BlockKey], now: float) -> None:
        try:
            self.inner.touch(keys, now)
        except ClosedError:
            raise
        except Exception as error:
            self._note("touch", error)

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        try:
            return await self.inner.evict(keys)
        except ClosedError:
            raise
        except Exception as error:
            self._note("evict", error)
            return 0

    async def drop_made_after(self, time: float) -> int:
        try:
            return await super().drop_made_after(time)
        except ClosedError:
            raise
        except Exception as error:
            self._note("drop_made_after", error)
            return 0

    async def tombstones(self) -> Mapping[Scope, float]:
        try:
            return await self.inner.tombstones()
        except ClosedError:
            raise
        except Exception as error:
            self._note("tombstones", error)
            return {}

    async def flush(self, deadline: float) -> None:
        await self._within("flush", self.inner.flush(deadline), deadline)

    async def close(self, deadline: float) -> None:
        await self._within("close", self.inner.close(deadline), deadline)

    async def _within(self, verb: str, work: Awaitable[None], deadline: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                await work
        except ClosedError:
            raise
        except Exception as error:
            self._note(verb, error)

    async def _overdue(self, work: Awaitable[T], deadline: float) -> T:
        """Await `work` to its end; tell the breaker if it outlives the deadline."""
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=max(0.0, deadline - self._clock.monotonic()) + 0.05)
            if not done:
                self.breaker.failed()
            return await task
        except asyncio.CancelledError:
            task.cancel()
            raise

    def _note(self, verb: str, error: Exception) -> None:
        """One line for operators when the tier falls ill, not one for every call that finds it so."""
        level = logging.DEBUG if self.breaker.errors else logging.WARNING
        self.breaker.failed()
        log.log(level, "%s: %s failed: %s: %s", self.name, verb, type(error).__name__, error)

    def _judge(self, results: Sequence[object]) -> None:
        if any(result in (Miss.ERROR, Miss.LATE) for result in results):
            self.breaker.failed()
        else:
            self.breaker.succeeded()


def _is_gone(result: object) -> bool:
    return isinstance(result, Miss) and result in _GONE


class Latency:
    """The last SAMPLES_MAX durations, in seconds."""

    SAMPLES_MAX = 1024

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=self.SAMPLES_MAX)

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)

    def quantile_ms(self, q: float) -> float:
        """Milliseconds; 0 before the first sample."""
        ordered = sorted(self._samples)
        return 1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


class Metered(Wrapper):
    """Counts blocks by outcome, bytes, and latency per call; keeps the estimates that plans are made with."""

    ESTIMATE_S = 60.0
    _SMOOTHING = 0.2

    inner: Guarded

    def __init__(self, inner: Guarded, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock
        self.loaded = 0
        self.misses: Counter[Miss] = Counter()
        self.stored: Counter[Stored] = Counter()
        self.read_bytes = 0
        self.written_bytes = 0
        self.read_latency = Latency()
        self.write_latency = Latency()
        self._read_s_per_block: float | None = None
        self._read_at = 0.0
        self._notify: Notify | None = None

    def subscribe(self, told: Notify | None) -> None:
        """Have `told` hear of blocks that become durable here, or turn out to be gone."""
        self._notify = told
        super().subscribe(told)

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: float) -> list[Loaded | Miss]:
        began = self._clock.monotonic()
        results = await self.inner.read(chain, targets, deadline)
        took = self._clock.monotonic() - began
        loaded = sum(isinstance(result, Loaded) for result in results)
        self.loaded += loaded
        self.read_bytes += loaded * self.block_bytes
        self.misses.update(result for result in results if isinstance(result, Miss))
        self.read_latency.add(took)
        if self._notify is not None:
            gone = [target.index for target, result in zip(targets, results, strict=True) if _is_gone(result)]
            self._notify([chain[index] for index in gone], False)
        if loaded:
            sample, old = took / loaded, self._read_s_per_block
            self._read_s_per_block = sample if old is None else old + self._SMOOTHING * (sample - old)
            self._read_at = self._clock.monotonic()
        return results

    def estimate(self) -> float | None:
        """Seconds per block of late reads; None when there were none for ESTIMATE_S. So a tier that was found too slow
        is tried again now and then: nothing else would tell that it has become faster."""
        if self._clock.monotonic() - self._read_at > self.ESTIMATE_S:
            self._read_s_per_block = None
        return self._read_s_per_block

    async def write(self, blocks: Sequence[Sealed], deadline: float) -> list[Stored]:
        began = self._clock.monotonic()
        results = await self.inner.write(blocks, deadline)
        self.write_latency.add(self._clock.monotonic() - began)
        self.stored.update(results)
        self.written_bytes += self.block_bytes * results.count(Stored.STORED)
        if self._notify is not None:
            pairs = zip(blocks, results, strict=True)
            self._notify([block.key for block, result in pairs if result.durable], True)
        return results
