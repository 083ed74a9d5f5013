"""Marks of blocks and purges."""

from __future__ import annotations

import pytest

from kvtier.retention.lifetime import FUTURE_S, Lifetime
from kvtier.retention.marks import (
    POSITIONS,
    is_ahead,
    is_refused,
    later,
    mark_below,
    mark_of,
    number_of,
    position_of,
    refused,
)
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


@pytest.mark.parametrize("position", [0, 1, 7, 2**32])
def test_a_refused_purge_covers_what_it_did_and_gives_way_to_its_own_entry_alone(position: int) -> None:
    asked = Wall(POSITIONS + position)
    mark = refused(asked)
    assert is_refused(mark) and refused(mark) == mark and number_of(mark) == position + 1
    assert asked < mark < mark_below(position + 1), "the next entry is later, whosesoever it is"
    assert not any(is_refused(other) for other in (asked, mark_below(position + 1), NOW))
    assert mark_of(Lifetime.of(BUILTIN["24h"], NOW), position + 1) > mark


def test_of_two_purges_one_of_which_was_refused_the_later_is_refused() -> None:
    mark, entry = refused(NOW), mark_below(5)
    both = later(mark, entry)
    assert both == later(entry, mark) > entry and is_refused(both) and both == refused(entry)
    assert both < mark_below(number_of(entry) + 1)
    assert later(entry, mark_below(6)) == mark_below(6) and later(NOW, Wall(NOW + 1)) == NOW + 1
    assert later(refused(entry), entry) == refused(entry), "covered already"
