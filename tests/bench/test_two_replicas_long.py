"""Two real replicas on one bucket, whose requests Dynamo's selector places."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.indexer import HOW, PYTHON

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason=HOW),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "two_replicas.py"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("two_replicas", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return dict(script.measured(Path(PYTHON), 120))


def test_the_selector_saves_a_quarter_of_what_round_robin_computes(results: dict[str, Any]) -> None:
    assert results["selector_to_round_robin"] <= 0.75
    assert all(results[name]["differ"] == 0 for name in ("round_robin", "selector", "killed"))


def test_a_replica_that_is_killed_costs_its_running_request(results: dict[str, Any]) -> None:
    """Which the other one answers, as all that follow."""
    assert results["killed"]["sent_again"] == 1 and results["killed"]["differ"] == 0
    assert results["killed"]["computed_second_half"] < results["prompt_tokens"] / 4, "most of it was in the bucket"
