"""Collects single blocks into strides: S blocks of one chain that a tier writes together, from RAM.

A chain is added as far as the tier above has it, or has refused it: when that reaches the last block of a stride, the
stride is complete, its missing members are read back into G2, and it is queued whole. Earlier strides of the chain that
the tier lacks go first, so it stays prefix-closed. A tail shorter than a stride waits for the blocks after it, or for a
flush.

Where no tier lies between, a complete stride is pinned in G2 until it is written.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvtier.identity.key_counts import KeyCounts
from kvtier.identity.keys import BlockKey
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.promote import Promoter
from kvtier.manager.slices import slices
from kvtier.manager.write_behind import ChainBatch, WriteBehind
from kvtier.supervisor import Service, soon
from kvtier.tiers.host.pins import Hold
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.protocol import Miss, Tier
from kvtier.times import Mono

CHAINS_MAX = 1 << 14
"""Chains that wait, and tails remembered; past this the oldest is forgotten, and stays in the tiers above."""

_STEP_S = 30.0
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class _Chain:
    """Work: bring all of `keys` into the tier. `holds` pin the blocks `pinned` until it is done."""

    keys: Sequence[BlockKey]
    holds: Sequence[Hold] = ()
    pinned: Sequence[BlockKey] = ()


class StrideCoalescer:
    """Queues the complete strides of growing chains for one tier. One worker on the manager's loop."""

    def __init__(self, hierarchy: Hierarchy, promoter: Promoter, tier: Tier, queue: WriteBehind) -> None:
        self._hierarchy = hierarchy
        self._promoter = promoter
        self._tier = tier
        self._queue = queue
        self._clock = hierarchy.clock
        self._work: OrderedDict[BlockKey, _Chain] = OrderedDict()  # by last block
        self._tails: OrderedDict[BlockKey, Sequence[BlockKey]] = OrderedDict()  # first block of the tail → chain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._pinned = KeyCounts()  # pins owned, by block
        self._pins = 0  # in all
        self._wider: OrderedDict[BlockKey, None] = OrderedDict()  # last blocks of strides with longer terms than before
        self._queued: set[BlockKey] = set()  # last blocks of strides in the queue that the tier has not answered for

    def start(self, service: Service) -> None:
        """Begin to work, on the running loop. `service` is out while that keeps failing."""
        self._loop = asyncio.get_running_loop()
        self._hierarchy.supervisor.start(f"{self._tier.name} strides", self._work_through, service)

    def add(self, chain: Sequence[BlockKey], stop: int, holds: Sequence[Hold] = ()) -> None:
        """Blocks before depth `stop` of `chain` are stored above, or held by these pins, which are the coalescer's now.
        Under the lock if there are pins; never blocks."""
        pinned = [chain[slot.index] for slot, _ in holds]
        self._pinned.add(pinned)
        self._pins += len(pinned)
        soon(self._loop, self._enqueue, _Chain(chain[:stop], holds, pinned))

    def widen(self, chain: Sequence[BlockKey], depths: Sequence[int]) -> None:
        """Blocks at these depths have longer terms than before: when the chain is added again, their strides are
        written though the tier has them. Thread-safe."""
        stride, stop = self._tier.stride, len(chain)
        ends = {min((depth // stride + 1) * stride, stop) for depth in depths}
        soon(self._loop, self._widen, [chain[end - 1] for end in sorted(ends)])

    def _widen(self, lasts: Sequence[BlockKey]) -> None:
        self._wider.update(dict.fromkeys(lasts))
        while len(self._wider) > CHAINS_MAX:
            self._wider.popitem(last=False)

    def answered(self, batch: ChainBatch) -> None:
        """The tier has answered for a stride. On the loop."""
        self._queued.discard(batch.last)

    def pinned(self) -> int:
        """Pins that are owned now. Under the lock."""
        return self._pins

    def has(self, key: BlockKey) -> bool:
        """Whether this block is pinned on its way down. Under the lock."""
        return key in self._pinned

    def pending(self) -> int:
        """Blocks of complete strides that wait to be queued. On the loop."""
        return len(self._work) * self._tier.stride

    def _enqueue(self, work: _Chain) -> None:
        stride, chain = self._tier.stride, work.keys
        complete = len(chain) // stride * stride
        if complete:
            self._tails.pop(chain[complete - stride], None)
            self._put_last(_Chain(chain[:complete], work.holds, work.pinned))
        elif work.holds:
            self._done(work)
        if len(chain) > complete:
            known = self._tails.pop(chain[complete], chain)
            self._tails[chain[complete]] = chain if len(chain) >= len(known) else known
            if len(self._tails) > CHAINS_MAX:
                _, tail = self._tails.popitem(last=False)
                self._queue.refused["forgotten"] += len(tail) % stride
        self._idle.clear()
        self._wake.set()

    def _put_last(self, work: _Chain) -> None:
        """Work on a chain, and in one go on the beginnings of it that wait already."""
        stride, chain = self._tier.stride, work.keys
        for end in range(stride, len(chain) + 1, stride):
            shorter = self._work.pop(chain[end - 1], None)
            if shorter is not None:
                work = _Chain(chain, [*shorter.holds, *work.holds], [*shorter.pinned, *work.pinned])
        self._work[chain[-1]] = work
        if len(self._work) > CHAINS_MAX:
            _, oldest = self._work.popitem(last=False)
            self._queue.refused["forgotten"] += stride
            self._done(oldest)

    def _done(self, work: _Chain) -> None:
        if work.holds:
            self._hierarchy.release(self._given_back(work))

    def _given_back(self, work: _Chain) -> Iterator[Hold]:
        """Its pins, the deepest block's first: they are owned no more as they are given, slice by slice."""
        pins = list(zip(work.pinned, work.holds, strict=True))
        for part in slices(pins[::-1]):
            with self._hierarchy.lock:
                self._pinned.remove(key for key, _ in part)
                self._pins -= len(part)
            yield from (hold for _, hold in part)

    async def flush(self, deadline: Mono) -> None:
        """Queue everything, tails included, and wait until the queue is drained or the deadline is over."""
        await asyncio.sleep(0)  # let what this very loop added arrive
        tails, self._tails = self._tails, OrderedDict()
        self._work.update((chain[-1], _Chain(chain)) for chain in tails.values())
        self._idle.clear()
        self._wake.set()
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                await self._idle.wait()
        except TimeoutError:
            return
        await self._queue.drained(deadline)

    async def _work_through(self) -> None:
        while True:
            if not self._work:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            _, work = self._work.popitem(last=False)
            try:
                await self._queue_missing(work.keys)
            finally:
                self._done(work)

    async def _queue_missing(self, chain: Sequence[BlockKey]) -> None:
        """Queue every stride of `chain` that the tier lacks, or has with shorter terms, head first; stop at the first
        that it lacks and that cannot be had."""
        stride, stop = self._tier.stride, len(chain)
        ends = [min(start + stride, stop) for start in range(0, stop, stride)]
        deadline = self._clock.monotonic() + _STEP_S
        queued = set(self._queued)  # before asking: a stride that is answered for meanwhile is there
        present = 0
        for part in slices(ends):
            answers = await self._tier.lookup(chain, [end - 1 for end in part], deadline)
            here = [miss is None or chain[end - 1] in queued for miss, end in zip(answers, part, strict=True)]
            present += here.index(False) if False in here else len(part)
            if False in here:
                break
        wider = [end for end in ends[:present] if chain[end - 1] in self._wider]
        for end in [*wider, *ends[present:]]:
            self._wider.pop(chain[end - 1], None)
            start = (end - 1) // stride * stride
            await asyncio.sleep(0)  # neither of these waits where G2 has the blocks and the queue has space
            slots = await self._gather_patiently(chain, start, end)
            there = slots is not None and await self._enqueue_stride(ChainBatch.of(chain, slots))
            if not there and end > (ends[present - 1] if present else 0):
                return

    async def _gather_patiently(self, chain: Sequence[BlockKey], start: int, end: int) -> tuple[Slot, ...] | None:
        """`_gather`, again and again while G2 has no space for blocks that must be read: nobody waits for this."""
        deadline = self._clock.monotonic() + _STEP_S
        while True:
            slots = await self._gather(chain, start, end)
            if slots is not Miss.NO_ROOM:
                return slots
            # Read only now: the attempt's own pins, given back, are no news. What it missed is seen after _RETRY_S.
            retry = min(deadline, self._clock.monotonic() + _RETRY_S)
            if not await self._hierarchy.space.wait(retry, self._hierarchy.space.version):
                mono_s = self._clock.monotonic()
                if mono_s < retry or mono_s >= deadline:  # no space is on its way, or it came too late
                    return None

    async def _gather(
        self, chain: Sequence[BlockKey], start: int, end: int
    ) -> tuple[Slot, ...] | Literal[Miss.NO_ROOM] | None:
        """Pin blocks start … end-1 in G2, fetching what is only below; None if one cannot be had or may not go."""
        hierarchy, wall_s = self._hierarchy, self._clock.wall()
        got: dict[int, Slot] = {}
        whole = False
        try:
            with hierarchy.lock:
                for index in range(start, end):
                    if (slot := hierarchy.host.pin(chain[index], wall_s)) is not None:
                        got[index] = slot
            missing = [index for index in range(start, end) if index not in got]
            nearest = hierarchy.nearest
            if missing and nearest is not None and nearest.stride == 1:
                deadline = self._clock.monotonic() + _STEP_S
                loaded = await self._promoter.load(chain, {nearest.name: missing}, deadline)
                got.update({index: out for index, out in loaded.items() if isinstance(out, Slot)})
                if Miss.NO_ROOM in loaded.values():
                    return Miss.NO_ROOM
            slots = tuple(got[index] for index in sorted(got))
            whole = [slot.index for slot in slots] == [*range(start, end)]  # else some are missing, or not this chain's
            whole = whole and all(slot.life.servable(self._tier.depth, wall_s) for slot in slots)
            return slots if whole else None
        finally:
            if not whole:
                hierarchy.unpin([(slot, slot.generation) for slot in got.values()])

    async def _enqueue_stride(self, batch: ChainBatch) -> bool:
        """Queue a pinned stride, waiting for space: this is the background, nobody waits for it."""
        queued = False
        try:
            while not queued:
                version = self._hierarchy.space.version
                with self._hierarchy.lock:
                    if self._queue.space() >= len(batch):
                        self._queue.enqueue(batch)
                        self._queued.add(batch.last)
                        queued = True
                if not queued and not await self._hierarchy.space.wait(self._clock.monotonic() + _STEP_S, version):
                    break
            return queued
        finally:
            if not queued:
                self._hierarchy.unpin(batch.holds)
