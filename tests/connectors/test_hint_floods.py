"""Hints in numbers that are made to do harm: many tenants, many actions, much that is kept at once."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvtier.connectors.control import gathered
from kvtier.identity.keys import BlockKey, Scope, scope_of
from kvtier.manager.slices import SLICE_BLOCKS
from kvtier.retention.hints import ACTIONS_MAX, KEYS, NO_HINTS
from kvtier.testing import chain_of, payloads_of
from tests.connectors.test_hints import NS, PROMPTS, SIZE, TENANTS, TOKENS, World, action, hints, keep

A, B, SHARED = TENANTS
LAST = len(PROMPTS[A]) - 1
FIELDS = ["name", "session_id", "ttl_seconds", "directives", "value", "start", "end", "priority", "duration", "actions"]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.cache.close()


def session_below(world: World, tenant: Scope) -> list[BlockKey]:
    """A session of the tenant's whose blocks only the tier below has."""
    chain = PROMPTS[tenant][LAST]
    world.cache.put(chain, payloads_of(chain, SIZE))
    assert world.cache.flush(10).pending == 0
    world.ask(tenant, chain, {"session": "s"})
    world.cache.evict("g2")
    return chain


def test_prefetches_of_many_tenants_leave_room_for_requests(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a tier that does not answer."""
    prompts = {tenant: session_below(world, tenant) for tenant in TENANTS}
    _, going_on = standing_still(world, monkeypatch)
    fetch = action("kv.prefetch", session_id="s")
    said = [world.outcomes(tenant, PROMPTS[tenant][0], fetch)[0] for tenant in prompts]
    assert said == ["clipped", "clipped", "deferred"]
    other = chain_of(NS, 20, 77, scope_of("other"))
    world.cache.put(other, payloads_of(other, SIZE))
    assert world.cache.manager.prefix(other) == len(other)
    going_on()
    assert world.outcomes(SHARED, PROMPTS[SHARED][0], fetch) == ["clipped"], "those before it have ended"


@pytest.mark.parametrize("end", ["release", "demote", "evict", "purge"])
def test_a_session_may_end_while_it_is_fetched(world: World, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    chain = session_below(world, A)
    world.outcomes(A, chain, keep(4 * TOKENS))
    reading, going_on = standing_still(world, monkeypatch)
    assert world.outcomes(A, PROMPTS[A][0], action("kv.prefetch", session_id="s")) == ["clipped"]
    assert reading.wait(5), "a purge that comes before the tier is asked leaves nothing to fetch"
    if end == "evict":
        world.cache.evict("g2")
    elif end == "purge":
        world.cache.purge(salt="a")
    else:
        said = world.outcomes(A, PROMPTS[A][0], action(f"kv.{end}", session_id="s"))
        assert said == ["deferred" if end == "demote" else "accepted"]
    going_on()
    world.cache.manager.check()
    found = world.cache.manager.prefix(chain)
    assert found == 0 if end == "purge" else found <= world.limit
    assert world.cache.stats()["g2"]["pinned"] == 0 and world.held(A) == (
        set() if end in ("purge", "release") else set(chain[:4])
    )


def standing_still(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, Callable[[], None]]:
    """The tier below answers no read until the returned function is called, which waits for the prefetches. The event
    is set when the tier was asked."""
    goes_on, read, reading = asyncio.Event(), world.tier.read, threading.Event()

    async def stuck(*arguments: Any) -> Any:
        reading.set()
        await goes_on.wait()
        return await read(*arguments)

    def go_on() -> None:
        executor = world.feedback._executor
        assert executor is not None and executor.fetching
        world.cache.submit(_call(goes_on.set)).result(60)
        until = time.monotonic() + 60
        while executor.fetching:
            assert time.monotonic() < until
            world.cache.submit(asyncio.sleep(0.001)).result(60)

    monkeypatch.setattr(world.tier, "read", stuck)
    return reading, go_on


async def _call(done: Callable[[], object]) -> None:
    done()


def test_what_a_request_asks_for_again_and_again_is_looked_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = session_below(world, A)
    looked, peek = [0], world.tier.peek

    def counted(keys: Sequence[BlockKey], wanted: Sequence[int]) -> Any:
        looked[0] += len(wanted)
        return peek(keys, wanted)

    monkeypatch.setattr(world.tier, "peek", counted)
    said = world.outcomes(A, PROMPTS[A][0], *[action("kv.demote", session_id="s")] * ACTIONS_MAX)
    assert len(said) == ACTIONS_MAX and len(set(said)) == 1, "each is answered"
    assert looked[0] <= 2 * len(chain)


def test_looking_for_what_is_over_gives_others_their_turn(world: World) -> None:
    """However much the tenants keep."""
    world.outcomes(A, PROMPTS[A][0], keep(1))
    executor = world.feedback._executor
    assert executor is not None
    turns, many = [0], 64 * SLICE_BLOCKS
    executor.shares.keep(B, [BlockKey(B + bytes(28) + n.to_bytes(4, "big")) for n in range(many)], world.clock.wall())
    world.clock.advance(60)

    async def ticking() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def run() -> None:
        others = asyncio.ensure_future(ticking())
        await executor.carry_out(A, NO_HINTS, (), {})
        others.cancel()

    world.cache.submit(run()).result(20)
    assert executor.shares.kept(B, [BlockKey(B + bytes(32))]) == [], "they are forgotten"
    assert turns[0] >= 60


def test_hostile_requests_raise_nothing_and_touch_nobody_else(world: World) -> None:
    """Values of wrong kinds and sizes in every place, names of other tenants' sessions and pins among them."""
    dice, b_names = random.Random(7), ["s", "manual", f"{B.hex()[:16]}/manual", "operators"]
    world.outcomes(B, PROMPTS[B][1], keep(3 * TOKENS), action("kv.pin", name="manual", ttl_seconds=600))
    world.ask(B, PROMPTS[B][1], {"session": "s"})
    world.cache.pins.create("operators", PROMPTS[SHARED][0], 600)
    before = {tenant: world.held(tenant) for tenant in (B, SHARED)}
    odd = [None, True, -1, 1 << 70, -0.0, 1e308, float("nan"), float("inf"), "", "x" * 2000, "\ud800", b"x", {}, ()]
    verbs = ["kv.retain", "kv.pin", "kv.release", "kv.prefetch", "kv.demote", "vllm.set_priority", "kv.fetch", ""]

    def value(depth: int = 0) -> Any:
        kind = dice.randrange(8)
        if kind == 0 and depth < 3:
            return {dice.choice([*FIELDS, "x", 1]): value(depth + 1) for _ in range(dice.randrange(4))}
        if kind == 1 and depth < 3:
            return [value(depth + 1) for _ in range(dice.choice([0, 1, 3]))]
        if kind == 2:
            return [0] * 3000
        return dice.choice(b_names) if kind < 5 else dice.choice(odd)

    def hint() -> Any:
        payload = {name: value(2) for name in dice.sample(FIELDS, 3)}
        one = {"action_id": value(2), "action_type": dice.choice(verbs), "action_version": "1.0", "payload": payload}
        return one if dice.random() < 0.8 else value()

    outcomes = set[str]()
    for number in range(300):
        params: Any = {name: value() for name in dice.sample(KEYS, 2)}
        params["kvtier"] = {name: value() for name in dice.sample(["session", "pin", "hints", "ranges", "usage"], 2)}
        actions = [hint() for _ in range(dice.randrange(4))]
        envelope = {"protocol_version": "1.0", "message_id": "", "actions": actions}
        raw = gathered(params if number % 9 else value(), envelope if number % 5 else value(), value())
        if number % 3 == 0:  # understood, and about what others have
            name = dice.choice(b_names)
            about = [action(f"kv.{verb}", name=name) for verb in ("release", "retain")]
            about += [action("kv.pin", name=name, ttl_seconds=60), action("kv.demote"), keep(12 * TOKENS)]
            raw = {"hints": hints(*about, *actions[:1]), "session": name}
        answer = world.ask(A, PROMPTS[A][number % 3], raw)
        outcomes.update(one["outcome"] for one in answer.get("hints", ()))
        json.dumps(answer)
    assert {"accepted", "rejected", "ignored"} <= outcomes, "some were understood"
    assert before == {tenant: world.held(tenant) for tenant in before}
    assert len(world.held(A)) <= world.limit
    pins = world.protection.pins
    assert pins.get("operators") is not None and pins.get(f"{B.hex()[:16]}/manual") is not None
    assert world.feedback._sessions.latest(B, "s") == tuple(PROMPTS[B][1])
    world.cache.manager.check()
