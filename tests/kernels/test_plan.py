"""The planner: every byte of every block copied once, none outside, in few runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from geometry import Problem, byte_addresses, problems
from hypothesis import given, settings

from kvtier.errors import InvalidRequest
from kvtier.kernels.layout import (
    Region,
    Shape,
    of_arenas,
    of_pool,
    of_slots,
    of_tensors,
)
from kvtier.kernels.plan import Planner, Runs


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
def test_every_byte_is_covered_once_and_none_outside(problem: Problem) -> None:
    shape, device, host, blocks, slots = problem.shape, problem.device, problem.host, problem.blocks, problem.slots
    on_device, on_host = byte_addresses(device, shape, blocks).ravel(), byte_addresses(host, shape, slots).ravel()
    stored = expand(Planner(device, host, shape).runs(blocks, slots))
    assert stored == dict(zip(on_host.tolist(), on_device.tolist(), strict=True))
    loaded = expand(Planner(host, device, shape).runs(slots, blocks))
    assert loaded == dict(zip(on_device.tolist(), on_host.tolist(), strict=True))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_runs_are_maximal_and_stay_inside_their_region(problem: Problem) -> None:
    device, host = problem.device, problem.host
    runs = Planner(device, host, problem.shape).runs(problem.blocks, problem.slots)
    rows = list(zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True))
    for src, dst, nbytes in rows:
        assert any(region.start <= src and src + nbytes <= region.end for region in device.regions)
        assert any(region.start <= dst and dst + nbytes <= region.end for region in host.regions)
    continued = {(src + n, dst + n) for src, dst, n in rows} & {(src, dst) for src, dst, _ in rows}
    src_starts, dst_starts = ({region.start for region in side.regions} for side in (device, host))
    for src, dst in continued:
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


def test_axis_orders_of_known_engines_are_accepted() -> None:
    shape = Shape(layers=2, kv=2, tokens=3, heads=2, channels=4, element_bytes=2)
    extents = {"L": 2, "B": 5, "K": 2, "N": 3, "H": 2}
    for order in permutations("LBHN"):
        dims = "".join(order) + "KC"  # K and V packed per head, any physical order around them
        tensor = torch.zeros([*(extents[axis] for axis in dims[:-1]), 4], dtype=torch.float16)
        assert of_tensors([tensor], dims, shape).count == 5


SHAPE = Shape(layers=2, kv=2, tokens=4, heads=2, channels=8, element_bytes=2)


def cache_of(*extents: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(*extents, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "dims", "says"),
    [
        ([cache_of(3, 2, 4, 2, 8)], "BKNHC", "expected 2 tensors for dims 'BKNHC', got 1"),
        ([cache_of(3, 2, 4, 2)] * 2, "BKNHC", "names 5 axes, the tensor has 4"),
        ([cache_of(3, 2, 4, 2, 8, dtype=torch.float32)] * 2, "BKNHC", "elements of 4 bytes, not 2"),
        ([cache_of(3, 2, 4, 2, 9)] * 2, "BKNHC", "axis C has 9 entries, expected 8"),
        ([(cache_of(3, 4, 2, 8),) * 3] * 2, "BNHC", r"a \(K, V\) pair needs"),
        ([(cache_of(3, 2, 4, 2, 8),) * 2] * 2, "BKNHC", r"a \(K, V\) pair needs"),
        ([cache_of(3, 2, 4, 2, 8), cache_of(4, 2, 4, 2, 8)], "BKNHC", "equal strides and block counts"),
        ([cache_of(3, 2, 4, 2, 8), cache_of(2, 3, 4, 2, 8).transpose(0, 1)], "BKNHC", "equal strides"),
    ],
)
def test_tensors_that_are_no_cache_of_this_shape_are_named(tensors: list[torch.Tensor], dims: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        of_tensors(tensors, dims, SHAPE)


def test_memory_that_cannot_hold_the_blocks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"Shape\.heads: expected at least 1, got 0"):
        Shape(layers=1, kv=1, tokens=1, heads=0, channels=1, element_bytes=1)
    pool = torch.zeros(4, 96, dtype=torch.uint8)
    for wrong in (pool[0], pool.to(torch.int32), pool.t()):
        with pytest.raises(InvalidRequest, match="contiguous rows"):
            of_pool(wrong)
    with pytest.raises(InvalidRequest, match="do not divide into 5 equal pieces"):
        of_pool(pool, pieces=5)
    _, halves = of_pool(pool, pieces=2)
    arena = memoryview(bytearray(4096))
    for arenas, slot_bytes in (([arena], 64), ([arena] * 2, 40)):
        with pytest.raises(InvalidRequest, match="do not fit"):
            of_arenas(arenas, slot_bytes, halves)
    with pytest.raises(InvalidRequest, match="does not fit a slot"):
        of_slots(arena, SHAPE.block_bytes - 1, SHAPE)


def test_a_description_that_contradicts_itself_is_refused() -> None:
    paged, shape = of_pool(torch.zeros(4, 96, dtype=torch.uint8))
    (whole,) = paged.regions
    half = Region(whole.start, whole.nbytes // 2)
    for wrong, says in (
        (replace(paged, bases=paged.bases[:, [0, 0]]), "bases: expected"),
        (replace(paged, count=-1), "must not be negative"),
        (replace(paged, stride=-96), "must not be negative"),
        (replace(paged, regions=()), "disjoint regions in ascending order"),
        (replace(paged, regions=(whole, half)), "disjoint regions in ascending order"),
        (replace(paged, regions=(half,)), "outside its memory"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            wrong.validate(shape)
    assert replace(paged, count=0, regions=()).validate(shape).count == 0, "nothing is there to lie anywhere"
