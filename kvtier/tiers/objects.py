"""G4: object storage shared by every replica, through fsspec.

One object is one unit: a stride of consecutive blocks (kvtier.tiers.strides has the names, kvtier.frame the bytes).
Objects are created, never changed in place: a writer that finds the name taken reads the header that is there and
leaves it, renews it, or replaces exactly the version it read. What this replica knows of the bucket is a hint
(kvtier.tiers.unit_index); a read decides.

Idle expiry counts from the last use that is recorded with the object (S3 metadata or a file's time, believed no
further ahead than the server's own stamp allows), hard expiry from the header. Tombstones are listed at most
FRESH_S before anything is served, so a purge takes effect everywhere within that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from kvtier.block import BlockKey, Scope
from kvtier.clock import Clock
from kvtier.errors import ClosedError, ConfigError, InvalidRequest, TierError
from kvtier.frame import COUNT_MAX
from kvtier.namespace import Namespace
from kvtier.pins import Pin
from kvtier.terms import Depth
from kvtier.tier import Loaded, Miss, Sealed, Stored, Target, Usage
from kvtier.tiers.bucket import TIER, Patient
from kvtier.tiers.bucket_url import Client, Limits, open_bucket
from kvtier.tiers.deltas import Deltas
from kvtier.tiers.loopthread import LoopThread
from kvtier.tiers.strides import (
    Names,
    default_stride,
    narrow,
    probe_width,
    renewal_due,
    spread,
)
from kvtier.tiers.sweeper import Sweeper
from kvtier.tiers.unit_index import Unit
from kvtier.tiers.unit_store import UnitStore

FRESH_S = 45.0
"""Age at which the list of tombstones must be read again before anything is served."""

ABSENT_S = 5.0
"""How long a probe's "not there" is believed."""

TRUST_S = 60.0
"""How long the index alone may say "already there" to a writer."""

RETRY_S = 2.0
"""After the server could not be reached, calls fail at once for about this long."""

OPEN_S = 10.0
CHORES_S = 30.0
ROUNDS_MAX = 2
REWRITES_MAX = 3


class ObjectTier:
    """The `kvtier.tier.Tier` over a bucket. Built closed; one process, any event loop.

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
        limits: Limits | None = None,
        attempts: int = 4,
        seed: int | None = None,
    ) -> None:
        self.block_bytes = namespace.block_bytes
        self.stride = default_stride(namespace.block_bytes) if stride is None else stride
        if not 1 <= self.stride <= COUNT_MAX:
            raise ConfigError(f"tiers.g4.stride must lie in 1 … {COUNT_MAX} blocks, got {self.stride}")
        self._url = url
        self._clock = clock
        self._limits = limits or Limits()
        self._random = random.Random(seed)
        bucket, prefix = open_bucket(url, options or {}, client, clock, self._limits)
        self._store = UnitStore(
            Patient(bucket, attempts=attempts, seed=seed), Names(prefix, namespace.digest), self.block_bytes,
            self.stride, clock, self._limits,
        )  # fmt: skip
        self._deltas = Deltas(self._store.bucket, self._store.names, self._store.index, clock)
        self._store.announce = self._deltas.add
        self._sweeper = Sweeper(self._store, self._deltas, clock, self._random)
        self._chores: asyncio.Task[None] | None = None
        self._loop = LoopThread("kvtier-g4")
        self._pid = 0
        self._started = False
        self._synced = float("-inf")
        self._retry_at = float("-inf")
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
        if self._chores is not None:
            self._chores.cancel()
            await asyncio.wait([self._chores])
        await self._store.bucket.close()

    def _begin_chores(self) -> None:
        """Publish and sweep beside the caller's work when it is time to; never more than one round at once."""
        if (self._chores is None or self._chores.done()) and (self._deltas.publishing_due or self._sweeper.due):
            self._chores = asyncio.get_running_loop().create_task(self._do_chores())

    async def _do_chores(self) -> None:
        with contextlib.suppress(TierError, TimeoutError):
            async with asyncio.timeout(CHORES_S):
                if self._deltas.publishing_due:
                    await self._deltas.publish()
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
        now = self._clock.wall()
        out: list[Miss | None] = []
        unit: Unit | None = None
        verdict: Miss | None = None
        for depth in wanted:
            if unit is None or not unit.holds(chain[depth], depth):
                unit = self._store.index.find(chain[depth - depth % self.stride], chain[depth], depth)
                verdict = Miss.ABSENT if unit is None else self._store.why_not(unit, now)
            out.append(verdict)
        return out

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: float) -> list[Miss | None]:
        found = self.peek(chain, wanted)
        if all(miss is None for miss in found) and self._clock.monotonic() - self._synced <= FRESH_S:
            return found
        presumed: set[int] = set()
        late = False
        try:
            await self._within(deadline, self._discover(chain, wanted, presumed))
        except TimeoutError:
            late = True
        verdicts: list[Miss | None] = []
        for depth, miss in zip(wanted, self.peek(chain, wanted), strict=True):
            if miss is Miss.ABSENT:
                miss = None if depth // self.stride in presumed else Miss.LATE if late else miss
            verdicts.append(miss)
        return verdicts

    async def _discover(self, chain: Sequence[BlockKey], wanted: Sequence[int], presumed: set[int]) -> None:
        """Find how far the chain's strides reach, in ROUNDS_MAX rounds of parallel probes; `presumed` takes the
        strides that prefix closure vouches for. After one round, a tail is looked for where the strides end."""
        await self._ready()
        size = self.stride
        low, high = wanted[0] // size, min(wanted[-1] // size + 1, len(chain) // size)
        end = wanted[-1] // size + 1
        while low < end and self._known(chain, low):
            low += 1
        if low < end:
            with contextlib.suppress(TierError):
                await self._deltas.poll()
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
            low, high = narrow(low, high, dict(zip(points, (isinstance(a, Unit) for a in answers), strict=True)))
            presumed.update(range(before, low))
            rounds += 1
        if low < end and rounds < ROUNDS_MAX:
            await self._probe_tails(chain, low)
        self._begin_chores()

    def _known(self, chain: Sequence[BlockKey], stride: int) -> bool:
        """Whether the index has all that `chain` names of a stride, fit to be served."""
        first, last = stride * self.stride, min((stride + 1) * self.stride, len(chain)) - 1
        unit = self._store.index.find(chain[first], chain[last], last)
        return unit is not None and self._store.why_not(unit, self._clock.wall()) is None

    async def _probe_tails(self, chain: Sequence[BlockKey], stride: int) -> Unit | None:
        """The longest tail of a stride whose full unit is not there."""
        first = stride * self.stride
        stops = range(first + 1, min(first + self.stride - 1, len(chain)) + 1)
        answers = await asyncio.gather(*(self._probe(chain, first, stop) for stop in stops))
        return next((unit for unit in reversed(answers) if isinstance(unit, Unit)), None)

    async def _probe(self, chain: Sequence[BlockKey], first: int, stop: int) -> Unit | Miss:
        """Ask the server for the unit of the blocks first … stop-1."""
        last = chain[stop - 1]
        if self._store.index.missing(last, self._clock.monotonic()):
            return Miss.ABSENT
        unit = await self._store.header(chain[first:stop], first)
        why_not = self._store.why_not(unit, self._clock.wall()) if unit is not None else Miss.ABSENT
        if unit is None or why_not is not None:
            self._store.index.miss(last, self._clock.monotonic() + ABSENT_S)
        return unit if unit is not None and why_not is None else why_not or Miss.ABSENT

    # -- headers --------------------------------------------------------------------------------------------------

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
        tail = await self._probe_tails(chain, first // self.stride)
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
        """Renew what was used and is due, and tell other replicas what was written."""
        self._usable()
        now = self._clock.wall()
        due = [unit for unit in self._store.index.take_touched() if renewal_due(unit.life, unit.renewed, now)]
        try:
            await self._within(deadline, self._flush(due))
        except TimeoutError:
            self._store.index.touch([unit.last for unit in due], now)  # for the next flush
        except asyncio.CancelledError:
            self._store.index.touch([unit.last for unit in due], now)
            raise

    async def _flush(self, due: Sequence[Unit]) -> None:
        if self._chores is not None and not self._chores.done():
            await asyncio.wait([self._chores])  # it may hold what is to be published
        if due or self._deltas.pending:
            await self._ready()
            done = await asyncio.gather(
                self._deltas.publish(),
                *(self._store.renew(unit, unit.life.last_use) for unit in due),
                return_exceptions=True,
            )
            for outcome in done:
                if isinstance(outcome, BaseException):
                    raise outcome

    # -- leaving --------------------------------------------------------------------------------------------------

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        """Delete the units that hold `keys`, their neighbours with them; None: the namespace's, for every replica."""
        self._usable()
        count: int = await self._run(self._evict_all(self._store.names.root) if keys is None else self._evict(keys))
        return count

    async def _evict(self, keys: Sequence[BlockKey]) -> int:
        await self._ready()
        doomed = self._store.index.holding(keys)
        had = {unit.frame.key(index) for unit in doomed for index in range(unit.blocks)} & set(keys)
        await self._store.delete([unit.last for unit in doomed])
        return len(had)

    async def _evict_all(self, prefix: str) -> int:
        await self._ready()
        blocks = 0
        async for page in self._store.bucket.list(prefix):
            named = [(last, stat) for stat in page if (last := self._store.names.parse_unit(stat.name)) is not None]
            blocks += sum(self._store.blocks_in(stat.size) for _, stat in named)
            await self._store.delete([last for last, _ in named])
        self._store.index.clear()
        return blocks

    async def purge(self, scope: Scope, before: float) -> int:
        """Lay a tombstone, then delete what it covers. Raises TierError if either could not be done: here the scope
        is purged all the same, elsewhere it is not."""
        self._usable()
        self._store.tombstones[scope] = max(before, self._store.tombstones.get(scope, 0.0))
        count: int = await self._run(self._purge(scope, before))
        return count

    async def tombstones(self) -> Mapping[Scope, float]:
        """As the server has them now, one listing. Raises TierError."""
        self._usable()

        async def listed() -> None:
            self._synced = min(self._synced, self._clock.monotonic() - FRESH_S - 1)
            await self._ready()

        await self._run(listed(), OPEN_S)
        return dict(self._store.tombstones)

    async def _purge(self, scope: Scope, before: float) -> int:
        await self._ready()
        await self._store.bucket.create(self._store.names.tombstone(scope, before), bytearray(), self._clock.wall())
        await self._store.pins.purge(scope, before)
        blocks = 0
        async for page in self._store.bucket.list(self._store.names.scope(scope)):
            lasts = [last for stat in page if (last := self._store.names.parse_unit(stat.name)) is not None]
            sizes = {stat.name: stat.size for stat in page}
            covered = await asyncio.gather(
                *(self._store.covered(last, sizes[self._store.names.unit(last)]) for last in lasts)
            )
            doomed = [last for last, gone in zip(lasts, covered, strict=True) if gone]
            blocks += sum(self._store.blocks_in(sizes[self._store.names.unit(last)]) for last in doomed)
            await self._store.delete(doomed)
        await self._drop_older_tombstones(scope)
        return blocks

    async def _drop_older_tombstones(self, scope: Scope) -> None:
        older = []
        async for page in self._store.bucket.list(self._store.names.tombstones + scope.hex()):
            older += [stat.name for stat in page]
        await self._store.bucket.delete_many(older[:-1])

    # -- pins -----------------------------------------------------------------------------------------------------

    async def pin(self, pin: Pin) -> None:
        """Keep what the bucket holds of the pin's chain, now or later, until the pin ends, for every replica; a pin of
        that name is replaced. Durable when this returns. Raises InvalidRequest or TierError."""
        self._usable()

        async def work() -> None:
            await self._ready()
            await self._store.pins.put(pin)

        await self._run(work())

    async def unpin(self, name: str) -> bool:
        """End a pin; whether there was one. Raises TierError."""
        self._usable()

        async def work() -> bool:
            await self._ready()
            return await self._store.pins.delete(name)

        return bool(await self._run(work()))

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

    def check(self) -> None:
        self._store.index.check(self.stride)


def _set(results: list[Loaded | Miss], positions: Iterable[int], miss: Miss) -> None:
    for position in positions:
        results[position] = miss
