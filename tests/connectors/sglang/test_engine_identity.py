"""Blocks of a real SGLang engine are found under what it truly computes with, and under nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.connectors.support.adapters import write_adapter

pytestmark = pytest.mark.timeout(600)

LORA = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"],
        "lora_backend": "torch_native", "max_loras_per_batch": 2}  # fmt: skip


def tiers(folder: Path) -> dict[str, Any]:
    return {"g2": {"capacity": "16MiB"}, "g3": {"path": str(folder / "g3"), "capacity": "64MiB"}}


@pytest.mark.long  # test_adapters.py shows quickly that its scope is another
def test_an_adapter_retrained_at_its_path_misses(serve: Any, prompt: Any, tmp_path: Path) -> None:
    """SGLang's id of it is a digest of its name and path."""
    path = tmp_path / "adapter"
    answers = []
    for seed in (1, 2, 1):
        write_adapter(path, seed, layers=3, width=128)
        engine = serve(tiers(tmp_path), arguments={**LORA, "lora_paths": {"tuned": str(path)}})
        answers += engine.host.generate(prompt(1), lora_path=["tuned"])
        if not seed - 1 and len(answers) == 1:
            plain = engine.host.generate(prompt(1))[0]
        assert engine.order("flush") == 0
    assert [answer["host"] for answer in answers] == [0, 0, 24 * 16]
    assert answers[0]["tokens"] == answers[2]["tokens"] != answers[1]["tokens"]
    assert plain["host"] == 0 and plain["tokens"] != answers[0]["tokens"]


@pytest.mark.long
def test_replicas_of_data_parallelism_have_metrics_of_their_own(
    serve: Any, prompt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.connectors.sglang.conftest import metric_at

    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")
    engine = serve({"g2": {"capacity": "16MiB"}}, arguments={"dp_size": 2})
    assert all(answer["tokens"] for answer in engine.host.generate(*[prompt(seed) for seed in range(4)]))
    assert all(metric_at(engine.port + rank, "kvtier_tier_capacity_bytes", tier="g2") for rank in range(2))
