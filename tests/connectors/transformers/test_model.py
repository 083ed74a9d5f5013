"""Namespaces of transformers models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvtier.connectors.transformers.model import (  # noqa: E402  (the tests need torch)
    KVShape,
    namespace_of,
    probe,
    weights_of,
)
from kvtier.errors import IdentityError, InvalidRequest  # noqa: E402


@pytest.mark.parametrize(
    ("model", "digest"),
    [
        ({}, "03db612edce1191f7d959211cff32bdc57e72884fa3c08ce57beef647bf5799b"),
        (
            {"rope": {"rope_type": "default", "rope_theta": 10000.0}},
            "5728b1e56dfcc023f5ae36c7cf7c923c47638baa581c723f587285141f9a5b37",
        ),
        (
            {"rope": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
            "982074623f59a2d6baa28e9c0d3668b687818ff78ec8528ccd386e30bdaa7fb4",
        ),
        (
            {"name": "hub/tiny", "attention": "eager"},
            "c5ef31a6460ac839bb5bf9a3e2292afa61c274678ff63d20cc492152dc8702aa",
        ),
    ],
)
def test_models_go_on_finding_what_they_stored(model: dict[str, Any], digest: str) -> None:
    """Digests that release 0.2 computes: other ones start cold."""

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


def test_models_that_no_prefix_of_is_final_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "is_encoder_decoder", True)
        with pytest.raises(InvalidRequest, match="only decoders are cached"):
            probe(model)
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "use_bidirectional_attention", True, raising=False)
        with pytest.raises(InvalidRequest, match="tokens attend to later ones"):
            probe(model)
    move = model.model.layers[1].register_forward_hook(
        lambda _layer, _args, named, _out: (
            named["past_key_values"].layers[1].__setattr__("keys", named["past_key_values"].layers[1].keys.to("meta"))
        ),
        with_kwargs=True,
    )
    with pytest.raises(InvalidRequest, match=r"several devices \(cpu, meta\)"):
        probe(model)
    move.remove()
    shape = probe(model)
    assert shape.device == torch.device("cpu")
    monkeypatch.setattr(model.config, "_attn_implementation_internal", None)
    with pytest.raises(IdentityError, match="set attn_implementation"):
        namespace_of(model, shape, 16)


def test_large_weights_are_sampled_and_adapters_told_apart(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_of(model)
    monkeypatch.setattr(model, "peft_config", {}, raising=False)
    named = set()
    for active in (["a"], ["b"], lambda: ["c"]):
        monkeypatch.setattr(model, "active_adapters", active, raising=False)
        named.add(weights_of(model))
    layer = model.model.layers[2].self_attn.q_proj
    for part, value in (("disable_adapters", False), ("disable_adapters", True), ("scaling", {"c": 2.0})):
        monkeypatch.setattr(layer, part, value, raising=False)  # as PEFT's layers have them
        named.add(weights_of(model))
    assert len(named | {whole}) == 7
    monkeypatch.setattr("kvtier.connectors.transformers.model._WHOLE_MODEL_BYTES", 0)
    monkeypatch.setattr("kvtier.connectors.transformers.model._SAMPLE_BYTES", 64)
    sampled = weights_of(model)
    assert sampled.startswith("live-s1:") and weights_of(model) == sampled
    assert weights_of(model, "full").startswith("live:"), "all of them were asked for"
