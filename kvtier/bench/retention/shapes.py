"""KV bytes per token of model shapes, for turning blocks into gigabytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvtier.errors import InvalidRequest


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
    """The shape called `name`. Raises InvalidRequest that lists what exists."""
    if name not in SHAPES:
        raise InvalidRequest(
            f"model {name!r} is not a known shape; known: {', '.join(SHAPES)}; or give bytes per token"
        )
    return SHAPES[name]
