"""Write-behind: from G2 down to one lower tier, in the background, bounded.

A queue per tier. Blocks are accepted from the head of a chain on; those that do not fit, the newest and deepest, are
refused with their descendants, so a tier never holds a tail without its head. Batches of one scope that wait one behind
the other are one write to G3, since a write costs it as much as many small blocks: while engines decode, most batches
are of one block. An accepted block stays pinned in G2 until the tier has answered. All state is guarded by the
hierarchy's lock; the workers run on the manager's event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

from kvtier.checksum import digest_of
from kvtier.clock import Clock
from kvtier.identity.key_counts import KeyCounts
from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.manager.slices import SLICE_BLOCKS
from kvtier.retention.terms import Depth
from kvtier.supervisor import Service, Supervisor, soon
from kvtier.tiers.host.pins import Hold
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.protocol import Sealed, Stored, Tier
from kvtier.tiers.rate_limiter import TokenBucket
from kvtier.times import Mono

T = TypeVar("T")
Write = asyncio.Future[None]
"""The end of one that is under way."""

BATCHES_MAX = 16
"""Of one write: they are taken in one hold of the lock, and answered for in one turn of the loop, of a millisecond."""


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

    @property
    def parent(self) -> BlockKey | None:
        """Name of the block before the first one; None: that is the head of the chain."""
        return self.chain[self.depths[0] - 1] if self.depths[0] else None

    @property
    def scope(self) -> Scope:
        """Of the chain."""
        return scope_of_key(self.chain[0])

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
        self._writing: dict[BlockKey, Write] = {}  # by block

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
            batches = self._take()
            if not batches:
                self._wake.clear()
                await self._wake.wait()
                continue
            results = [[Stored.FAILED] * len(batch) for batch in batches]
            keys = [key for batch in batches for key in batch.keys]
            # All of them were taken before these batches, so that writes never wait in a circle.
            parents = {self._writing[batch.parent] for batch in batches if batch.parent in self._writing}
            ended: Write = asyncio.get_running_loop().create_future()
            self._writing.update(dict.fromkeys(keys, ended))
            try:
                results = await self._write(batches, parents)
            finally:  # a tier's own failures are answers: an error is ours, and for the supervisor
                for key in keys:
                    if self._writing.get(key) is ended:
                        del self._writing[key]
                ended.set_result(None)
                with self._lock:
                    self._busy -= len(keys)
                    self._names.remove(keys)
                with ExitStack() as ends:  # each batch is answered for, though the answer for another one raises
                    ends.callback(self._look_idle)
                    for batch, result in reversed(list(zip(batches, results, strict=True))):
                        ends.callback(self._finished, batch, result)

    def _look_idle(self) -> None:
        if not self.pending():
            self._idle.set()

    def _take(self) -> list[ChainBatch]:
        """The batches of the next write. No block is there twice, and they have one scope, since a data key that is not
        to be had fails the whole write. The last is cut to a write's size.

        A tier of objects gets them one by one: it saves nothing by a common write, and sends a write's objects side by
        side, so that one might be stored though its parent is not.
        """
        stride, block_bytes = self.tier.stride, self.tier.block_bytes
        most_bytes = min(self._limits.batch_bytes_max, self.rate.at_once)
        left = stride if stride > 1 else min(SLICE_BLOCKS, max(1, int(most_bytes // block_bytes)))
        most = BATCHES_MAX if stride == 1 and self.tier.depth is Depth.G3 else 1
        taken: list[ChainBatch] = []
        names: set[BlockKey] = set()
        with self._lock:
            while self._queue and left and len(taken) < most:
                batch, rest = self._queue[0].split(left)
                if taken and (batch.scope != taken[0].scope or not names.isdisjoint(batch.keys)):
                    break
                self._queue.popleft()
                if rest:
                    self._queue.appendleft(rest)
                taken.append(batch)
                names.update(batch.keys)
                left -= len(batch)
            self._queued -= len(names)
            self._busy += len(names)
        return taken

    async def _write(self, batches: Sequence[ChainBatch], parents: set[Write]) -> list[list[Stored]]:
        """The results of each batch. `parents` is waited for first."""
        if parents:
            await asyncio.wait(parents, timeout=self._limits.write_deadline_s)
        known: list[bool] = []
        names: set[BlockKey | None] = set()
        for batch in batches:
            known.append(batch.parent in names or await self._has_parent(batch))
            names.update(batch.keys)
        blocks = sum(len(batch) for batch, there in zip(batches, known, strict=True) if there)
        await self.rate.take(blocks * self.tier.block_bytes)
        sealed = await to_the_end(partial(_seal_all, batches, self._positions(batches, known)))
        answers = iter(await self._answers([one for some in sealed for one in some]))
        return [
            list(islice(answers, len(some))) or [Stored.REFUSED] * len(batch)
            for batch, some in zip(batches, sealed, strict=True)
        ]

    def _positions(self, batches: Sequence[ChainBatch], known: Sequence[bool]) -> list[int | None]:
        """Where in the purge log each batch is taken for writing; None: it is refused, and so are those that follow it.
        `known`: whether its parent is in the tier, or in a batch before it."""
        out: list[int | None] = []
        refused: set[BlockKey | None] = set()
        with self._lock:
            for batch, there in zip(batches, known, strict=True):
                orphan = not there or batch.parent in refused
                position = None if orphan else self._position(batch)
                if position is None:
                    self.refused["orphan" if orphan else "purged"] += len(batch)
                    refused.update(batch.keys)
                out.append(position)
        return out

    async def _answers(self, sealed: Sequence[Sealed]) -> list[Stored]:
        """Write them, if any."""
        if not sealed:
            return []
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
        return await self.tier.write(sealed, self._deadline())

    async def _has_parent(self, batch: ChainBatch) -> bool:
        """Whether the tier has the block before the batch's first."""
        first = batch.depths[0]
        return first == 0 or (await self.tier.lookup(batch.chain, [first - 1], self._deadline()))[0] is None

    def _deadline(self) -> Mono:
        return self._clock.monotonic() + self._limits.write_deadline_s


async def to_the_end(work: Callable[[], T]) -> T:
    """Run `work` on a thread. Whatever ends the wait is raised when the thread has ended: until then it reads pinned
    memory."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
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


def _seal_all(batches: Sequence[ChainBatch], positions: Sequence[int | None]) -> list[list[Sealed]]:
    """`seal` of each batch; nothing of those without a position."""
    return [
        [] if position is None else seal(batch, position) for batch, position in zip(batches, positions, strict=True)
    ]
