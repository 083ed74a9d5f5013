"""Loads that fail for good, an arena out of reach, copies that hang and errors inside the connector, in a real engine.

The engine is that of test_engine.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.connectors.vllm.support.prompts import IDLE, prompt, tokens

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("mended")]


def cold(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Computed, stored, and only in G2."""
    out = tokens([engine.generate(prompts=[p])[0] for p in prompts])
    assert engine.reset()
    return out


def test_loads_that_always_fail_are_asked_for_once_per_request(engine: Any) -> None:
    prompts = [prompt(seed) for seed in (200, 201, 202)]
    right = cold(engine, prompts)
    failures = engine.counters().get("load_failures", 0)
    engine.break_loads(how="always", positions=[0])
    for number, one in enumerate(prompts):
        engine.add(name=f"sick{number}", prompt=one)
    assert engine.steps_to_end(limit=300) < 300, "it goes on for ever"
    again = engine.generate(prompts=prompts)
    assert tokens(again) == right and engine.counters()["load_failures"] - failures == 3
    engine.mend()
    engine.settle()
    assert engine.check() == IDLE


def test_a_worker_that_cannot_reach_the_arena_costs_hits_only(engine: Any) -> None:
    prompts = [prompt(seed) for seed in (205, 206)]
    right = cold(engine, prompts)
    engine.lose_arena()
    for turn in range(2):
        for number, one in enumerate(prompts):
            engine.add(name=f"r{turn}{number}", prompt=one)
        assert engine.steps_to_end(limit=300) < 300, "its requests hang"
        assert engine.reset()
    failures = engine.counters()["load_failures"]
    assert tokens(engine.generate(prompts=prompts)) == right
    assert engine.counters()["load_failures"] == failures, "nothing is offered"
    engine.find_arena()
    engine.generate(prompts=[[5]])
    assert engine.reset()
    warm = engine.generate(prompts=prompts)
    assert tokens(warm) == right and [out["read"] for out in warm] == [{"g2": 288}] * 2
    assert engine.check() == IDLE


def test_a_load_that_hangs_is_cancelled_and_its_request_computes(engine: Any) -> None:
    right = cold(engine, [prompt(208)])
    engine.limit(ack_timeout_s=0.2)
    engine.stall_copies()
    engine.add(name="waits", prompt=prompt(208))
    engine.steps_until_placed(name="waits")
    engine.steps(count=3)
    assert engine.check()["loading"] == 1
    engine.sleep(seconds=0.3)
    assert engine.steps_to_end(limit=300) < 300, "it waits for ever"
    engine.limit(ack_timeout_s=30.0)
    engine.mend()
    engine.settle()
    assert engine.counters()["loads_cancelled"] == 1
    assert engine.reset()
    warm = engine.generate(prompts=[prompt(208)])
    assert tokens(warm) == right and warm[0]["read"] == {"g2": 288}
    assert engine.check() == IDLE


CALLS = [
    ("half", "_follow"),
    ("_confirmer", "plan"),
    ("half", "_add_arena"),
    ("_kept", "free"),
    ("_loads", "overdue"),
    ("_loads", "take"),
    ("_stores", "plan"),
    ("_stores", "_reserve"),
    ("half", "undelivered"),
]


def test_an_error_while_a_step_is_planned_costs_no_request_and_nothing_later(engine: Any) -> None:
    prompts = [prompt(seed) for seed in (210, 211)]
    right = cold(engine, prompts)
    fresh = tokens([engine.generate(prompts=[prompt(212)], control={"load": False, "store": False})[0]])
    for owner, call in CALLS:
        assert engine.reset()
        engine.add(name="loads", prompt=prompts[0])
        engine.add(name="stores", prompt=prompt(212))
        engine.break_once(owner=owner, call=call)
        assert engine.steps_to_end(limit=300) < 300, call
        engine.settle()
        assert engine.check() == IDLE, call
        assert engine.reset()
        warm = engine.generate(prompts=[*prompts, prompt(212)])
        assert tokens(warm) == [*right, *fresh] and warm[0]["read"] == {"g2": 288}, call
