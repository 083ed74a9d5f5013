"""Identity that all engines share: models, weights, block keys, the rotation of keys."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvtier
from kvtier.connectors.identity import (
    ROPE_TYPES,
    engine_keys,
    epoch_after_reset,
    model_name,
    rope_of,
    rope_problem,
    weights_of,
)
from kvtier.connectors.settings import Settings
from kvtier.identity.keys import SHARED


def make_config(**more: object) -> kvtier.Config:
    return kvtier.Config.parse({"tiers": {"g2": {"capacity": "1MiB"}}, **more})


def test_a_model_is_named_by_what_it_is_not_by_where_it_lies(tmp_path: Path) -> None:
    assert model_name("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    assert model_name("/models/llama") == "llama"
    assert model_name(str(tmp_path)) == tmp_path.name
    assert model_name("/models/llama", "mine") == "mine"


def test_weights_are_the_operators_id_or_the_files(tmp_path: Path) -> None:
    settings = Settings(make_config())
    (tmp_path / "model.bin").write_bytes(b"weights" * 1000)
    first = weights_of(settings, str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"Weights" * 1000)
    assert weights_of(settings, str(tmp_path)) != first
    assert weights_of(Settings(make_config(), weights="v2"), "nowhere") == "id:v2"
    with pytest.raises(kvtier.IdentityError, match="set the connector argument weights"):
        weights_of(settings, "no-such-org/no-such-model")


def test_a_hub_model_is_named_by_the_snapshot_that_the_engine_has_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --download-dir it is not that of the hub's own cache, which may be another commit."""
    from kvtier.connectors import identity

    folder, commits = tmp_path / "models--org--name", ("a" * 40, "b" * 40)
    for commit in commits:
        (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commits[0])
    monkeypatch.setattr(identity, "_snapshot", lambda *_: tmp_path / "models--x" / "snapshots" / ("c" * 40))
    settings = Settings(make_config())
    assert weights_of(settings, "org/name", None, str(tmp_path)) == f"hub:{commits[0]}"
    assert weights_of(settings, "org/name", commits[1], str(tmp_path)) == f"hub:{commits[1]}"
    assert weights_of(settings, "org/name") == weights_of(settings, "org/no", None, str(tmp_path)) == f"hub:{'c' * 40}"


def test_an_update_of_weights_starts_an_epoch_of_its_own() -> None:
    namespace = kvtier.Namespace(model="m", weights="w", dtype="float32", layout="x", block_tokens=16, block_bytes=64)
    one, two = (epoch_after_reset(make_config(), namespace) for _ in range(2))
    assert len({namespace.digest, one.digest, two.digest}) == 3
    assert epoch_after_reset(make_config(keep_on_reset=True), namespace) is namespace


def test_engine_hashes_are_used_as_they_are_if_they_are_long_enough() -> None:
    assert engine_keys(SHARED, [b"h" * 32]) == [bytes(16) + b"h" * 32]
    with pytest.raises(kvtier.IdentityError, match="have 16 bytes"):
        engine_keys(SHARED, [b"h" * 16])


def model_config(max_model_len: int = 4096, **rope: Any) -> Any:
    text = SimpleNamespace(rope_theta=10000.0, rope_scaling=rope or None)
    return SimpleNamespace(hf_text_config=text, max_model_len=max_model_len)


def test_rotations_that_depend_on_the_prompts_length_are_refused() -> None:
    for kind in ("dynamic", "longrope"):
        for engine in ("sglang", "transformers"):
            for parameters in ({"rope_type": kind}, {"type": kind}, {"full_attention": {"rope_type": kind}}):
                assert f"RoPE of type {kind}" in rope_problem(engine, parameters), (engine, parameters)
        assert rope_problem("vllm", {"rope_type": kind}) == ""
        with pytest.raises(kvtier.IdentityError, match=kind):
            rope_of("sglang", model_config(rope_type=kind))
    for kind in ("default", "linear", "yarn", "llama3", ""):
        assert not ROPE_TYPES.get(kind) and rope_problem("sglang", {"rope_type": kind}) == ""
    assert rope_problem("transformers", None) == ""


def test_a_rotation_that_depends_on_the_longest_prompt_names_it() -> None:
    """vLLM takes LongRoPE's long or short factors by max_model_len."""
    for parameters in ({"rope_type": "longrope", "factor": 4.0}, {"full_attention": {"rope_type": "longrope"}}):
        short, long = (rope_of("vllm", model_config(length, **parameters)) for length in (4096, 131072))
        assert short != long and json.loads(long)["max_model_len"] == 131072
    for kind in ("dynamic", "of-the-future"):
        short, long = (rope_of("vllm", model_config(length, rope_type=kind)) for length in (4096, 131072))
        assert short != long, "nothing says that it does not"
    for kind in ("default", "llama3", "linear", "yarn"):
        short, long = (rope_of("vllm", model_config(length, rope_type=kind)) for length in (4096, 131072))
        assert short == long and "max_model_len" not in long
