"""An SGLang rank's device pool as blocks: where their bytes lie, and which pools are refused.

One block is one page of tokens of all layers of this rank. In G2 its bytes are in the order layer, K before V, token,
head, channel, whatever strides the pool has.

A pool of sliding windows (SWAKVPool) is two: one of the layers of full attention, whose pages are blocks as above, and
one of the window's layers, with pages, indices and an allocator of its own. A page of the latter is cut by layers into
as many blocks as it takes, none of them larger than one of the former: *parts*. So one arena holds both. The states of
Mamba and linear attention (HybridLinearKVPool), which lie in a pool beside that of full attention, are parts, too
(`kvtier.connectors.sglang.state_pool`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier.connectors.configuration import digest16
from kvtier.connectors.sglang.state_pool import StatePart, described, parts_of
from kvtier.errors import IdentityError
from kvtier.kernels.layout import Paged, Shape, of_tensors

PARTS_MAX = 16
"""Blocks of a page of windows, each of which is copied by an engine of its own."""

_PART_BITS = 40

Numbers = TypeVar("Numbers", int, NDArray[np.int64])


def block_of(part: int, page: int) -> int:
    """The number of a page in the copies of all parts."""
    return part << _PART_BITS | page


def place_of(block: Numbers) -> tuple[Numbers, Numbers]:
    """The part and the page of a block, or of each of an array."""
    return block >> _PART_BITS, block & (1 << _PART_BITS) - 1


Places = tuple[tuple[int, int | None], ...]
"""The parts (0: full) in which a layer of the model has something, and its place there; None: it needs all of it."""


@dataclass(frozen=True, slots=True)
class PoolPart:
    """Layers of one pool: `tensors[layer]` is a (K, V) pair, or the latent alone, [tokens, heads, channels]."""

    tensors: tuple[Any, ...]
    shape: Shape

    def pages(self) -> Paged:
        """The layers as pages of tokens, for the copy engine. Keeps the tensors alive; touches no byte."""
        return of_tensors([tuple(self._paged(t) for t in pair) for pair in self.tensors], "BNHC", self.shape)

    def _paged(self, tensor: Any) -> Any:
        pages = tensor.shape[0] // self.shape.tokens
        return tensor[: pages * self.shape.tokens].unflatten(0, (pages, self.shape.tokens))


@dataclass(frozen=True, slots=True)
class KVPools:
    """One rank's pool: the layers of full attention, and the parts of windows or of states, if there are any."""

    tensors: tuple[Any, ...]
    kind: str  # "full" or "mla"
    dtype: str
    page: int
    shape: Shape
    layers: tuple[int, int]  # half-open range of the model's layers
    beside: tuple[PoolPart, ...] = ()  # of windows
    states: tuple[StatePart, ...] = ()
    places: tuple[Places, ...] = ()  # by layer of the model
    window: int = 0  # tokens before a token that it attends to, in the layers of windows
    named: str = ""  # what the states are, for the namespace

    @property
    def on_gpu(self) -> bool:
        return bool(self.tensors[0][0].is_cuda)

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes

    @property
    def depth(self) -> int:
        """How many layers of the model there are."""
        return self.layers[1] - self.layers[0]

    @property
    def parts(self) -> tuple[PoolPart | StatePart, ...]:
        return (PoolPart(self.tensors, self.shape), *self.beside, *self.states)

    @property
    def replicated(self) -> bool:
        """Whether all ranks of tensor parallelism have the same."""
        return self.kind == "mla" and not self.states

    def place(self, layer: int) -> Places:
        return self.places[layer] if self.places else ((0, layer),)

    @property
    def group(self) -> str:
        """For the namespace: what is kept, and of windows and states how it is cut into blocks."""
        if self.states:
            return f"{self.kind}+state:{self.named}"
        if not self.beside:
            return self.kind
        shapes = [[part.shape.layers, part.shape.heads, part.shape.channels] for part in self.beside]
        named = digest16([self.window, shapes, [place for (place,) in self.places]])
        return f"{self.kind}+{len(self.beside)}*window:{named}"


def pool_of(device_pool: Any, page: int, components: Iterable[Any], window: int = 0) -> KVPools:
    """A device pool that can be cached; `window`: tokens before a token that it attends to, in layers that have a pool
    of windows. Raises IdentityError for pools of which a part would be lost: index caches, per-token scales, packed or
    reordered layouts, and for windows and states whose tree is not of both."""
    kinds = sorted(component.name for component in components)
    name = type(device_pool).__name__
    if name == "SWAKVPool" and kinds == ["FULL", "SWA"]:
        return _windows_of(device_pool, page, window)
    if name == "HybridLinearKVPool" and kinds == ["FULL", "MAMBA"]:
        return _states_of(device_pool, page)
    if kinds != ["FULL"]:
        raise IdentityError(
            f"this model keeps state of the kinds {', '.join(kinds)} in a {name}; kvtier keeps FULL attention and MLA, "
            "and beside FULL sliding windows (SWA) in an SWAKVPool, or states (MAMBA) in a HybridLinearKVPool, and a "
            "prefix without the rest would be wrong: start this engine without kvtier"
        )
    pairs, kind = _full_of(device_pool)
    first = int(device_pool.start_layer)
    return KVPools(pairs, kind, _dtype(device_pool), page, _shape(pairs, page), (first, first + len(pairs)))


def _full_of(device_pool: Any) -> tuple[tuple[tuple[Any, ...], ...], str]:
    """The layers of full attention of a pool that has no others, and of which kind it is."""
    name = type(device_pool).__name__
    if name == "MHATokenToKVPool":
        return _pairs_of(device_pool), "full"
    if name == "MLATokenToKVPool" and not device_pool.use_dsa and device_pool.kv_scale_buffer is None:
        return tuple((tensor,) for tensor in device_pool.kv_buffer), "mla"
    raise IdentityError(
        f"the device pool is a {name}; kvtier keeps MHATokenToKVPool and plain MLATokenToKVPool whole, no other"
    )


def _states_of(device_pool: Any, page: int) -> KVPools:
    pairs, kind = _full_of(device_pool.full_kv_pool)
    if not pairs:
        raise IdentityError("the model has no layer of full attention beside its states: start without kvtier")
    shape, mapped = _shape(pairs, page), dict(device_pool.full_attention_layer_id_mapping)
    parts = parts_of(device_pool.mamba_pool, shape.block_bytes)
    recurrent = [int(layer) for layer in device_pool.mamba_pool.mamba_layer_ids]
    places = list[Places]()
    for layer in range(1 + max(*mapped, *recurrent)):
        full = [(0, mapped[layer])] if layer in mapped else []
        places.append((*full, *((1 + part, None) for part in range(len(parts)) if layer in recurrent)))
    return KVPools(
        pairs, kind, _dtype(device_pool.full_kv_pool), page, shape, (0, len(places)), states=parts,
        places=tuple(places), named=described(parts, recurrent, sorted(mapped, key=mapped.__getitem__)),
    )  # fmt: skip


def _windows_of(device_pool: Any, page: int, window: int) -> KVPools:
    full, beside = device_pool.full_kv_pool, device_pool.swa_kv_pool
    for inner in (full, beside):
        if type(inner).__name__ != "MHATokenToKVPool":
            raise IdentityError(
                f"the pool of windows is made of a {type(inner).__name__}; kvtier keeps MHATokenToKVPool whole, and no "
                "other: start this engine with --disable-hybrid-swa-memory, or without kvtier"
            )
    pairs, windows = _pairs_of(full), _pairs_of(beside)
    if not pairs or not windows or _dtype(full) != _dtype(beside):
        raise IdentityError("the pool of windows has no layer of full attention, or none of windows, or two dtypes")
    shape, one = _shape(pairs, page), _shape(windows[:1], page)
    layers = shape.block_bytes // one.block_bytes
    if not layers or -(-len(windows) // layers) > PARTS_MAX:
        raise IdentityError(
            f"{len(windows)} layers of windows do not fit into {PARTS_MAX} blocks of {len(pairs)} layers of full "
            "attention each, which kvtier cuts them into: start this engine without kvtier"
        )
    cuts = [windows[start : start + layers] for start in range(0, len(windows), layers)]
    places = dict[int, Places]()
    for layer, (number, in_window) in device_pool.layers_mapping.items():
        places[layer] = ((1 + number // layers, number % layers) if in_window else (0, number),)
    if sorted(places) != list(range(len(places))) or len(places) != len(pairs) + len(windows):
        raise IdentityError("the pool of windows does not hold the model's layers from the first on")
    parts = tuple(PoolPart(cut, _shape(cut, page)) for cut in cuts)
    listed = tuple(places[layer] for layer in sorted(places))
    return KVPools(
        pairs, "full", _dtype(full), page, shape, (0, len(listed)), parts, places=listed, window=window
    )  # fmt: skip


def _pairs_of(device_pool: Any) -> tuple[tuple[Any, ...], ...]:
    _refuse_mha(device_pool)
    return tuple(zip(device_pool.k_buffer, device_pool.v_buffer, strict=True))


def _shape(pairs: Sequence[tuple[Any, ...]], page: int) -> Shape:
    _, heads, channels = pairs[0][0].shape
    return Shape(len(pairs), len(pairs[0]), page, heads, channels, pairs[0][0].element_size())


def _dtype(device_pool: Any) -> str:
    return str(device_pool.dtype).removeprefix("torch.")


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
