"""Slots of G2 reserved for a part of a chain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

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
    for these; with `insist` the policy may not refuse them. `stuck` makes a block absent that another caller fills, if
    that is stuck, and says whether it is. `slots` are FILLING and the caller's; at `present` depths G2 has the block,
    at `widened` ones with longer terms than before; `passed` gets the depths of those that another caller fills.
    """

    chain: Sequence[BlockKey]
    time: Reading
    work: Work
    keep: Callable[[BlockKey], bool] | None
    insist: bool
    stuck: Callable[[BlockKey], bool] = lambda _: False
    passed: set[int] | None = None
    slots: list[Slot] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    widened: list[int] = field(default_factory=list)
    _latest: tuple[Terms, Lifetime] | None = None  # one life for all blocks under the same terms

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
        try:
            for first in range(start, stop, MOVED_BLOCKS):
                end, known = min(stop, first + MOVED_BLOCKS), len(self.present)
                with lock:
                    if not host.capacity or self.work.lost(self.chain[first:end]):  # closed, or purged, meanwhile
                        break
                    reached = self.take(host, losses, first, end, terms)
                    met(self.chain[first:end], [self.chain[index] for index in self.present[known:]])
                if reached < end:
                    break
        except BaseException:  # of the caller's thread, such as Ctrl-C: nobody is given the slots
            with lock:
                for slot in self.slots:
                    host.abort(slot, slot.generation)
            raise
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
        if self._latest is None or self._latest[0] is not terms:
            self._latest = terms, Lifetime.of(terms, stamp)
        life = self._latest[1]
        ends, priority = life.ends(Depth.G2), terms.priority
        table, chain, index = host.index.table, self.chain, start
        kind = table.kind_of(terms.name)
        while index < stop:
            rest = chain[index:stop]
            found = host.find_leading(rest, now)
            if found:
                self._widen(host, index, found, terms)
                index += len(found)
                continue
            numbers, room = host.reserve_leading(
                rest, index, self.keep, insist=self.insist, priority=priority, wall_s=now
            )
            self.slots += map(Slot, numbers, repeat(table))
            table.stamp_all(numbers, kind, life, ends)
            index += len(numbers)
            if not room:
                key = chain[index]
                losses.record(key, Miss.QUOTA if host.quota.full(key) else Miss.NO_ROOM)
                return index
            if not numbers and not self.stuck(chain[index]):
                if self.passed is not None:
                    self.passed.add(index)
                index += 1
        return stop

    def _widen(self, host: HostTier, depth: int, numbers: Sequence[int], terms: Terms) -> None:
        """Add the terms to blocks from `depth` on that are here."""
        table, priority = host.index.table, terms.priority
        self.present += range(depth, depth + len(numbers))
        widened = set(table.extend_all(numbers, terms, self.time.stamp))
        lower = [number for number in numbers if table.priorities[number] < priority]
        if widened or lower:
            for number in lower:
                host.raise_priority(Slot(number, table), priority)
            widened.update(lower)
            self.widened += [index for index, number in enumerate(numbers, depth) if number in widened]
