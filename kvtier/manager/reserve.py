"""Slots of G2 reserved for a part of a chain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.identity.keys import BlockKey
from kvtier.manager.accounts import Losses
from kvtier.manager.slices import MOVED_BLOCKS
from kvtier.manager.work import Work
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.ranges import ChainTerms
from kvtier.retention.terms import Depth, Terms
from kvtier.retention.trusted_clock import Reading
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Miss


@dataclass(slots=True)
class ChainReservation:
    """Grows by `take` from one depth to the next, under the manager's lock.

    `work` is the verb's: what was purged since it began is not taken in. `keep` claims blocks that must not be evicted
    for these; with `insist` the policy may not refuse them. `slots` are FILLING and the caller's; at `present` depths
    G2 has the block, at `widened` ones with longer terms than before.
    """

    chain: Sequence[BlockKey]
    time: Reading
    work: Work
    keep: Callable[[BlockKey], bool] | None
    insist: bool
    slots: list[Slot] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    widened: list[int] = field(default_factory=list)

    def take_slices(
        self,
        lock: threading.Lock,
        host: HostTier,
        losses: Losses,
        start: int,
        stop: int,
        terms: ChainTerms,
        met: Callable[[Sequence[BlockKey], Sequence[BlockKey]], None],
    ) -> int:
        """`take`, a slice in each hold of the lock; `met` is called in it with the slice's keys and those present.

        Between two slices the slots taken are FILLING and the caller's; a block that was present may leave again, as it
        may after the last.
        """
        reached = start
        for first in range(start, stop, MOVED_BLOCKS):
            end, known = min(stop, first + MOVED_BLOCKS), len(self.present)
            with lock:
                if not host.capacity or self.work.lost(self.chain[first:end]):  # closed, or purged, meanwhile
                    break
                reached = self.take(host, losses, first, end, terms)
                met(self.chain[first:end], [self.chain[index] for index in self.present[known:]])
            if reached < end:
                break
        return reached

    def take(self, host: HostTier, losses: Losses, start: int, stop: int, terms: ChainTerms) -> int:
        """Reserve blocks start … stop-1; returns the depth reached: there was no space for it, or it is `stop`. Blocks
        that another caller is filling are passed over."""
        reached = start
        for first, end, block in terms.spans(start, stop):
            reached = self._take_span(host, losses, first, end, block.terms)
            if reached < end:
                break
        return reached

    def _take_span(self, host: HostTier, losses: Losses, start: int, stop: int, terms: Terms) -> int:
        now, stamp = self.time.serve, self.time.stamp
        life = Lifetime.of(terms, stamp)
        ends, priority = life.ends(Depth.G2), terms.priority
        for index in range(start, stop):
            key = self.chain[index]
            found = host.index.parts[key[-1]].get(key)
            if found is not None and host.drop_dead(key, now):
                found = None
            if found is not None:
                self.present.append(index)
                if found.extend(terms, stamp) or priority > found.priority:
                    self.widened.append(index)
                host.raise_priority(found, priority)
                continue
            slot = host.reserve(key, index, self.keep, insist=self.insist, priority=priority, wall_s=now)
            if slot is not None:
                slot.kind = terms.name
                slot.stamp(life, ends)
                self.slots.append(slot)
            elif host.peek(key, now) is not Miss.PENDING:
                losses.record(key, Miss.QUOTA if host.quota.full(key) else Miss.NO_ROOM)
                return index
        return stop
