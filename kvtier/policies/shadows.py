"""Shadow caches: the hits that each rule would have had, counted without bytes.

A shadow is a cache of full size that always follows one rule. It is prefix-closed, so it holds the head of a run up to
some depth: that depth per run is its whole content, and replaying a request takes a few steps per run, however long the
runs are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from math import exp, inf

from kvtier.identity.keys import KEY_PARTS
from kvtier.policies.pages import Pages
from kvtier.policies.run import LEVELS, Standing
from kvtier.times import Mono

EVICTED_AT_ONCE = 16
"""Runs that one step of a replay evicts, at most: as long as a short request takes."""

Rule = tuple[float, float]
"""(beta, theta): bonus per doubling of references, in mean gaps; weight of a newcomer's own gap."""


@dataclass(slots=True)
class ChainReference:
    """One request, as it is replayed. Depths count from the root; `old` and `new` begin there."""

    mono_s: Mono
    gap_s: float  # mean gap of continued chains
    blocks: int
    old: list[tuple[Standing, int, int]]  # (run, first depth, end depth) that this request took
    new: list[tuple[Standing, int, int]]


class Shadow:
    """One rule's cache of `capacity` blocks. `number` is its rule's."""

    def __init__(self, number: int, capacity: int, rule: Rule) -> None:
        self.number = number
        self.capacity = capacity
        self.beta, self.theta = rule
        self.used_blocks = 0
        # Those that are held, the coldest first.
        self._levels: list[Pages[Standing]] = [Pages("number") for _ in range(LEVELS)]
        self._held: list[dict[Standing, int]] = [{} for _ in range(KEY_PARTS)]  # depth up to which, by number
        self._top_level = 0

    def resize(self, capacity: int) -> Iterator[None]:
        """Have another capacity: the coldest leave, in steps, each of at most EVICTED_AT_ONCE evictions."""
        self.capacity, evictions = capacity, 0
        while self.used_blocks > capacity and self._evict(self.used_blocks - capacity, 0.0, inf):
            evictions += 1
            if not evictions % EVICTED_AT_ONCE:
                yield

    def replay(self, ref: ChainReference, bases: list[int]) -> Generator[None, None, int]:
        """Replay one request, in steps; returns the blocks hit: its longest resident prefix.

        `bases[i]`: where ref.old[i] began before this request; its `base` says where it begins now.
        """
        hit = 0
        for (run, start, stop), base in zip(ref.old, bases, strict=True):
            held = self.held(run)
            if held <= base:
                continue
            here = min(held, stop)
            self.used_blocks -= here - base  # taken out, so that it is not evicted for its own request
            if hit == start < here:
                hit = here
            if held <= stop:
                self._drop(run)
        self.used_blocks += hit
        end = yield from self._admit(ref, hit)
        for run, start, stop in reversed(ref.new):
            if end > start:
                self._levels[run.level].add(run)
                self._held[run.number % KEY_PARTS][run] = min(end, stop)
                if run.level > self._top_level:
                    self._top_level = run.level
        return hit

    def _drop(self, run: Standing) -> None:
        """Nothing of a run is held any more."""
        self._levels[run.level].remove(run)
        del self._held[run.number % KEY_PARTS][run]

    def _admit(self, ref: ChainReference, hit: int) -> Generator[None, None, int]:
        """Admit the blocks that missed, head first; returns the depth up to which the request is held then."""
        bonus_s, depth, evictions = self.beta * ref.gap_s, hit, 0
        for run, _, stop in ref.new:
            rank_max = ref.mono_s - self.theta * run.gap_s + bonus_s * run.level / 2 if self.theta else inf
            while depth < stop:
                free = self.capacity - self.used_blocks
                if not free:
                    evictions += 1
                    if not evictions % EVICTED_AT_ONCE:
                        yield
                    free = self._evict(stop - depth, bonus_s, rank_max)
                    if not free:
                        return depth
                step = min(free, stop - depth)
                self.used_blocks += step
                depth += step
        return depth

    def _evict(self, wanted: int, bonus_s: float, rank_max: float) -> int:
        """Drop up to `wanted` blocks of the coldest run if its rank is below `rank_max`; returns how many."""
        coldest, rank = None, rank_max
        for number in range(self._top_level + 1):
            if (run := self._levels[number].first) is not None:
                own = run.last + bonus_s * number / 2
                if own < rank:
                    coldest, rank = run, own
        if coldest is None:
            return 0
        held = self.held(coldest)
        count = min(wanted, held - coldest.base)
        self.used_blocks -= count
        if count == held - coldest.base:
            self._drop(coldest)
        else:
            self._held[coldest.number % KEY_PARTS][coldest] = held - count
        return count

    def held(self, run: Standing) -> int:
        """The depth up to which a run is held, 0: it is not."""
        return self._held[run.number % KEY_PARTS].get(run, 0)

    def check(self) -> None:
        """Assert that `used_blocks` is what the runs say, and within the capacity. O(runs)."""
        held = [stop - run.base for part in self._held for run, stop in part.items()]
        listed = [run for level in self._levels for run in level]
        assert len(listed) == len(held) and all(map(self.held, listed)), "a run is not in its level"
        assert sum(held) == self.used_blocks <= self.capacity, f"shadow {self.number} counts {self.used_blocks} blocks"
        assert all(count > 0 for count in held), "an empty run is listed"


LEAD = 0.01
"""Share by which a challenger must lead: at 0.05 short traces lose 1.3 points."""

LEAD_GROWTH, LEAD_MAX = 1.5, 0.1
"""Each time the first rule was left for less than a window, the lead needed to leave it again grows by LEAD_GROWTH, up
to LEAD_MAX; a longer absence takes the growth back. A change of rule costs the real cache content that it has to
exchange, which no shadow counts."""


class Duel:
    """All shadows, and the score of each: its prefix hits, fading over `window` referenced blocks."""

    def __init__(self, capacity: int, rules: tuple[Rule, ...], window: int) -> None:
        self.rules = rules
        self.shadows = [Shadow(number, capacity, rule) for number, rule in enumerate(rules)]
        self.scores = [0.0] * len(rules)
        self.best = 0
        self.switches = 0
        self.lead = LEAD  # needed to leave the first rule
        self._window = window
        self._references = 0  # blocks referenced so far
        self._runs = 0
        self._left_at = 0  # `_references` when the first rule was left last

    def resize(self, capacity: int, window: int) -> Iterator[None]:
        """Judge the rules for another capacity and window from now on. In steps, between two requests."""
        self._window = window
        for shadow in self.shadows:
            yield from shadow.resize(capacity)

    def train(self, ref: ChainReference) -> Iterator[None]:
        """Replay one request in every shadow, then choose the rule in force. In steps, each of at most EVICTED_AT_ONCE
        evictions in one shadow; a request is replayed to its end before the next."""
        for run, start, _ in reversed(ref.new):  # tail first, as in the real order
            self._runs += 1
            run.base, run.number = start, self._runs
        ref.old = [part for part in ref.old if part[0].base >= 0]  # else it arrived before any reference named it
        bases = [run.base for run, _, _ in ref.old]
        for run, _, stop in ref.old:
            run.base = stop
        fade = exp(-ref.blocks / self._window)
        for shadow in self.shadows:
            hits = yield from shadow.replay(ref, bases)
            self.scores[shadow.number] = self.scores[shadow.number] * fade + hits
        self._references += ref.blocks
        self._choose(max(range(len(self.scores)), key=self.scores.__getitem__))

    def _choose(self, leader: int) -> None:
        """Follow the leader if it leads by enough. The return to the first rule, leaf-first LRU, needs no lead: a false
        switch costs more than a late one."""
        needed = 0.0 if not leader else LEAD if self.best else self.lead
        if self.scores[leader] <= self.scores[self.best] * (1 + needed):
            return
        if not self.best:
            self._left_at = self._references
        elif not leader:
            false_alarm = self._references - self._left_at < self._window
            self.lead = min(self.lead * LEAD_GROWTH, LEAD_MAX) if false_alarm else max(LEAD, self.lead / LEAD_GROWTH)
        self.best = leader
        self.switches += 1

    def held(self, run: Standing) -> int:
        """The depth up to which some shadow holds a run, 0: none does."""
        return max([shadow.held(run) for shadow in self.shadows], default=0)

    def check(self) -> None:
        for shadow in self.shadows:
            shadow.check()
