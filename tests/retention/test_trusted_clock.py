"""Expired bytes are not served, whatever the wall clock does."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import CorruptError
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Depth, Terms
from kvtier.retention.trusted_clock import (
    SETTLE_S,
    SKEW_S,
    Anchor,
    Reading,
    RelayedClock,
    WallClockGuard,
    boot_id,
    decode_anchor,
    deletion_time,
    encode_anchor,
)
from kvtier.testing import VirtualClock

DAY_S = 86_400.0
TERMS = Terms("1h", ttl=3600.0, max_age=7200.0)


def test_without_jumps_there_is_one_time() -> None:
    clock = VirtualClock()
    expiry = WallClockGuard(clock)
    for _ in range(100):
        clock.advance(50.0)
        reading = expiry.read()
        assert reading.serve == reading.stamp == reading.delete == clock.wall() and not reading.adopted


@pytest.mark.parametrize("days", [10, -10])
def test_a_jump_serves_by_the_later_time_and_deletes_nothing(days: int) -> None:
    clock = VirtualClock()
    expiry = WallClockGuard(clock)
    true = clock.wall()
    clock.jump_wall(days * DAY_S)
    reading = expiry.read()
    assert reading.serve == max(true, clock.wall()) and reading.stamp == min(true, clock.wall())
    assert reading.delete is None
    clock.jump_wall(-days * DAY_S)  # set right again: nothing was lost
    assert expiry.read().delete == true


@pytest.mark.parametrize("days", [10, -10])
def test_a_new_time_that_keeps_its_pace_is_adopted_once(days: int) -> None:
    clock = VirtualClock()
    expiry = WallClockGuard(clock)
    clock.jump_wall(days * DAY_S)
    adopted = []
    while clock.monotonic() < 1000.0 + SETTLE_S + 200:
        adopted.append(expiry.read().adopted)
        clock.advance(60.0)
    assert adopted.count(True) == 1
    assert expiry.read().delete == clock.wall()


def test_a_clock_that_keeps_jumping_is_never_adopted() -> None:
    clock, rng = VirtualClock(), random.Random(1)
    expiry = WallClockGuard(clock)
    for _ in range(200):
        clock.jump_wall(rng.choice((-1, 1)) * rng.uniform(1, 10) * DAY_S)
        clock.advance(SETTLE_S / 3)
        assert not expiry.read().adopted


def test_small_steps_do_not_add_up_to_a_jump() -> None:
    """A clock pushed by less than the skew at a time is followed only as fast as NTP may slew."""
    clock = VirtualClock()
    expiry = WallClockGuard(clock)
    true = clock.wall()
    for _ in range(100):
        clock.jump_wall(-SKEW_S * 0.9)
        clock.advance(1.0)
        reading = expiry.read()
    assert reading.serve >= true + 99.0


@pytest.mark.parametrize("step_s", [-110.0, -5.0, 5.0, 110.0])
def test_a_small_step_changes_nothing_and_is_adopted_within_ten_minutes(step_s: float) -> None:
    """NTP sets a clock by less than the skew: one-minute blocks go on being served, and soon there is one time."""
    clock = VirtualClock()
    expiry = WallClockGuard(clock)
    minute = Terms("minute", ttl=60.0)
    clock.advance(5.0)
    before = expiry.read()
    clock.jump_wall(step_s)
    reading = expiry.read()
    assert reading.serve == reading.stamp == before.serve
    for _ in range(59):
        life = Lifetime.of(minute, expiry.read().stamp)
        clock.advance(10.0)
        assert life.servable(Depth.G2, expiry.read().serve)
    clock.advance(10.0)
    assert expiry.read().adopted and expiry.read() == (clock.wall(), clock.wall(), clock.wall(), False)


def test_an_anchor_carries_the_rule_over_a_restart() -> None:
    clock = VirtualClock()
    before = WallClockGuard(clock)
    clock.advance(5.0)
    before.read()
    true = clock.wall()
    clock.jump_wall(-10 * DAY_S)  # while no process was there
    assert WallClockGuard(clock, before.anchor).read().serve == true
    assert WallClockGuard(clock).read().serve == true - 10 * DAY_S  # the control: without it the jump is not seen
    assert before.anchor == Anchor(true, 1005.0)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.floats(1, 1500)),
        st.tuples(st.just("jump"), st.floats(-10, 10)),
        st.tuples(st.just("use"), st.integers(0, 3)),
        st.tuples(st.just("store"), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_nothing_expired_is_ever_served(steps: list[tuple[str, float]]) -> None:
    """Against true time: no block is servable past its ttl or max_age by more than the skew, wherever the wall clock
    has been. The owner does what the rule asks for: it stamps, serves and drops by the reading."""
    clock = VirtualClock()
    expiry = WallClockGuard(clock)
    lives: dict[int, Lifetime] = {}
    used: dict[int, float] = {}
    made: dict[int, float] = {}
    for verb, value in steps:
        if verb == "pass":
            clock.advance(value)
        elif verb == "jump":
            clock.jump_wall(value * DAY_S)
        reading, true = expiry.read(), clock.monotonic()
        if reading.adopted:
            lives = {b: life for b, life in lives.items() if life.last_use <= reading.serve + SKEW_S}
        if verb == "store":
            lives[int(value)] = Lifetime.of(TERMS, reading.stamp)
            used[int(value)] = made[int(value)] = true
        for block, life in lives.items():
            if life.servable(Depth.G2, reading.serve):
                assert true - used[block] <= 3600 + 2 * SKEW_S
                assert true - made[block] <= 7200 + 2 * SKEW_S
                if verb == "use" and block == int(value):
                    lives[block] = life.used(max(reading.stamp, life.last_use))
                    used[block] = true


def test_a_relayed_time_runs_on_and_deletes_nothing_once_it_is_old() -> None:
    clock = VirtualClock()
    relayed = RelayedClock(clock)
    assert relayed.read() == Reading(clock.wall(), clock.wall(), None), "nothing was relayed yet"
    assert deletion_time(relayed) is None and deletion_time(clock) == clock.wall()
    relayed.set(Reading(1000.0, 990.0, 980.0))
    began = relayed.monotonic()
    clock.advance(RelayedClock.STALE_S)
    assert relayed.monotonic() - began == RelayedClock.STALE_S
    assert relayed.read() == Reading(1060.0, 1050.0, 1040.0) and relayed.wall() == 1060.0
    assert deletion_time(relayed) == 1040.0
    clock.advance(1.0)
    assert relayed.read() == Reading(1061.0, 1051.0, None)
    relayed.set(Reading(2000.0, 2000.0, None))
    clock.advance(1.0)
    assert relayed.read().delete is None
    clock.jump_wall(1e6)
    assert relayed.wall() == 2001.0, "the other process's time, not this machine's"


def test_an_anchor_is_read_on_its_own_boot_alone() -> None:
    anchor, boot = Anchor(1000.0, 5.0), b"b" * 36
    raw = encode_anchor(anchor, boot)
    assert decode_anchor(raw, boot) == anchor
    assert decode_anchor(raw, b"c" * 36) is None and decode_anchor(raw, b"") is None
    for wrong in (raw[:-1], raw[:-1] + bytes([raw[-1] ^ 1]), b"", encode_anchor(Anchor(-1.0, 5.0), boot)):
        with pytest.raises(CorruptError):
            decode_anchor(wrong, boot)


def test_a_machine_without_a_boot_s_name_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path) -> bytes:
        raise FileNotFoundError(str(self))

    monkeypatch.setattr(Path, "read_bytes", missing)
    assert boot_id() == b""


async def test_sleep_is_the_clock_s_own() -> None:
    clock = VirtualClock()
    relayed = RelayedClock(clock)
    sleeping = asyncio.ensure_future(relayed.sleep(5.0))
    await asyncio.sleep(0)
    assert not sleeping.done()
    clock.advance(5.0)
    await asyncio.wait_for(sleeping, 5)
