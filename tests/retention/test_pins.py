"""Named pins, quotas and guarantees as state machines."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.checksum import DIGEST_BYTES, digest_of
from kvtier.errors import CorruptError, InvalidRequest
from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.guarantees import Guarantees
from kvtier.retention.pins import Pin, Pins, decode, encode
from kvtier.tiers.host.quota import Quota

SCOPES = [Scope(bytes([number]) * 16) for number in range(3)]


def key(scope: int, number: int) -> BlockKey:
    return BlockKey(SCOPES[scope] + number.to_bytes(32, "big"))


def test_a_pin_holds_until_its_time_and_extends() -> None:
    pins = Pins(10)
    pins.create("docs/manual", [key(0, 1), key(0, 2)], wall_s=0.0, ttl=60.0, tokens=32)
    assert pins.covers(key(0, 1)) and not pins.covers(key(0, 3))
    pins.extend("docs/manual", wall_s=50.0, ttl=60.0)
    assert pins.expire(100.0) == [] and pins.expire(111.0) == [key(0, 1), key(0, 2)]
    assert pins.listed() == []


def test_shared_blocks_stay_until_the_last_pin_ends() -> None:
    pins = Pins(10)
    pins.create("a", [key(0, 1), key(0, 2)], 0.0, 60.0)
    pins.create("b", [key(0, 1), key(0, 3)], 0.0, 60.0)
    assert pins.delete("a") == [key(0, 2)] and pins.covers(key(0, 1))
    assert pins.delete("a") == []
    assert pins.delete("b") == [key(0, 1), key(0, 3)]


def test_refusals_change_nothing() -> None:
    pins = Pins(2)
    pins.create("a", [key(0, 1)], 0.0, 60.0)
    for name, chain, ttl, message in (
        ("a", [key(0, 2)], 60.0, "exists already"),
        ("../a b", [key(0, 2)], 60.0, "a name has"),
        ("b", [], 60.0, "at least one block"),
        ("b", [key(0, 2)], 0.0, "ttl above 0"),
        ("b", [key(0, 2), key(0, 3)], 60.0, "1 of 2 are pinned"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            pins.create(name, chain, 0.0, ttl)
    with pytest.raises(InvalidRequest, match="does not exist"):
        pins.extend("b", 0.0, 60.0)
    assert [pin.name for pin in pins.listed()] == ["a"]
    pins.check()


def test_pins_survive_a_restart_and_damage_is_seen() -> None:
    pins = Pins(10)
    pins.create("a", [key(0, 1), key(1, 2)], 1.0, 60.0, tokens=7)
    raw = encode(pins.listed())
    assert decode(raw) == pins.listed()
    for bad in (b"", raw[:-1], b"\0" + raw[1:], raw[:12] + b"\xff" + raw[13:]):
        with pytest.raises(CorruptError):
            decode(bad)


def test_every_flipped_bit_of_stored_pins_is_noticed() -> None:
    pins = Pins(10)
    pins.create("a", [key(0, 1)], 1.0, 60.0, tokens=7)
    raw = bytearray(encode(pins.listed()))
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            decode(bytes(raw))
        raw[bit // 8] ^= 1 << bit % 8


def test_a_name_that_is_no_text_is_damage() -> None:
    pins = Pins(10)
    pins.create("docs", [key(0, 1)], wall_s=0.0, ttl=60.0)
    body = encode(pins.listed())[:-DIGEST_BYTES].replace(b"docs", b"\xff\xfedo")
    with pytest.raises(CorruptError):
        decode(body + digest_of([body]))


def test_a_purge_is_stronger_than_a_pin() -> None:
    pins = Pins(10)
    pins.create("a", [key(0, 1)], 0.0, 60.0)
    pins.create("b", [key(1, 1)], 0.0, 60.0)
    assert pins.purge(SCOPES[0]) == [key(0, 1)]
    assert [pin.name for pin in pins.listed()] == ["b"]


def test_a_purge_ends_the_pins_of_its_very_moment_and_no_later_ones() -> None:
    pins = Pins(10)
    pins.create("then", [key(0, 1)], wall_s=5.0, ttl=60.0)
    pins.create("later", [key(0, 2)], wall_s=5.5, ttl=60.0)
    assert pins.purge(SCOPES[0], 5.0) == [key(0, 1)]
    assert [pin.name for pin in pins.listed()] == ["later"]


def test_a_guarantee_that_was_renewed_ends_at_its_new_time() -> None:
    guarantees = Guarantees(4096, 4096)
    guarantees.reserve([key(0, 1)], 10.0)
    guarantees.reserve([key(0, 1)], 20.0)
    assert guarantees.expire(11.0) == [], "looked at too early, and put back"
    guarantees.check()
    assert guarantees.expire(21.0) == [key(0, 1)]
    assert not len(guarantees)


def test_one_scope_cannot_fill_the_tier() -> None:
    quota = Quota(0.3, 10)
    for number in range(3):
        assert not quota.full(key(0, number))
        quota.take(key(0, number))
    assert quota.full(key(0, 3)) and not quota.full(key(1, 0))
    quota.give(key(0, 1))
    assert not quota.full(key(0, 9))
    quota.check([key(0, 0), key(0, 2)])
    with pytest.raises(ValueError, match="holds none"):
        quota.give(key(2, 0))
    free = Quota(0.0, 10)
    for number in range(100):
        free.take(key(0, number))
        assert not free.full(key(0, number))


def test_guarantees_that_are_given_up_leave_nothing() -> None:
    """Kept for a day and given up at once, over and over: what is remembered is bounded by what is guaranteed."""
    given = Guarantees(limit_bytes=100 * 4096, block_bytes=4096)
    given.reserve(kept := [key(0, number) for number in range(3)], 500.0)
    for number in range(2000):
        keys = [key(1, 5 * number + place) for place in range(5)]
        given.reserve(keys, 86_400.0 - number)
        for one in keys:
            given.drop(one)
    given.check()
    assert _entries(given) <= 100
    assert given.expire(400.0) == [] and sorted(given.expire(600.0)) == kept
    assert given.expire(math.inf) == [] and len(given) == 0 and not given.due(math.inf)


def _entries(given: Guarantees) -> int:
    return sum(len(value) for value in vars(given).values() if isinstance(value, list | dict))


def test_a_guarantee_beyond_the_budget_is_refused_at_once() -> None:
    given = Guarantees(limit_bytes=3 * 4096, block_bytes=4096)
    given.reserve([key(0, 1), key(0, 2)], until=100.0)
    with pytest.raises(InvalidRequest, match="2 of 3 have one"):
        given.reserve([key(0, 3), key(0, 4)], until=100.0)
    assert given.until(key(0, 3)) < 0.0 and given.refused == 1
    given.reserve([key(0, 1)], until=50.0)  # a shorter guarantee never shortens one
    assert given.until(key(0, 1)) == 100.0
    assert not given.fits([key(0, 3), key(0, 4), key(0, 5)])
    assert given.expire(200.0) == [key(0, 1), key(0, 2)]
    given.reserve([key(0, 3), key(0, 4), key(0, 5)], until=300.0)
    given.drop(key(0, 3))
    assert len(given) == 2


class PinsAgainstAModel(RuleBasedStateMachine):
    """Any order of verbs, purges and time leaves holds equal to what the living pins name."""

    def __init__(self) -> None:
        super().__init__()
        self.pins, self.now = Pins(12), 0.0
        self.model: dict[str, tuple[set[BlockKey], float]] = {}

    @rule(
        name=st.sampled_from("abcd"),
        scope=st.integers(0, 2),
        numbers=st.sets(st.integers(0, 5), min_size=1),
        ttl=st.floats(1, 50),
    )
    def create(self, name: str, scope: int, numbers: set[int], ttl: float) -> None:
        self._tick()
        chain = [key(scope, number) for number in sorted(numbers)]
        held = set().union(*(keys for keys, _ in self.model.values()))
        allowed = name not in self.model and len(held | set(chain)) <= 12
        try:
            self.pins.create(name, chain, self.now, ttl)
        except InvalidRequest:
            assert not allowed
        else:
            assert allowed
            self.model[name] = (set(chain), self.now + ttl)

    @rule(name=st.sampled_from("abcd"))
    def delete(self, name: str) -> None:
        self.pins.delete(name)
        self.model.pop(name, None)

    @rule(scope=st.integers(0, 2))
    def purge(self, scope: int) -> None:
        self.pins.purge(SCOPES[scope])
        self.model = {n: v for n, v in self.model.items() if not any(k.startswith(SCOPES[scope]) for k in v[0])}

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._tick()
        self.pins.expire(self.now)

    @rule()
    def restart(self) -> None:
        stored, self.pins = encode(self.pins.listed()), Pins(12)
        for pin in decode(stored):
            self.pins.adopt(pin)

    def _tick(self) -> None:
        self.model = {n: v for n, v in self.model.items() if v[1] >= self.now}

    @invariant()
    def holds(self) -> None:
        self.pins.check()
        held = set().union(*(keys for keys, _ in self.model.values()))
        assert all(self.pins.covers(key(s, n)) == (key(s, n) in held) for s in range(3) for n in range(6))


TestPinsAgainstAModel = PinsAgainstAModel.TestCase
TestPinsAgainstAModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_pin_is_taken_over_in_place_of_one_of_its_name() -> None:
    pins, other = Pins(1), Pins(10)
    pins.create("a", [key(0, 1)], 0.0, 60.0)
    pin = other.create("a", [key(0, 2), key(0, 3)], 5.0, 60.0)
    pins.adopt(pin)
    assert pins.get("a") == pin and pins.get("b") is None and list(pins) == [pin] and pins.names == 1
    assert not pins.covers(key(0, 1)) and pins.covers(key(0, 2)) and len(pins) == 2, "beyond the limit, too"
    assert pins.untils([key(0, 1), key(0, 2)]) == {key(0, 2): 65.0}
    pins.check()


def test_a_pin_that_has_ended_covers_nothing_new_and_is_uncovered_in_slices_from_its_end() -> None:
    pins = Pins(10)
    chain = [key(0, number) for number in range(5)]
    pins.create("a", chain, 0.0, 60.0)
    assert pins.end("a") and not pins.end("a") and pins.ending
    pins.cover("a", [key(0, 9)])
    assert not pins.covers(key(0, 9))
    assert pins.untils(chain) == {}, "it has no say any more"
    assert pins.uncover(2) == chain[3:] and pins.ending and pins.covers(chain[0])
    assert pins.uncover(0) == [] and sorted(pins.uncover()) == chain[:3] and not pins.ending


def test_a_pin_s_new_length_is_above_nothing() -> None:
    pins = Pins(10)
    pins.create("a", [key(0, 1)], 0.0, 60.0)
    with pytest.raises(InvalidRequest, match="ttl must be above 0"):
        pins.extend("a", 1.0, 0.0)


@pytest.mark.parametrize(
    "pin",
    [
        Pin("a/../b!", (key(0, 1),), 0.0, 1.0),
        Pin("a", (), 0.0, 1.0),
        Pin("a", (BlockKey(b"short"),), 0.0, 1.0),
        Pin("a", (key(0, 1),), math.nan, 1.0),
        Pin("a", (key(0, 1),), 0.0, math.inf),
    ],
)
def test_pins_that_cannot_be_are_not_read(pin: Pin) -> None:
    with pytest.raises(CorruptError):
        decode(encode([pin]))


def test_pins_of_another_form_are_not_read() -> None:
    whole = encode([])
    for body in (whole[:-DIGEST_BYTES] + b"\xc1", whole[:-DIGEST_BYTES][:-1] + b"\x91\x01"):
        with pytest.raises(CorruptError, match="not a list of pins"):
            decode(body + digest_of([body]))


def test_a_block_of_a_pin_that_never_came_to_cover_it_is_not_uncovered() -> None:
    pins = Pins(10)
    chain = [key(0, 1), key(0, 2)]
    pins.admit("a", chain, 0.0, 60.0, 0, new=2)
    pins.cover("a", chain[:1])
    pins.cover("a", chain[:1])
    assert pins.delete("a") == chain[:1]
