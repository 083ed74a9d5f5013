"""G4: object storage shared by every replica, through fsspec.

One object is one unit: a stride of consecutive blocks (strides.py has the names, frame.py the bytes).
Objects are created, never changed in place: a writer that finds the name taken reads the header that is there and
leaves it, renews it, or replaces exactly the version it read. What this replica knows of the bucket is a hint
(kvtier.tiers.objects.index); a read decides.

Idle expiry counts from the last use that is recorded with the object (S3 metadata or a file's time, believed no
further ahead than the server's own stamp allows), hard expiry from the header. Tombstones are listed at most
FRESH_S before anything is served, so a purge takes effect everywhere within that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kvtier.clock import Clock
from kvtier.errors import ClosedError, ConfigError, InvalidRequest, TierError
from kvtier.identity.keys import BlockKey, Scope
from kvtier.identity.namespace import Namespace
from kvtier.retention.pins import Pin
from kvtier.retention.terms import Depth
from kvtier.tiers.objects.bucket.open import BucketLimits, Client, open_bucket
from kvtier.tiers.objects.bucket.protocol import TIER, RetryingBucket
from kvtier.tiers.objects.delete import Remover
from kvtier.tiers.objects.deltas import Deltas
from kvtier.tiers.objects.frame import COUNT_MAX
from kvtier.tiers.objects.loop_thread import LoopThread
from kvtier.tiers.objects.probe import Prober
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.objects.strides import ObjectNames, default_stride
from kvtier.tiers.objects.sweep import Sweeper
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Usage

FRESH_S = 45.0
"""Age at which the list of tombstones must be read again before anything is served."""

RETRY_S = 2.0
"""After the server could not be reached, calls fail at once for about this long."""

RENEW_S = 30.0
"""Between two looks at which uses are worth telling the server of."""

OPEN_S = 10.0
CHORES_S = 30.0

T = TypeVar("T")


class ObjectTier:
    """The `kvtier.tiers.protocol.Tier` over a bucket. Built closed; one process, any event loop.

    `url`: any fsspec URL. `options`: the client library's own, credentials included if they are not in its chain.
    `stride`: blocks per object; every replica that shares a bucket must use the same. An unreachable server does not
    keep `open` from returning: until it answers, every verb fails fast with TierError. `problem` says why.
    """

    name = TIER
    depth = Depth.G4

    def __init__(
        self,
        url: str,
        namespace: Namespace,
        *,
        clock: Clock,
        options: Mapping[str, object] | None = None,
        client: Client = "auto",
        stride: int | None = None,
        limits: BucketLimits | None = None,
        attempts: int = 4,
        seed: int | None = None,
    ) -> None:
        self.block_bytes = namespace.block_bytes
        self.stride = default_stride(namespace.block_bytes) if stride is None else stride
        if not 1 <= self.stride <= COUNT_MAX:
            raise ConfigError(f"tiers.g4.stride must lie in 1 … {COUNT_MAX} blocks, got {self.stride}")
        self._url = url
        self._clock = clock
        self._limits = limits or BucketLimits()
        self._random = random.Random(seed)
        bucket, prefix = open_bucket(url, options or {}, client, clock, self._limits)
        self._store = ObjectStore(
            RetryingBucket(bucket, attempts=attempts, seed=seed), ObjectNames(prefix, namespace.digest),
            self.block_bytes,
            self.stride, clock, self._limits,
        )  # fmt: skip
        self._deltas = Deltas(self._store.bucket, self._store.names, self._store.index, clock)
        self._store.announce = self._deltas.add
        self._finder = Prober(self._store, clock)
        self._remover = Remover(self._store, clock)
        self._sweeper = Sweeper(self._store, self._deltas, clock, self._random)
        self._chores: asyncio.Task[None] | None = None
        self._lessons: asyncio.Task[None] | None = None
        self._loop = LoopThread("kvtier-g4")
        self._pid = 0
        self._started = False
        self._synced = float("-inf")
        self._retry_at = float("-inf")
        self._renew_at = clock.monotonic() + RENEW_S
        self.problem = ""

    def __repr__(self) -> str:
        return f"ObjectTier({self._url!r}, stride={self.stride})"

    # -- life -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the loop thread and try the server once, for at most OPEN_S. Raises ConfigError."""
        if self._pid == os.getpid():
            return
        self._loop.start()
        self._pid = os.getpid()
        self._sync_lock = asyncio.Lock()
        try:
            await self._run(self._ready(), OPEN_S)
        except ConfigError:
            await self.close(self._clock.monotonic())
            raise
        except (TierError, TimeoutError):
            pass

    async def close(self, deadline: float) -> None:
        if self._pid != os.getpid():
            return
        budget = max(deadline - self._clock.monotonic(), 0.1)
        try:
            await self.flush(deadline)
        except (TierError, TimeoutError):
            pass
        finally:
            self._pid = 0
            try:
                await self._run(self._let_go(), budget)
            except (TierError, TimeoutError, OSError):
                pass
            finally:
                await asyncio.get_running_loop().run_in_executor(None, self._loop.stop, budget)
                self._started, self._synced, self._retry_at = False, float("-inf"), float("-inf")
                self._store.index.clear()

    async def _let_go(self) -> None:
        for task in (self._chores, self._lessons):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self._store.bucket.close()

    def _begin_chores(self) -> None:
        """Publish, renew, sweep and learn beside the caller's work when it is time to; each never twice at once."""
        if self._deltas.publishing_due or self._sweeper.due or self._clock.monotonic() >= self._renew_at:
            self._chores = self._beside(self._chores, self._do_chores)
        if self._deltas.polling_due:
            self._lessons = self._beside(self._lessons, self._deltas.poll)

    def _beside(self, last: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """A task for `work`, unless the last one still runs; for at most CHORES_S, and its failures are nobody's."""

        async def bounded() -> None:
            with contextlib.suppress(TierError, TimeoutError):
                async with asyncio.timeout(CHORES_S):
                    await work()

        if last is not None and not last.done():
            return last
        return asyncio.get_running_loop().create_task(bounded())

    async def _do_chores(self) -> None:
        if self._deltas.publishing_due:
            await self._deltas.publish()
        if self._clock.monotonic() >= self._renew_at:
            self._renew_at = self._clock.monotonic() + RENEW_S
            await self._store.renew_used()
        if self._sweeper.due:
            await self._sweeper.page()

    def _usable(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(f"{self.name} is closed, or was opened in another process")

    async def _run(self, work: Coroutine[Any, Any, Any], budget_s: float | None = None) -> Any:
        """`work` on the loop thread, for at most `budget_s`. Raises TimeoutError."""

        async def bounded() -> Any:
            async with asyncio.timeout(budget_s):
                return await work

        try:
            return await self._loop.run(bounded())
        finally:
            work.close()  # in case it was cancelled before it began

    async def _within(self, deadline: float, work: Coroutine[Any, Any, Any]) -> Any:
        """`work` on the loop thread until the injected clock's `deadline`. Raises TimeoutError."""
        budget = deadline - self._clock.monotonic()
        if budget <= 0:
            work.close()
            raise TimeoutError
        return await self._run(work, budget)

    async def _ready_then(self, work: Coroutine[Any, Any, T]) -> T:
        """`work` on the loop thread, once the server was reached; without a deadline of its own."""

        async def both() -> T:
            try:
                await self._ready()
                return await work
            finally:
                work.close()

        result: T = await self._run(both())
        return result

    async def _ready(self) -> None:
        """Make sure that the server was reached and that the tombstones are fresh. Raises TierError."""
        if self._clock.monotonic() - self._synced <= FRESH_S:
            return
        async with self._sync_lock:
            now = self._clock.monotonic()
            if now - self._synced <= FRESH_S:
                return
            if now < self._retry_at:
                raise TierError(TIER, "connect", self.problem)
            try:
                if not self._started:
                    await self._store.bucket.start()
                    self._started = True
                await self._read_tombstones()
                await self._store.pins.refresh()
            except BaseException as error:
                self.problem = str(error) if isinstance(error, TierError) else "no answer"
                self._retry_at = now + RETRY_S * self._random.uniform(0.5, 1.5)
                raise
            self._synced, self.problem = now, ""

    async def _read_tombstones(self) -> None:
        async for page in self._store.bucket.list(self._store.names.tombstones):
            for stat in page:
                parsed = self._store.names.parse_tombstone(stat.name)
                if parsed is not None:
                    scope, before = parsed
                    self._store.tombstones[scope] = max(before, self._store.tombstones.get(scope, 0.0))

    # -- what is here ---------------------------------------------------------------------------------------------

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        self._usable()
        return self._finder.peek(chain, wanted)

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: float) -> list[Miss | None]:
        found = self.peek(chain, wanted)
        if all(miss is None for miss in found) and self._clock.monotonic() - self._synced <= FRESH_S:
            return found
        presumed: set[int] = set()
        late = False
        budget = deadline - self._clock.monotonic()
        try:
            # By the caller's own loop: whatever keeps the other one busy, nobody waits for it longer than this.
            async with asyncio.timeout(max(0.0, budget)):
                await self._loop.run(self._discover(chain, wanted, presumed), abandon=True)
        except TimeoutError:
            late = True
        verdicts: list[Miss | None] = []
        for depth, miss in zip(wanted, self.peek(chain, wanted), strict=True):
            if miss is Miss.ABSENT:
                miss = None if depth // self.stride in presumed else Miss.LATE if late else miss
            verdicts.append(miss)
        return verdicts

    async def _discover(self, chain: Sequence[BlockKey], wanted: Sequence[int], presumed: set[int]) -> None:
        await self._ready()
        try:
            await self._finder.discover(chain, wanted, presumed)
        finally:
            self._begin_chores()

    # -- reading --------------------------------------------------------------------------------------------------

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: float) -> list[Loaded | Miss]:
        self._usable()
        for target in targets:
            if sum(len(piece) for piece in target.into) != self.block_bytes:
                raise InvalidRequest(f"target for block {target.index} does not have {self.block_bytes} bytes")
        results: list[Loaded | Miss] = [Miss.LATE] * len(targets)
        try:
            await self._within(deadline, self._read(chain, targets, results))
        except TimeoutError:
            pass
        return results

    async def _read(self, chain: Sequence[BlockKey], targets: Sequence[Target], results: list[Loaded | Miss]) -> None:
        await self._ready()
        strides: dict[int, list[int]] = {}
        for position in sorted(range(len(targets)), key=lambda p: targets[p].index):
            strides.setdefault(targets[position].index // self.stride, []).append(position)
        if len(strides) == 1:  # the commonest read needs no task beside this one
            ((stride, positions),) = strides.items()
            await self._read_stride(chain, stride, positions, targets, results)
            return
        async with asyncio.TaskGroup() as group:
            for stride, positions in strides.items():
                group.create_task(self._read_stride(chain, stride, positions, targets, results))

    async def _read_stride(
        self, chain: Sequence[BlockKey], stride: int, positions: list[int],
        targets: Sequence[Target], results: list[Loaded | Miss],
    ) -> None:  # fmt: skip
        """Serve all targets of one stride, or say why not."""
        first, deepest = stride * self.stride, targets[positions[-1]].index
        unit = self._store.index.find(chain[first], chain[deepest], deepest)
        try:
            if unit is None:
                await self._serve_unknown(chain, first, positions, targets, results)
            else:
                keys = [unit.frame.key(index) for index in range(unit.blocks)]
                verdict = await self._store.serve(keys, first, unit, positions, targets, results)
                if verdict is not None:
                    _set(results, positions, Miss.EVICTED if verdict is Miss.ABSENT else verdict)
        except TierError:
            _set(results, [p for p in positions if results[p] is Miss.LATE], Miss.ERROR)

    async def _serve_unknown(
        self, chain: Sequence[BlockKey], first: int, positions: list[int],
        targets: Sequence[Target], results: list[Loaded | Miss],
    ) -> None:  # fmt: skip
        """Serve from the full unit if it is there, else from the longest tail."""
        stop = first + self.stride
        verdict: Miss | None = Miss.ABSENT
        if stop <= len(chain):
            verdict = await self._store.serve(chain[first:stop], first, None, positions, targets, results)
        if verdict is not Miss.ABSENT:
            if verdict is not None:
                _set(results, positions, verdict)
            return
        tail = await self._finder.tail(chain, first // self.stride)
        reach = tail.frame.depth + tail.blocks if tail is not None else first
        inside = [p for p in positions if targets[p].index < reach]
        _set(results, [p for p in positions if targets[p].index >= reach], Miss.ABSENT)
        if tail is not None and inside:
            verdict = await self._store.serve(chain[first:reach], first, tail, inside, targets, results)
            if verdict is not None:
                _set(results, inside, verdict)

    # -- writing --------------------------------------------------------------------------------------------------

    async def write(self, blocks: Sequence[Sealed], deadline: float) -> list[Stored]:
        self._usable()
        for position, block in enumerate(blocks):
            if block.index != blocks[0].index + position or blocks[0].index % self.stride:
                raise InvalidRequest(f"g4 takes consecutive blocks from a multiple of {self.stride} on")
            if sum(len(piece) for piece in block.pieces) != self.block_bytes:
                raise InvalidRequest(f"block {block.index} does not have {self.block_bytes} bytes")
        results = [Stored.FAILED] * len(blocks)
        try:
            await self._within(deadline, self._write(blocks, results))
        except TimeoutError:
            pass
        return results

    async def _write(self, blocks: Sequence[Sealed], results: list[Stored]) -> None:
        await self._ready()

        async def one(start: int, unit: Sequence[Sealed]) -> None:
            accepted = self._store.acceptable(unit)
            results[start + len(accepted) : start + len(unit)] = [Stored.REFUSED] * (len(unit) - len(accepted))
            if accepted:
                results[start : start + len(accepted)] = [await self._store.store(accepted)] * len(accepted)

        async with asyncio.TaskGroup() as group:
            for start in range(0, len(blocks), self.stride):
                group.create_task(one(start, blocks[start : start + self.stride]))
        self._begin_chores()

    # -- renewal --------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[BlockKey], now: float) -> None:
        self._usable()
        self._store.index.touch(keys, now)

    async def flush(self, deadline: float) -> None:
        """Renew what was used and is due, and tell other replicas what was written. What is late stays to be done."""
        self._usable()
        with contextlib.suppress(TimeoutError):
            await self._within(deadline, self._flush())

    async def _flush(self) -> None:
        if self._chores is not None and not self._chores.done():
            await asyncio.wait([self._chores])  # it may hold what is to be published
        if self._store.index.touched() or self._deltas.pending:
            await self._ready()
            await self._deltas.publish()
            await self._store.renew_used()

    # -- leaving --------------------------------------------------------------------------------------------------

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        """Delete the units that hold `keys`, their neighbours with them; None: the namespace's, for every replica. Keys
        of units that this replica does not know cost a walk over their scopes."""
        self._usable()
        return await self._ready_then(self._remover.all() if keys is None else self._remover.some(keys))

    async def purge(self, scope: Scope, before: float) -> int:
        """Lay a tombstone, then delete what it covers. Raises TierError if either could not be done: here the scope
        is purged all the same, elsewhere it is not."""
        self._usable()
        self._store.tombstones[scope] = max(before, self._store.tombstones.get(scope, 0.0))
        return await self._ready_then(self._remover.purge(scope, before))

    async def tombstones(self) -> Mapping[Scope, float]:
        """As the server has them now, one listing. Raises TierError."""
        self._usable()

        async def listed() -> None:
            self._synced = min(self._synced, self._clock.monotonic() - FRESH_S - 1)
            await self._ready()
            self._begin_chores()

        await self._run(listed(), OPEN_S)
        return dict(self._store.tombstones)

    # -- pins -----------------------------------------------------------------------------------------------------

    async def pin(self, pin: Pin) -> None:
        """Keep what the bucket holds of the pin's chain, now or later, until the pin ends, for every replica; a pin of
        that name is replaced. Durable when this returns. Raises InvalidRequest or TierError."""
        self._usable()
        await self._ready_then(self._store.pins.put(pin))

    async def unpin(self, name: str) -> bool:
        """End a pin; whether there was one. Raises TierError."""
        self._usable()
        return await self._ready_then(self._store.pins.delete(name))

    async def pins(self) -> list[Pin]:
        """The pins that have not ended, by name, at most FRESH_S old. Raises TierError."""
        self._usable()
        await self._run(self._ready())
        return self._store.pins.list()

    # -- accounts -------------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """What this replica knows to be in the bucket, of this namespace."""
        blocks, size = self._store.index.totals()
        return Usage(blocks, size)

    def counters(self) -> dict[str, int]:
        """What this replica did since it was opened, beyond what every tier counts."""
        swept = self._sweeper.swept
        return {
            "retries": self._store.bucket.retries,
            "renewed_units": self._store.renewed,
            "learnt_units": self._deltas.learnt,
            "swept_units": swept.units,
            "swept_blocks": swept.blocks,
            "swept_bytes": swept.bytes,
        }

    def check(self) -> None:
        self._store.index.check(self.stride)


def _set(results: list[Loaded | Miss], positions: Iterable[int], miss: Miss) -> None:
    for position in positions:
        results[position] = miss
