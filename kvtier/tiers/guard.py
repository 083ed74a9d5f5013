"""The guard that every lower tier gets, whatever it is made of: `Metered(Guarded(tier))`, see `kvtier.tiers.meter`.

`Guarded` is the one place where a tier's exceptions become misses, and where its breaker is fed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from kvtier.clock import Clock
from kvtier.errors import ClosedError
from kvtier.events import Notify
from kvtier.identity.keys import BlockKey, Scope
from kvtier.tiers.breaker import Breaker
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Tier, Usage
from kvtier.times import Mono, Wall

log = logging.getLogger(__name__)
T = TypeVar("T")


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

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        return await self.inner.lookup(chain, wanted, deadline)

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        return await self.inner.read(chain, targets, deadline)

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        return await self.inner.write(blocks, deadline)

    def touch(self, keys: Sequence[BlockKey], now: Wall) -> None:
        self.inner.touch(keys, now)

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        return await self.inner.evict(keys)

    async def drop_made_after(self, time: Wall) -> int:
        """See `kvtier.tiers.protocol.Retaining`; a tier that cannot drops nothing."""
        work = getattr(self.inner, "drop_made_after", None)
        return int(await work(time)) if work is not None else 0

    async def purge(self, scope: Scope, before: Wall) -> int:
        return await self.inner.purge(scope, before)

    async def tombstones(self) -> Mapping[Scope, Wall]:
        return await self.inner.tombstones()

    async def flush(self, deadline: Mono) -> None:
        await self.inner.flush(deadline)

    def subscribe(self, notify: Notify | None) -> None:
        """Call `notify` for blocks that the tier drops by itself, as far as it can say."""
        subscribe = getattr(self.inner, "subscribe", None)
        if subscribe is not None:
            subscribe(notify)

    def usage(self) -> Usage:
        return self.inner.usage()

    def counters(self) -> Mapping[str, int]:
        """Counters of this kind of tier alone, by name; most have none."""
        counters: Callable[[], Mapping[str, int]] = getattr(self.inner, "counters", dict)
        return counters()

    def check(self) -> None:
        self.inner.check()

    async def close(self, deadline: Mono) -> None:
        await self.inner.close(deadline)


class Guarded(Wrapper):
    """Turns a sick tier into misses. Raises nothing but ClosedError and cancellation, except from `open`, `check`
    and `purge`, whose failures their caller must see."""

    def __init__(self, inner: Tier, clock: Clock, breaker: Breaker | None = None) -> None:
        super().__init__(inner)
        self._clock = clock
        self.breaker = breaker or Breaker(clock)

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        with self._absorb("peek"):
            return self.inner.peek(chain, wanted)
        return [Miss.ERROR] * len(wanted)

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        if not self.breaker.allows():
            return [Miss.BREAKER] * len(wanted)
        with self._absorb("lookup"):
            try:
                async with asyncio.timeout(self._left_s(deadline)):
                    found = await self.inner.lookup(chain, wanted, deadline)
            except TimeoutError:
                found = [Miss.LATE] * len(wanted)
            self._report(Miss.ERROR in found or Miss.LATE in found)
            return found
        return [Miss.ERROR] * len(wanted)

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        """Returns when nothing writes to the targets any more, however late; the breaker hears at the deadline."""
        if not self.breaker.allows():
            return [Miss.BREAKER] * len(targets)
        with self._absorb("read"):
            results = await self._overdue(self.inner.read(chain, targets, deadline), deadline)
            self._report(Miss.ERROR in results or Miss.LATE in results)
            return results
        return [Miss.ERROR] * len(targets)

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        if not self.breaker.allows():
            return [Stored.FAILED] * len(blocks)
        with self._absorb("write"):
            results = await self._overdue(self.inner.write(blocks, deadline), deadline)
            self._report(Stored.FAILED in results)
            return results
        return [Stored.FAILED] * len(blocks)

    def touch(self, keys: Sequence[BlockKey], now: Wall) -> None:
        with self._absorb("touch"):
            self.inner.touch(keys, now)

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        with self._absorb("evict"):
            return await self.inner.evict(keys)
        return 0

    async def drop_made_after(self, time: Wall) -> int:
        with self._absorb("drop_made_after"):
            return await super().drop_made_after(time)
        return 0

    async def tombstones(self) -> Mapping[Scope, Wall]:
        with self._absorb("tombstones"):
            return await self.inner.tombstones()
        return {}

    async def flush(self, deadline: Mono) -> None:
        with self._absorb("flush"):
            async with asyncio.timeout(self._left_s(deadline)):
                await self.inner.flush(deadline)

    async def close(self, deadline: Mono) -> None:
        with self._absorb("close"):
            async with asyncio.timeout(self._left_s(deadline)):
                await self.inner.close(deadline)

    def _left_s(self, deadline: Mono) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    async def _overdue(self, work: Awaitable[T], deadline: Mono) -> T:
        """Await `work` to its end; report a failure to the breaker if it outlives the deadline."""
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._left_s(deadline) + 0.05)
            if not done:
                self.breaker.failed()
            return await task
        except asyncio.CancelledError:
            task.cancel()
            raise

    @contextmanager
    def _absorb(self, verb: str) -> Iterator[None]:
        """Swallow any exception but ClosedError: report it to the breaker, and log the first of a row as a warning."""
        try:
            yield
        except ClosedError:
            raise
        except Exception as error:
            level = logging.DEBUG if self.breaker.errors else logging.WARNING
            self.breaker.failed()
            log.log(level, "%s: %s failed: %s: %s", self.name, verb, type(error).__name__, error)

    def _report(self, failed: bool) -> None:
        if failed:
            self.breaker.failed()
        else:
            self.breaker.succeeded()
