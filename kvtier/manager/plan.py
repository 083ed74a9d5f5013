"""Decides which blocks move for one request, without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvtier.tiers.protocol import Miss

Where = str | Miss
"""A tier's name, or why no tier has the block."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Estimates for load-or-recompute, in seconds per block. A tier without an estimate is taken to pay off."""

    compute_s: float
    load_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome of planning: blocks 0 … hit-1 will be served, the engine computes from block `hit` on.

    `loads[tier]` are the depths to promote from that tier, ascending. `miss` says why block `hit` ends the prefix;
    None when the whole chain is served.
    """

    hit: int
    loads: Mapping[str, tuple[int, ...]]
    miss: Miss | None


def make_plan(where: Sequence[Where], slots: int, resident: str = "g2", costs: Costs | None = None) -> Plan:
    """Decide what to load. Pure.

    `where[i]` is the place of block i; `resident` names the tier that needs no load; `slots` blocks can be held at
    once, resident or loaded. The hit is the longest contiguous prefix that is somewhere, that fits, and, with
    `costs`, whose last load still arrives sooner than computing those blocks would take.
    """
    hit = 0
    miss: Miss | None = None
    for place in where:
        if isinstance(place, Miss):
            miss = place
            break
        if hit == slots:
            miss = Miss.NO_ROOM
            break
        hit += 1
    if costs is not None:
        worth = _worthwhile(where[:hit], resident, costs)
        if worth < hit:
            hit, miss = worth, Miss.SLOWER
    by_tier: dict[str, list[int]] = {}
    for index, place in enumerate(where[:hit]):
        if place != resident:
            by_tier.setdefault(str(place), []).append(index)
    return Plan(hit, MappingProxyType({tier: tuple(found) for tier, found in by_tier.items()}), miss)


def _worthwhile(where: Sequence[Where], resident: str, costs: Costs) -> int:
    """The prefix length with the largest gain, compute time saved less load time; the shorter of equals.

    Tiers load side by side, so a prefix takes as long as its slowest tier.
    """
    busy_s: dict[str, float] = {}
    best, best_gain_s = 0, 0.0
    for index, place in enumerate(where):
        if place != resident:
            name = str(place)
            busy_s[name] = busy_s.get(name, 0.0) + costs.load_s.get(name, 0.0)
        gain_s = (index + 1) * costs.compute_s - max(busy_s.values(), default=0.0)
        if gain_s > best_gain_s:
            best, best_gain_s = index + 1, gain_s
    return best
