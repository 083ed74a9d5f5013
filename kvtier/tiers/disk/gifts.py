"""Which class of G3 gives space to which: by worth, and by age where nothing is known of a class yet.

A class takes from another what it gained by there, less what the other would lose, if that exceeds a price: blocks that
leave must be stored anew when they are used again, so space moves only for hits that pay for it soon. Blocks of a class
that nobody asks for a second time, as in a scan, have no price. A class of
which little was stored so far is on trial: from a class that is hardly hit it takes what is older than its own oldest,
as one common order would have it. A class that can store nothing at all takes from the one that loses least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.tiers.disk.class_worth import LEVELS, ClassWorth

PRICE = 0.1
"""Hits per byte moved, within the time in which counts fade, that a move must be worth, up to all uses of the giver. Of
0.08 to 0.15 those about it keep 0.95 of the best split in all rows of benchmarks/g3_swings.py."""
TRIAL = 0.5
"""Of the capacity, that a class stores before it must be worth the space it takes."""
CERTAINTY = 1.0
"""By how many standard deviations of the difference: blocks come one by one."""


class Gift(NamedTuple):
    """Bytes that a class gives, and the level of worth that decided it (None: it was not worth)."""

    giver: int
    size: int
    level: int | None = None


def gifts(
    taker: ClassWorth, givers: Sequence[ClassWorth], step: int, capacity: int, now: int, *, must: bool
) -> list[Gift]:
    """Space that others may give to `taker`, the best first. `must`: it can store nothing otherwise. `now`: the tick.
    Pure."""
    found = [
        (surplus, Gift(giver.slot_class, size, level))
        for giver in givers
        for level, steps in enumerate(LEVELS)
        if (size := max(step, min(steps * step, giver.ages.total)))
        and (surplus := _surplus(taker, giver, level, size)) > 0
    ]
    out = [gift for _surplus, gift in sorted(found, key=lambda one: -one[0])]
    by_age = sorted(givers, key=lambda giver: _age(giver, step, now))
    if taker.stored < TRIAL * capacity:
        own = taker.ages.tick_at(0, now)
        idle = [giver for giver in by_age if giver.loss[0] <= PRICE * step]
        out += [Gift(giver.slot_class, step) for giver in idle if _age(giver, step, now) < own]
    if must:
        out += [Gift(giver.slot_class, step) for giver in sorted(by_age, key=lambda giver: giver.loss[0])]
    return list(dict.fromkeys(out))


def _age(giver: ClassWorth, size: int, now: int) -> int:
    """When the youngest of the `size` bytes that leave first was used; -1 if there is nothing."""
    return giver.ages.tick_at(min(size, giver.ages.total) - 1, now) if giver.ages.total else -1


def _surplus(taker: ClassWorth, giver: ClassWorth, level: int, size: int) -> float:
    gain, loss = taker.gain[level], giver.loss[level]
    doubt = CERTAINTY * math.sqrt(taker.slot_bytes * gain + giver.slot_bytes * loss)
    price = min(PRICE * size, giver.loss[-1] + giver.gain[-1])
    return gain - loss - price - doubt
