"""The engine's KV tensors as the copy engine sees them: whole pages of blocks, found by storage offset and stride."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.connectors.configuration import digest16
from kvtier.errors import IdentityError
from kvtier.kernels import layout


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The engine's description of its cache: layers in their order, and bytes per block of each.

    A block has a piece per rank. The ranks of one pipeline stage have the same layers, and stand side by side; in the
    scheduler the layers are those of the first stage. Where a stage's ranks hold the same bytes, they share one piece.
    """

    layers: tuple[str, ...]
    page_bytes: tuple[int, ...]
    blocks: int
    layout: str  # the engine's own name of the byte order
    ranks: int
    rank: int
    replicated: bool  # the ranks of a stage hold the same bytes: one piece, written by the first
    overlays: tuple[tuple[str, ...], ...] = ()  # layers of other groups, which lie in the same pages
    groups: str = ""  # name of the set of groups; "" for one
    stages: int = 1  # of the pipeline
    context: int = 1  # ranks that divide the tokens of a block among them
    interleave: int = 1  # tokens that one of these has before the next one has some

    @property
    def width(self) -> int:
        """Ranks of a stage."""
        return self.ranks // self.stages

    @property
    def pieces(self) -> int:
        """How many pieces a block has."""
        return self.stages if self.replicated else self.ranks

    def piece_of(self, rank: int) -> int:
        """Which of them a rank reads."""
        return rank // self.width if self.replicated else rank

    def writes(self, rank: int) -> bool:
        """Whether the rank writes it, too."""
        return not self.replicated or rank % self.width == 0


@dataclass(frozen=True, slots=True)
class Described:
    """KV tensors as the copy engine sees them: whole pages, one after another in layer order."""

    memory: layout.Paged
    shape: layout.Shape
    identity: str
    dtype: str
    absent: tuple[tuple[tuple[int, int], ...], ...] = ()  # see `absent_bytes`

    @property
    def on_gpu(self) -> bool:
        tensor: Any = self.memory.owners[0]
        return bool(tensor.is_cuda)


def describe(cache_layout: CacheLayout, tensors: Mapping[str, Any]) -> Described:
    """Find every layer's page by storage offset and stride. Touches no byte. Raises IdentityError for tensors
    whose layout is not certain."""
    missing = [name for name in cache_layout.layers if name not in tensors]
    if missing:
        raise IdentityError(f"layer {missing[0]} has no KV tensor of its own; such models are not served")
    unit = math.gcd(*cache_layout.page_bytes)
    bases: list[int] = []
    inner: list[str] = []
    strides: set[int] = set()
    regions: dict[int, layout.Region] = {}
    for name, page in zip(cache_layout.layers, cache_layout.page_bytes, strict=True):
        tensor = tensors[name]
        if isinstance(tensor, (list, tuple)):
            raise IdentityError(f"layer {name} keeps its state in {len(tensor)} tensors; such models are not served")
        size, split = tensor.element_size(), tensor.shape[0] // cache_layout.blocks
        if split < 1 or tensor.shape[0] % cache_layout.blocks:
            raise IdentityError(
                f"layer {name}: {tensor.shape[0]} rows do not divide among {cache_layout.blocks} blocks"
            )
        extents, steps = tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])
        run = 1 + sum((n - 1) * step for n, step in zip(extents, steps, strict=True))
        if run != math.prod(extents) or tensor.stride(0) * split * size < page or run * split * size > page:
            raise IdentityError(
                f"layer {name}: a block is no single run of bytes in layout {cache_layout.layout} (shape "
                f"{tuple(tensor.shape)}, strides {tuple(tensor.stride())}); choose a layout with heads inside the "
                "block, such as VLLM_KV_CACHE_LAYOUT=NHD"
            )
        strides.add(tensor.stride(0) * split * size)
        bases += range(tensor.data_ptr(), tensor.data_ptr() + page, unit)
        inner.append(f"{'x'.join(map(str, extents))}/{'x'.join(map(str, steps))}/{split}@{page}")
        storage = tensor.untyped_storage()
        regions[storage.data_ptr()] = layout.Region(storage.data_ptr(), storage.nbytes())
    if len(strides) != 1:
        raise IdentityError(f"layers lie {sorted(strides)} bytes apart per block; equal strides are needed")
    absent = absent_bytes(cache_layout, tensors, *strides)
    shape = layout.Shape.opaque(unit, len(bases))
    memory = layout.Paged(
        bases=np.array(bases, dtype=np.uint64)[:, None],
        count=cache_layout.blocks,
        stride=strides.pop(),
        token=0,
        head=0,
        regions=tuple(sorted(regions.values(), key=lambda region: region.start)),
        owners=tuple(tensors[name] for name in cache_layout.layers),
    ).validate(shape)
    first = tensors[cache_layout.layers[0]]
    kinds = sorted(set(inner))
    identity = f"{len(cache_layout.layers)}*{kinds[0]}" if len(kinds) == 1 else "+".join(inner)
    if parted := _offsets_of_states(cache_layout, tensors):
        identity += f"+states:{digest16(parted)}"
    if cache_layout.context > 1:
        identity += f"+context:{cache_layout.context}/{cache_layout.interleave}"
    return Described(memory, shape, identity, str(first.dtype).removeprefix("torch."), absent)


def absent_bytes(
    cache_layout: CacheLayout, tensors: Mapping[str, Any], stride: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Of each overlay the bytes of a block that none of its layers uses: offset in the block, and count. Blocks lie
    `stride` bytes apart. Raises IdentityError where a layer lies in none of the pages that are copied, or not whole."""
    pages = {_place(tensors.get(name), name): number for number, name in enumerate(cache_layout.layers)}
    sizes = cache_layout.page_bytes
    out = []
    for layers in cache_layout.overlays:
        used: dict[int, list[tuple[int, int]]] = {}
        for name in layers:
            parts = _parts(tensors.get(name))
            number = min((pages[at] for one in parts if (at := _place(one, name)) in pages), default=None)
            if number is None:
                raise IdentityError(
                    f"layer {layers[0]} and its group lie in other memory than {cache_layout.layers[0]} and its group; "
                    "groups of KV cache that share their pages are needed"
                )
            used[number] = _runs(name, parts, cache_layout.blocks, stride, sizes[number])
        absent: list[tuple[int, int]] = []
        for number, size in enumerate(sizes):
            absent += ((sum(sizes[:number]) + first, count) for first, count in _between(used.get(number, []), size))
        out.append(tuple(absent))
    return tuple(out)


def _parts(found: Any) -> list[Any]:
    """The tensors of a layer: a state has several, one behind another in a page."""
    return list(found) if isinstance(found, (list, tuple)) and found else [found]


def _offsets_of_states(cache_layout: CacheLayout, tensors: Mapping[str, Any]) -> list[list[Any]]:
    """Of each layer with a state: where its tensors begin in a page, in their order."""
    names = sorted(name for layers in cache_layout.overlays for name in layers)
    parted = [(name, parts) for name in names if len(parts := _parts(tensors[name])) > 1]
    return [[name, *(part.data_ptr() - parts[0].data_ptr() for part in parts)] for name, parts in parted]


def _place(tensor: Any, name: str) -> tuple[int, int]:
    if tensor is None or isinstance(tensor, (list, tuple)):
        raise IdentityError(f"layer {name} has no KV tensor of its own; such models are not served")
    return tensor.data_ptr(), tensor.untyped_storage().data_ptr()


def _runs(name: str, parts: Sequence[Any], blocks: int, stride: int, page: int) -> list[tuple[int, int]]:
    """Where the tensors of a layer lie in a page: offset and bytes, ascending."""
    begin, runs = min(part.data_ptr() for part in parts), []
    for part in parts:
        size, split = part.element_size(), part.shape[0] // blocks
        extents, steps = tuple(part.shape[1:]), tuple(part.stride()[1:])
        reach = 1 + sum((n - 1) * step for n, step in zip(extents, steps, strict=True))
        apart = part.stride(0) * size
        alike = part.shape[0] == blocks * split and split > 0 and apart * split == stride
        if not alike or reach != math.prod(extents) or (split > 1 and reach * size != apart):
            raise IdentityError(
                f"layer {name}: a block is no single run of bytes in each tensor (shape {tuple(part.shape)}, strides "
                f"{tuple(part.stride())}); such models are not served"
            )
        runs.append((part.data_ptr() - begin, reach * split * size))
    runs.sort()
    if any(first + count > after for (first, count), (after, _) in zip(runs, [*runs[1:], (page, 0)], strict=True)):
        raise IdentityError(f"layer {name}: its tensors overlap or leave its page; such models are not served")
    return runs


def _between(runs: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """What a page of `size` bytes has beside these runs."""
    ends = [0, *(first + count for first, count in runs)]
    begins = [*(first for first, _ in runs), size]
    return [(end, begin - end) for end, begin in zip(ends, begins, strict=True) if begin > end]
