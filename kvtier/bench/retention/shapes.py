"""KV bytes per token of model shapes, for turning blocks into gigabytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvtier.errors import InvalidRequest

CONFIG_BYTES_MAX = 1 << 20
_VALUE_BYTES = {"float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class CacheShape:
    """A model's KV cache. `bytes_per_token` over all layers; `prefill_tokens_s` what one H100-class GPU prefills,
    an order of magnitude to start from and to be replaced by a measured one."""

    name: str
    bytes_per_token: int
    prefill_tokens_s: float


def kv_bytes(layers: int, heads: int, head_size: int, bytes_per_value: int = 2) -> int:
    """Keys and values of one token over all layers. Pure."""
    return 2 * layers * heads * head_size * bytes_per_value


SHAPES: Mapping[str, CacheShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            CacheShape("llama-3.1-8b", kv_bytes(32, 8, 128), 10_000),
            CacheShape("llama-3.1-70b", kv_bytes(80, 8, 128), 2_000),
            CacheShape("deepseek-v3", 61 * (512 + 64) * 2, 4_000),  # MLA: one compressed latent and one RoPE key
        )
    }
)


def shape_of(name: str) -> CacheShape:
    """The shape called `name`, or that of the checkpoint in the directory, or in the config.json, of that name. Raises
    InvalidRequest that lists what exists."""
    path = Path(name)
    if name not in SHAPES and (path.is_dir() or path.suffix == ".json"):
        return _shape_in(path / "config.json" if path.is_dir() else path)
    if name not in SHAPES:
        raise InvalidRequest(
            f"model {name[:80]!r} is neither a directory with a config.json nor a known shape; known: "
            f"{', '.join(SHAPES)}; or give bytes per token"
        )
    return SHAPES[name]


def _shape_in(path: Path) -> CacheShape:
    """The shape that a config.json describes. The prefill rate is not in there: an 8B model's is taken."""
    try:
        whole = json.loads(path.read_bytes()[:CONFIG_BYTES_MAX])
        fields = whole.get("text_config") or whole
        layers = int(fields["num_hidden_layers"])
        size = _VALUE_BYTES.get(str(fields.get("dtype") or fields.get("torch_dtype") or whole.get("torch_dtype")), 2)
        if fields.get("kv_lora_rank"):  # MLA: one compressed latent and one RoPE key
            per_token = layers * (int(fields["kv_lora_rank"]) + int(fields["qk_rope_head_dim"])) * size
        else:
            heads = int(fields["num_attention_heads"])
            head_size = int(fields.get("head_dim") or int(fields["hidden_size"]) // heads)
            per_token = kv_bytes(layers, int(fields.get("num_key_value_heads") or heads), head_size, size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as wrong:
        reason = f"{wrong} is missing" if isinstance(wrong, KeyError) else str(wrong)
        raise InvalidRequest(f"{path} does not describe a KV cache: {reason}; give bytes per token") from None
    if per_token <= 0:
        raise InvalidRequest(f"{path} describes {per_token} bytes of KV per token; give bytes per token")
    return CacheShape(path.parent.name or "model", per_token, SHAPES["llama-3.1-8b"].prefill_tokens_s)
