"""G4: object storage shared by every replica.

One object is one stride of consecutive blocks (strides.py has the arithmetic, names.py the names, frame.py the bytes).
Objects are created, never changed in place: a writer that finds the name taken reads the header that is there and
leaves it, renews it, or replaces exactly the version it read. A replica's knowledge of the bucket is a hint (index.py);
a read decides.

Idle expiry counts from the last use that is recorded with the object (S3 metadata or a file's time, believed no
further ahead than the server's own stamp allows, and with a keyring only with its proof), hard expiry from the header.
The purge log is read at most FRESH_S before anything is served, so a purge takes effect everywhere within that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from kvtier.clock import Clock
from kvtier.errors import ClosedError, ConfigError, InvalidRequest, TierError, TierTimeout
from kvtier.identity.keys import BlockKey, Scope
from kvtier.identity.namespace import Namespace
from kvtier.keyring import Keyring
from kvtier.retention.pins import Pin
from kvtier.retention.terms import Depth
from kvtier.supervisor import Service, Unwatched, abandon
from kvtier.tiers.data_keys import DataKeys
from kvtier.tiers.objects.background import Background
from kvtier.tiers.objects.bucket.open import BucketLimits, Client, open_bucket
from kvtier.tiers.objects.bucket.protocol import TIER, Bucket
from kvtier.tiers.objects.bucket.retry import RetryingBucket
from kvtier.tiers.objects.compression import codes
from kvtier.tiers.objects.delete import Remover
from kvtier.tiers.objects.frame import COUNT_MAX
from kvtier.tiers.objects.loop_thread import CallersLoop, LoopThread
from kvtier.tiers.objects.names import ObjectNames
from kvtier.tiers.objects.payload import require_library
from kvtier.tiers.objects.probe import Prober
from kvtier.tiers.objects.purge_log import TenantLog
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.objects.strides import default_stride
from kvtier.tiers.objects.sweep import Sweeper
from kvtier.tiers.objects.writer import ObjectWriter
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Usage
from kvtier.times import Mono, Wall

log = logging.getLogger(__name__)

FRESH_S = 45.0
"""Age at which the purge log must be read again before anything is served."""

RETRY_S = 2.0
"""After the server could not be reached, calls fail at once for about this long."""

OPEN_S = 10.0

T = TypeVar("T")


class ObjectTier:
    """The `kvtier.tiers.protocol.Tier` over a bucket. Built closed; one process, any event loop.

    `url`: any fsspec URL. `options`: the client library's own, credentials included if they are not in its chain.
    `stride`: blocks per object; every replica that shares a bucket must use the same. An unreachable server does not
    keep `open` from returning: until it answers, every verb fails fast with TierError. `problem` says why. `keys`:
    units are encrypted with these; without them they are plain, and encrypted ones are misses. `compression`:
    "lossless" codes the units of a namespace of 16-bit floats; coded ones are read with "none", too. `bucket`: a client
    made by the caller, that lives on the caller's event loop as the whole tier then does; `url` is the prefix in it.
    `seed`: of what is drawn (pauses, samples, this replica's number); None: another one each time.
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
        bucket: Bucket | None = None,
        stride: int | None = None,
        limits: BucketLimits | None = None,
        keyring: Keyring | None = None,
        keys: DataKeys | None = None,
        compression: str = "none",
        attempts: int = 4,
        seed: int | None = None,
    ) -> None:
        limits, keyring = limits or BucketLimits(), keyring or Keyring.public()
        if keyring.trusted:
            require_library()
        self.block_bytes = namespace.block_bytes
        self.stride = default_stride(namespace.block_bytes) if stride is None else stride
        if not 1 <= self.stride <= COUNT_MAX:
            raise ConfigError(f"tiers.g4.stride must lie in 1 … {COUNT_MAX} blocks, got {self.stride}")
        self._url = url
        self._trusted = keyring.trusted
        self._clock = clock
        self._random = random.Random(seed)
        self._loop: LoopThread | CallersLoop = LoopThread("kvtier-g4") if bucket is None else CallersLoop()
        bucket, prefix = (bucket, url) if bucket else open_bucket(url, options or {}, client, clock, limits)
        self._store = ObjectStore(
            RetryingBucket(bucket, attempts=attempts, seed=seed), ObjectNames(prefix, namespace.digest, keyring),
            keyring, self.block_bytes, self.stride, clock, limits, keys, codes(compression, namespace.dtype),
            replica=self._random.getrandbits(32),
        )  # fmt: skip
        self._prober, self._remover = Prober(self._store, clock), Remover(self._store)
        self._writer = ObjectWriter(self._store, keyring, clock, limits)
        self._sweeper = Sweeper(self._store, clock, self._random)
        self._background = Background(self._store, self._sweeper, clock)
        self._service: Service = Unwatched()
        self._pid, self._started = 0, False
        self._synced = self._retry_at = float("-inf")
        self._syncing: asyncio.Future[None] | None = None
        self.problem = ""

    def __repr__(self) -> str:
        return f"ObjectTier({self._url!r}, stride={self.stride})"

    # -- life -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the loop thread and try the server once, for at most OPEN_S. Raises ConfigError."""
        if self._pid == os.getpid():
            return
        if not self._trusted:
            log.info("g4: no keys are configured (security.key_file): whoever may write to the bucket is believed")
        self._loop.start()
        self._pid = os.getpid()
        await self._loop.run(self._start_background())
        try:
            await self._loop.run(self._ready(), OPEN_S)
        except ConfigError:
            await self.close(self._clock.monotonic())
            raise
        except (TierError, TimeoutError):
            pass

    async def close(self, deadline: Mono) -> None:
        if self._pid != os.getpid():
            return
        budget_s = max(deadline - self._clock.monotonic(), 0.1)
        try:
            await self.flush(deadline)
        except (TierError, ClosedError, TimeoutError):
            pass
        finally:
            self._pid = 0
            # Now, and not by this task: it may be cancelled, and must not hang on a thread to spare.
            ended = self._loop.stop(self._disconnect(budget_s / 8), budget_s / 2)
            try:
                async with asyncio.timeout(budget_s):
                    await asyncio.wrap_future(ended)
            except TimeoutError:
                pass
            finally:
                self._started, self._synced, self._retry_at = False, float("-inf"), float("-inf")
                self._syncing = None
                self._store.index.clear()

    async def _start_background(self) -> None:
        self._background.start(self._service)

    async def _disconnect(self, wait_s: float) -> None:
        if self._syncing is not None:
            self._syncing.cancel()
        try:
            await self._background.close(Mono(self._clock.monotonic() + wait_s))
            await self._loop.end_tasks(wait_s)  # first: they would start its threads and connections again
        finally:
            await self._store.close()

    def report_to(self, service: Service) -> None:
        """Tell `service`, on the tier's own loop, when a background task keeps failing. Call it before `open`."""
        self._service = service

    def restarts(self) -> Mapping[str, int]:
        """How often background tasks failed and were restarted, by task."""
        return self._background.supervisor.restarts

    def _usable(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(f"{self.name} is closed, or was opened in another process")

    async def _within(self, deadline: Mono, work: Coroutine[Any, Any, T]) -> T:
        """`work` on the loop thread until the injected clock's `deadline`. Raises TimeoutError."""
        budget_s = deadline - self._clock.monotonic()
        if budget_s <= 0:
            work.close()
            raise TimeoutError
        return await self._loop.run(work, budget_s)

    async def _ready_then(self, work: Coroutine[Any, Any, T]) -> T:
        """`work` on the loop thread, once the server was reached; without a deadline."""

        async def both() -> T:
            await self._ready()
            return await work

        try:
            return await self._loop.run(both())
        finally:
            work.close()  # in case it was cancelled before it began

    async def _ready(self) -> None:
        """Make sure that the server was reached and that the lists of purges and pins are fresh. Raises TierError."""
        now = self._clock.monotonic()
        if now - self._synced <= FRESH_S and not self._store.purges.doubtful:
            return
        if self._syncing is None or self._syncing.done():
            if now < self._retry_at:
                raise TierError(TIER, "connect", self.problem)
            # One for all, and nobody's alone: that a caller gives up says nothing about the server.
            self._syncing = asyncio.ensure_future(self._sync(now))
            abandon(self._syncing)
        await asyncio.shield(self._syncing)

    async def _sync(self, now: Mono) -> None:
        try:
            async with asyncio.timeout(OPEN_S):
                if not self._started:
                    await self._store.bucket.start()
                    self._started = True
                await self._store.refresh()
        except BaseException as error:
            self.problem = str(error) if isinstance(error, TierError) else "no answer"
            self._retry_at = now + RETRY_S * self._random.uniform(0.5, 1.5)
            if isinstance(error, TimeoutError):
                raise TierTimeout(TIER, "connect", self.problem) from None
            raise
        self._synced, self.problem = now, ""

    # -- lookup ---------------------------------------------------------------------------------------------------

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        self._usable()
        return self._prober.peek(chain, wanted)

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        found = self.peek(chain, wanted)
        if all(miss is None for miss in found) and self._clock.monotonic() - self._synced <= FRESH_S:
            return found
        presumed: set[int] = set()
        absent = Miss.ABSENT
        budget_s = deadline - self._clock.monotonic()
        try:
            # Timed by the caller's own loop: however busy the loop thread is, no caller waits longer than this.
            async with asyncio.timeout(max(0.0, budget_s)):
                await self._loop.run_or_abandon(self._search(chain, wanted, presumed))
        except TimeoutError:
            absent = Miss.LATE
        found = self.peek(chain, wanted)
        for place, depth in enumerate(wanted):
            if found[place] is Miss.ABSENT:
                why = absent if absent is Miss.LATE else self._prober.reason(chain, depth)
                found[place] = None if depth // self.stride in presumed else why
        return found

    async def _search(self, chain: Sequence[BlockKey], wanted: Sequence[int], presumed: set[int]) -> None:
        await self._ready()
        try:
            await self._prober.search(chain, wanted, presumed)
        finally:
            self._background.start_due()

    # -- reading --------------------------------------------------------------------------------------------------

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        self._usable()
        for target in targets:
            if sum(len(piece) for piece in target.into) != self.block_bytes:
                raise InvalidRequest(f"target for block {target.index} does not have {self.block_bytes} bytes")
        if len({target.index for target in targets}) != len(targets):
            raise InvalidRequest("two targets for one block")
        results: dict[int, Loaded | Miss] = {}
        with contextlib.suppress(TimeoutError):
            await self._within(deadline, self._read(chain, targets, results))
        return [results.get(target.index, Miss.LATE) for target in targets]

    async def _read(
        self, chain: Sequence[BlockKey], targets: Sequence[Target], results: dict[int, Loaded | Miss]
    ) -> None:
        """Read stride by stride. `results`, by depth, grows as they end: a deadline leaves those that were in time."""
        await self._ready()
        strides: dict[int, list[Target]] = {}
        for target in sorted(targets, key=lambda target: target.index):
            strides.setdefault(target.index // self.stride, []).append(target)

        async def one(stride: int, wanted: Sequence[Target]) -> None:
            try:
                results.update(await self._prober.read_stride(chain, stride * self.stride, wanted))
            except TierError:
                results.update((target.index, Miss.ERROR) for target in wanted)

        if len(strides) == 1:  # the commonest read needs no task beside this one
            await one(*strides.popitem())
            return
        async with asyncio.TaskGroup() as group:
            for stride, wanted in strides.items():
                group.create_task(one(stride, wanted))

    # -- writing --------------------------------------------------------------------------------------------------

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        self._usable()
        for position, block in enumerate(blocks):
            if self.stride > 1 and (block.index != blocks[0].index + position or blocks[0].index % self.stride):
                raise InvalidRequest(f"g4 takes consecutive blocks from a multiple of {self.stride} on")
            if sum(len(piece) for piece in block.pieces) != self.block_bytes:
                raise InvalidRequest(f"block {block.index} does not have {self.block_bytes} bytes")
        results = [Stored.FAILED] * len(blocks)
        with contextlib.suppress(TimeoutError):
            await self._within(deadline, self._write(blocks, results))
        return results

    async def _write(self, blocks: Sequence[Sealed], results: list[Stored]) -> None:
        """Write stride by stride. `results` changes as they end: a deadline leaves those that were in time."""
        await self._ready()

        async def one(start: int, stride: Sequence[Sealed]) -> None:
            accepted = self._writer.acceptable(stride)
            results[start + len(accepted) : start + len(stride)] = [Stored.REFUSED] * (len(stride) - len(accepted))
            if accepted:
                results[start : start + len(accepted)] = [await self._writer.write(accepted)] * len(accepted)

        async with asyncio.TaskGroup() as group:
            for start in range(0, len(blocks), self.stride):
                group.create_task(one(start, blocks[start : start + self.stride]))
        self._background.start_due()

    # -- renewal --------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[BlockKey], wall_s: Wall) -> None:
        self._usable()
        self._store.index.touch(keys, wall_s)

    async def flush(self, deadline: Mono) -> None:
        """Record uses that are due, and publish to other replicas the objects written. The rest stays due."""
        self._usable()
        with contextlib.suppress(TimeoutError):
            await self._within(deadline, self._flush())

    async def _flush(self) -> None:
        await self._background.wait()
        if self._store.index.unrecorded() or self._store.deltas.pending:
            await self._ready()
            await self._store.deltas.publish()
            await self._store.renewer.record_uses()

    # -- deletion -------------------------------------------------------------------------------------------------

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        """Delete the objects that hold `keys`, with all their blocks; None: the namespace's, for every replica. Keys
        that this replica does not know cost a walk over their scopes."""
        self._usable()
        return await self._ready_then(self._remover.everything() if keys is None else self._remover.blocks(keys))

    async def purge(self, scope: Scope, before: Wall) -> int:
        """Write the purge of the scope's tenant to the log, unless it has a later one than `before` says and holds none
        (`PurgeLogging.hold`), then delete the objects that it covers. Raises TierError: where the log could not be
        written, this replica alone keeps to it."""
        self._usable()
        if not self._store.purges.holds(scope):
            if before < self._store.purges.mark(scope):
                return 0  # a purge of the log, which another tier has learned
            self._store.purges.hold(scope)
        return await self._ready_then(self._remover.purge(scope))

    async def tombstones(self) -> Mapping[Scope, Wall]:
        """As the server has them now, one listing. Raises TierError."""
        self._usable()

        async def listed() -> None:
            self._synced = min(self._synced, self._clock.monotonic() - FRESH_S - 1)
            await self._ready()
            self._background.start_due()

        await self._loop.run(listed(), OPEN_S)
        return self._store.purges.all()

    @property
    def purge_log(self) -> TenantLog:
        """The purges that every replica keeps to."""
        return self._store.purges

    # -- pins -----------------------------------------------------------------------------------------------------

    async def pin(self, pin: Pin) -> None:
        """Retain blocks of the pin's chain that are in the bucket, now or later, until the pin ends, for every replica;
        replaces a pin of that name. Durable when this returns. Raises InvalidRequest or TierError."""
        self._usable()
        await self._ready_then(self._store.pins.put(pin))

    async def unpin(self, name: str, only: Pin | None = None) -> bool:
        """End a pin; whether it was there. `only`: this one, whose time is over or which was purged; where it may hold
        by other replicas' clocks it is left to the sweep. Raises TierError."""
        self._usable()
        pins = self._store.pins

        async def ended(pin: Pin) -> bool:
            return await pins.delete_ended(pin, await self._sweeper.deletion_time())

        return await self._ready_then(pins.delete(name) if only is None else ended(only))

    async def pins(self) -> list[Pin]:
        """The pins that have not ended, by name, at most FRESH_S old. Raises TierError."""
        self._usable()
        await self._ready_then(self._store.pins.settle())
        return self._store.pins.list()

    # -- accounts -------------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Blocks and bytes of this namespace in the bucket, as far as this replica knows."""
        blocks, size = self._store.index.totals()
        return Usage(blocks, size)

    def counters(self) -> dict[str, int]:
        """This replica's actions since it was opened, beyond the counts of every tier."""
        swept = self._sweeper.swept
        return {
            "retries": self._store.bucket.retries,
            "renewed_units": self._store.renewer.renewed,
            "foreign_units": self._store.foreign,
            "purge_log_faults": self._store.purges.faults,
            "learnt_units": self._store.deltas.received,
            "saved_bytes": self._writer.saved_bytes,
            "swept_units": swept.objects,
            "swept_blocks": swept.blocks,
            "swept_bytes": swept.bytes,
        }

    def check(self) -> None:
        self._store.index.check()
