"""Layout of a block's bytes: one description for engine tensors, pools and host slots.

A block has up to five axes: layer, kv (K before V), token, head and channel. A `Paged` memory holds many items
(device blocks, or host slots) of one `Shape`; the address of an element of item i is

    bases[layer, kv] + i * stride + token * token_stride + head * head_stride + channel * element_bytes

so an engine's layer-first tensors (one base per layer), NHD and HND order, K and V split or packed, a pool of
whole blocks and a block-major host slot differ in numbers only, and a copy between any two is one plan.
Bytes without inner structure (a whole block, an opaque page) are one long row of one-byte channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import InvalidRequest

Addresses = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


class Order(StrEnum):
    """Nesting of tokens and heads inside a layer of a slot."""

    NHD = "NHD"  # token, head, channel
    HND = "HND"  # head, token, channel


@dataclass(frozen=True, slots=True)
class Shape:
    """Extents of one block. `kv` is 2 for K and V, 1 where there is one latent vector or an opaque page."""

    layers: int
    kv: int
    tokens: int
    heads: int
    channels: int
    element_bytes: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv", "tokens", "heads", "channels", "element_bytes"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"Shape.{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def row_bytes(self) -> int:
        """The channels of one head of one token: contiguous in every layout."""
        return self.channels * self.element_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers * self.kv * self.tokens * self.heads * self.row_bytes

    @classmethod
    def opaque(cls, nbytes: int, pieces: int = 1) -> Shape:
        """A block of `pieces` runs of `nbytes` each, without inner structure."""
        return cls(layers=pieces, kv=1, tokens=1, heads=1, channels=nbytes, element_bytes=1)


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of memory that one allocation or registration covers. A single copy never spans two."""

    start: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """Memory of `count` items. Keeps the `owners` of the memory alive.

    bases    uint64[layers, kv], address of that layer's K or V in item 0
    stride   bytes from one item to the next; `token` and `head` likewise inside an item
    regions  ascending, disjoint; every byte of every item lies in one of them
    """

    bases: Addresses
    count: int
    stride: int
    token: int
    head: int
    regions: tuple[Region, ...]
    owners: tuple[object, ...] = field(default=(), repr=False)

    def rows(self, shape: Shape) -> Addresses:
        """Addresses of item 0's rows, uint64[layers, kv, tokens, heads]."""
        tokens = np.arange(shape.tokens, dtype=np.uint64)[:, None] * np.uint64(self.token)
        heads = np.arange(shape.heads, dtype=np.uint64)[None, :] * np.uint64(self.head)
        rows: Addresses = self.bases[:, :, None, None] + (tokens + heads)[None, None]
        return rows

    def at(self, new_bases: Addresses, count: int, stride: int, regions: tuple[Region, ...]) -> Paged:
        """The same inner structure in other memory."""
        return replace(self, bases=new_bases, count=count, stride=stride, regions=regions, owners=())

    def of_layers(self, part: slice) -> Paged:
        """The same memory, of which only some layers are meant."""
        return replace(self, bases=self.bases[part])

    def validate(self, shape: Shape) -> Paged:
        """Raise InvalidRequest unless every row of every item lies inside one region and the rows of neighbouring
        items are disjoint (overlapping ones, as in an expanded tensor, cannot be written without a race)."""
        if self.bases.shape != (shape.layers, shape.kv):
            raise InvalidRequest(f"Paged.bases: expected {(shape.layers, shape.kv)}, got {self.bases.shape}")
        if self.count < 0 or min(self.stride, self.token, self.head) < 0:
            raise InvalidRequest("Paged: count and strides must not be negative")
        if self.count == 0:
            return self
        first = self.rows(shape).ravel()
        pair = np.sort(first if self.count == 1 else np.concatenate([first, first + np.uint64(self.stride)]))
        if pair.size > 1 and int(np.diff(pair).min()) < shape.row_bytes:
            raise InvalidRequest(
                "Paged: rows overlap; strides must keep the elements of a block and its neighbour apart"
            )
        last = first + np.uint64((self.count - 1) * self.stride)
        starts = np.array([region.start for region in self.regions], dtype=np.uint64)
        ends = np.array([region.end for region in self.regions], dtype=np.uint64)
        if not len(starts) or np.any(starts[1:] < ends[:-1]):
            raise InvalidRequest("Paged.regions: expected disjoint regions in ascending order")
        for rows in (first, last):
            home = np.searchsorted(starts, rows, side="right").astype(np.int64) - 1
            inside = (home >= 0) & (rows + np.uint64(shape.row_bytes) <= ends[np.maximum(home, 0)])
            if not np.all(inside):
                raise InvalidRequest("Paged: a row lies outside its memory; check count, strides and regions")
        return self


def of_tensors(tensors: Sequence[Any], dims: str, shape: Shape) -> Paged:
    """Describe an engine's KV tensors (torch, any device, any strides). Touches no byte; keeps the tensors alive.

    `dims` names each tensor's axes: B block, L layer, K kv, N token, H head, C channel. Axes of extent 1 may be
    left out. Without L there is one tensor per layer; an entry may be a (K, V) pair where K and V are separate
    tensors. Examples: "KBNHC" or "BKNHC" per layer, "LBHNKC" with K and V packed per head, "BC" for opaque pages.
    Raises InvalidRequest for an extent or stride that does not fit `shape`.
    """
    pairs = [entry if isinstance(entry, (tuple, list)) else (entry,) for entry in tensors]
    _check_dims(dims, pairs, shape)
    views = [[_axes(tensor, dims, shape) for tensor in pair] for pair in pairs]
    first = views[0][0]
    for view in (view for row in views for view in row):
        if any(view[axis] != first[axis] for axis in "BNHC") or view["count"] != first["count"]:
            raise InvalidRequest("of_tensors: tensors of one cache must have equal strides and block counts")
    bases = np.zeros((shape.layers, shape.kv), dtype=np.uint64)
    for layer in range(shape.layers):
        for kv in range(shape.kv):
            pair = views[0] if "L" in dims else views[layer]
            view = pair[kv] if len(pair) == 2 else pair[0]
            bases[layer, kv] = view["start"] + layer * view["L"] * ("L" in dims) + kv * view["K"] * (len(pair) == 1)
    flat = [tensor for pair in pairs for tensor in pair]
    return Paged(
        bases=bases,
        count=first["count"],
        stride=first["B"],
        token=first["N"],
        head=first["H"],
        regions=_join(Region(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in flat),
        owners=tuple(flat),
    ).validate(shape)


def of_pool(pool: Any, pieces: int = 1) -> tuple[Paged, Shape]:
    """Describe a pool of whole blocks: a uint8 tensor `[blocks, block_bytes]` whose rows are contiguous.

    `pieces` equal parts of each block go to as many arenas, one per rank. Keeps the tensor alive.
    """
    if pool.dim() != 2 or pool.element_size() != 1 or pool.stride(1) != 1:
        raise InvalidRequest("of_pool: expected a uint8 tensor [blocks, block_bytes] with contiguous rows")
    blocks, block_bytes = pool.shape
    if block_bytes % pieces:
        raise InvalidRequest(f"of_pool: {block_bytes} bytes per block do not divide into {pieces} equal pieces")
    shape = Shape.opaque(block_bytes // pieces, pieces)
    base = pool.data_ptr()
    bases = np.array([[base + piece * shape.row_bytes] for piece in range(pieces)], dtype=np.uint64)
    storage = pool.untyped_storage()
    regions = (Region(storage.data_ptr(), storage.nbytes()),)
    paged = Paged(bases, blocks, pool.stride(0), token=0, head=0, regions=regions, owners=(pool,))
    return paged.validate(shape), shape


def of_arenas(arenas: Sequence[memoryview], slot_bytes: int, shape: Shape) -> Paged:
    """Describe host slots for whole blocks: slot i is the `slot_bytes` at i * slot_bytes of every arena.

    `shape` comes from `of_pool`: one piece per arena. Holds the arenas' buffers exported until dropped.
    """
    if len(arenas) != shape.layers or shape.row_bytes > slot_bytes:
        raise InvalidRequest(
            f"of_arenas: {shape.layers} pieces of {shape.row_bytes} bytes do not fit {len(arenas)} arenas "
            f"with slots of {slot_bytes} bytes"
        )
    held = [np.frombuffer(arena, dtype=np.uint8) for arena in arenas]
    return Paged(
        bases=np.array([[array.ctypes.data] for array in held], dtype=np.uint64),
        count=min(array.nbytes // slot_bytes for array in held),
        stride=slot_bytes,
        token=0,
        head=0,
        regions=_join(Region(array.ctypes.data, array.nbytes) for array in held),
        owners=tuple(held),
    ).validate(shape)


def of_slots(arena: memoryview, slot_bytes: int, shape: Shape, order: Order = Order.NHD, packed: bool = False) -> Paged:
    """Describe one rank's block-major host slots with a known inner order: layer, kv, then `order`.

    `packed` puts K and V of one head side by side (channel axis K‖V) instead of all K of a layer before all V.
    Holds the arena's buffer exported until dropped.
    """
    if shape.block_bytes > slot_bytes:
        raise InvalidRequest(f"of_slots: a block of {shape.block_bytes} bytes does not fit a slot of {slot_bytes}")
    held = np.frombuffer(arena, dtype=np.uint8)
    row = shape.row_bytes * (shape.kv if packed else 1)
    head, token = (row, row * shape.heads) if order is Order.NHD else (row * shape.tokens, row)
    plane = shape.row_bytes if packed else shape.tokens * shape.heads * shape.row_bytes
    layer = shape.kv * shape.tokens * shape.heads * shape.row_bytes
    layers = np.arange(shape.layers, dtype=np.uint64)[:, None] * np.uint64(layer)
    planes = np.arange(shape.kv, dtype=np.uint64)[None, :] * np.uint64(plane)
    return Paged(
        bases=np.uint64(held.ctypes.data) + layers + planes,
        count=held.nbytes // slot_bytes,
        stride=slot_bytes,
        token=token,
        head=head,
        regions=_join([Region(held.ctypes.data, held.nbytes)]),
        owners=(held,),
    ).validate(shape)


def _check_dims(dims: str, pairs: Sequence[Sequence[Any]], shape: Shape) -> None:
    if len(set(dims)) != len(dims) or not set(dims) <= set("BLKNHC") or "B" not in dims:
        raise InvalidRequest(f"dims: expected B and letters of LKNHC, each once, got {dims!r}")
    expected = 1 if "L" in dims else shape.layers
    if len(pairs) != expected:
        raise InvalidRequest(f"of_tensors: expected {expected} tensors for dims {dims!r}, got {len(pairs)}")
    for pair in pairs:
        if len(pair) not in (1, 2) or (len(pair) == 2 and (shape.kv != 2 or "K" in dims)):
            raise InvalidRequest("of_tensors: a (K, V) pair needs kv == 2 and no K axis in dims")
        if len(pair) == 1 and shape.kv > 1 and "K" not in dims:
            raise InvalidRequest(f"of_tensors: kv == {shape.kv} needs a K axis in dims or (K, V) pairs")


def _axes(tensor: Any, dims: str, shape: Shape) -> dict[str, int]:
    """Byte strides by axis letter, with "start" and "count", after checking every extent."""
    if tensor.dim() != len(dims):
        raise InvalidRequest(f"of_tensors: dims {dims!r} names {len(dims)} axes, the tensor has {tensor.dim()}")
    if tensor.element_size() != shape.element_bytes:
        raise InvalidRequest(f"of_tensors: elements of {tensor.element_size()} bytes, not {shape.element_bytes}")
    want = {"L": shape.layers, "K": shape.kv, "N": shape.tokens, "H": shape.heads, "C": shape.channels}
    axes = dict.fromkeys("BLKNHC", 0)
    for axis, extent, stride in zip(dims, tensor.shape, tensor.stride(), strict=True):
        if axis != "B" and extent != want[axis]:
            raise InvalidRequest(f"of_tensors: axis {axis} has {extent} entries, expected {want[axis]}")
        axes[axis] = int(stride) * shape.element_bytes
    for axis, extent in want.items():
        if axis not in dims and axis not in "LK" and extent != 1:
            raise InvalidRequest(f"of_tensors: axis {axis} of extent {extent} is missing in dims {dims!r}")
    if "C" in dims and shape.channels > 1 and axes["C"] != shape.element_bytes:
        raise InvalidRequest("of_tensors: the channels of one head must be contiguous")
    axes["C"] = shape.element_bytes
    return axes | {"start": int(tensor.data_ptr()), "count": int(tensor.shape[dims.index("B")])}


def _join(regions: Any) -> tuple[Region, ...]:
    """Regions in ascending order without repeats (several views of one storage name it several times)."""
    return tuple(sorted({region for region in regions if region.nbytes}, key=lambda region: region.start))
