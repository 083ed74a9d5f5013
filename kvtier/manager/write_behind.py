"""Write-behind: from G2 down to one lower tier, in the background, bounded.

A queue per tier. Blocks are accepted from the head of a chain on; those that do not fit, the newest and deepest, are
refused with their descendants, so a tier never holds a tail without its head. An accepted block stays pinned in G2
until the tier has answered. All state is guarded by the hierarchy's lock; the workers run on the manager's event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kvtier.checksum import digest_of
from kvtier.clock import Clock
from kvtier.identity.key_counts import KeyCounts
from kvtier.identity.keys import BlockKey
from kvtier.manager.slices import SLICE_BLOCKS
from kvtier.supervisor import Service, Supervisor, soon
from kvtier.tiers.host.pins import Hold
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.protocol import Sealed, Stored, Tier
from kvtier.tiers.rate_limiter import TokenBucket
from kvtier.times import Mono

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChainBatch:
    """Blocks of one chain that are pinned in G2, ascending in depth. Whoever takes the batch owes each hold one unpin.

    `depths` and `keys` are the batch's own: once its pins are undone, its slots may hold other blocks.
    """

    chain: Sequence[BlockKey]
    depths: tuple[int, ...]
    holds: tuple[Hold, ...]

    @classmethod
    def of(cls, chain: Sequence[BlockKey], slots: Sequence[Slot]) -> ChainBatch:
        """The batch of slots that are pinned once each."""
        return cls(chain, tuple(slot.index for slot in slots), tuple((slot, slot.generation) for slot in slots))

    def __len__(self) -> int:
        return len(self.depths)

    @property
    def keys(self) -> list[BlockKey]:
        """Names of the blocks."""
        return [self.chain[depth] for depth in self.depths]

    @property
    def last(self) -> BlockKey:
        """Name of the deepest block."""
        return self.chain[self.depths[-1]]

    def split(self, count: int) -> tuple[ChainBatch, ChainBatch]:
        """The first `count` blocks, and the rest."""
        return (
            ChainBatch(self.chain, self.depths[:count], self.holds[:count]),
            ChainBatch(self.chain, self.depths[count:], self.holds[count:]),
        )


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of one queue. `write_deadline_s` is per call to the tier."""

    blocks_max: int
    batch_bytes_max: int = 32 * 1024 * 1024
    write_deadline_s: float = 30.0
    writers: int = 2


class WriteBehind:
    """The queue in front of one tier and the worker that empties it."""

    def __init__(
        self,
        tier: Tier,
        clock: Clock,
        limits: QueueLimits,
        *,
        lock: threading.Lock,
        rate: TokenBucket,
        finished: Callable[[ChainBatch, list[Stored]], None],
        position: Callable[[ChainBatch], int | None],
        flush_uses: Callable[[], Awaitable[bool]],
    ) -> None:
        """`finished` is called on the event loop, without the lock, once per batch; it unpins. `position` says, under
        the lock, at which position of the purge log a batch is taken for writing; None: it was purged meanwhile.
        `flush_uses` tells the tiers of uses that they do not know; whether there were any."""
        self._position = position
        self._flush_uses = flush_uses
        self.tier = tier
        self.refused: Counter[str] = Counter()
        self._clock = clock
        self._limits = limits
        self._lock = lock
        self.rate = rate
        self._finished = finished
        self._queue: deque[ChainBatch] = deque()
        self._queued = 0  # blocks waiting
        self._busy = 0  # blocks with a writer
        self._names = KeyCounts()  # of all those
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._writing: dict[BlockKey, asyncio.Future[None]] = {}  # block with a writer → the end of its batch

    def start(self, supervisor: Supervisor, service: Service) -> None:
        """Begin to empty the queue, on the running loop. `service` is out while that keeps failing."""
        self._loop = asyncio.get_running_loop()
        for _ in range(self._limits.writers):
            supervisor.start(f"{self.tier.name} write-behind", self._work, service)

    def bound(self, blocks_max: int) -> None:
        """Have another `QueueLimits.blocks_max`. Under the lock."""
        self._limits = replace(self._limits, blocks_max=blocks_max)

    def space(self) -> int:
        """How many blocks `enqueue` would take now. Under the lock."""
        return max(0, self._limits.blocks_max - self._queued - self._busy)

    def pending(self) -> int:
        """Blocks accepted and not yet answered for. Under the lock."""
        return self._queued + self._busy

    def has(self, key: BlockKey) -> bool:
        """Whether this block is accepted and not yet answered for. Under the lock."""
        return key in self._names

    def _forget(self, batch: ChainBatch) -> None:
        self._names.remove(batch.keys)

    def enqueue(self, batch: ChainBatch) -> int:
        """Accept the head of a batch, as far as there is space; returns how many blocks. Under the lock; never blocks.

        The caller keeps the pins of refused blocks.
        """
        taken = min(self.space(), len(batch))
        if taken < len(batch):
            self.refused["queue"] += len(batch) - taken
        if taken:
            accepted, _ = batch.split(taken)
            self._queue.append(accepted)
            self._queued += taken
            self._names.add(accepted.keys)
            soon(self._loop, self._stir)
        return taken

    def _stir(self) -> None:
        self._idle.clear()
        self._wake.set()

    async def drained(self, deadline: Mono) -> bool:
        """Wait until nothing is pending; False at the deadline."""
        while True:
            with self._lock:
                if not self.pending():
                    return True
                self._idle.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                    await self._idle.wait()
            except TimeoutError:
                with self._lock:
                    return not self.pending()

    def close(self) -> list[ChainBatch]:
        """Empty the queue, whose workers have ended; returns what was not written, whose pins are the caller's now."""
        with self._lock:
            left, self._queued = list(self._queue), 0
            self._queue.clear()
        return left

    async def _work(self) -> None:
        while True:
            batch = self._take()
            if batch is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            results = [Stored.FAILED] * len(batch)
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            keys = batch.keys
            self._writing.update(dict.fromkeys(keys, ended))
            try:
                results = await self._write(batch)
            finally:  # a tier's own failures are answers: an error is ours, and for the supervisor
                for key in keys:
                    if self._writing.get(key) is ended:
                        del self._writing[key]
                ended.set_result(None)
                with self._lock:
                    self._busy -= len(batch)
                    self._forget(batch)
                try:
                    self._finished(batch, results)
                finally:
                    if not self.pending():
                        self._idle.set()

    def _take(self) -> ChainBatch | None:
        """The next batch, cut to the size of one write; the rest stays at the front."""
        most = self.tier.stride
        if most == 1:
            most = min(SLICE_BLOCKS, max(1, self._limits.batch_bytes_max // self.tier.block_bytes))
        with self._lock:
            if not self._queue:
                return None
            batch = self._queue.popleft()
            if len(batch) > most:
                batch, rest = batch.split(most)
                self._queue.appendleft(rest)
            self._queued -= len(batch)
            self._busy += len(batch)
        return batch

    async def _write(self, batch: ChainBatch) -> list[Stored]:
        size = len(batch) * self.tier.block_bytes
        deadline = self._clock.monotonic() + self._limits.write_deadline_s
        if not await self._has_parent(batch, deadline):
            self.refused["orphan"] += len(batch)
            return [Stored.REFUSED] * len(batch)
        await self.rate.take(size)
        with self._lock:
            position = self._position(batch)
        if position is None:
            self.refused["purged"] += len(batch)
            return [Stored.REFUSED] * len(batch)
        sealed = await to_the_end(partial(seal, position=position), batch)
        results = await self._offer(sealed)
        if Stored.FULL in results and await self._flush_uses():
            # The coldest block there may be the parent of one that is written, which leaves for none of its own chain.
            rest = [place for place, result in enumerate(results) if result in (Stored.FULL, Stored.REFUSED)]
            for place, result in zip(rest, await self._offer([sealed[place] for place in rest]), strict=True):
                results[place] = result
        if over := results.count(Stored.BUDGET):
            self.refused["budget"] += over
        return results

    async def _offer(self, sealed: Sequence[Sealed]) -> list[Stored]:
        return await self.tier.write(sealed, self._clock.monotonic() + self._limits.write_deadline_s)

    async def _has_parent(self, batch: ChainBatch, deadline: Mono) -> bool:
        """Whether the tier has the block before the batch's first. One that another worker writes now is waited for:
        batches wait for shallower ones only, so they never wait in a circle."""
        first = batch.depths[0]
        if first == 0:
            return True
        parent = self._writing.get(batch.chain[first - 1])
        if parent is not None:
            await asyncio.wait({parent}, timeout=max(0.0, deadline - self._clock.monotonic()))
        return (await self.tier.lookup(batch.chain, [first - 1], deadline))[0] is None


async def to_the_end(work: Callable[[ChainBatch], T], batch: ChainBatch) -> T:
    """Run `work` on a thread. Whatever ends the wait is raised when the thread has ended: until then it reads pinned
    memory."""
    running = asyncio.ensure_future(asyncio.to_thread(work, batch))
    interrupted: BaseException | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except (Exception, asyncio.CancelledError) as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
    return running.result()


def seal(batch: ChainBatch, position: int = 0) -> list[Sealed]:
    """Digest each block that has none yet, and describe it. Reads every byte; call it off the event loop. Raises
    ValueError for a slot that does not have the block that the chain has at its depth."""
    out = []
    for depth, (slot, _) in zip(batch.depths, batch.holds, strict=True):
        if slot.key != batch.chain[depth]:
            raise ValueError("a block was to be written under another's name")
        if slot.digest is None:
            slot.digest = digest_of(slot.pieces)
        pieces = tuple(piece.toreadonly() for piece in slot.pieces)
        parent = batch.chain[depth - 1] if depth else None
        out.append(Sealed(batch.chain[depth], depth, slot.digest, pieces, slot.life, parent, slot.priority, position))
    return out
