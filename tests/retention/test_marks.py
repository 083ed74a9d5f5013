"""Marks of blocks and purges."""

from __future__ import annotations

import pytest

from kvtier.retention.lifetime import FUTURE_S, Lifetime
from kvtier.retention.marks import POSITIONS, is_ahead, mark_below, mark_of, number_of, position_of
from kvtier.retention.terms import BUILTIN
from kvtier.times import Wall

NOW = Wall(1.8e9)


@pytest.mark.parametrize(
    ("mark", "ahead"),
    [
        (NOW, False),
        (NOW + FUTURE_S, False),
        (NOW + FUTURE_S + 1, True),
        (NOW + 2 * 86400, True),
        (POSITIONS - 1, True),
        (POSITIONS, False),
        (POSITIONS + 7, False),
    ],
)
def test_a_time_from_the_future_is_ahead_and_a_position_never(mark: float, ahead: bool) -> None:
    assert is_ahead(Wall(mark), NOW) is ahead


def test_a_purge_of_the_log_covers_the_positions_below_its_number() -> None:
    life = Lifetime.of(BUILTIN["24h"], NOW)
    assert mark_of(life, 0) == life.born == NOW and position_of(NOW) == number_of(NOW) == 0
    for number in (1, 2, 1000):
        purge = mark_below(number)
        assert number_of(purge) == number
        covered = [position for position in (1, number - 1, number, number + 1) if mark_of(life, position) <= purge]
        assert covered == [position for position in (1, number - 1, number, number + 1) if position < number]
        assert position_of(mark_of(life, number)) == number
        assert mark_of(life, 0) <= purge, "what has no position is covered by every entry"
