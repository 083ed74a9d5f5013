"""Decides whether a request's blocks are loaded or computed, by what both have cost requests of this engine.

Costs are end to end, since only so do waits, further steps and copies beside a forward count: from the moment a hit is
known to the request's first token. A request without a load tells what prefill costs; of one with a load, what its own
prefill does not explain was the load's. To these comes what either costs the others that run: steps are as long as
their prefill, and by what they are longer while blocks arrive was the load's.

The gate looks at the other choice now and then, within a budget: a share of all the time that it has seen requests
take, and half of what earlier looks gained. So looks cost at most that share. Beside it, a load that is thought to cost
more is looked at whenever hits have grown threefold: the share of a short replay pays for no look at all. Over n hits
these are log₃ n, and what they cost is a debt that the budget pays before any look of its own. A look that finds a load
far cheaper than thought is followed by another at once. And a load is waited for only as long as it may save, so one
that nobody could foresee costs no more than its blocks computed twice. On the engines that the tests make up (dear or
cheap loads, drifting, noisy, with rare outliers), over replays of 2,000 requests, it is never more than a twentieth
worse than the better of always and never loading. Shorter replays leave less time to learn.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace

from kvtier.cost_line import CostLine

_BUDGET = 0.015
"""Share of all time that looking at the other choice may cost."""
_SAMPLES_MIN = 3
"""Samples of prefill from which on it is known. Until then every other hit is loaded, so that loads are known as soon
and neither choice is paid for alone: after a restart, all hits are whole prompts. Then so many are loaded, and while
none of these has told what it cost, one of _LOOK_EVERY."""
_LOADS_MIN, _LOADS_FAR = 4, 2
"""Loads from which on they are judged, and the same where the cheapest is _FAR dearer than prefill. One alone judges
nothing: it may have been an engine's first step, or a process that stood still."""
_FAR = 4.0
_LOOK_EVERY, _LOOK_EVERY_SURE = 8, 32
"""Requests between two looks at the other choice; where the difference is beyond doubt, the latter."""
_LOOKS_AT_ONCE = 2
"""Of the dearest looks lately, so many are paid for by what is saved up, at most: the rest of it lapses."""
_PRICE_KEPT = 0.98
"""Share of that price that is left at the next hit: small hits between large ones do not let it lapse."""
_DEAREST_LOOK = 8.0
"""Times its price that a look is charged at most: what is dearer by chance, as requests of either choice now and then
are, would end all looks for long, and the average of such chances is in the price."""
_FIRST_S, _FIRST_BLOCK_S = 0.05, 0.005
"""As long is a load waited for before any prefill has told what it is worth, and so much longer per block."""
_FIRST_DEBT, _DEBT_GROWTH = 16, 3
"""A load that is thought to cost more is looked at without credit at so many hits, and whenever these have grown so
many times since. About the schedule with the least regret over loads that get cheap at an unknown hit: looks at hits 3,
16 and 64 of 120 (tests/connectors/test_load_gate.py)."""
_SURPRISE = 0.5
"""A look at a load that took no more than this share of what was thought is followed by another at once, without
credit: loads may have become cheap, and it takes a few of them to tell."""
_SURE = 3.0
"""Standard errors of both estimates together from which on a difference is beyond doubt."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether `blocks` that come by `way` are to be loaded. `look`: it is the choice that is thought to cost more, by
    `price_s`. What it truly costs the request more than `rival_s`, the estimate of the other, is paid from the budget,
    and with it `others_s`, by which it is thought to hold the others up longer. Blocks that have not come after
    `patience_s` are to be computed."""

    way: str
    blocks: int
    load: bool
    look: bool = False
    rival_s: float = 0.0
    others_s: float = 0.0
    price_s: float = 0.0
    patience_s: float = math.inf


class LoadGate:
    """See the module. Pure: told of times, reads no clock. Not thread-safe. A few hundred bytes per way.

    A way is how blocks arrive: a name such as "async", since its costs are its own. Sizes in blocks.
    """

    def __init__(self, budget: float = _BUDGET) -> None:
        self._budget = budget
        self._prefill = CostLine()  # blocks computed until the first token of a request without a load
        self._steps = CostLine()  # blocks computed in a step without copies
        self._loads: defaultdict[str, CostLine] = defaultdict(CostLine)
        self._untold: Counter[str] = Counter()  # decisions since a load told what it cost, while few have
        self._stalls: defaultdict[str, CostLine] = defaultdict(CostLine)  # what arriving blocks add to steps
        self._unexplained: deque[tuple[str, float, float, float]] = deque(maxlen=_SAMPLES_MIN)  # see `loaded`
        self._credit_s = 0.0
        self._price_s = 0.0  # of the dearest look lately
        self._since_look = 0
        self._hits = 0
        self._debt_at = _FIRST_DEBT  # hits at which the next look is made without credit

    def decide(self, way: str, blocks: int, others: int = 0) -> Verdict:
        """Whether to load so many blocks while `others` requests run, and how long to wait for them."""
        verdict = self._choose(way, blocks, others)
        return replace(verdict, patience_s=self._patience_s(way, blocks, others)) if verdict.load else verdict

    def _patience_s(self, way: str, blocks: int, others: int) -> float:
        """As long as computing them would take all requests together, and as loads usually take where these are worth
        it: what is waited for in vain is computed, too, so the request has its first token after twice the time at
        most."""
        if not len(self._prefill):
            return _FIRST_S + _FIRST_BLOCK_S * blocks
        loads = self._loads[way]
        compute_s, load_s = (1 + others) * self._prefill.between(0, blocks), loads.at(blocks)
        return compute_s + (load_s if len(loads) >= _LOADS_MIN and load_s <= compute_s else 0.0)

    def _choose(self, way: str, blocks: int, others: int) -> Verdict:
        loads = self._loads[way]
        self._hits += 1
        if len(self._prefill) < _SAMPLES_MIN:
            self._untold[way] += 1
            return Verdict(way, blocks, self._untold[way] % 2 == 1)  # loads alone tell nothing
        compute_s, load_s = self._prefill.between(0, blocks), loads.least(blocks)
        held_s = others * (self._stall_s(way, blocks) - self._steps.between(0, blocks))  # longer by the load
        if len(loads) < _LOADS_FAR or (len(loads) < _LOADS_MIN and loads.cheapest(blocks) + held_s < _FAR * compute_s):
            self._untold[way] += 1
            return Verdict(way, blocks, self._untold[way] <= _SAMPLES_MIN or self._untold[way] % _LOOK_EVERY == 0)
        gain_s = compute_s - load_s - held_s
        price_s = abs(gain_s)
        self._since_look += 1
        self._price_s = max(price_s, _PRICE_KEPT * self._price_s)
        self._credit_s = min(self._credit_s, _LOOKS_AT_ONCE * self._price_s)
        sure = price_s > _SURE * (loads.error() + self._prefill.error())
        due = self._since_look >= (_LOOK_EVERY_SURE if sure else _LOOK_EVERY) and price_s <= self._credit_s
        if not (due or (gain_s < 0 and self._hits >= self._debt_at)):
            return Verdict(way, blocks, gain_s >= 0)
        if gain_s < 0 and not due:
            self._debt_at = _DEBT_GROWTH * self._hits
        self._since_look = 0
        if gain_s >= 0:
            return Verdict(way, blocks, False, True, load_s, -held_s, price_s)
        return Verdict(way, blocks, True, True, compute_s, held_s, price_s)

    def prefill_s(self, blocks: int) -> float | None:
        """What so many more blocks to compute add to a request; None while that is not known."""
        return self._prefill.between(0, blocks) if len(self._prefill) >= _SAMPLES_MIN else None

    def saves_s(self, way: str, blocks: int) -> float | None:
        """What so many more blocks to load, in place of computing them, save a request; None while that is not
        known."""
        prefill_s = self.prefill_s(blocks)
        return None if prefill_s is None else max(0.0, prefill_s - self._loads[way].between(0, blocks))

    def _stall_s(self, way: str, blocks: int) -> float:
        stalls = self._stalls.get(way)
        return 0.0 if stalls is None else stalls.least(blocks)

    def computed(self, blocks: float, seconds: float, verdict: Verdict | None = None) -> None:
        """A request that loaded nothing computed so many blocks; seconds until its first token. `verdict`, if its hit
        was decided upon."""
        self._spent(seconds)
        if verdict is not None and verdict.look:
            self._pay(verdict, seconds - self._prefill.at(blocks - verdict.blocks))
        self._prefill.add(blocks, seconds)
        if len(self._prefill) >= _SAMPLES_MIN:
            while self._unexplained:
                way, loaded, rest, took_s = self._unexplained.popleft()
                self._loads[way].add(loaded, took_s - self._prefill.at(rest))
                self._untold[way] = 0

    def loaded(self, verdict: Verdict, computed: float, seconds: float) -> None:
        """A request loaded as decided and computed `computed` further blocks; seconds from its hit to its first token.
        Until prefill is known, nobody can tell how much of it was the load's."""
        self._spent(seconds)
        if len(self._prefill) < _SAMPLES_MIN:
            self._unexplained.append((verdict.way, verdict.blocks, computed, seconds))
            return
        load_s = seconds - self._prefill.at(computed)
        if verdict.look:
            self._pay(verdict, load_s)
            thought_s = verdict.rival_s + verdict.price_s - verdict.others_s
            if load_s < _SURPRISE * thought_s:
                self._debt_at = min(self._debt_at, self._hits + 1)
        self._loads[verdict.way].add(verdict.blocks, load_s)
        self._untold[verdict.way] = 0

    def _pay(self, look: Verdict, seconds: float) -> None:
        """A look took so long. One that was better than the other choice is followed by more, which its gain pays."""
        price_s = min(seconds - look.rival_s + look.others_s, _DEAREST_LOOK * look.price_s)
        self._credit_s -= price_s if price_s > 0 else price_s / 2
        if price_s < 0:
            self._since_look = _LOOK_EVERY_SURE

    def ran(self, computed: float, seconds: float) -> None:
        """A step without copies computed so many blocks in this time."""
        self._steps.add(computed, seconds)

    def stalled(self, way: str, blocks: float, computed: float, seconds: float) -> None:
        """A step in which `blocks` arrived computed `computed` others in this time."""
        if len(self._steps) >= _SAMPLES_MIN:
            self._stalls[way].add(blocks, seconds - self._steps.at(computed))

    def _spent(self, seconds: float) -> None:
        self._credit_s += self._budget * max(0.0, seconds)
