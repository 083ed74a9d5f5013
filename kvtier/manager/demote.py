"""Decides which blocks go down from G2, and in which order: the lower tiers stay prefix-closed.

    commit → nearest tier's queue → (durable there, or refused) → strides → deepest tier's queue

A block goes to the nearest lower tier together with whatever that tier lacks of the chain before it. One that it
refuses, or whose chain it lacks, goes to the deepest tier from G2. The hierarchy's lock guards all state; nothing here
waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from kvtier.identity.keys import BlockKey
from kvtier.manager.admission import Admission
from kvtier.manager.coalesce import StrideCoalescer
from kvtier.manager.hierarchy import Hierarchy, ManagerLimits
from kvtier.manager.promote import Promoter
from kvtier.manager.protection import Protection
from kvtier.manager.slices import SLICE_BLOCKS, slices
from kvtier.manager.write_behind import ChainBatch, QueueLimits, WriteBehind
from kvtier.retention.terms import Depth
from kvtier.tiers.host.pins import Hold
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.meter import Metered
from kvtier.tiers.protocol import Miss, Stored, Tier
from kvtier.tiers.rate_limiter import TokenBucket
from kvtier.times import Mono

_FULL_S = 1.0
"""How long a tier that answered FULL is offered no block again; new blocks are."""


class Demoter:
    """The queues below G2, and the rules of what enters them. Built empty; `open` makes the queues."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        promoter: Promoter,
        protection: Protection,
        flush_uses: Callable[[], Awaitable[bool]],
    ) -> None:
        self._hierarchy = hierarchy
        self._flush_uses = flush_uses
        self._host, self._lock, self._clock = hierarchy.host, hierarchy.lock, hierarchy.clock
        self._promoter, self._protection = promoter, protection
        self._nearest: Metered | None = None
        self._coalescer: StrideCoalescer | None = None
        self._coalesced: Metered | None = None  # the tier that strides are collected for
        self._full_until = 0.0  # monotonic time
        self._pinned_max = 0  # slots of G2 that one queue may pin
        self.queues: dict[str, WriteBehind] = {}
        self.admission = Admission(hierarchy.limits.store_threshold, hierarchy.limits.min_prefix_blocks)
        self.durable: Counter[str] = Counter()  # blocks written, by tier
        self.dropped = 0  # accepted into G2, refused by the nearest lower tier or for want of space in its queue

    def open(self) -> None:
        """Begin to empty the queues of the tiers in use, on the running loop. Called again when another one joins."""
        tiers = self._hierarchy.lower
        self._bound_queues()
        fresh = {name: self._queue_for(tier) for name, tier in tiers.items() if name not in self.queues}
        known = {**self.queues, **fresh}
        self.queues = {name: known[name] for name in tiers}
        nearest, deepest = self._hierarchy.nearest, next(reversed(list(tiers.values())), None)
        if deepest is not None and deepest is not self._coalesced and (deepest is not nearest or deepest.stride > 1):
            self._coalescer = StrideCoalescer(self._hierarchy, self._promoter, deepest, self.queues[deepest.name])
            self._coalesced = deepest
            self._coalescer.start(deepest.breaker)
        self._nearest = nearest
        for name, queue in fresh.items():
            queue.start(self._hierarchy.supervisor, tiers[name].breaker)

    def apply(self, limits: ManagerLimits) -> None:
        """Admission, rate and bounds of a changed configuration. Under the lock."""
        self._bound_queues()
        self.admission.change(limits.store_threshold, limits.min_prefix_blocks)
        for queue in self.queues.values():
            queue.rate.change(*self._rate_of(queue.tier))

    def _bound_queues(self) -> None:
        """Let each queue pin its share of G2. What it has accepted stays."""
        self._pinned_max = max(1, int(self._host.capacity * self._hierarchy.limits.queue_fraction))
        for queue in self.queues.values():
            queue.bound(max(queue.tier.stride, self._pinned_max))

    def _rate_of(self, tier: Tier) -> tuple[float, float]:
        """Rate and burst of a tier's writes; G4 keeps to rates of its own."""
        rate = self._hierarchy.limits.write_rate if tier.depth is Depth.G3 else 0.0
        return rate, max(rate, tier.block_bytes)

    def _queue_for(self, tier: Metered) -> WriteBehind:
        return WriteBehind(
            tier,
            self._clock,
            QueueLimits(blocks_max=max(tier.stride, self._pinned_max)),
            lock=self._lock,
            rate=TokenBucket(self._clock, *self._rate_of(tier)),
            finished=lambda batch, results: self._finished(tier, batch, results),
            position=lambda batch: self._hierarchy.position_of(batch.chain, batch.holds),
            flush_uses=self._flush_uses,
        )

    # ── into the queues ─────────────────────────────────────────────────────────────────────────────────────

    def demote(self, chain: Sequence[BlockKey], indices: Sequence[int]) -> list[int]:
        """Queue blocks that are READY in G2, ascending in depth. Returns the depths that were not accepted."""
        if not indices or not self._may_accept():
            return list(indices)
        slots: list[Slot] = []
        for part in slices(indices):
            with self._lock:
                here = [slot for index in part if (slot := self._host.index.at(chain, index)) is not None]
                for slot in here:
                    self._host.pins.add(slot)
            slots += here
        return self.demote_pinned(chain, slots)

    def stored_again(self, chain: Sequence[BlockKey], present: Sequence[int], widened: Sequence[int]) -> None:
        """A put found the blocks at `present` here. Those that the nearest tier lacks go down; those `widened`, which
        have longer terms now, go to the tiers that have them, too."""
        if widened and self._coalescer is not None:
            self._coalescer.widen(chain, widened)
        self.demote(chain, sorted({*widened, *self.lacking(chain, present)}))

    def _may_accept(self) -> bool:
        """Whether blocks that were stored earlier are worth another try: each try wakes all who wait for space."""
        if self._nearest is None or self._full():
            return False
        with self._lock:
            return self._nearest.stride > 1 or self.queues[self._nearest.name].space() > 0

    def _full(self) -> bool:
        return self._clock.monotonic() < self._full_until

    def demote_pinned(self, chain: Sequence[BlockKey], slots: Sequence[Slot]) -> list[int]:
        """Like `demote`, for slots that are pinned once each; the pins are the demoter's from here on."""
        if self._nearest is None or not slots:
            self._release(slots)
            return [slot.index for slot in slots]
        if self.admission.active:
            slots = self._admitted(chain, slots)
            if not slots:
                return []
        if self._nearest.stride > 1:
            return self._pin_strides(chain, slots)
        parents = self._missing_parents(chain, slots[0].index)
        if parents is None:
            self.queues[self._nearest.name].refused["orphan"] += len(slots)
            self._pass_on(chain, slots[-1].index + 1)
            self._release(slots)
            return [slot.index for slot in slots]
        now, depth = self._clock.wall(), self._nearest.depth
        deep: list[Slot] = []
        shallow: list[Slot] = []
        for slot in [*parents, *slots]:
            (deep if slot.life.servable(depth, now) else shallow).append(slot)
        queue, taken = self.queues[self._nearest.name], 0
        for part in slices(deep):
            batch = ChainBatch.of(chain, part)
            with self._lock:
                accepted = queue.enqueue(batch)
            taken += accepted
            if accepted < len(part):  # though there may be space again: the rest has no parent there
                queue.refused["queue"] += len(deep) - taken - (len(part) - accepted)
                break
        self._release(shallow + deep[taken:])
        return [slot.index for slot in deep[taken:]]

    def found(self, chain: Sequence[BlockKey], indices: Sequence[int]) -> None:
        """A request found the blocks at these depths, in G1 too: that may make them worth a write."""
        if self.admission.active:
            for part in slices(indices):
                with self._lock:
                    self.admission.want(chain[index] for index in part)
            self.demote(chain, sorted(self.lacking(chain, indices)))

    def promoted(self, chain: Sequence[BlockKey], start: int, tiers: Sequence[str], *, counted: bool) -> None:
        """A request was given the leading blocks of a chain; those from `start` on were found in these tiers, and go to
        the nearest one below G2 where a deeper one had them. `counted`: those that were not there are `found`
        already."""
        if self.admission.active:
            before = () if counted else range(start)
            new = (index for index, tier in enumerate(tiers, start) if not counted or tier != self._host.name)
            self.found(chain, [*before, *new])
        if self._nearest is not None:
            near = (self._host.name, self._nearest.name)
            self.demote(chain, [index for index, tier in enumerate(tiers, start) if tier not in near])

    def _admitted(self, chain: Sequence[BlockKey], slots: Sequence[Slot]) -> list[Slot]:
        """The slots that are worth a write; the pins of the rest are undone, and nobody waits for those."""
        worth: list[Slot] = []
        for part in slices(slots):
            with self._lock:
                admitted = [slot for slot in part if self.admission.admits(chain, slot.index)]
                self.admission.refused += len(part) - len(admitted)
            worth += admitted
        kept = {slot.number for slot in worth}
        self._release([slot for slot in slots if slot.number not in kept])
        return worth

    def demote_rest(self, chain: Sequence[BlockKey], stop: int, tried: set[int], start: int = 0) -> set[int]:
        """Queue what is READY at start … stop-1, not below yet and not `tried`; adds to `tried` what was accepted.

        Returns the depths for which waiting may help: no queue had space. (A block that a tier refused, or
        that waits for the rest of its stride, stays in G2 alone.)
        """
        fresh = sorted(self.alone(chain, stop, start) - tried)
        refused = set(self.demote(chain, fresh))
        tried.update(set(fresh) - refused)
        return set() if self._full() else {index for index in refused if index < self.demotable(stop)}

    def alone(self, chain: Sequence[BlockKey], stop: int, start: int = 0) -> set[int]:
        """Depths start … stop-1 whose blocks are READY in G2 and nowhere below it, nor on their way there."""
        if self._nearest is None:
            return set()
        here: list[int] = []
        for part in slices(range(start, stop)):
            with self._lock:
                here += [index for index in part if chain[index] in self._host.index]
        return self.lacking(chain, here)

    def below(self, chain: Sequence[BlockKey], start: int, stop: int) -> int:
        """The depth up to which, from `start` on, the nearest lower tier has all blocks; at most `stop`."""
        if self._nearest is None:
            return start
        for part in slices(range(start, stop)):
            for index, miss in zip(part, self._nearest.peek(chain, part), strict=True):
                if miss is not None:
                    return index
        return max(start, stop)

    def lacking(self, chain: Sequence[BlockKey], indices: Sequence[int]) -> set[int]:
        """Those depths whose blocks are neither in the nearest lower tier nor on their way there, and should be."""
        return set(self._misses(chain, indices))

    def _misses(self, chain: Sequence[BlockKey], indices: Sequence[int]) -> dict[int, Miss]:
        """`lacking`, with the tier's reasons; LATE: it may have the block, but would have to be asked."""
        if self._nearest is None or not indices:
            return {}
        has, admits, out = self.on_its_way, self.admission.admits, dict[int, Miss]()
        for part in slices(indices):
            with self._lock:
                if self.admission.active:
                    part = [index for index in part if admits(chain, index)]
                idle = [index for index in part if not has(chain[index])]
            # In this order: a block on its way now has arrived, or failed, by the time the tier is asked.
            misses = self._nearest.peek(chain, idle)
            out.update((index, miss) for index, miss in zip(idle, misses, strict=True) if miss is not None)
        return out

    def on_its_way(self, key: BlockKey) -> bool:
        """Whether a block is being written to the nearest lower tier, or waits for that. Under the lock."""
        if self._nearest is None:
            return False
        if self._coalescer is not None and self._nearest.stride > 1:
            return self._coalescer.has(key)
        return self.queues[self._nearest.name].has(key)

    def demotable(self, stop: int) -> int:
        """Up to which depth a chain of `stop` blocks can go below G2 now: whole strides right above G4, else all."""
        stride = self._nearest.stride if self._nearest is not None else 1
        return stop // stride * stride

    def space(self) -> int:
        """Blocks that would be accepted now; all of G2 where there is no lower tier."""
        if self._nearest is None:
            return self._host.capacity
        with self._lock:
            if self._coalescer is not None and self._nearest.stride > 1:
                return max(0, max(self._nearest.stride, self._pinned_max) - self._coalescer.pinned())
            return self.queues[self._nearest.name].space()

    def _missing_parents(self, chain: Sequence[BlockKey], first: int) -> list[Slot] | None:
        """The blocks right before depth `first` that the nearest tier may lack, pinned, as far as they are in G2; None
        if one is not to be had. (Where the tier would have to be asked for the one before them, the queue does.)"""
        slots: list[Slot] = []
        for index in reversed(range(first)):
            miss = self._misses(chain, [index]).get(index)
            if miss is None:
                break
            with self._lock:
                slot = self._host.index.at(chain, index)
                if slot is not None:
                    self._host.pins.add(slot)
                    slots.append(slot)
            if slot is None and miss is Miss.LATE:
                break
            if slot is None or self._full():
                self._release(slots)
                return None
        return slots[::-1]

    def _pin_strides(self, chain: Sequence[BlockKey], slots: Sequence[Slot]) -> list[int]:
        """Hand the complete strides that `slots` reach into to the coalescer, pinned as far as it may pin."""
        assert self._coalescer is not None and self._nearest is not None
        stride, stop = self._nearest.stride, slots[-1].index + 1
        start, complete = slots[0].index // stride * stride, stop // stride * stride
        now, width = self._clock.wall(), max(1, SLICE_BLOCKS // stride) * stride
        for first in range(start, max(complete, start + 1), width):
            holds, end = list[Hold](), min(complete, first + width)
            with self._lock:
                space = max(stride, self._pinned_max) - self._coalescer.pinned()
                reached = min(end, first + space // stride * stride)
                for depth in range(first, reached):
                    if self._host.index.at(chain, depth) and (slot := self._host.pin(chain[depth], now)) is not None:
                        holds.append((slot, slot.generation))
                self._coalescer.add(chain, stop if end == complete or reached < end else end, holds)
            if reached < end:  # the strides after it would have no parent
                complete = reached
                break
        self._release(slots)
        return [slot.index for slot in slots if slot.index >= complete]

    # ── answers of the tiers ────────────────────────────────────────────────────────────────────────────────

    def _finished(self, tier: Metered, batch: ChainBatch, results: Sequence[Stored]) -> None:
        """A tier has answered for a batch. On the loop."""
        if tier is self._coalesced and self._coalescer is not None:
            self._coalescer.answered(batch)
        durable = [key for key, result in zip(batch.keys, results, strict=True) if result.durable]
        if tier is self._nearest and Stored.FULL in results:
            self._full_until = self._clock.monotonic() + _FULL_S
        try:
            with self._lock:
                self.durable[tier.name] += results.count(Stored.STORED)
                if tier is self._nearest:
                    self.dropped += len(results) - len(durable)
                if self._protection.busy:
                    self._protection.retainer.stored(tier.name, durable)
        finally:
            self._hierarchy.unpin(batch.holds)
        if tier is not self._coalesced:
            self._pass_on(batch.chain, batch.depths[-1] + 1)

    def _pass_on(self, chain: Sequence[BlockKey], stop: int) -> None:
        """The nearest tier has answered for the blocks before `stop`, or can take none of them: they are the
        coalescer's, which reads what is not in G2 from there."""
        if self._coalescer is not None:
            self._coalescer.add(chain, stop)

    def _release(self, slots: Sequence[Slot]) -> None:
        self._hierarchy.unpin([(slot, slot.generation) for slot in slots])

    # ── end ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def drain(self, deadline: Mono) -> None:
        """Wait until everything accepted is as deep as it may go, tails of strides included, or until the deadline."""
        if self._nearest is not None and self._nearest.stride == 1:
            await self.queues[self._nearest.name].drained(deadline)
        if self._coalescer is not None:
            await self._coalescer.flush(deadline)

    def pending(self) -> int:
        """Blocks accepted and not yet answered for. Under the lock."""
        waiting = self._coalescer.pending() if self._coalescer is not None else 0
        return waiting + sum(queue.pending() for queue in self.queues.values())

    async def close(self) -> None:
        """Unpin what is still queued. The supervisor has ended the workers."""
        for queue in self.queues.values():
            for batch in queue.close():
                self._hierarchy.unpin(batch.holds)
