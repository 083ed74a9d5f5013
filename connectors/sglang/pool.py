"""An SGLang rank's device pool as blocks: where their bytes lie, and which pools are refused.

One block is one page of tokens of all layers of this rank. In G2 its bytes are in the order layer, K before V, token,
head, channel, whatever strides the pool has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvtier.errors import IdentityError
from kvtier.kernels.layout import Paged, Shape, of_tensors


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
    def on_gpu(self) -> bool:
        return bool(self.tensors[0][0].is_cuda)

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
    """A device pool that can be cached. Raises IdentityError for pools of which a part would be lost: sliding windows,
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
