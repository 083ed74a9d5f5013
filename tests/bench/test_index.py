"""The index benchmark measures what it says, quickly enough for a test."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.tiers.index import BLOCK_TOKENS, PoolCycle, make_prompt, measure
from kvtier.cli import main
from kvtier.testing import sample_namespace


def test_every_subject_has_a_figure() -> None:
    figures = measure(tokens=4 * BLOCK_TOKENS, rounds=2, repeats=2)
    assert set(figures) == {"hash", "hash_floor", "match", "match_floor", "pool"}
    assert all(0 < figure["min"] <= figure["median"] <= figure["max"] for figure in figures.values())


def test_prompts_share_nothing_and_every_allocation_evicts() -> None:
    prompts = [make_prompt(sample_namespace(), 4 * BLOCK_TOKENS, seed) for seed in range(3)]
    assert len({key for prompt in prompts for key in prompt.keys}) == 12
    assert PoolCycle(prompts, repeats=5).seconds_per_block() > 0


def test_what_observation_costs_is_told_for_both() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from kvtier.bench.tiers.observed import measure_observed
    from kvtier.spans import spans_on

    figures = measure_observed(tokens=4 * BLOCK_TOKENS, rounds=4)
    assert figures["plain"]["median"] > 0 and figures["observed"]["median"] > 0 and figures["scrape_us"] > 0
    assert isinstance(figures["percent"], float) and not spans_on()


@pytest.mark.parametrize(
    ("words", "kind"), [((), "index"), (("--observed",), "observed"), (("--scale", "--blocks", "2000"), "index_scale")]
)
def test_the_command_measures_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], kind: str
) -> None:
    asked = list[object]()

    def measured(name: str) -> Callable[..., dict[str, Any]]:
        return lambda *given: (asked.append((name, *given)), {name: 1.0})[1]

    command = importlib.import_module("kvtier.cli.bench.index")
    for name in ("measure", "measure_observed", "measure_scale"):
        monkeypatch.setattr(command, name, measured(name))
    with pytest.raises(SystemExit) as done:
        main(["bench", "index", *words, "--tokens", "64", "--rounds", "2", "--save", str(tmp_path), "--json"])
    assert not done.value.code
    (file,) = tmp_path.iterdir()
    expected = {"index": ("measure", 64, 2), "observed": ("measure_observed", 64, 60)}
    assert file.name == f"{kind}.json" and asked == [expected.get(kind, ("measure_scale", [2000]))]
