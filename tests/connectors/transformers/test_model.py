"""Namespaces of transformers models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvtier.connectors.transformers.model import KVShape, namespace_of  # noqa: E402  (the tests need torch)


@pytest.mark.parametrize(
    ("model", "digest"),
    [
        ({}, "234f7c865f46f7a5298a6144ee77c83cbd5241fa6c606c9fbcc75e19c01187cd"),
        (
            {"rope": {"rope_type": "default", "rope_theta": 10000.0}},
            "1af02f9b716d9a065ac4b6ea8c446f89b552ed758dd0f0cf73062fe735c94ffb",
        ),
        (
            {"rope": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
            "47c4e560e6cd2577c49e50c637de6bfe247f9d3e05681047587be75109f4c376",
        ),
        (
            {"name": "hub/tiny", "attention": "eager"},
            "927a405b3fa31f5c059c75def788ababb2765338fd781ea207909b7fa7bfce1a",
        ),
    ],
)
def test_models_find_what_they_stored_with_earlier_releases(model: dict[str, Any], digest: str) -> None:
    """Digests that release 0.1 computed."""

    def namespace(rope: Any = None, attention: str = "sdpa", **named: Any) -> Any:
        config = SimpleNamespace(
            _attn_implementation=attention, rope_parameters=rope, max_position_embeddings=2048, model_type="llama"
        )
        described = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: config))
        return namespace_of(described, KVShape(4, 4, 16, torch.float32), 16, weights="w", **named)

    assert namespace(**model).digest.hex() == digest


def test_the_module_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, kvtier.connectors.transformers.model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == 0
