"""KV bytes of model shapes, per token and per boundary, for turning blocks into gigabytes.

Layers of full attention keep every token. Those of sliding windows and of states (linear attention) keep what the next
token needs at a boundary, a place at which a prompt can go on: the windows' last tokens, or the states after them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvtier.errors import InvalidRequest

CONFIG_BYTES_MAX = 1 << 20
_VALUE_BYTES = {"float32": 4, "float64": 8}
_WINDOW_BLOCK_TOKENS = 16
"""Windows are kept in whole blocks; this is vLLM's usual size."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """A model's KV cache. `bytes_per_token` over all layers that keep every token; `prefill_tokens_s` what one
    H100-class GPU prefills, an order of magnitude to start from and to be replaced by a measured one;
    `boundary_bytes` what the other layers keep for each boundary."""

    name: str
    bytes_per_token: int
    prefill_tokens_s: float
    boundary_bytes: int = 0

    def with_boundaries(self, tokens: float) -> CacheShape:
        """The same with a boundary for each so many distinct tokens: its bytes are spread over them."""
        return replace(self, bytes_per_token=self.bytes_per_token + round(self.boundary_bytes / tokens))


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
        size = _value_bytes(fields.get("dtype") or fields.get("torch_dtype") or whole.get("torch_dtype"))
        kinds = _kinds_of_layers(fields, layers)
        full = kinds.count(_FULL)
        if fields.get("kv_lora_rank"):  # MLA: one compressed latent and one RoPE key
            per_layer = (int(fields["kv_lora_rank"]) + int(fields["qk_rope_head_dim"])) * size
        else:
            heads = int(fields["num_attention_heads"])
            head_size = int(fields.get("head_dim") or int(fields["hidden_size"]) // heads)
            per_layer = kv_bytes(1, int(fields.get("num_key_value_heads") or heads), head_size, size)
        per_token = full * per_layer
        boundary = _windows_bytes(fields, kinds, per_layer) + kinds.count(_STATE) * _state_bytes(fields, kinds, size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as wrong:
        reason = f"{wrong} is missing" if isinstance(wrong, KeyError) else str(wrong)
        raise InvalidRequest(f"{path} does not describe a KV cache: {reason}; give bytes per token") from None
    if per_token <= 0:
        raise InvalidRequest(f"{path} describes {per_token} bytes of KV per token; give bytes per token")
    return CacheShape(path.parent.name or "model", per_token, SHAPES["llama-3.1-8b"].prefill_tokens_s, boundary)


def _value_bytes(dtype: object) -> int:
    return _VALUE_BYTES.get(str(dtype), 2)


_FULL, _WINDOW, _STATE = "full_attention", "sliding_attention", "linear_attention"


def _kinds_of_layers(fields: Mapping[str, Any], layers: int) -> Sequence[str]:
    """Of each layer, what it keeps: `layer_types`, or the rule that older configurations give instead. Layers of other
    kinds, and all where none keeps every token, are taken to keep every token."""
    types, window = fields.get("layer_types"), fields.get("sliding_window")
    pattern = int(fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or 0)
    interval = int(fields.get("full_attention_interval") or 0)
    if types:
        kinds = [str(kind) for kind in types]
    elif pattern or interval:
        other = _WINDOW if pattern else _STATE
        kinds = [_FULL if (layer + 1) % (pattern or interval) == 0 else other for layer in range(layers)]
    else:
        kinds = [_FULL] * layers
    if len(kinds) != layers:
        raise ValueError(f"layer_types names {len(kinds)} of {layers} layers")
    kept = {_WINDOW} if window else set()
    kinds = [kind if kind in kept | {_STATE} else _FULL for kind in kinds]
    return kinds if _FULL in kinds else [_FULL] * layers


def _windows_bytes(fields: Mapping[str, Any], kinds: Sequence[str], per_layer: int) -> int:
    """Of a boundary: the last w - 1 tokens in whole blocks, of groups of as many layers as the full one has. The last
    group is filled up."""
    if _WINDOW not in kinds:
        return 0
    full = kinds.count(_FULL)
    blocks = -(-(int(fields["sliding_window"]) - 1) // _WINDOW_BLOCK_TOKENS)
    return -(-kinds.count(_WINDOW) // full) * full * blocks * _WINDOW_BLOCK_TOKENS * per_layer


def _state_bytes(fields: Mapping[str, Any], kinds: Sequence[str], size: int) -> int:
    """Of a boundary and a layer of gated delta nets: the convolution's last inputs, and a matrix per value head."""
    if _STATE not in kinds:
        return 0
    keys, key_size = int(fields["linear_num_key_heads"]), int(fields["linear_key_head_dim"])
    values, value_size = int(fields["linear_num_value_heads"]), int(fields["linear_value_head_dim"])
    inputs = (2 * keys * key_size + values * value_size) * (int(fields["linear_conv_kernel_dim"]) - 1)
    matrices = values * key_size * value_size
    named = fields.get("mamba_ssm_dtype")
    return inputs * size + matrices * (_value_bytes(named) if named else size)
