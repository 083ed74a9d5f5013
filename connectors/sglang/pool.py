"""An SGLang rank's device pool as blocks: what lies where, who it is, and which pools cannot be kept whole.

One block is one page of tokens of all layers of this rank. In G2 its bytes are in the order layer, K before V, token,
head, channel, whatever strides the pool has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.connectors.common import Settings, model_name, weights_of
from kvtier.errors import IdentityError
from kvtier.identity.namespace import Namespace
from kvtier.kernels.layout import Paged, Shape, of_tensors

HASH_ALGORITHM = "sglang-sha256"
HASH_VERSION = "1"
"""Of SGLang's page chain: sha256(parent ‖ tokens as u32), seeded with "sglang-cache-namespace-v1" for salts."""

_SIZE_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's place in the parallel run: attention tensor parallelism and the pipeline."""

    tp_rank: int = 0
    tp: int = 1
    pp_rank: int = 0
    pp: int = 1


@dataclass(frozen=True, slots=True)
class KVPools:
    """One rank's pool: `tensors[layer]` is a (K, V) pair, or the latent alone, of shape [tokens, heads, channels]."""

    tensors: tuple[Any, ...]
    kind: str  # "full" or "mla"
    dtype: str
    page: int
    shape: Shape
    layers: tuple[int, int]  # half-open range of the model's layers

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes

    def pages(self) -> Paged:
        """The pool as pages of tokens, for the copy engine. Keeps the tensors alive; touches no byte."""
        return of_tensors([tuple(self._paged(t) for t in pair) for pair in self.tensors], "BNHC", self.shape)

    def _paged(self, tensor: Any) -> Any:
        pages = tensor.shape[0] // self.page
        return tensor[: pages * self.page].unflatten(0, (pages, self.page))


def pool_of(device_pool: Any, page: int, components: Iterable[Any]) -> KVPools:
    """What can be kept of a device pool. Raises IdentityError for pools of which a part would be lost: sliding windows,
    state-space models, index caches, per-token scales, packed or reordered layouts."""
    kinds = sorted(component.name for component in components)
    if kinds != ["FULL"]:
        raise IdentityError(
            f"this model keeps state of the kinds {', '.join(kinds)}; kvtier keeps FULL attention and MLA only, and a "
            "prefix without the rest would be wrong: start this engine without kvtier"
        )
    name = type(device_pool).__name__
    if name == "MHATokenToKVPool":
        _refuse_mha(device_pool)
        pairs: tuple[tuple[Any, ...], ...] = tuple(zip(device_pool.k_buffer, device_pool.v_buffer, strict=True))
        kind = "full"
    elif name == "MLATokenToKVPool" and not device_pool.use_dsa and device_pool.kv_scale_buffer is None:
        pairs = tuple((tensor,) for tensor in device_pool.kv_buffer)
        kind = "mla"
    else:
        raise IdentityError(
            f"the device pool is a {name}; kvtier keeps MHATokenToKVPool and plain MLATokenToKVPool whole, no other"
        )
    _, heads, channels = pairs[0][0].shape
    shape = Shape(len(pairs), len(pairs[0]), page, heads, channels, pairs[0][0].element_size())
    dtype = str(device_pool.dtype).removeprefix("torch.")
    first = int(device_pool.start_layer)
    return KVPools(pairs, kind, dtype, page, shape, (first, first + len(pairs)))


def _refuse_mha(device_pool: Any) -> None:
    if device_pool.k_scale_buffer is not None:
        raise IdentityError("the device pool keeps scales beside its KV; kvtier keeps unscaled and static fp8 pools")
    layout = getattr(device_pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise IdentityError(f"the device pool's layout is {layout}; kvtier keeps nhd (unset SGLANG_USE_HND_KVCACHE)")
    if device_pool.head_dim != device_pool.v_head_dim:
        raise IdentityError(
            f"heads of K have {device_pool.head_dim} channels and heads of V {device_pool.v_head_dim}; equal sizes "
            "are needed"
        )


def namespace_of(server: Any, model_config: Any, settings: Settings, pool: KVPools, ranks: Ranks) -> Namespace:
    """The identity of one rank's blocks. Reads the checkpoint. Raises IdentityError.

    MLA pools are equal on all tensor-parallel ranks, so theirs is rank 0 of 1 and they share what lies below G2.
    """
    replicated = pool.kind == "mla"
    return Namespace(
        layout=f"sglang:{'L' if replicated else 'L2'}NHD",
        block_tokens=pool.page,
        block_bytes=pool.block_bytes,
        layers=f"{pool.layers[0]}:{pool.layers[1]}",
        kv_heads=pool.shape.heads,
        head_size=pool.shape.channels,
        rank=0 if replicated else ranks.tp_rank,
        ranks=1 if replicated else ranks.tp,
        tp=1 if replicated else ranks.tp,
        pp=ranks.pp,
        group=pool.kind,
        **engine_fields(server, model_config, settings, pool.dtype),
    )


def engine_fields(server: Any, model_config: Any, settings: Settings, dtype: str) -> dict[str, Any]:
    """What a namespace says of the engine, whatever the shape of its pools. Reads the checkpoint. Raises IdentityError
    for runs whose KV depends on more than a namespace can say."""
    if getattr(server, "speculative_algorithm", None):
        raise IdentityError(
            "speculative decoding keeps KV of a draft model that kvtier does not; start without it, or without kvtier"
        )
    text = getattr(model_config, "hf_text_config", None) or model_config.hf_config
    rope = {name: getattr(text, name, None) for name in ("rope_theta", "rope_scaling", "rope_parameters")}
    _refuse_rope(rope)
    quantized = dtype.startswith("float8")
    return {
        "model": model_name(server.model_path, settings.model),
        "weights": f"{weights_of(settings, server.model_path, server.revision)}+{_made(server, model_config)}",
        "dtype": dtype,
        "quantization": dtype if quantized else "",
        "scales": _scales(server) if quantized else "",
        "rope": _canonical(rope),
        "hash_algorithm": HASH_ALGORITHM,
        "hash_version": HASH_VERSION,
    }


def _made(server: Any, model_config: Any) -> str:
    """What the engine makes of the checkpoint before it computes with it."""
    made = {
        "dtype": str(model_config.dtype),
        "load_format": str(server.load_format),
        "quantization": str(server.quantization),
        "overrides": str(server.json_model_override_args),
    }
    return hashlib.sha256(_canonical(made).encode()).hexdigest()[:16]


def _scales(server: Any) -> str:
    """fp8 KV has static scales: from a file of their own, else from the checkpoint (or 1), which `weights` covers."""
    path = getattr(server, "quantization_param_path", None)
    return "checkpoint" if not path else hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _refuse_rope(rope: dict[str, Any]) -> None:
    for value in rope.values():
        if isinstance(value, dict):
            kind = str(value.get("rope_type", value.get("type", "")))
            if kind in _SIZE_DEPENDENT_ROPE:
                raise IdentityError(
                    f"RoPE of type {kind} rotates keys by the length of the whole prompt: a block's bytes depend on "
                    "what comes after it; start this engine without kvtier"
                )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
