"""Decides which blocks move for one request, without I/O."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvtier.cost_line import Bound
from kvtier.tiers.protocol import Miss

Where = str | Miss
"""A tier's name, or why no tier has the block."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Estimates for load-or-recompute: seconds to compute a block, and what loading blocks costs, by tier. A tier
    without an estimate is taken to pay off."""

    compute_s: float
    loads: Mapping[str, Bound]


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome of planning: blocks 0 … hit-1 will be served, the engine computes from block `hit` on.

    `loads[tier]` are the depths to promote from that tier, ascending. `miss` says why block `hit` ends the prefix;
    None when the whole chain is served.
    """

    hit: int
    loads: Mapping[str, Sequence[int]]
    miss: Miss | None


class Planning:
    """Decides what to load, place by place from depth 0 on. Pure. O(1) per block, so that a long chain can be planned
    in slices.

    `resident` names the tier that needs no load; `slots` blocks can be held at once, resident or loaded. The hit is the
    longest contiguous prefix that is somewhere, that fits, and, with `costs`, that has the largest gain: compute time
    saved less load time, the shorter of equals. Tiers load side by side, so a prefix takes as long as its slowest tier.
    """

    def __init__(self, slots: int, resident: str = "g2", costs: Costs | None = None) -> None:
        self._slots = slots
        self._resident = resident
        self._costs = costs
        self._reached = 0  # places that a hit may contain
        self._ended: Miss | None = None  # why it may contain no more
        self._loads: dict[str, array[int]] = {}  # not lists: a hundred thousand numbers are given up at once
        self._busy_s: dict[str, float] = {}
        self._best, self._best_gain_s = 0, 0.0

    def add(self, places: Sequence[Where]) -> None:
        """The places of the next blocks."""
        for place in places:
            if self._ended is not None:
                return
            if isinstance(place, Miss):
                self._ended = place
            elif self._reached == self._slots:
                self._ended = Miss.NO_ROOM
            else:
                self._add(place)

    def _add(self, place: str) -> None:
        index = self._reached
        self._reached = index + 1
        if place != self._resident:
            if (loads := self._loads.get(place)) is None:
                loads = self._loads[place] = array("L")
            loads.append(index)
        costs = self._costs
        if costs is None:
            return
        if place != self._resident:
            load = costs.loads.get(place)
            self._busy_s[place] = 0.0 if load is None else load.at(len(self._loads[place]))
        gain_s = (index + 1) * costs.compute_s - max(self._busy_s.values(), default=0.0)
        if gain_s > self._best_gain_s:
            self._best, self._best_gain_s = index + 1, gain_s

    def plan(self) -> Plan:
        """The plan for the places so far."""
        hit, miss = self._reached, self._ended
        if self._costs is not None and self._best < hit:
            hit, miss = self._best, Miss.SLOWER
        loads = {tier: found[: bisect_left(found, hit)] for tier, found in self._loads.items()}
        return Plan(hit, MappingProxyType({tier: found for tier, found in loads.items() if found}), miss)


def make_plan(where: Sequence[Where], slots: int, resident: str = "g2", costs: Costs | None = None) -> Plan:
    """Decide what to load, where `where[i]` is the place of block i; see `Planning`. Pure."""
    planning = Planning(slots, resident, costs)
    planning.add(where)
    return planning.plan()
