"""Namespaces of SGLang ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.connectors.sglang.support.linker_bench import PAGE, mha, mla, pool, server  # noqa: E402  (needs torch)

pytestmark = pytest.mark.usefixtures("on_cpu")


def model_config(**rope: Any) -> Any:
    text = SimpleNamespace(rope_theta=10000.0, rope_scaling=None, rope_parameters=rope or None)
    return SimpleNamespace(hf_text_config=text, dtype=torch.float32)


def name(device: Any = None, *, ranks: dict[str, int] | None = None, rope: Any = None, **changed: Any) -> Any:
    from kvtier.config import Config
    from kvtier.connectors.settings import Settings
    from kvtier.connectors.sglang.identity import Ranks, namespace_of

    settings = Settings(Config.parse({"version": 1}), weights="1")
    kept = pool(device if device is not None else mha())
    return namespace_of(server(**changed), model_config(**(rope or {})), settings, kept, Ranks(**(ranks or {})))


def test_whatever_changes_the_bytes_changes_the_name() -> None:
    same = name()
    others = [
        name(mha(dtype=torch.float16)),
        name(mha(head_num=4)),
        name(mha(layer_num=2)),
        name(mla()),
        name(ranks={"tp_rank": 0, "tp": 2}),
        name(ranks={"tp_rank": 1, "tp": 2}),
        name(rope={"rope_type": "linear", "factor": 2.0}),
        name(quantization="fp8"),
        name(json_model_override_args='{"rope_theta": 5}'),
        name(model_path="hub/other"),
    ]
    assert name().digest == same.digest
    assert len({n.digest for n in (same, *others)}) == len(others) + 1


def test_mla_ranks_share() -> None:
    assert name(mla(), ranks={"tp_rank": 1, "tp": 4}).digest == name(mla()).digest


@pytest.mark.parametrize(
    "given",
    [
        *(
            {"load_format": kind}
            for kind in ("remote_instance", "flash_rl", "presharded", "npcache", "of a later release")
        ),
        {"weight_cache_mode": "client"},
        {"modelopt_checkpoint_restore_path": "/elsewhere"},
    ],
)
def test_weights_from_elsewhere_than_the_files_have_a_name_of_this_process_alone(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon holds what lay at the path when it was started, and another instance may have had an update since: the
    files that lie there now would name other weights than those that compute."""
    from kvtier.config import Config
    from kvtier.connectors.settings import Settings
    from kvtier.connectors.sglang import identity

    monkeypatch.setattr(identity, "weights_of", lambda settings, *_: settings.weights or "the files'")
    config = Config.parse({"version": 1})
    assert identity._weights(server(), Settings(config)) == "the files'"
    names = [identity._weights(server(**given), Settings(config)) for _ in range(2)]
    assert len({*names, "the files'"}) == 3
    assert identity._weights(server(**given), Settings(config, weights="v2")) == "v2"


def test_runs_whose_blocks_have_no_name_are_refused() -> None:
    from kvtier.errors import IdentityError

    for algorithm in ("EAGLE", "NGRAM"):
        with pytest.raises(IdentityError, match=f"speculative decoding .{algorithm}"):
            name(speculative_algorithm=algorithm)
    with pytest.raises(IdentityError, match=r"diffusion language model \(LowConfidence"):
        name(dllm_algorithm="LowConfidence")
    for kind in ("dynamic", "longrope"):
        with pytest.raises(IdentityError, match=kind):
            name(rope={"rope_type": kind})


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"pp_size": 2}, "pipeline"),
        ({"attn_cp_size": 2}, "attn_cp_size is 2"),
        ({"attn_dcp_size": 4}, "attn_dcp_size is 4"),
    ],
)
def test_runs_whose_pages_are_spread_over_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, place: dict[str, int], said: str
) -> None:
    from sglang.srt import runtime_context

    from kvtier.connectors.sglang import identity
    from kvtier.errors import IdentityError

    one = {"attn_tp_rank": 0, "attn_tp_size": 1, "pp_size": 1, "attn_cp_size": 1, "attn_dcp_size": 1}
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(**{**one, **place}))
    with pytest.raises(IdentityError, match=said):
        identity.namespace_of_rank(None, None, None)


def test_sglang_hashes_pages_as_the_namespace_says() -> None:
    import hashlib
    import struct

    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens = list(range(3 * PAGE))
    expected, parent = [], b""
    for start in range(0, len(tokens), PAGE):
        parent = hashlib.sha256(parent + struct.pack(f"<{PAGE}I", *tokens[start : start + PAGE])).digest()
        expected.append(parent.hex())
    assert list(get_storage_hash_str(RadixKey(tokens), None, page_size=PAGE)) == expected


@pytest.mark.parametrize(
    ("rank", "digest"),
    [
        ({}, "a1f0b67565fbd80450c47d7269bfe9e40d2ed110b519e0c526b89bcd0ea7c290"),
        (
            {"rope": {"rope_type": "linear", "factor": 2.0}},
            "3646cd5265438d71c3773db9b6fd7800395a2f24b9d35b754cf0526ff1deb773",
        ),
        (
            {"kind": "mla", "ranks": {"tp_rank": 1, "tp": 4}},
            "01822283fc370fae4fa7fced9b65abac538a98508cc340657267a626536f86d8",
        ),
        ({"ranks": {"tp_rank": 1, "tp": 2}}, "ac708875aa8ef214cf80291fbba085429cee2a4606adb18b96880a5caa19cdd1"),
        (
            {"dtype": "float8_e4m3fn", "quantization": "fp8"},
            "696aedb53f90e368a679b440b86514c212ecea28e74f256226f33e3053ec668f",
        ),
        (
            {"json_model_override_args": '{"rope_theta": 5}'},
            "78a90a5208b32cec57482e0eee79a9239b7d61e6207555e707d15419b8519a00",
        ),
    ],
)
def test_ranks_go_on_finding_what_they_stored(rank: dict[str, Any], digest: str) -> None:
    """Digests that release 0.2 computes: other ones start cold."""

    def namespace(
        kind: str = "full", dtype: str = "bfloat16", rope: Any = None, ranks: Any = None, **changed: Any
    ) -> Any:
        from kvtier.config import Config
        from kvtier.connectors.settings import Settings
        from kvtier.connectors.sglang.identity import Ranks, namespace_of
        from kvtier.connectors.sglang.pool import KVPools
        from kvtier.kernels.layout import Shape

        halves, heads, channels = (2, 2, 32) if kind == "full" else (1, 1, 64)
        kept = KVPools((), kind, dtype, 16, Shape(3, halves, 16, heads, channels, 2), (0, 3))
        text = SimpleNamespace(rope_theta=10000.0, rope_scaling=None, rope_parameters=rope)
        config = SimpleNamespace(hf_text_config=text, dtype="torch.bfloat16")
        settings = Settings(Config(), weights="1")
        return namespace_of(server(**changed), config, settings, kept, Ranks(**(ranks or {})))

    assert namespace(**rank).digest.hex() == digest


SPEAK = """
import json, sys
from kvtier.testing import sglang_cpu
sglang_cpu.install()
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs
from kvtier.connectors.sglang.configuration import configuration_of
arguments = ServerArgs(**json.loads(sys.argv[1]))
print(configuration_of(arguments, ModelConfig.from_server_args(arguments)))
"""


@pytest.mark.long
def test_another_process_at_another_place_gives_the_same_configuration_the_same_name(tmp_path: Path) -> None:
    """Else nothing stored would be found after a restart, or by a replica."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs
    from transformers import LlamaConfig

    from kvtier.connectors.sglang.configuration import configuration_of

    here, there = tmp_path / "here", tmp_path / "there"
    LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=4096, architectures=["LlamaForCausalLM"],
    ).save_pretrained(here)  # fmt: skip
    shutil.copytree(here, there)

    def given(model: Path, port: int, **more: Any) -> dict[str, Any]:
        place = {"port": port, "nccl_port": port + 1, "extra_metric_labels": {"pod": f"at {port}"}}
        return {"model_path": str(model), "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu",
                "served_model_name": f"at {port}", "download_dir": str(model), **place, **more}  # fmt: skip

    def named(**more: Any) -> str:
        arguments = ServerArgs(**given(here, 30000, **more))
        return configuration_of(arguments, ModelConfig.from_server_args(arguments))

    home = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONHASHSEED": "7", "USER": "another"}
    out = subprocess.run(
        [sys.executable, "-P", "-c", SPEAK, json.dumps(given(there, 31000))], cwd=tmp_path,
        env={**os.environ, **home}, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert [line for line in out.stdout.splitlines() if line.startswith("{")] == [named()]
    assert named(kv_cache_dtype="bfloat16") != named(), "the control"
