"""A wall clock that is set, by ten days either way: nothing that has expired is served, whichever time is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvtier
from kvtier.errors import CorruptError
from kvtier.retention.terms import BUILTIN
from kvtier.retention.trusted_clock import (
    SETTLE_S,
    Anchor,
    TrustedClock,
    decode_anchor,
    decode_stamp,
    deletion_time,
    encode_anchor,
    encode_stamp,
)  # fmt: skip
from kvtier.testing import VirtualClock, chain_of, payloads_of
from kvtier.tiers.host.slot import copy_in
from tests.retention.support.requests import BLOCK, NS, served

DAY = 86_400.0
KEYS = list(chain_of(NS, 8))
OTHER = list(chain_of(NS, 8, seed=1))


@contextmanager
def opened(path: Path, clock: VirtualClock, stack: str) -> Iterator[kvtier.Cache]:
    tiers: dict[str, object] = {"g2": {"capacity": 32 * BLOCK}}
    if "g3" in stack:
        tiers["g3"] = {"path": str(path / "g3"), "capacity": 64 * BLOCK}
    if "g4" in stack:
        tiers["g4"] = {"url": f"file://{path}/g4", "stride": 4}
    computes = "process" in stack
    with kvtier.open(kvtier.Config.parse({"tiers": tiers}), NS, clock=clock, computes=computes) as cache:
        yield cache
        cache.check()


def put(cache: kvtier.Cache, keys: list[bytes], retention: str = "24h") -> None:
    assert cache.put(keys, payloads_of(keys, BLOCK), retention) == len(keys)
    cache.flush()


STACKS = pytest.mark.parametrize("stack", ["", "g3", "g3 in a process", "g4", "g3+g4"])


@STACKS
def test_a_jump_forward_serves_nothing_that_may_have_expired(tmp_path: Path, stack: str) -> None:
    clock = VirtualClock()
    with opened(tmp_path, clock, stack) as cache:
        put(cache, KEYS)
        assert served(cache, KEYS) == 8
        clock.jump_wall(10 * DAY)
        assert served(cache, KEYS) == 0
        clock.jump_wall(-10 * DAY)  # an operator's mistake, undone
        assert served(cache, KEYS) == 8, "it was deleted, though it had not expired"


@STACKS
def test_a_jump_back_lengthens_nothing(tmp_path: Path, stack: str) -> None:
    clock = VirtualClock()
    with opened(tmp_path, clock, stack) as cache:
        put(cache, KEYS, "1h")
        clock.advance(1000)
        clock.jump_wall(-10 * DAY)
        assert served(cache, KEYS) == 8
        for _ in range(5):
            clock.advance(1000)
            assert served(cache, KEYS) in (0, 8)
        clock.advance(3601)
        assert served(cache, KEYS) == 0


@STACKS
@pytest.mark.parametrize("days", [-10, 10])
def test_a_time_that_is_set_is_accepted_in_the_end(tmp_path: Path, stack: str, days: int) -> None:
    clock = VirtualClock()
    with opened(tmp_path, clock, stack) as cache:
        put(cache, KEYS)
        clock.jump_wall(days * DAY)
        served(cache, OTHER)
        clock.advance(SETTLE_S + 1)
        served(cache, OTHER)
        put(cache, OTHER)
        assert served(cache, OTHER) == 8
        clock.advance(DAY + 1)
        assert served(cache, OTHER) == 0


@pytest.mark.parametrize("stack", ["g3", "g3+g4"])
@pytest.mark.parametrize("days", [-10, 10])
def test_a_jump_while_nobody_runs_is_seen_by_the_next_process(tmp_path: Path, stack: str, days: int) -> None:
    clock = VirtualClock()
    with opened(tmp_path, clock, stack) as cache:
        put(cache, KEYS, "1h")
    clock.advance(3000)
    clock.jump_wall(days * DAY)
    with opened(tmp_path, clock, stack) as cache:
        assert served(cache, KEYS) == (8 if days < 0 else 0)
    clock.advance(700)
    with opened(tmp_path, clock, stack) as cache:
        assert days < 0 or served(cache, KEYS) == 0
        clock.advance(3601)
        assert served(cache, KEYS) == 0, "served after its hour"


@pytest.mark.parametrize("stack", ["g3", "g4"])
def test_what_another_process_stamped_in_the_future_is_not_served(tmp_path: Path, stack: str) -> None:
    ahead, right = VirtualClock(1_800_000_000.0 + 10 * DAY), VirtualClock()
    ahead.advance(1)
    with opened(tmp_path, ahead, stack) as cache:
        put(cache, KEYS)
        assert served(cache, KEYS) == 8
    if stack == "g3":
        right._monotonic = 0.0  # another boot: what the first process trusted says nothing
    with opened(tmp_path, right, stack) as cache:
        assert served(cache, KEYS) == 0
        put(cache, OTHER)
        assert served(cache, OTHER) == 8


def test_what_a_wrong_clock_stamped_does_not_come_back_later(tmp_path: Path) -> None:
    clock = VirtualClock()
    with opened(tmp_path, clock, "g3") as cache:
        clock.jump_wall(10 * DAY)
        cache.match(KEYS)
        clock.advance(SETTLE_S + 1)
        cache.match(KEYS)
        put(cache, KEYS)
        assert served(cache, KEYS) == 8
        clock.jump_wall(-10 * DAY)
        cache.match(KEYS)
        clock.advance(SETTLE_S + 1)
        cache.match(KEYS)
        cache._run(cache.manager.hierarchy.accept_time())
        clock.advance(10 * DAY)
        assert served(cache, KEYS) == 0


def accept_time_of(cache: kvtier.Cache, clock: VirtualClock, days: int) -> None:
    """The wall clock is set, and the cache accepts that."""
    clock.jump_wall(days * DAY)
    cache.match(KEYS)
    clock.advance(SETTLE_S + 1)
    cache.match(KEYS)
    cache._run(cache.manager.hierarchy.accept_time())


@pytest.mark.parametrize("dropped", [True, False])
def test_what_a_wrong_clock_stamped_is_not_published_later(tmp_path: Path, dropped: bool) -> None:
    """Slots are filled for as long as an engine's copy takes: the clock may be given up meanwhile."""
    clock = VirtualClock()
    with opened(tmp_path, clock, "") as cache:
        accept_time_of(cache, clock, 10)
        slots, _ = cache.manager.reserve(KEYS, 0, 8, BUILTIN["24h"])
        for slot, payload in zip(slots, payloads_of(KEYS, BLOCK), strict=True):
            copy_in(slot.pieces, memoryview(payload))
        if dropped:
            accept_time_of(cache, clock, -10)
        cache.manager.commit(KEYS, slots, [slot.generation for slot in slots])
        assert served(cache, KEYS) == (0 if dropped else 8)
        assert not cache.manager.host.busy(), "a slot was lost"
        put(cache, OTHER)
        assert served(cache, OTHER) == 8


def test_deletion_waits_while_the_time_is_in_doubt() -> None:
    inner = VirtualClock()
    clock = TrustedClock.around(inner)
    assert TrustedClock.around(clock) is clock
    assert deletion_time(clock) == deletion_time(inner) == inner.wall()
    inner.jump_wall(10 * DAY)
    assert deletion_time(clock) is None and clock.wall() == inner.wall()
    inner.jump_wall(-20 * DAY)
    assert deletion_time(clock) is None and clock.wall() == inner.wall() + 10 * DAY


def test_an_anchor_is_checked() -> None:
    anchor = Anchor(1.8e9, 5000.0)
    raw = encode_anchor(anchor, b"boot")
    assert decode_anchor(raw, b"boot") == anchor and decode_anchor(raw, b"other") is None
    for bad in (b"", raw[:-1], raw[:9] + b"\xff" + raw[10:]):
        with pytest.raises(CorruptError):
            decode_anchor(bad, b"boot")


def test_a_stamp_is_checked() -> None:
    raw = encode_stamp(1.9e9)
    assert decode_stamp(raw) == 1.9e9
    for bad in (b"", raw[:-1], raw[:9] + b"\xff" + raw[10:], encode_stamp(float("nan")), encode_stamp(float("inf"))):
        with pytest.raises(CorruptError):
            decode_stamp(bad)


def accept_earlier_time(cache: kvtier.Cache, clock: VirtualClock, back_s: float) -> None:
    """Store KEYS, set the clock back, store OTHER, until the cache has accepted the time."""
    put(cache, KEYS)
    clock.jump_wall(-back_s)
    for _ in range(20):
        assert served(cache, KEYS[:1]) == 1
        clock.advance(SETTLE_S / 20 - 1)
    put(cache, OTHER)
    clock.advance(21)
    assert served(cache, OTHER) == 8
    assert cache.manager.hierarchy.clock.adopted == 1


@STACKS
@pytest.mark.parametrize("back_s", [30.0, 100.0, 250.0])
def test_a_purge_after_an_earlier_time_was_accepted_covers_what_the_later_one_stamped(
    tmp_path: Path, stack: str, back_s: float
) -> None:
    clock = VirtualClock()
    with opened(tmp_path, clock, stack) as cache:
        accept_earlier_time(cache, clock, back_s)
        cache.purge()
        assert served(cache, KEYS) == served(cache, OTHER) == 0
    with opened(tmp_path, clock, stack) as cache:
        assert served(cache, KEYS) == served(cache, OTHER) == 0, "it came back with the next process"


@pytest.mark.parametrize("stack", ["g3", "g3 in a process", "g3+g4"])
@pytest.mark.parametrize("killed", [False, True])
def test_so_does_a_purge_of_the_next_process(tmp_path: Path, stack: str, killed: bool) -> None:
    clock, back_s = VirtualClock(), 100.0
    with opened(tmp_path, clock, stack) as cache:
        accept_earlier_time(cache, clock, back_s)
        if killed:  # a while after it has accepted the time
            cache.submit(cache.manager._housekeeping.run()).result(20)
            cache.manager._saved._notebook = None
    with opened(tmp_path, clock, stack) as cache:
        assert served(cache, OTHER) == 8
        cache.purge()
        assert served(cache, KEYS) == served(cache, OTHER) == 0
    with opened(tmp_path, clock, stack) as cache:
        assert served(cache, KEYS) == served(cache, OTHER) == 0
