"""Marks: what orders purges and the blocks that they cover, as one number.

    a purge covers the blocks of its tenant whose mark is at most the purge's

Where replicas share a purge log, a block's mark is POSITIONS plus its position there: the number of the last entry that
was in force when it was taken over. An entry of number q covers positions below q. Where there is none, the mark is the
wall time at which the block's youngest stamp was made. POSITIONS is later than any time: what has no position is
covered by every entry.

Purges of one position differ in the fraction, which tells how the log stands to them:

    p                        asked for where the log was read up to p: an entry of the tenant from there on counts as it
    p + _REFUSED             *refused*: the log did not take it. No entry of others counts as it, since blocks may have
                             been stored between that entry and this purge
    number - 1 + _LOGGED     the entry of this number

Both fractions are less than times are rounded by, so that an earlier release takes the three for one.
"""

from __future__ import annotations

from kvtier.retention.lifetime import FUTURE_S, Lifetime
from kvtier.times import Wall

POSITIONS = 2.0**41
"""Position 0. Below are times; stored times are below 2^40."""

_REFUSED, _LOGGED = 2.0**-11, 2.0**-10  # an f64 of this size has a step of 2^-11


def mark_of(life: Lifetime, position: int) -> Wall:
    """The mark of a block that was taken over at this position of the purge log; 0: there is none. Pure."""
    return Wall(POSITIONS + position) if position else life.born


def is_ahead(mark: Wall, wall_s: Wall) -> bool:
    """Whether a block's mark is a time from the future, which a clock that was wrong has stamped: nobody can tell what
    it was made before, and it is not served until then. A purge takes it along. Pure."""
    return wall_s + FUTURE_S < mark < POSITIONS


def mark_below(number: int) -> Wall:
    """The mark of the purge that is this entry of the log. Pure."""
    return Wall(POSITIONS + number - 1 + _LOGGED)


def refused(mark: Wall) -> Wall:
    """The earliest mark of a purge that the log did not take and that covers no less than this one. Pure."""
    above = max(0.0, mark - POSITIONS)
    position = int(above)
    return Wall(POSITIONS + position + (above - position > _REFUSED) + _REFUSED)


def is_refused(mark: Wall) -> bool:
    """Whether it is the mark of a purge that the log did not take. Pure."""
    return mark >= POSITIONS and (mark - POSITIONS) % 1 == _REFUSED


def later(one: Wall, other: Wall) -> Wall:
    """The mark of two purges of one tenant: it covers what they cover, and is refused where one is. Pure."""
    least, most = (one, other) if one <= other else (other, one)
    return refused(most) if is_refused(least) else most


def position_of(mark: Wall) -> int:
    """The position that a block's mark says; 0 for a time. Pure."""
    return int(mark - POSITIONS) if mark >= POSITIONS else 0


def number_of(mark: Wall) -> int:
    """The inverse of `mark_below`; 0 for a time. Pure."""
    return int(mark - POSITIONS) + 1 if mark >= POSITIONS else 0
