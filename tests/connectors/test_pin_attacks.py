"""Pins that requests ask for: never beyond the tenant's share, never somebody else's, over restarts as well."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.connectors.feedback import Feedback, Wishes
from kvtier.identity.keys import BlockKey
from kvtier.retention.hints import DURATION_S_MAX
from kvtier.retention.pins import Pin
from kvtier.testing import chain_of
from tests.connectors.test_hints import NS, PROMPTS, SHARE, TENANTS, TOKENS, World, action, hints, keep

A, B, SHARED = TENANTS
SIX, TWELVE = PROMPTS[A][1], PROMPTS[A][2]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.cache.close()


def pin(name: str = "x", seconds: float = 60) -> dict[str, Any]:
    return action("kv.pin", name=name, ttl_seconds=seconds)


def ends(world: World) -> dict[str, float]:
    return {one.name: one.until for one in world.protection.listed()}


def test_a_time_that_is_refused_frees_nothing_of_the_share(world: World) -> None:
    assert world.outcomes(A, SIX, pin()) == ["accepted"]
    told = world.ask(A, SIX, {"pin": {"name": "x", "ttl": "0s"}})["pin"]
    assert told == {"name": "x", "refused": True, "why": "the time of a pin must be above 0"}
    world.clock.advance(11)
    assert world.outcomes(A, TWELVE[:8], pin("y")) == ["rejected"], "six of ten are held"
    assert world.held(A) == set(SIX)


def test_what_is_no_name_is_not_in_the_log(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt where its name should be."""
    with caplog.at_level(logging.DEBUG):
        told = world.ask(A, SIX, {"pin": {"name": "my canary, a secret", "ttl": "1h"}})["pin"]
    assert told["refused"] and "a pin is refused" in caplog.text and "canary" not in caplog.text


def test_no_request_lengthens_what_an_operator_made(world: World) -> None:
    prompt = PROMPTS[SHARED][0]
    world.cache.pins.create("x", prompt, 600)
    before = ends(world)
    assert world.outcomes(SHARED, prompt, pin("x", 6000)) == ["rejected"]
    assert world.ask(SHARED, prompt, {"pin": {"name": "x", "ttl": "9w"}})["pin"]["refused"]
    assert ends(world) == before


def test_a_pin_that_took_the_place_of_a_requests_is_not_the_requests(world: World) -> None:
    prompt = PROMPTS[SHARED][0]
    assert world.outcomes(SHARED, prompt, pin("x", 1000)) == ["accepted"]
    world.clock.advance(1)
    world.cache.pins.delete("x")
    world.cache.pins.create("x", prompt, 600)
    before = ends(world)
    assert world.outcomes(SHARED, prompt, pin("x", 1), action("kv.release", name="x")) == ["rejected"] * 2
    assert ends(world) == before
    world.cache.pins.delete("x")
    assert world.outcomes(SHARED, prompt, pin("x", 1)) == ["accepted"], "the name is free"


def test_a_request_pins_for_a_day_at_most(world: World) -> None:
    until = world.ask(A, SIX, {"pin": {"name": "x", "ttl": "52w"}})["pin"]["until"]
    assert until <= world.clock.wall() + DURATION_S_MAX + 1
    assert all(end <= world.clock.wall() + DURATION_S_MAX + 1 for end in ends(world).values())


def test_a_restart_gives_no_other_share(world: World) -> None:
    assert world.outcomes(A, SIX, pin()) == ["accepted"]
    world.feedback = Feedback(TOKENS, SHARE)  # the pins are where they were, whoever made them
    assert world.outcomes(A, TWELVE, keep(12 * TOKENS)) == ["clipped"]
    assert len(world.held(A)) <= world.limit
    assert world.outcomes(A, SIX, pin("x", 90), action("kv.release", name="x")) == ["accepted"] * 2, "it is A's still"
    assert ends(world) == {}


def test_two_requests_at_once_have_one_pin_that_counts(world: World) -> None:
    control = world.controls.parse({"hints": hints(pin())})

    async def both() -> list[Wishes | None]:  # on the loop: neither has begun when the other is there
        return [world.feedback.begin(world.cache, A, control, SIX) for _ in range(2)]

    wishes = world.cache.submit(both()).result(10)
    outcomes = [one["outcome"] for wish in wishes if wish is not None for one in wish.result(10)["hints"]]
    assert sorted(outcomes) == ["accepted", "rejected"]
    assert world.outcomes(A, TWELVE[:8], pin("y")) == ["rejected"], "six of ten are held"


def test_a_pin_that_a_tier_fails_to_write_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(pin: Pin) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(world.protection, "_establish", fails)
    wish = world.feedback.begin(world.cache, A, world.controls.parse({"hints": hints(pin())}), SIX)
    assert wish is not None
    with pytest.raises(OSError, match="no space"):
        wish.result(10)
    monkeypatch.undo()
    assert list(ends(world)) == [f"{A.hex()[:16]}/x"]
    assert world.outcomes(A, TWELVE[:8], pin("y")) == ["rejected"]


def test_a_refusal_tells_nothing_of_others(world: World) -> None:
    world.cache.pins.create("all", chain_of(NS, 15, 99, SHARED), 600)
    (answer,) = world.ask(A, SIX, {"hints": hints(pin())})["hints"]
    assert answer["outcome"] == "rejected" and not any(digit in answer["why"] for digit in "0123456789")


def test_nobody_takes_the_names_of_a_tenant(world: World) -> None:
    assert world.outcomes(SHARED, PROMPTS[SHARED][0], pin(f"{A.hex()[:16]}/x")) == ["rejected"]
    assert world.outcomes(A, SIX, pin()) == ["accepted"]


class Key(bytes):
    """A key that counts how often it is hashed: what walks over blocks one by one does that."""

    hashed = 0

    def __hash__(self) -> int:
        Key.hashed += 1
        return super().__hash__()


def test_long_sessions_cost_the_scheduler_nothing_by_the_block(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(8):
        chain = [BlockKey(Key(key)) for key in chain_of(NS, 500, seed, A)]
        world.feedback.of(f"{seed}", A, world.controls.parse({"session": "s"}), chain, {}, None)
    monkeypatch.setattr(world.cache, "submit", lambda work: work.close())
    Key.hashed = 0
    world.feedback.begin(
        world.cache, A, world.controls.parse({"hints": hints(action("kv.demote", session_id="s"))}), SIX
    )
    assert Key.hashed == 0


def test_a_pin_whose_time_was_over_is_made_anew(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Before housekeeping had ended it, it was refused, with its name in the log and a count of others' pins."""
    assert world.outcomes(A, SIX, pin("canary", 1)) == ["accepted"]
    world.clock.advance(1.5)
    assert world.outcomes(A, SIX, pin("canary", 60)) == ["accepted"]
    assert len(ends(world)) == 1 and world.held(A) == set(SIX) and "canary" not in caplog.text
