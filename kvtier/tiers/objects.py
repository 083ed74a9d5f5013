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
import os
import random
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtier import integrity
from kvtier.block import SCOPE_BYTES, BlockKey, Scope, scope_of_key
from kvtier.clock import Clock
from kvtier.errors import ClosedError, ConfigError, CorruptError, InvalidRequest, TierError
from kvtier.frame import COUNT_MAX, Frame, decode, header_bytes_of
from kvtier.namespace import Namespace
from kvtier.terms import Depth, Lifetime
from kvtier.tier import Loaded, Miss, Sealed, Stored, Target, Usage
from kvtier.tiers.bucket import LIST_PAGE, TIER, Bucket, Patient, Stat
from kvtier.tiers.bucket_url import Client, Timeouts, open_bucket
from kvtier.tiers.loopthread import LoopThread
from kvtier.tiers.strides import (
    Names,
    born,
    common_life,
    default_stride,
    narrow,
    probe_width,
    renewal_due,
    runs,
    spread,
)
from kvtier.tiers.unit_index import Unit, UnitIndex

FRESH_S = 45.0
"""Age at which the list of tombstones must be read again before anything is served."""

ABSENT_S = 5.0
"""How long a probe's "not there" is believed."""

TRUST_S = 60.0
"""How long the index alone may say "already there" to a writer."""

RETRY_S = 2.0
"""After the server could not be reached, calls fail at once for about this long."""

OPEN_S = 10.0
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
        timeouts: Timeouts | None = None,
        attempts: int = 4,
        seed: int | None = None,
    ) -> None:
        self.block_bytes = namespace.block_bytes
        self.stride = default_stride(namespace.block_bytes) if stride is None else stride
        if not 1 <= self.stride <= COUNT_MAX:
            raise ConfigError(f"tiers.g4.stride must lie in 1 … {COUNT_MAX} blocks, got {self.stride}")
        self._url = url
        self._clock = clock
        self._namespace = namespace.digest
        self._timeouts = timeouts or Timeouts()
        self._random = random.Random(seed)
        bucket, prefix = open_bucket(url, options or {}, client, clock, self._timeouts)
        self._bucket: Bucket = Patient(bucket, attempts=attempts, seed=seed)
        self._names = Names(prefix, self._namespace)
        self._units = UnitIndex()
        self._suspect: dict[BlockKey, None] = {}
        self._tombstones: dict[Scope, float] = {}
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
        self._gate = asyncio.Semaphore(self._timeouts.concurrency)
        self._probes = asyncio.Semaphore(4 * self._timeouts.concurrency)
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
                await self._run(self._bucket.close(), budget)
            except (TierError, TimeoutError, OSError):
                pass
            finally:
                await asyncio.get_running_loop().run_in_executor(None, self._loop.stop, budget)
                self._started, self._synced, self._retry_at = False, float("-inf"), float("-inf")
                self._units.clear()

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
                    await self._bucket.start()
                    self._started = True
                await self._read_tombstones()
            except BaseException as error:
                self.problem = str(error) if isinstance(error, TierError) else "no answer"
                self._retry_at = now + RETRY_S * self._random.uniform(0.5, 1.5)
                raise
            self._synced, self.problem = now, ""

    async def _read_tombstones(self) -> None:
        async for page in self._bucket.list(self._names.tombstones):
            for stat in page:
                parsed = self._names.parse_tombstone(stat.name)
                if parsed is not None:
                    scope, before = parsed
                    self._tombstones[scope] = max(before, self._tombstones.get(scope, 0.0))

    # -- what is here ---------------------------------------------------------------------------------------------

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        self._usable()
        now = self._clock.wall()
        out: list[Miss | None] = []
        unit: Unit | None = None
        verdict: Miss | None = None
        for depth in wanted:
            if unit is None or not unit.holds(chain[depth], depth):
                unit = self._units.find(chain[depth - depth % self.stride], chain[depth], depth)
                verdict = Miss.ABSENT if unit is None else self._why_not(unit, now)
            out.append(verdict)
        return out

    def _why_not(self, unit: Unit, now: float) -> Miss | None:
        if self._purged(unit.frame.scope, born(unit.frame.life)):
            return Miss.PURGED
        return None if unit.life.servable(self.depth, now) else Miss.EXPIRED

    def _purged(self, scope: Scope, created: float) -> bool:
        return created <= self._tombstones.get(scope, float("-inf"))

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
        now = self._clock.monotonic()
        absent = (s for s in range(low, high) if self._units.missing(chain[s * size + size - 1], now))
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

    def _known(self, chain: Sequence[BlockKey], stride: int) -> bool:
        """Whether the index has all that `chain` names of a stride, fit to be served."""
        first, last = stride * self.stride, min((stride + 1) * self.stride, len(chain)) - 1
        unit = self._units.find(chain[first], chain[last], last)
        return unit is not None and self._why_not(unit, self._clock.wall()) is None

    async def _probe_tails(self, chain: Sequence[BlockKey], stride: int) -> Unit | None:
        """The longest tail of a stride whose full unit is not there."""
        first = stride * self.stride
        stops = range(first + 1, min(first + self.stride - 1, len(chain)) + 1)
        answers = await asyncio.gather(*(self._probe(chain, first, stop) for stop in stops))
        return next((unit for unit in reversed(answers) if isinstance(unit, Unit)), None)

    async def _probe(self, chain: Sequence[BlockKey], first: int, stop: int) -> Unit | Miss:
        """Ask the server for the unit of the blocks first … stop-1."""
        last = chain[stop - 1]
        if self._units.missing(last, self._clock.monotonic()):
            return Miss.ABSENT
        unit = await self._header(chain[first:stop], first)
        why_not = self._why_not(unit, self._clock.wall()) if unit is not None else Miss.ABSENT
        if unit is None or why_not is not None:
            self._units.miss(last, self._clock.monotonic() + ABSENT_S)
        return unit if unit is not None and why_not is None else why_not or Miss.ABSENT

    # -- headers --------------------------------------------------------------------------------------------------

    async def _header(self, keys: Sequence[BlockKey], first: int) -> Unit | None:
        """Read and check the header of the unit that is to hold `keys` from depth `first` on.

        None if it is not there, or was damaged (twice in a row) and has been condemned.
        """
        name = self._names.unit(keys[-1])
        stat: Stat | None = None
        for _ in range(2):
            raw = bytearray(header_bytes_of(len(keys)))
            try:
                async with self._probes:
                    stat = await self._bucket.read(name, 0, [memoryview(raw)])
                if stat is None:
                    self._units.drop(keys[-1])
                    return None
                unit = self._unit(raw, stat, keys, first)
            except CorruptError:
                continue
            self._units.put(unit)
            return unit
        await self._condemn(keys[-1], stat.etag if stat is not None else None)
        return None

    def _unit(self, raw: bytearray, stat: Stat, keys: Sequence[BlockKey], first: int) -> Unit:
        """The unit that a header describes. Raises CorruptError unless it is exactly the one that was asked for."""
        frame = decode(memoryview(raw))
        expected = (self._namespace, scope_of_key(keys[0]), first, self.block_bytes, len(keys))
        if (frame.namespace, frame.scope, frame.depth, frame.block_bytes, len(frame.hashes)) != expected or any(
            frame.key(index) != key for index, key in enumerate(keys)
        ):
            raise CorruptError("another unit's frame under this name")
        if stat.size != frame.total_bytes:
            raise CorruptError(f"object of {stat.size} bytes, its frame has {frame.total_bytes}")
        used = frame.life.last_use if stat.used is None else stat.used
        return Unit(frame, stat.size, stat.etag, Lifetime(used, frame.life.stamps), used, self._clock.monotonic())

    async def _condemn(self, last: BlockKey, etag: str | None) -> None:
        """Delete the version that failed its check; the next write of this name does not ask what is there."""
        self._units.drop(last)
        self._suspect[last] = None
        while len(self._suspect) > LIST_PAGE:
            del self._suspect[next(iter(self._suspect))]
        try:
            await self._bucket.delete(self._names.unit(last), etag)
        except TierError:
            pass  # the write that is no longer conditional replaces it

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
        unit = self._units.find(chain[first], chain[deepest], deepest)
        try:
            if unit is None:
                await self._serve_unknown(chain, first, positions, targets, results)
            else:
                keys = [unit.frame.key(index) for index in range(unit.blocks)]
                verdict = await self._serve(keys, first, unit, positions, targets, results)
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
            verdict = await self._serve(chain[first:stop], first, None, positions, targets, results)
        if verdict is not Miss.ABSENT:
            if verdict is not None:
                _set(results, positions, verdict)
            return
        tail = await self._probe_tails(chain, first // self.stride)
        reach = tail.frame.depth + tail.blocks if tail is not None else first
        inside = [p for p in positions if targets[p].index < reach]
        _set(results, [p for p in positions if targets[p].index >= reach], Miss.ABSENT)
        if tail is not None and inside:
            verdict = await self._serve(chain[first:reach], first, tail, inside, targets, results)
            if verdict is not None:
                _set(results, inside, verdict)

    async def _serve(
        self, keys: Sequence[BlockKey], first: int, unit: Unit | None, positions: list[int],
        targets: Sequence[Target], results: list[Loaded | Miss],
    ) -> Miss | None:  # fmt: skip
        """Read targets out of one unit. A Miss that holds for all of them, or None: `results` has each one's.

        What fails its check is read a second time, header included, before the object is condemned: the first
        time may have been the network, or another replica's replacement between two requests.
        """
        verdict: Miss | None = None
        for attempt in range(2):
            pending = positions
            if attempt:
                unit, pending = None, [p for p in positions if not isinstance(results[p], Loaded)]
            try:
                unit = await self._fill(keys, first, unit, pending, targets)
            except CorruptError:
                verdict = Miss.CORRUPT
                continue
            if unit is None:
                return Miss.ABSENT
            verdict = self._why_not(unit, self._clock.wall())
            if verdict is Miss.EXPIRED and not attempt:
                continue  # another replica may have renewed it
            if verdict is not None:
                return verdict
            bad = self._verify(unit, first, pending, targets, results)
            if not bad:
                return None
            verdict = None
        last = keys[-1]
        await self._condemn(last, unit.etag if unit is not None else None)
        return verdict

    def _verify(
        self, unit: Unit, first: int, pending: list[int], targets: Sequence[Target], results: list[Loaded | Miss]
    ) -> bool:
        """Compare what was read with the header's digests; whether any block failed."""
        bad = False
        for position in pending:
            digest = unit.frame.digests[targets[position].index - first]
            if integrity.matches(digest, targets[position].into):
                results[position] = Loaded(digest, unit.life)
            else:
                results[position], bad = Miss.CORRUPT, True
        return bad

    async def _fill(
        self, keys: Sequence[BlockKey], first: int, unit: Unit | None, pending: list[int], targets: Sequence[Target]
    ) -> Unit | None:
        """Read the pending targets' bytes, and the header with them if it is not known. None: not there.

        Blocks are read in runs of neighbours. All runs come from the version the header came from; if another one
        has taken its place, CorruptError asks for a second look.
        """
        name = self._names.unit(keys[-1])
        by_index = {targets[position].index: targets[position].into for position in pending}
        spans = runs(sorted(by_index))
        buffers = [[piece for index in range(*span) for piece in by_index[index]] for span in spans]
        if unit is not None and self._why_not(unit, self._clock.wall()) is not None:
            return unit
        if unit is None:
            raw = bytearray(header_bytes_of(len(keys)))
            head_first = bool(spans) and spans[0][0] == first
            lead = [memoryview(raw), *(buffers[0] if head_first else ())]
            stat = await self._get(name, 0, lead)
            if stat is None:
                self._units.drop(keys[-1])
                return None
            unit = self._unit(raw, stat, keys, first)
            self._units.put(unit)
            if self._why_not(unit, self._clock.wall()) is not None:
                return unit
            if head_first:
                spans, buffers = spans[1:], buffers[1:]
        for span, into in zip(spans, buffers, strict=True):
            stat = await self._get(name, unit.frame.span(span[0] - first, span[1] - first)[0], into)
            if stat is None:
                self._units.drop(keys[-1])
                return None
            if stat.etag != unit.etag:
                raise CorruptError("replaced between two reads")
        return unit

    async def _get(self, name: str, start: int, into: Sequence[memoryview]) -> Stat | None:
        async with self._gate:
            return await self._bucket.read(name, start, into)

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
            async with self._gate:
                accepted = self._acceptable(unit)
                results[start + len(accepted) : start + len(unit)] = [Stored.REFUSED] * (len(unit) - len(accepted))
                if accepted:
                    results[start : start + len(accepted)] = [await self._store(accepted)] * len(accepted)

        async with asyncio.TaskGroup() as group:
            for start in range(0, len(blocks), self.stride):
                group.create_task(one(start, blocks[start : start + self.stride]))

    def _acceptable(self, unit: Sequence[Sealed]) -> Sequence[Sealed]:
        """The leading blocks that may lie in this tier: what follows one that may not would have no parent."""
        now = self._clock.wall()
        for count, block in enumerate(unit):
            gone = self._purged(scope_of_key(block.key), born(block.life))
            if gone or not block.life.servable(self.depth, now):
                return unit[:count]
        return unit

    async def _store(self, blocks: Sequence[Sealed]) -> Stored:
        """Make one unit durable with at least these blocks' life."""
        keys = [block.key for block in blocks]
        first, last = blocks[0].index, keys[-1]
        life = common_life([block.life for block in blocks])
        if not life.servable(self.depth, self._clock.wall()):
            return Stored.REFUSED
        known = self._units.find(keys[0], last, blocks[-1].index)
        if known is not None and last not in self._suspect:
            known = await self._still_there(known)
            if known is not None and self._why_not(known, self._clock.wall()) is None and self._covers(known, life):
                await self._use(known)
                return Stored.PRESENT
        try:
            return await self._put(blocks, keys, first, life)
        except TierError:
            return Stored.FAILED

    async def _still_there(self, unit: Unit) -> Unit | None:
        if self._clock.monotonic() - unit.seen <= TRUST_S:
            return unit
        return await self._header([unit.frame.key(index) for index in range(unit.blocks)], unit.frame.depth)

    def _covers(self, unit: Unit, life: Lifetime) -> bool:
        """Whether whatever use `life` allows is allowed by the unit's stamps, last use apart."""
        return all(any(old.covers(new) for old in unit.life.stamps) for new in life.stamps)

    async def _use(self, unit: Unit) -> None:
        """The unit was stored again: that is a use."""
        now = self._clock.wall()
        self._units.touch([unit.last], now)
        if renewal_due(unit.life, unit.renewed, now):
            await self._renew(unit, now)

    async def _put(self, blocks: Sequence[Sealed], keys: Sequence[BlockKey], first: int, life: Lifetime) -> Stored:
        name, last = self._names.unit(keys[-1]), keys[-1]
        frame = self._frame(blocks, life)
        data = _encode(frame, blocks)
        outcome = Stored.STORED
        for _ in range(REWRITES_MAX):
            if last in self._suspect:
                stat = await self._bucket.replace(name, data, life.last_use, None)
                self._suspect.pop(last, None)
            else:
                stat = await self._bucket.create(name, data, life.last_use)
            if stat is None:
                there = await self._header(keys, first)
                if there is None:
                    continue  # gone since, or condemned: then the next round does not ask
                if self._why_not(there, self._clock.wall()) is None:
                    if self._covers(there, life):
                        await self._use(there)
                        return Stored.PRESENT
                    # The terms add up; the bytes become ours, since a frame holds one writer's.
                    life = there.life.join(life, self._clock.wall())
                    frame, outcome = replace(frame, life=life), Stored.PRESENT
                    data = _encode(frame, blocks)
                stat = await self._bucket.replace(name, data, life.last_use, there.etag)
            if stat is not None:
                break
        else:
            return Stored.FAILED
        if self._purged(frame.scope, born(life)):
            await self._bucket.delete(name, stat.etag)
            return Stored.REFUSED
        self._units.put(Unit(frame, len(data), stat.etag, life, life.last_use, self._clock.monotonic()))
        return outcome

    def _frame(self, blocks: Sequence[Sealed], life: Lifetime) -> Frame:
        return Frame(
            self._namespace,
            scope_of_key(blocks[0].key),
            blocks[0].index,
            self.block_bytes,
            tuple(block.key[SCOPE_BYTES:] for block in blocks),
            tuple(block.digest for block in blocks),
            life,
        )

    # -- renewal --------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[BlockKey], now: float) -> None:
        self._usable()
        self._units.touch(keys, now)

    async def flush(self, deadline: float) -> None:
        self._usable()
        now = self._clock.wall()
        due = [unit for unit in self._units.take_touched() if renewal_due(unit.life, unit.renewed, now)]
        if due:
            try:
                await self._within(deadline, self._renew_all(due))
            except (TimeoutError, asyncio.CancelledError) as error:
                self._units.touch([unit.last for unit in due], now)  # for the next flush
                if isinstance(error, asyncio.CancelledError):
                    raise

    async def _renew_all(self, units: Iterable[Unit]) -> None:
        await self._ready()
        await asyncio.gather(*(self._renew(unit, unit.life.last_use) for unit in units))

    async def _renew(self, unit: Unit, used: float) -> None:
        """Tell the server of a use: by a copy of the object onto itself, or by writing it again."""
        name = self._names.unit(unit.last)
        if self._bucket.renewable:
            stat = await self._bucket.renew(name, unit.etag, used)
        else:
            stat = await self._rewrite(unit, used)
        if stat is None or stat.size != unit.size:
            self._units.drop(unit.last)
            return
        self._units.put(replace(unit, etag=stat.etag, renewed=used))

    async def _rewrite(self, unit: Unit, used: float) -> Stat | None:
        """The same payload under a header with the unit's present life; None if it is not there as it should be."""
        data = bytearray(unit.size)
        view = memoryview(data)
        try:
            there = await self._bucket.read(self._names.unit(unit.last), 0, [view])
        except CorruptError:
            return None
        if there is None or there.etag != unit.etag:
            return None
        for index, digest in enumerate(unit.frame.digests):
            if not integrity.matches(digest, [view[slice(*unit.frame.span(index, index + 1))]]):
                return None
        header = replace(unit.frame, life=unit.life).encode()
        data[: len(header)] = header
        return await self._bucket.replace(self._names.unit(unit.last), data, used, unit.etag)

    # -- leaving --------------------------------------------------------------------------------------------------

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        """Delete the units that hold `keys`, their neighbours with them; None: the namespace's, for every replica."""
        self._usable()
        count: int = await self._run(self._evict_all(self._names.root) if keys is None else self._evict(keys))
        return count

    async def _evict(self, keys: Sequence[BlockKey]) -> int:
        await self._ready()
        doomed = self._units.holding(keys)
        had = {unit.frame.key(index) for unit in doomed for index in range(unit.blocks)} & set(keys)
        await self._delete([unit.last for unit in doomed])
        return len(had)

    async def _evict_all(self, prefix: str) -> int:
        await self._ready()
        blocks = 0
        async for page in self._bucket.list(prefix):
            named = [(last, stat) for stat in page if (last := self._names.parse_unit(stat.name)) is not None]
            blocks += sum(self._blocks_in(stat.size) for _, stat in named)
            await self._delete([last for last, _ in named])
        self._units.clear()
        return blocks

    async def _delete(self, lasts: Sequence[BlockKey]) -> None:
        for start in range(0, len(lasts), LIST_PAGE):
            some = lasts[start : start + LIST_PAGE]
            for last in some:
                self._units.drop(last)
            await self._bucket.delete_many([self._names.unit(last) for last in some])

    def _blocks_in(self, size: int) -> int:
        """How many blocks an object of `size` bytes holds; 0 if it is no whole frame."""
        guess = min(size // self.block_bytes, COUNT_MAX)
        return next((n for n in range(guess, 0, -1) if header_bytes_of(n) + n * self.block_bytes == size), 0)

    async def purge(self, scope: Scope, before: float) -> int:
        """Lay a tombstone, then delete what it covers. Raises TierError if either could not be done: here the scope
        is purged all the same, elsewhere it is not."""
        self._usable()
        self._tombstones[scope] = max(before, self._tombstones.get(scope, 0.0))
        count: int = await self._run(self._purge(scope, before))
        return count

    async def tombstones(self) -> Mapping[Scope, float]:
        """As the server has them now, one listing. Raises TierError."""
        self._usable()

        async def listed() -> None:
            self._synced = min(self._synced, self._clock.monotonic() - FRESH_S - 1)
            await self._ready()

        await self._run(listed(), OPEN_S)
        return dict(self._tombstones)

    async def _purge(self, scope: Scope, before: float) -> int:
        await self._ready()
        await self._bucket.create(self._names.tombstone(scope, before), bytearray(), self._clock.wall())
        blocks = 0
        async for page in self._bucket.list(self._names.scope(scope)):
            lasts = [last for stat in page if (last := self._names.parse_unit(stat.name)) is not None]
            covered = await asyncio.gather(*(self._covered(last) for last in lasts))
            sizes = {stat.name: stat.size for stat in page}
            doomed = [last for last, gone in zip(lasts, covered, strict=True) if gone]
            blocks += sum(self._blocks_in(sizes[self._names.unit(last)]) for last in doomed)
            await self._delete(doomed)
        await self._drop_older_tombstones(scope)
        return blocks

    async def _covered(self, last: BlockKey) -> bool:
        """Whether the unit is older than its scope's tombstone; what cannot be read is taken for it."""
        known = self._units.get(last)
        if known is not None:
            return self._purged(known.frame.scope, born(known.frame.life))
        raw = bytearray(header_bytes_of(self.stride))
        try:
            async with self._probes:
                stat = await self._bucket.read(self._names.unit(last), 0, [memoryview(raw)])
            return stat is not None and self._purged(scope_of_key(last), born(decode(memoryview(raw)).life))
        except CorruptError:
            return True

    async def _drop_older_tombstones(self, scope: Scope) -> None:
        older = []
        async for page in self._bucket.list(self._names.tombstones + scope.hex()):
            older += [stat.name for stat in page]
        await self._bucket.delete_many(older[:-1])

    # -- accounts -------------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """What this replica knows to be in the bucket, of this namespace."""
        blocks, size = self._units.totals()
        return Usage(blocks, size)

    def check(self) -> None:
        self._units.check(self.stride)


def _set(results: list[Loaded | Miss], positions: Iterable[int], miss: Miss) -> None:
    for position in positions:
        results[position] = miss


def _encode(frame: Frame, blocks: Sequence[Sealed]) -> bytearray:
    """The frame's bytes in memory of their own, so that a request that outlives its caller reads nothing of theirs."""
    data = bytearray(frame.total_bytes)
    header = frame.encode()
    data[: len(header)] = header
    offset = len(header)
    for block in blocks:
        for piece in block.pieces:
            data[offset : offset + len(piece)] = piece
            offset += len(piece)
    return data
