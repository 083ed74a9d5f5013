"""Shadows: what other rules would have hit, kept in counters instead of copies.

A shadow is a full-size cache without bytes that runs one rule for good. Since what it holds of a run is always
the run's head (it is prefix-closed), a depth per run is all its content, and a request costs it a few steps per
run touched, whatever its length.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import exp, inf

from kvtier.policies.runs import LEVELS, Run

Rule = tuple[float, float]
"""(beta, theta): bonus per doubling of references, in mean gaps; weight of a newcomer's own gap."""


@dataclass(slots=True)
class ChainReference:
    """One request as the shadows see it. Depths are absolute, `old` and `new` go from the root on."""

    now: float
    gap: float  # mean gap of continued chains, in seconds
    blocks: int
    old: list[tuple[Run, int, int]]  # (run, first depth, end depth) that this request took
    new: list[tuple[Run, int, int]]


class Shadow:
    """One rule's cache of `capacity` blocks. `number` is its place in every run's `marks`."""

    def __init__(self, number: int, capacity: int, rule: Rule) -> None:
        self.number = number
        self.capacity = capacity
        self.beta, self.theta = rule
        self.used = 0
        self._levels: list[OrderedDict[Run, None]] = [OrderedDict() for _ in range(LEVELS)]
        self._top_level = 0

    def step(self, ref: ChainReference, floors: list[int]) -> int:
        """Replay one request; gives the blocks hit: its longest resident prefix.

        `floors[i]`: where ref.old[i] began before this request; its mark already tells where it begins now.
        """
        number, levels, hit = self.number, self._levels, 0
        for (run, start, stop), floor in zip(ref.old, floors, strict=True):
            held = run.marks[number]
            if held <= floor:
                continue
            here = min(held, stop)
            self.used -= here - floor  # detached: not to be evicted for its own request
            if hit == start < here:
                hit = here
            if held <= stop:
                del levels[run.level][run]
        self.used += hit
        end = self._admit(ref, hit)
        for run, start, stop in reversed(ref.new):  # tail first, as in the real order
            if end > start:
                run.marks[number] = min(end, stop)
                levels[run.level][run] = None
                if run.level > self._top_level:
                    self._top_level = run.level
        return hit

    def _admit(self, ref: ChainReference, hit: int) -> int:
        """Take in what missed, head first; gives the depth up to which the request is held now."""
        unit, depth = self.beta * ref.gap, hit
        for run, _, stop in ref.new:
            bar = ref.now - self.theta * run.gap + unit * run.level / 2 if self.theta else inf
            while depth < stop:
                free = self.capacity - self.used or self._evict(stop - depth, unit, bar)
                if not free:
                    return depth
                step = min(free, stop - depth)
                self.used += step
                depth += step
        return depth

    def _evict(self, wanted: int, unit: float, bar: float) -> int:
        """Drop up to `wanted` blocks of the coldest run if its rank is below `bar`; gives how many."""
        coldest, rank = None, bar
        for number in range(self._top_level + 1):
            level = self._levels[number]
            if level:
                run = next(iter(level))
                its = run.last + unit * number / 2
                if its < rank:
                    coldest, rank = run, its
        if coldest is None:
            return 0
        marks, floor = coldest.marks, coldest.marks[-1]
        count = min(wanted, marks[self.number] - floor)
        marks[self.number] -= count
        self.used -= count
        if marks[self.number] == floor:
            del self._levels[coldest.level][coldest]
        return count

    def check(self) -> None:
        """Assert that `used` is what the runs say, and within the capacity. O(runs)."""
        held = [run.marks[self.number] - run.marks[-1] for level in self._levels for run in level]
        assert sum(held) == self.used <= self.capacity, f"shadow {self.number}: {sum(held)} held, {self.used} counted"
        assert all(count > 0 for count in held), "an empty run is listed"


LEAD = 0.01
"""By this share a challenger must lead: at 0.05 short traces lose 1.3 points."""

LEAD_GROWTH, LEAD_MAX = 1.5, 0.1
"""Each time the first rule was left for less than a window, the lead that leaving it takes grows by this factor, at
most to this; a longer absence takes the growth back. A cache pays for every change of rule with content it then has
to exchange, which the shadows do not see."""


class Duel:
    """All shadows, and the score of each: its prefix hits, fading over `window` references."""

    def __init__(self, capacity: int, rules: tuple[Rule, ...], window: int) -> None:
        self.rules = rules
        self.shadows = [Shadow(number, capacity, rule) for number, rule in enumerate(rules)]
        self.scores = [0.0] * len(rules)
        self.best = 0
        self.switches = 0
        self.lead = LEAD  # that leaving the first rule takes
        self._window = window
        self._seen = 0  # references
        self._left_at = 0  # of them, when the first rule was left last

    def train(self, ref: ChainReference) -> None:
        """Replay one request in every shadow, then choose the rule in force."""
        # A run's marks: the depth up to which each shadow holds it, and at the end the depth where it begins.
        for run, start, _ in ref.new:
            run.marks = [start] * (len(self.shadows) + 1)
        ref.old = [part for part in ref.old if part[0].marks]  # without: arrived before any reference named it
        floors = [run.marks[-1] for run, _, _ in ref.old]
        for run, _, stop in ref.old:
            run.marks[-1] = stop
        fade = exp(-ref.blocks / self._window)
        for shadow in self.shadows:
            self.scores[shadow.number] = self.scores[shadow.number] * fade + shadow.step(ref, floors)
        self._seen += ref.blocks
        self._choose(max(range(len(self.scores)), key=self.scores.__getitem__))

    def _choose(self, leader: int) -> None:
        """Follow the leader if it leads by enough. The way back to the first rule, leaf-first LRU, needs no lead: a
        false switch costs more than a late one."""
        wanted = 0.0 if not leader else LEAD if self.best else self.lead
        if self.scores[leader] <= self.scores[self.best] * (1 + wanted):
            return
        if not self.best:
            self._left_at = self._seen
        elif not leader:
            false_alarm = self._seen - self._left_at < self._window
            self.lead = min(self.lead * LEAD_GROWTH, LEAD_MAX) if false_alarm else max(LEAD, self.lead / LEAD_GROWTH)
        self.best = leader
        self.switches += 1

    def check(self) -> None:
        for shadow in self.shadows:
            shadow.check()
