"""Drawn geometries: shapes, engine tensors in any axis order, host slots in theirs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from kvtier.kernels.layout import Order, Paged, Shape, of_slots, of_tensors

DTYPES = {1: torch.uint8, 2: torch.float16, 4: torch.float32}

shapes = st.builds(
    Shape,
    layers=st.integers(1, 4),
    kv=st.integers(1, 2),
    tokens=st.integers(1, 5),
    heads=st.integers(1, 4),
    channels=st.integers(1, 9),
    element_bytes=st.sampled_from([1, 2, 4]),
)


@dataclass(frozen=True, eq=False)
class Problem:
    """Copy `blocks[i]` of the device memory to or from `slots[i]` of the host memory."""

    shape: Shape
    device: Paged
    host: Paged
    blocks: np.ndarray
    slots: np.ndarray


@st.composite
def engine_tensors(draw: st.DrawFn, shape: Shape, blocks: int) -> tuple[list[object], str]:
    """In a drawn axis order: one tensor per layer, (K, V) pairs, or one for all layers, with padding."""
    inner = "".join(draw(st.permutations("BNH"))) + "C"
    kind = draw(st.sampled_from(["per-layer", "pairs", "whole"] if shape.kv == 2 else ["per-layer", "whole"]))
    place = draw(st.integers(0, 3))
    dims = inner if kind == "pairs" else inner[:place] + "K" + inner[place:]
    if kind == "whole":
        place = draw(st.integers(0, dims.index("C")))
        dims = dims[:place] + "L" + dims[place:]
    extents = {"B": blocks, "L": shape.layers, "K": shape.kv, "N": shape.tokens, "H": shape.heads, "C": shape.channels}
    size = [extents[axis] for axis in dims]
    pad = draw(st.integers(0, 2))

    def tensor() -> torch.Tensor:
        full = torch.zeros([*size[:-1], size[-1] + pad], dtype=DTYPES[shape.element_bytes])
        return full[..., : size[-1]]

    if kind == "whole":
        return [tensor()], dims
    if kind == "pairs":
        return [(tensor(), tensor()) for _ in range(shape.layers)], dims
    return [tensor() for _ in range(shape.layers)], dims


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    shape = draw(shapes)
    blocks, slots = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    tensors, dims = draw(engine_tensors(shape, blocks))
    device = of_tensors(tensors, dims, shape)
    slot_bytes = shape.block_bytes + draw(st.sampled_from([0, 0, 1, 3, 64]))
    arena = memoryview(bytearray(slots * slot_bytes))
    host = of_slots(arena, slot_bytes, shape, draw(st.sampled_from(Order)), draw(st.booleans()))
    n = draw(st.integers(0, min(blocks, slots)))
    return Problem(
        shape,
        device,
        host,
        np.array(draw(st.permutations(range(blocks)))[:n], dtype=np.int64),
        np.array(draw(st.permutations(range(slots)))[:n], dtype=np.int64),
    )


def byte_addresses(paged: Paged, shape: Shape, items: np.ndarray) -> np.ndarray:
    """Address of every byte of the items, by plain loops over the definition: [items, bytes of a block]."""
    return np.array(
        [
            [
                int(paged.bases[layer, kv]) + int(item) * paged.stride + token * paged.token + head * paged.head + byte
                for layer in range(shape.layers)
                for kv in range(shape.kv)
                for token in range(shape.tokens)
                for head in range(shape.heads)
                for byte in range(shape.row_bytes)
            ]
            for item in items
        ],
        dtype=np.uint64,
    ).reshape(len(items), shape.block_bytes)
