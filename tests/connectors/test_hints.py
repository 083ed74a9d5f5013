"""Hints from requests that nobody trusts: bounded per tenant and in time, and never another tenant's affair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvtier
from kvtier.cache import Cache
from kvtier.config import Config
from kvtier.connectors.control import Controls
from kvtier.connectors.feedback import Feedback
from kvtier.identity.keys import BlockKey, Scope, scope_of, tenant_of
from kvtier.metrics import figures_of
from kvtier.retention.hints import DURATION_S_MAX
from kvtier.testing import MemoryTier, VirtualClock, chain_of, payloads_of, sample_namespace
from tests.support.waiting import eventually

SIZE, SLOTS, SHARE = 4096, 40, 0.5
NS = sample_namespace(SIZE)
TENANTS = [scope_of("a"), scope_of("b"), scope_of(None)]
LENGTHS = (3, 6, 12)
PROMPTS = {tenant: [chain_of(NS, blocks, seed, tenant) for seed, blocks in enumerate(LENGTHS)] for tenant in TENANTS}
TOKENS = NS.block_tokens


class World:
    """A cache with a little memory, and one engine's feedback."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.config = Config.parse({"tiers": {"g2": {"capacity": SLOTS * SIZE}}, "retention": {"hints": SHARE}})
        self.tier = MemoryTier(NS, self.clock, capacity_blocks=SLOTS)
        self.cache: Cache = kvtier.open(self.config, NS, clock=self.clock, tiers=[self.tier])
        self.protection = self.cache.manager.protection
        self.controls = Controls(self.config)
        self.feedback = Feedback(TOKENS, self.controls.hint_share)
        self.number = 0

    def ask(self, tenant: Scope, prompt: list[BlockKey], raw: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request with these parameters."""
        self.number += 1
        control = self.controls.parse(raw)
        wishes = self.feedback.begin(self.cache, tenant, control, prompt)
        if wishes is not None:
            wishes.result(10)
        return self.feedback.of(f"request-{self.number}", tenant, control, prompt, {}, wishes)

    def outcomes(self, tenant: Scope, prompt: list[BlockKey], *actions: dict[str, Any]) -> list[str]:
        return [one["outcome"] for one in self.ask(tenant, prompt, {"hints": hints(*actions)})["hints"]]

    def tend(self) -> None:
        self.cache.submit(self.protection.tend()).result(10)

    def held(self, tenant: Scope) -> set[BlockKey]:
        keys = [key for chain in PROMPTS[tenant] for key in chain]
        with self.cache.manager.lock:
            return {key for key in keys if self.protection.wanted(key)}

    @property
    def limit(self) -> int:
        return int(SHARE * self.protection.budget)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.cache.close()


def hints(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"kv_hints": {"protocol_version": "1", "message_id": "", "actions": list(actions)}}


def action(kind: str, **payload: Any) -> dict[str, Any]:
    return {"action_id": "", "action_type": kind, "action_version": "1.0", "payload": payload}


def keep(tokens: int, seconds: float = 60) -> dict[str, Any]:
    return action("kv.retain", directives=[{"end": tokens, "priority": 80, "duration": seconds}])


A, B, SHARED = TENANTS


def test_what_is_kept_outlasts_the_pressure_of_others_and_ends_at_its_time(world: World) -> None:
    prompt = PROMPTS[A][1]
    assert world.outcomes(A, prompt, keep(4 * TOKENS)) == ["accepted"]
    world.cache.put(prompt, payloads_of(prompt, SIZE))
    for seed in range(50, 60):
        other = chain_of(NS, 8, seed, B)
        world.cache.put(other, payloads_of(other, SIZE))
    with world.cache.get(prompt, 5) as found:
        assert len(found) >= 4, "kept though others came, and asked for before the blocks were there"
        assert [bytes(block) for block in found.blocks[:4]] == payloads_of(prompt[:4], SIZE)
    for _ in range(5):
        world.clock.advance(13)
        with world.cache.get(prompt, 5):  # uses renew nothing
            pass
    world.tend()
    assert world.held(A) == set()


def test_more_than_the_tenants_share_is_clipped_and_then_rejected(world: World) -> None:
    first, second, third = PROMPTS[A][2], PROMPTS[A][1], PROMPTS[A][0]
    assert world.limit == 10
    assert world.outcomes(A, first, keep(12 * TOKENS)) == ["clipped"]
    assert world.held(A) == set(first[:10])
    assert world.outcomes(A, second, keep(TOKENS)) == ["rejected"]
    assert world.outcomes(B, PROMPTS[B][0], keep(TOKENS)) == ["accepted"], "it is not the other's share"
    assert world.outcomes(A, first, action("kv.release")) == ["accepted"] and world.held(A) == set()
    assert world.outcomes(A, third, keep(3 * TOKENS)) == ["accepted"]


def test_the_metrics_have_sessions_and_what_became_of_hints(world: World) -> None:
    assert world.cache.stats()["requests"]["hints"] == {}
    prompt = PROMPTS[A][2]
    world.outcomes(A, prompt, keep(12 * TOKENS), keep(TOKENS), action("kv.unheard", why="x"))
    world.ask(A, prompt, {"hints": hints(action("kv.unheard")), "session": "agent"})  # none that could be carried out
    world.ask(B, PROMPTS[B][0], {"session": "agent"})
    requests = world.cache.stats()["requests"]
    assert requests["hints"] == {"clipped": 1, "accepted": 1, "ignored": 2}
    assert requests["sessions"] == {"sessions": 2, "blocks": len(prompt) + len(PROMPTS[B][0])}
    families = {family.name: dict(found) for family, found in figures_of(world.cache.stats())}
    assert families["kvtier_hints"] == {
        ("accepted",): 1, ("clipped",): 1, ("deferred",): 0, ("rejected",): 0, ("ignored",): 2
    }  # fmt: skip
    assert families["kvtier_sessions"]["sessions",] == 2


def test_many_directives_are_one_pass(world: World) -> None:
    prompt = PROMPTS[A][2]
    asked = [keep(2 * TOKENS, 100), keep(8 * TOKENS, 10), keep(5 * TOKENS, 50), keep(TOKENS - 1)]
    assert world.outcomes(A, prompt, *asked) == ["accepted"] * 3 + ["ignored"]
    for seconds, blocks in ((0, 8), (11, 5), (40, 2), (60, 0)):
        world.clock.advance(seconds)
        world.tend()
        assert world.held(A) == set(prompt[:blocks])


def test_a_tenants_pin_is_its_own(world: World) -> None:
    pin = action("kv.pin", name="manual", ttl_seconds=60)
    assert world.outcomes(A, PROMPTS[A][0], pin) == ["accepted"]
    assert world.outcomes(B, PROMPTS[B][0], action("kv.release", name="manual")) == ["rejected"]
    assert world.outcomes(SHARED, PROMPTS[SHARED][0], action("kv.release", name="manual")) == ["rejected"]
    assert world.held(A) == set(PROMPTS[A][0])
    world.cache.pins.create("operators", PROMPTS[SHARED][0], 600)
    assert world.outcomes(SHARED, PROMPTS[SHARED][0], action("kv.release", name="operators")) == ["rejected"]
    assert world.outcomes(A, PROMPTS[A][0], action("kv.release", name="manual")) == ["accepted"]
    assert world.held(A) == set() and world.held(SHARED) == set(PROMPTS[SHARED][0])


def test_pins_of_one_tenant_leave_names_for_others(world: World) -> None:
    asked = [action("kv.pin", name=f"pin-{number}", ttl_seconds=60) for number in range(80)]
    said = [one for part in range(0, 80, 16) for one in world.outcomes(A, PROMPTS[A][0], *asked[part : part + 16])]
    assert said == ["accepted"] * 64 + ["rejected"] * 16
    assert world.outcomes(B, PROMPTS[B][0], asked[0]) == ["accepted"]


def test_a_session_is_fetched_before_it_goes_on(world: World) -> None:
    prompt = PROMPTS[A][1]
    world.cache.put(prompt, payloads_of(prompt, SIZE))
    assert world.cache.flush(10).pending == 0
    world.ask(A, prompt, {"session": "s"})
    assert world.outcomes(A, PROMPTS[A][0], action("kv.demote", session_id="s")) == ["accepted"]
    assert world.cache.manager.prefix(prompt) == 0, "G3 has them"
    assert world.outcomes(B, PROMPTS[B][0], action("kv.prefetch", session_id="s")) == ["rejected"], "not B's session"
    assert world.cache.manager.prefix(prompt) == 0
    assert world.outcomes(A, PROMPTS[A][0], action("kv.prefetch", session_id="s")) == ["accepted"]
    world.cache.flush(10)
    assert eventually(lambda: world.cache.manager.prefix(prompt) == len(prompt))
    assert world.outcomes(A, PROMPTS[A][0], action("kv.prefetch", session_id="nobody")) == ["rejected"]


def test_what_is_kept_is_not_given_up(world: World) -> None:
    prompt = PROMPTS[A][1]
    world.cache.put(prompt, payloads_of(prompt, SIZE))
    assert world.cache.flush(10).pending == 0
    assert world.outcomes(A, prompt, keep(2 * TOKENS), action("kv.demote")) == ["accepted"] * 2
    assert world.cache.manager.prefix(prompt) == 2


def test_a_request_that_may_not_be_cached_gets_no_wish(world: World) -> None:
    """Its parameters are wrong, so its sender may have asked for less than the default stores."""
    answer = world.ask(A, PROMPTS[A][0], {"hints": {**hints(keep(TOKENS)), "cache_control": {"ttl": "9h"}}})
    assert answer == {} and world.held(A) == set()


class Untrusted(RuleBasedStateMachine):
    """Requests of three tenants that ask for whatever they like."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.cache.pins.create("operators", PROMPTS[SHARED][0], 3000 * DURATION_S_MAX)
        self.own = set(PROMPTS[SHARED][0])

    def teardown(self) -> None:
        self.world.cache.manager.check()
        self.world.cache.close()

    wishes = st.one_of(
        st.builds(keep, st.sampled_from([0, TOKENS, 4 * TOKENS, 14 * TOKENS]), st.sampled_from([1.0, 60.0, 3e6])),
        st.builds(
            lambda name, ttl: action("kv.pin", name=name, ttl_seconds=ttl),
            st.sampled_from(["operators", "x", "y", f"{B.hex()[:16]}/x"]),
            st.sampled_from([1.0, 60.0, 3e6]),
        ),
        st.builds(
            lambda name: action("kv.release", name=name), st.sampled_from(["operators", "x", "y", f"{B.hex()[:16]}/x"])
        ),
        st.builds(
            lambda kind, name: action(kind, session_id=name),
            st.sampled_from(["kv.release", "kv.demote", "kv.prefetch"]),
            st.sampled_from(["s", "t"]),
        ),
        st.just(action("kv.release")),
        st.just(action("kv.demote")),
        st.builds(lambda value: action("vllm.set_priority", value=value, ttl_seconds=60), st.integers(-1, 101)),
    )

    @rule(
        tenant=st.sampled_from(TENANTS),
        prompt=st.integers(0, len(LENGTHS) - 1),
        wanted=st.lists(wishes, max_size=4),
        session=st.sampled_from(["", "s", "t"]),
        pin=st.sampled_from([None, "x", "operators"]),
        stored=st.booleans(),
    )
    def ask(
        self, tenant: Scope, prompt: int, wanted: list[dict[str, Any]], session: str, pin: str | None, stored: bool
    ) -> None:
        chain = PROMPTS[tenant][prompt]
        others = {other: self.world.held(other) for other in TENANTS if other != tenant}
        raw: dict[str, Any] = {"hints": hints(*wanted), "session": session}
        if pin is not None:
            raw["pin"] = {"name": pin, "ttl": "1h"}
        answer = self.world.ask(tenant, chain, raw)
        assert len(answer.get("hints", ())) == len(wanted), "each is answered"
        assert all(one["why"] or one["outcome"] == "accepted" for one in answer.get("hints", ()))
        if stored:
            self.world.cache.put(chain, payloads_of(chain, SIZE))
        assert others == {other: self.world.held(other) for other in others}, "another tenant's blocks"

    @rule(seconds=st.sampled_from([1.0, 70.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        self.world.tend()

    @rule()
    def flush(self) -> None:
        self.world.cache.flush(10)

    @precondition(lambda self: self.world.clock.wall() < 2e9)
    @rule()
    def outlive(self) -> None:
        self.world.clock.advance(DURATION_S_MAX + 1)
        self.world.tend()
        assert all(self.world.held(tenant) <= self.own for tenant in TENANTS), "a hint outlives its bound"

    @invariant()
    def within_the_share(self) -> None:
        for tenant in TENANTS:
            held = self.world.held(tenant) - (self.own if tenant == tenant_of(SHARED) or tenant == SHARED else set())
            assert len(held) <= self.world.limit

    @invariant()
    def the_operators_pin_stays(self) -> None:
        pin = self.world.protection.pins.get("operators")
        assert pin is not None and set(pin.chain) == self.own


TestUntrusted = Untrusted.TestCase
TestUntrusted.settings = settings(derandomize=True, deadline=None, max_examples=12, stateful_step_count=15)


@pytest.mark.long
class TestUntrustedForLong(Untrusted.TestCase):
    settings = settings(derandomize=True, deadline=None, max_examples=400, stateful_step_count=40)


def test_what_is_pinned_counts_until_its_pin_ends(world: World) -> None:
    pin, six = action("kv.pin", name="x", ttl_seconds=60), PROMPTS[A][1]
    assert world.outcomes(A, six, pin, keep(2 * TOKENS), action("kv.release")) == ["accepted"] * 3
    assert world.held(A) == set(six), "released is what was kept, and the pin stays"
    assert world.outcomes(A, PROMPTS[A][2], keep(12 * TOKENS)) == ["clipped"]
    assert len(world.held(A)) == world.limit
    assert world.outcomes(A, six, action("kv.release", name="x")) == ["accepted"]
    assert world.outcomes(A, PROMPTS[A][2], keep(12 * TOKENS)) == ["clipped"]
    assert world.held(A) == set(PROMPTS[A][2][:10])


def test_a_refusal_takes_nothing_of_the_share_and_gives_nothing_back(world: World) -> None:
    six, twelve = PROMPTS[A][1], PROMPTS[A][2]
    assert world.outcomes(A, six, keep(3 * TOKENS, 50)) == ["accepted"]
    other = chain_of(NS, 16, 99, SHARED)
    world.cache.pins.create("all", other, 600)
    assert world.outcomes(A, six, keep(6 * TOKENS, 60)) == ["rejected"], "the operator has reserved the rest"
    world.cache.pins.delete("all")
    assert world.outcomes(A, twelve, keep(12 * TOKENS)) == ["clipped"]
    assert len(world.held(A)) == world.limit
