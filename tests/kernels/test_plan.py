"""The planner: every byte of every block copied once, none outside, in few runs."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import InvalidRequest
from kvtier.kernels.layout import (
    Order,
    Paged,
    Region,
    Shape,
    of_arenas,
    of_pool,
    of_slots,
    of_tensors,
    slot_bytes_for,
)
from kvtier.kernels.plan import Planner, Runs

shapes = st.builds(
    Shape,
    layers=st.integers(1, 4),
    kv=st.integers(1, 2),
    tokens=st.integers(1, 5),
    heads=st.integers(1, 4),
    channels=st.integers(1, 9),
    element_bytes=st.sampled_from([1, 2, 4]),
)
DTYPES = {1: torch.uint8, 2: torch.float16, 4: torch.float32}


@st.composite
def device_memory(draw: st.DrawFn, shape: Shape, blocks: int) -> tuple[list[object], str]:
    """Engine tensors in a drawn axis order: one per layer, (K, V) pairs, or one for all layers, with padding."""
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
def problems(draw: st.DrawFn) -> tuple[Shape, Paged, Paged, np.ndarray, np.ndarray]:
    shape = draw(shapes)
    blocks, slots = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    tensors, dims = draw(device_memory(shape, blocks))
    device = of_tensors(tensors, dims, shape)
    slot_bytes = shape.block_bytes + draw(st.sampled_from([0, 0, 1, 3, 64]))
    arena = memoryview(bytearray(slots * slot_bytes))
    host = of_slots(arena, slot_bytes, shape, draw(st.sampled_from(Order)), draw(st.booleans()))
    n = draw(st.integers(0, min(blocks, slots)))
    some_blocks = np.array(draw(st.permutations(range(blocks)))[:n], dtype=np.int64)
    some_slots = np.array(draw(st.permutations(range(slots)))[:n], dtype=np.int64)
    return shape, device, host, some_blocks, some_slots


def row_addresses(paged: Paged, shape: Shape, items: np.ndarray) -> np.ndarray:
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


def expand(runs: Runs) -> dict[int, int]:
    """Destination byte → source byte; fails on a byte written twice."""
    pairs: dict[int, int] = {}
    for src, dst, nbytes in zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True):
        for offset in range(nbytes):
            assert dst + offset not in pairs, "a byte is written twice"
            pairs[dst + offset] = src + offset
    return pairs


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_every_byte_is_covered_once_and_none_outside(
    problem: tuple[Shape, Paged, Paged, np.ndarray, np.ndarray],
) -> None:
    shape, device, host, blocks, slots = problem
    on_device, on_host = row_addresses(device, shape, blocks).ravel(), row_addresses(host, shape, slots).ravel()
    stored = expand(Planner(device, host, shape).runs(blocks, slots))
    assert stored == dict(zip(on_host.tolist(), on_device.tolist(), strict=True))
    loaded = expand(Planner(host, device, shape).runs(slots, blocks))
    assert loaded == dict(zip(on_device.tolist(), on_host.tolist(), strict=True))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_runs_are_maximal_and_stay_inside_their_region(
    problem: tuple[Shape, Paged, Paged, np.ndarray, np.ndarray],
) -> None:
    shape, device, host, blocks, slots = problem
    runs = Planner(device, host, shape).runs(blocks, slots)
    for paged, starts in ((device, runs.src), (host, runs.dst)):
        for start, nbytes in zip(starts.tolist(), runs.nbytes.tolist(), strict=True):
            assert any(region.start <= start and start + nbytes <= region.end for region in paged.regions)
    ends = {
        (src + n, dst + n)
        for src, dst, n in zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True)
    }
    begins = set(zip(runs.src.tolist(), runs.dst.tolist(), strict=True))
    src_starts = {region.start for region in device.regions}
    dst_starts = {region.start for region in host.regions}
    for src, dst in ends & begins:
        assert src in src_starts or dst in dst_starts, "two runs that continue each other were not joined"


def test_neighbouring_whole_blocks_become_one_run() -> None:
    pool = torch.zeros(16, 4096, dtype=torch.uint8)
    device, shape = of_pool(pool)
    host = of_arenas([memoryview(bytearray(16 * 4096))], 4096, shape)
    runs = Planner(device, host, shape).runs(np.arange(3, 9), np.arange(5, 11))
    assert runs.nbytes.tolist() == [6 * 4096]
    shuffled = np.array([5, 3, 4])
    assert len(Planner(device, host, shape).runs(shuffled, shuffled)) == 1, "the order of a command does not matter"
    assert len(Planner(device, host, shape).runs(np.array([3, 5]), np.array([5, 6]))) == 2


def test_layer_first_tensors_give_one_fragment_per_layer_and_plane() -> None:
    shape = Shape(layers=4, kv=2, tokens=16, heads=8, channels=128, element_bytes=2)
    layers = [torch.zeros(2, 10, 16, 8, 128, dtype=torch.float16) for _ in range(4)]
    device = of_tensors(layers, "KBNHC", shape)
    host = of_slots(memoryview(bytearray(8 * shape.block_bytes)), shape.block_bytes, shape)
    planner = Planner(device, host, shape)
    assert planner.fragments == 8
    assert planner.fragment_bytes == 16 * 8 * 128 * 2
    assert len(planner.runs(np.array([1, 2]), np.array([0, 1]))) == 16


def test_a_run_is_cut_at_a_seam_between_two_registrations() -> None:
    pool = torch.zeros(8, 4096, dtype=torch.uint8)
    device, shape = of_pool(pool)
    host = of_arenas([memoryview(bytearray(8 * 4096))], 4096, shape)
    whole = host.regions[0]
    halves = (Region(whole.start, whole.nbytes // 2), Region(whole.start + whole.nbytes // 2, whole.nbytes // 2))
    registered = host.at(host.bases, host.count, host.stride, halves)
    every = np.arange(8)
    assert Planner(device, host, shape).runs(every, every).nbytes.tolist() == [8 * 4096]
    assert Planner(device, registered, shape).runs(every, every).nbytes.tolist() == [4 * 4096] * 2


def test_ranks_send_their_piece_to_their_own_arena() -> None:
    pool = torch.arange(4 * 6, dtype=torch.uint8).reshape(4, 6)
    device, shape = of_pool(pool, pieces=2)
    arenas = [memoryview(bytearray(4 * 8)) for _ in range(2)]
    host = of_arenas(arenas, 8, shape)
    pairs = expand(Planner(device, host, shape).runs(np.array([2]), np.array([1])))
    base, target = pool.data_ptr(), [int(host.bases[rank, 0]) for rank in range(2)]
    assert pairs == {target[rank] + 8 + byte: base + 12 + rank * 3 + byte for rank in range(2) for byte in range(3)}


@pytest.mark.parametrize("dims", ["BNHC", "BKNH", "KNHC", "BBKNHC", "XKBNHC"])
def test_wrong_axis_names_are_refused(dims: str) -> None:
    shape = Shape(layers=1, kv=2, tokens=2, heads=2, channels=2, element_bytes=2)
    tensor = torch.zeros([2] * len(dims), dtype=torch.float16)
    with pytest.raises(InvalidRequest):
        of_tensors([tensor], dims, shape)
    assert of_tensors([torch.zeros(2, 2, 2, 2, 2, dtype=torch.float16)], "BKNHC", shape).count == 2


def test_overlapping_rows_are_refused() -> None:
    shape = Shape(layers=1, kv=1, tokens=4, heads=2, channels=8, element_bytes=1)
    expanded = torch.zeros(3, 1, 2, 8, dtype=torch.uint8).expand(3, 4, 2, 8)
    with pytest.raises(InvalidRequest, match="overlap"):
        of_tensors([expanded], "BNHC", shape)
    assert of_tensors([expanded.contiguous()], "BNHC", shape).count == 3


def test_memory_too_short_for_its_slots_is_refused() -> None:
    shape = Shape.opaque(100)
    arena = memoryview(bytearray(1000))
    host = of_arenas([arena], 100, shape)
    assert host.count == 10
    with pytest.raises(InvalidRequest, match="outside"):
        host.at(host.bases, 11, host.stride, host.regions).validate(shape)


def test_channels_that_are_not_contiguous_are_refused() -> None:
    shape = Shape(layers=1, kv=1, tokens=2, heads=3, channels=4, element_bytes=2)
    tensor = torch.zeros(5, 2, 4, 3, dtype=torch.float16).transpose(2, 3)
    with pytest.raises(InvalidRequest, match="contiguous"):
        of_tensors([tensor], "BNHC", shape)


def test_slots_are_aligned_for_direct_disk_access() -> None:
    assert [slot_bytes_for(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_axis_orders_of_known_engines_are_accepted() -> None:
    shape = Shape(layers=2, kv=2, tokens=3, heads=2, channels=4, element_bytes=2)
    extents = {"L": 2, "B": 5, "K": 2, "N": 3, "H": 2}
    for order in permutations("LBHN"):
        dims = "".join(order) + "KC"  # K and V packed per head, any physical order around them
        tensor = torch.zeros([*(extents[axis] for axis in dims[:-1]), 4], dtype=torch.float16)
        assert of_tensors([tensor], dims, shape).count == 5
