"""What goes down from G2, and in which order: the lower tiers stay prefix-closed.

    commit → nearest tier's queue → (durable there) → feeder → deepest tier's queue

A block is offered to the nearest lower tier with whatever that tier lacks of the chain before it. A chain whose
earlier blocks can no longer be had stays in G2. The manager's lock guards all state; nothing here waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvtier.clock import Clock
from kvtier.identity.keys import BlockKey
from kvtier.manager.admission import Admission
from kvtier.manager.coalesce import StrideCoalescer
from kvtier.manager.lease import Hold
from kvtier.manager.write_behind import ChainBatch, QueueLimits, WriteBehind
from kvtier.retention.terms import Depth
from kvtier.tiers.breaker import Health
from kvtier.tiers.guard import Metered
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.protocol import Miss, Stored
from kvtier.tiers.rate_limiter import TokenBucket

if TYPE_CHECKING:
    from kvtier.manager.manager import Manager, ManagerLimits


class Demoter:
    """The queues below G2, and the rules of what enters them. Made when the tiers are open; part of one manager."""

    def __init__(self, manager: Manager, clock: Clock, settings: ManagerLimits) -> None:
        self._manager = manager
        self._host = manager.host
        self._lock = manager.lock
        self._clock = clock
        self._hold_max = max(1, int(manager.host.capacity * settings.queue_fraction))
        self._tiers: Mapping[str, Metered] = manager.lower
        self._nearest = next(iter(manager.lower.values()), None)
        self.queues = {name: self._queue_for(tier, settings) for name, tier in manager.lower.items()}
        last = next(reversed(manager.lower.values()), None)
        self._fed = None if last is None or (last is self._nearest and last.stride == 1) else last
        self._feeder = (
            StrideCoalescer(manager, self._fed, self.queues[self._fed.name], clock) if self._fed is not None else None
        )
        self.admission = Admission(settings.store_threshold, settings.min_prefix_blocks)
        self.durable: Counter[str] = Counter()  # blocks by tier
        self.dropped = 0  # accepted into G2, refused by the nearest lower tier or for want of room in its queue

    def _queue_for(self, tier: Metered, settings: ManagerLimits) -> WriteBehind:
        rate, budget = settings.write_rate, settings.write_budget_per_day
        if tier.depth is not Depth.G3:
            rate = budget = 0.0  # G4 keeps to rates of its own
        return WriteBehind(
            tier,
            self._clock,
            QueueLimits(blocks_max=max(tier.stride, self._hold_max)),
            lock=self._lock,
            rate=TokenBucket(self._clock, rate, max(rate, tier.block_bytes)),
            budget=TokenBucket(self._clock, budget / 86_400, budget),
            finished=lambda batch, results: self._finished(tier, batch, results),
        )

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to empty the queues. On the loop."""
        for queue in self.queues.values():
            queue.start(loop)
        if self._feeder is not None:
            self._feeder.start(loop)

    # ── what enters ─────────────────────────────────────────────────────────────────────────────────────────

    def demote(self, chain: Sequence[BlockKey], indices: Sequence[int]) -> list[int]:
        """Queue blocks that are READY in G2, ascending in depth. Returns the depths that were not accepted."""
        with self._lock:
            slots = [slot for index in indices if (slot := self._host.index.get(chain[index])) is not None]
            for slot in slots:
                slot.pins += 1
        return self.demote_pinned(chain, slots)

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
            return self._hold_strides(chain, slots)
        parents = self._missing_parents(chain, slots[0].index)
        if parents is None:
            self.queues[self._nearest.name].refused["orphan"] += len(slots)
            self._release(slots)
            return [slot.index for slot in slots]
        now, depth = self._clock.wall(), self._nearest.depth
        deep: list[Slot] = []
        shallow: list[Slot] = []
        for slot in [*parents, *slots]:
            (deep if slot.life.servable(depth, now) else shallow).append(slot)
        with self._lock:
            taken = self.queues[self._nearest.name].enqueue(ChainBatch(chain, tuple(deep)))
        self._release(shallow + deep[taken:])
        return [slot.index for slot in deep[taken:]]

    def _admitted(self, chain: Sequence[BlockKey], slots: Sequence[Slot]) -> list[Slot]:
        """Those that are worth a write; the others are let go of, and are not for waiting."""
        with self._lock:
            worth = [slot for slot in slots if self.admission.admits(chain, slot.index)]
            self.admission.refused += len(slots) - len(worth)
        kept = {slot.number for slot in worth}
        self._release([slot for slot in slots if slot.number not in kept])
        return worth

    def demote_rest(self, chain: Sequence[BlockKey], stop: int, tried: set[int]) -> set[int]:
        """Queue what is READY before depth `stop`, not below yet and not `tried`; adds to `tried` what was accepted.

        Returns the depths for which waiting may help: no queue had room. (A block that a tier was given and did not
        keep, or that waits for the rest of its stride, stays in G2 alone.)
        """
        fresh = sorted(self.alone(chain, stop) - tried)
        refused = set(self.demote(chain, fresh))
        tried.update(set(fresh) - refused)
        return {index for index in refused if index < self.demotable(stop)}

    def alone(self, chain: Sequence[BlockKey], stop: int, start: int = 0) -> set[int]:
        """Depths start … stop-1 whose blocks are READY in G2 and nowhere below it, nor on their way there."""
        with self._lock:
            here = [index for index in range(start, stop) if chain[index] in self._host.index]
        return self.lacking(chain, here)

    def lacking(self, chain: Sequence[BlockKey], indices: Sequence[int]) -> set[int]:
        """Those depths whose blocks are neither in the nearest lower tier nor on their way there, and should be."""
        return set(self._misses(chain, indices))

    def _misses(self, chain: Sequence[BlockKey], indices: Sequence[int]) -> dict[int, Miss]:
        """The same, and what the tier says of them; LATE: it may have the block, but would have to be asked."""
        if self._nearest is None or not indices:
            return {}
        with self._lock:
            if self.admission.active:
                indices = [index for index in indices if self.admission.admits(chain, index)]
            has = self._feeder.has if self._feeder and self._nearest.stride > 1 else self.queues[self._nearest.name].has
            idle = [index for index in indices if not has(chain[index])]
        # Asked in this order: what is on its way now has arrived, or failed, by the time the tier is asked.
        misses = self._nearest.peek(chain, idle)
        return {index: miss for index, miss in zip(idle, misses, strict=True) if miss is not None}

    def demotable(self, stop: int) -> int:
        """Up to which depth a chain of `stop` blocks can go below G2 now: whole strides right above G4, else all."""
        stride = self._nearest.stride if self._nearest is not None else 1
        return stop // stride * stride

    def space(self) -> int:
        """Blocks that would be accepted now; all of G2 where there is no lower tier."""
        if self._nearest is None:
            return self._host.capacity
        with self._lock:
            if self._feeder is not None and self._nearest.stride > 1:
                return max(0, max(self._nearest.stride, self._hold_max) - self._feeder.held())
            return self.queues[self._nearest.name].space()

    def healthy(self) -> bool:
        """Whether there is a lower tier, well enough to wait for."""
        return self._nearest is not None and self._nearest.inner.breaker.health is Health.WELL

    def _missing_parents(self, chain: Sequence[BlockKey], first: int) -> list[Slot] | None:
        """The blocks right before depth `first` that the nearest tier may lack, pinned, as far as they are in G2; None
        if one is not to be had. (Where the tier would have to be asked for the one before them, the queue does.)"""
        slots: list[Slot] = []
        for index in reversed(range(first)):
            miss = self._misses(chain, [index]).get(index)
            if miss is None:
                break
            with self._lock:
                slot = self._host.index.get(chain[index])
                if slot is not None:
                    slot.pins += 1
                    slots.append(slot)
            if slot is None and miss is Miss.LATE:
                break
            if slot is None:
                self._release(slots)
                return None
        return slots[::-1]

    def _hold_strides(self, chain: Sequence[BlockKey], slots: Sequence[Slot]) -> list[int]:
        """Hand the complete strides that `slots` reach into to a feeder right below G2, pinned as far as it holds."""
        assert self._feeder is not None and self._nearest is not None
        stride, stop = self._nearest.stride, slots[-1].index + 1
        start, complete = slots[0].index // stride * stride, stop // stride * stride
        now, holds = self._clock.wall(), list[Hold]()
        with self._lock:
            room = max(stride, self._hold_max) - self._feeder.held()
            complete = min(complete, start + room // stride * stride)
            for key in chain[start:complete]:
                if (slot := self._host.pin(key, now)) is not None:
                    holds.append((slot, slot.generation))
            self._feeder.add(chain, stop, holds)
        self._release(slots)
        return [slot.index for slot in slots if slot.index >= complete]

    # ── what was answered ───────────────────────────────────────────────────────────────────────────────────

    def _finished(self, tier: Metered, batch: ChainBatch, results: Sequence[Stored]) -> None:
        """A tier has answered for a batch. On the loop."""
        durable = sum(result.durable for result in results)
        with self._lock:
            self.durable[tier.name] += durable
            if tier is self._nearest:
                self.dropped += len(results) - durable
            if self._manager.protection.busy:
                stored = zip(batch.slots, results, strict=True)
                self._manager.protection.stored(tier.name, [batch.chain[s.index] for s, r in stored if r.durable])
        self._release([slot for slot in batch.slots if isinstance(slot, Slot)])
        if self._feeder is None:
            return
        if tier is self._fed:
            self._feeder.answered(batch)
        elif durable:
            self._feeder.add(batch.chain, batch.slots[-1].index + 1)

    def _release(self, slots: Sequence[Slot]) -> None:
        self._manager.release([(slot, slot.generation) for slot in slots])

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────

    async def drain(self, deadline: float) -> None:
        """Wait until everything accepted is as deep as it may go, tails of strides included, or until the deadline."""
        if self._nearest is not None and self._nearest.stride == 1:
            await self.queues[self._nearest.name].drained(deadline)
        if self._feeder is not None:
            await self._feeder.flush(deadline)

    def pending(self) -> int:
        """Blocks accepted and not yet answered for. Under the lock."""
        return sum(queue.pending() for queue in self.queues.values())

    async def close(self) -> None:
        """Stop; what is still queued is let go of."""
        if self._feeder is not None:
            await self._feeder.close()
        for queue in self.queues.values():
            for batch in await queue.close():
                self._release([slot for slot in batch.slots if isinstance(slot, Slot)])
