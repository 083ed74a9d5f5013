"""Two clocks per term, several terms per block: nothing is served past its end, no request shortens another's."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import CorruptError, InvalidRequest
from kvtier.retention.guarantees import Guarantees
from kvtier.retention.lifetime import FUTURE_S, STAMPS_MAX, Lifetime, Stamp
from kvtier.retention.terms import BUILTIN, Depth, Terms, resolve
from kvtier.units import parse_duration

T0 = 1.8e9
terms = st.builds(
    Terms,
    name=st.just("t"),
    ttl=st.none() | st.integers(1, 1000).map(float),
    max_age=st.none() | st.integers(1, 1000).map(float),
    ceiling=st.sampled_from([Depth.G2, Depth.G3, Depth.G4]),
)


def test_ttl_is_renewed_by_use_and_max_age_is_not() -> None:
    life = Lifetime.of(Terms("t", ttl=100, max_age=250), T0)
    for now in (90, 180, 240):
        assert life.servable(Depth.G4, T0 + now)
        life = life.used(T0 + now)
    assert not life.servable(Depth.G4, T0 + 251)
    assert not Lifetime.of(Terms("t", ttl=100), T0).servable(Depth.G4, T0 + 101)


@given(terms, terms, st.integers(0, 500), st.integers(0, 1500), st.sampled_from([Depth.G2, Depth.G3, Depth.G4]))
def test_what_two_blocks_share_is_what_both_allow(
    one: Terms, other: Terms, later: int, after: int, depth: Depth
) -> None:
    """One object holds both: it lives no longer, goes no deeper, and is covered by the purge of either."""
    lives = [Lifetime.of(one, T0), Lifetime.of(other, T0 + later)]
    shared, now = Lifetime.common(lives), T0 + later + after
    first = [Lifetime(shared.last_use, life.stamps) for life in lives]
    assert shared.servable(depth, now) <= all(life.servable(depth, now) for life in first)
    assert shared.last_use == T0
    assert not shared.stamps or shared.born == T0


def test_a_block_is_born_with_its_youngest_stamp() -> None:
    """A purge between two requests covers what the first of them stored, not what the second did."""
    life = Lifetime.of(Terms("t", ttl=1000, ceiling=Depth.G2), T0).add(Terms("u", ttl=500), T0 + 60)
    assert len(life.stamps) == 2 and life.born == T0 + 60
    assert Lifetime(T0).born == T0


def test_a_stamp_of_a_clock_that_is_ahead_only_shortens() -> None:
    life = Lifetime.of(Terms("t", ttl=1000, max_age=2000), T0 + 100).dated_by(T0)
    assert life.last_use == T0 and life.born == T0 - FUTURE_S
    assert Lifetime.of(Terms("t", ttl=1000), T0).dated_by(T0).born == T0, "the control"


def test_more_stamps_than_there_can_be_are_damage() -> None:
    stamps = tuple(Stamp(T0, 10.0 + number, None, Depth.G4) for number in range(STAMPS_MAX))
    raw = bytearray(Lifetime(T0, stamps).encode())
    assert Lifetime.decode(bytes(raw)).stamps
    raw[8] = STAMPS_MAX + 1
    with pytest.raises(CorruptError, match="impossible"):
        Lifetime.decode(bytes(raw))


def test_a_budget_that_is_set_aside_is_given_to_nobody_else() -> None:
    guarantees = Guarantees(4 * 512, 512)
    guarantees.admit(3)
    assert guarantees.admits(1) and not guarantees.admits(2)
    guarantees.settle(3)
    assert guarantees.admits(4)


def test_a_pin_makes_no_block_younger() -> None:
    """A purge that covered the block before still covers it."""
    life = Lifetime.of(Terms("t", ttl=1000), T0).extend_until(T0 + 5000, Depth.G3, T0 + 100)
    assert life.servable(Depth.G3, T0 + 4999) and life.born == T0


def test_a_use_does_not_revive() -> None:
    life = Lifetime.of(Terms("t", ttl=100), T0).used(T0 + 500)
    assert not life.servable(Depth.G2, T0 + 500)
    joined = Lifetime.of(Terms("t", ttl=100), T0).join(Lifetime.of(Terms("u", ttl=10), T0 + 500), T0 + 500)
    assert not joined.servable(Depth.G2, T0 + 511), "the young term's use revived the old one"


def test_ceilings_bound_each_term_by_itself() -> None:
    life = Lifetime.of(Terms("deep", ttl=100, ceiling=Depth.G4), T0).add(Terms("ram", ttl=900, ceiling=Depth.G2), T0)
    assert life.servable(Depth.G4, T0 + 100)
    assert not life.servable(Depth.G4, T0 + 101)
    assert life.servable(Depth.G2, T0 + 900)
    assert (life.ceiling(T0), life.ceiling(T0 + 200)) == (Depth.G4, Depth.G2)


@given(terms, terms, st.integers(0, 2000))
def test_adding_a_term_never_shortens(first: Terms, second: Terms, later: int) -> None:
    one = Lifetime.of(first, T0)
    both = one.add(second, T0)
    for depth in (Depth.G2, Depth.G3, Depth.G4):
        alone = one.servable(depth, T0 + later) or Lifetime.of(second, T0).servable(depth, T0 + later)
        assert both.servable(depth, T0 + later) == alone


@given(st.lists(terms, max_size=9), st.integers(0, 2000))
def test_stamps_are_bounded_and_ends_is_the_end(many: list[Terms], later: int) -> None:
    life = Lifetime(T0)
    for term in many:
        life = life.add(term, T0)
    assert len(life.stamps) <= STAMPS_MAX
    for depth in (Depth.G2, Depth.G4):
        assert life.servable(depth, T0 + later) == (T0 + later <= life.ends(depth))


@given(st.lists(terms, min_size=1, max_size=4))
def test_the_encoding_never_lengthens(many: list[Terms]) -> None:
    life = Lifetime(T0)
    for term in many:
        life = life.add(Terms("t", term.ttl and term.ttl + 0.7, term.max_age, ceiling=term.ceiling), T0)
    assert Lifetime.decode(life.encode()).ends(Depth.G2) <= life.ends(Depth.G2)


@pytest.mark.parametrize(
    ("text", "seconds"), [("10m", 600), ("24h", 86400), ("1.5s", 1.5), ("250ms", 0.25), ("7d", 604800)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-1s", "1y", "1h30m", "nan s"])
def test_bad_durations_say_what_is_expected(text: str) -> None:
    with pytest.raises(InvalidRequest, match="such as 24h"):
        parse_duration(text)


@pytest.mark.parametrize(
    "bad",
    [
        {"ttl": 0}, {"ttl": -1}, {"ttl": "5m"}, {"max_age": float("nan")}, {"priority": 101}, {"priority": 1.5},
        {"ceiling": 7}, {"ceiling": None}, {"ceiling": "G3"},
    ],
)  # fmt: skip
def test_impossible_terms_are_refused(bad: dict[str, Any]) -> None:
    """Here: met when a block was stored, they left its slot reserved for good; beyond G4, it could not be read."""
    with pytest.raises(InvalidRequest, match=next(iter(bad))):
        Terms("t", **bad)
    with pytest.raises(InvalidRequest, match="named by a string"):
        Terms(7)  # type: ignore[arg-type]


def test_an_unknown_class_lists_the_known() -> None:
    with pytest.raises(InvalidRequest, match="known: 1h, 24h, 5m, in_memory"):
        resolve("2h", BUILTIN.values())


@pytest.mark.parametrize(("ttl", "max_age"), [(0.2, None), (None, 0.2), (0.2, 3600.0), (3600.0, 0.9)])
def test_a_life_below_a_second_is_not_stored_longer(ttl: float | None, max_age: float | None) -> None:
    """Stored lives are in whole seconds: one that is shorter stays in RAM, and is left out of what is stored."""
    brief = Terms("brief", ttl=ttl, max_age=max_age)
    life = Lifetime.of(brief, T0)
    assert life.servable(Depth.G2, T0) and not life.servable(Depth.G3, T0)
    assert not Lifetime.decode(life.encode()).stamps
    both = life.add(Terms("1h", ttl=3600.0), T0)
    assert [stamp.ttl for stamp in Lifetime.decode(both.encode()).stamps] == [3600.0]


def test_parts_of_a_second_are_rounded_down() -> None:
    life = Lifetime.of(Terms("x", ttl=1.9, max_age=2.9), T0)
    (stamp,) = Lifetime.decode(life.encode()).stamps
    assert (stamp.ttl, stamp.max_age) == (1, 2)


def test_a_life_that_is_longer_than_can_be_stored_is_stored_as_the_longest() -> None:
    """Of a stride whose blocks have the longest terms since different times. It could not be written at all, which
    counted as the tier's fault."""
    most = 2.0**32 - 1
    lives = [Lifetime.of(Terms("t"), T0), Lifetime.of(Terms("t", max_age=most), T0 + 60)]
    (stamp,) = Lifetime.decode(Lifetime.common(lives).encode()).stamps
    assert (stamp.created, stamp.max_age) == (T0, most)


def test_stamps_that_never_live_together_meet_in_none() -> None:
    long = Stamp(100.0, None, 60.0, Depth.G2)
    assert Stamp(100.0, None, 0.5, Depth.G4).meet(long) is None, "less than a second is not stored"
    assert long.meet(Stamp(90.0, 30.0, None, Depth.G3)) == Stamp(90.0, 30.0, 70.0, Depth.G2)


def test_what_is_dead_is_not_extended() -> None:
    life = Lifetime.of(Terms("short", ttl=10.0), 0.0)
    assert life.extend_until(1000.0, Depth.G3, 50.0) is life
    assert life.extend_until(4.0, Depth.G3, 5.0) is life, "an end that is past"
    assert life.extend_until(1000.0, Depth.G3, 5.0).servable(Depth.G3, 500.0)


def test_a_lifetime_with_impossible_fields_is_not_read() -> None:
    whole = Lifetime.of(Terms("day", ttl=86400.0), 1000.0).encode()
    for wrong in (whole[:-1], whole + b"\0", b""):
        with pytest.raises(CorruptError, match="a lifetime has"):
            Lifetime.decode(wrong)
    for offset, value in ((0, math.nan), (0, -1.0), (0, 2.0**41), (9, -1.0), (9, math.nan)):
        raw = bytearray(whole)
        struct.pack_into("<d", raw, offset, value)
        with pytest.raises(CorruptError, match="impossible"):
            Lifetime.decode(bytes(raw))
    for ceiling in (0, 5):
        raw = bytearray(whole)
        raw[9 + 16] = ceiling
        with pytest.raises(CorruptError, match="impossible"):
            Lifetime.decode(bytes(raw))
