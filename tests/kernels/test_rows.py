"""Whole rows to and from host pieces, in batches, over a simulated device."""

from __future__ import annotations

import ctypes
from random import Random

import numpy as np
import pytest
import torch
from simulated import COMPUTE, SimulatedDriver

from kvtier.arena import Arena
from kvtier.errors import InvalidRequest, TierError
from kvtier.kernels.rows import RowCopier
from kvtier.tiers.device import DevicePool

ROW, RANKS = 96, 2


@pytest.fixture
def driver(kernel_library: ctypes.CDLL) -> SimulatedDriver:
    return SimulatedDriver(kernel_library, Random(3))


def copier_of(driver: SimulatedDriver) -> tuple[RowCopier, torch.Tensor, list[memoryview]]:
    rows = torch.arange(8 * ROW, dtype=torch.int64).remainder(249).to(torch.uint8).reshape(8, ROW)
    arenas = [memoryview(bytearray(8 * 64)) for _ in range(RANKS)]
    return RowCopier(rows, driver, sleep=lambda _: None), rows, arenas


def pieces(arenas: list[memoryview], slot: int) -> tuple[memoryview, ...]:
    return tuple(arena[slot * 64 : slot * 64 + ROW // RANKS] for arena in arenas)


def test_rows_come_back_as_they_went(driver: SimulatedDriver) -> None:
    copier, rows, arenas = copier_of(driver)
    before = rows.clone()
    copier.out([5, 0, 3], [pieces(arenas, slot) for slot in (1, 7, 2)])
    for row, slot in ((5, 1), (0, 7), (3, 2)):
        assert b"".join(map(bytes, pieces(arenas, slot))) == before[row].numpy().tobytes()
    assert bytes(arenas[0][0:64]) == bytes(64), "no other slot was written"
    rows.zero_()
    copier.into([pieces(arenas, slot) for slot in (1, 7, 2)], [4, 6, 2])
    expected = torch.zeros_like(rows)
    expected[4], expected[6], expected[2] = before[5], before[0], before[3]
    assert torch.equal(rows, expected)
    copier.out([], [])
    copier.close()
    assert driver.closed


def test_a_copy_waits_for_what_the_caller_has_enqueued(driver: SimulatedDriver) -> None:
    copier, rows, arenas = copier_of(driver)
    driver.compute(lambda: rows[2].fill_(7))
    copier.out([2], [pieces(arenas, 0)])
    assert b"".join(map(bytes, pieces(arenas, 0))) == bytes([7]) * ROW
    assert [call.name for call in driver.calls] == ["record", "wait", "copy", "record"]
    assert driver.calls[0].stream == COMPUTE != driver.calls[1].stream


def test_neighbours_travel_as_one_run_and_pinned_memory_as_a_batch(driver: SimulatedDriver) -> None:
    seen: list[bool] = []
    inner = driver.copy
    driver.copy = lambda runs, stream, pageable=False: (seen.append(pageable), inner(runs, stream, pageable=pageable))  # type: ignore[assignment,misc,return-value]
    rows = torch.arange(8 * 64, dtype=torch.int64).to(torch.uint8).reshape(8, 64)
    arena = memoryview(bytearray(8 * 64))
    copier = RowCopier(rows, driver, sleep=lambda _: None)
    slots = [(arena[64 * slot : 64 * slot + 64],) for slot in range(8)]
    copier.out([1, 2, 3], slots[4:7])
    assert [call.detail for call in driver.calls if call.name == "copy"] == [1] and seen == [True]
    address = np.frombuffer(arena, np.uint8).ctypes.data
    assert copier.pin(address, arena.nbytes, 64)
    copier.out([1, 2, 3], slots[4:7])
    foreign = memoryview(bytearray(64))
    copier.out([1, 2], [slots[0], (foreign,)])
    assert seen == [True, False, True], "one piece outside the locked memory makes the copy pageable"
    assert bytes(foreign) == rows[2].numpy().tobytes()
    copier.close()
    assert not driver.registered


def test_a_refused_copy_raises_once_its_part_is_over(driver: SimulatedDriver) -> None:
    copier, rows, arenas = copier_of(driver)
    driver.trouble.refuse["copy"] = 1
    with pytest.raises(TierError, match="copy"):
        copier.out([0, 2, 4], [pieces(arenas, slot) for slot in (0, 2, 4)])
    assert not driver.step(), "nothing is under way any more"
    copier.out([0], [pieces(arenas, 0)])
    assert b"".join(map(bytes, pieces(arenas, 0))) == rows[0].numpy().tobytes()
    driver.trouble.dead = True
    with pytest.raises(TierError):
        copier.out([0], [pieces(arenas, 0)])


def test_a_device_pool_copies_through_it(driver: SimulatedDriver) -> None:
    """A pool on a GPU, played by one in RAM, and an arena of two ranks."""
    pool = DevicePool(6, ROW)
    arena = Arena(ROW, RANKS, 1 << 16)
    assert not pool.lock_host(arena), "a pool in RAM has no bus to lock memory for"
    pool._copier = RowCopier(pool.rows, driver, sleep=lambda _: None)
    pool.rows[:] = torch.arange(6, dtype=torch.uint8)[:, None] + torch.arange(ROW, dtype=torch.uint8)
    before = pool.rows.clone()
    arena.open()
    assert pool.lock_host(arena) and len(driver.registered) == RANKS
    pool.copy_out([4, 1], [arena.pieces(0), arena.pieces(3)])
    assert b"".join(map(bytes, arena.pieces(0))) == before[4].numpy().tobytes()
    assert b"".join(map(bytes, arena.pieces(3))) == before[1].numpy().tobytes()
    pool.copy_in([arena.pieces(3)], [5])
    assert torch.equal(pool.rows[5], before[1]) and torch.equal(pool.rows[:5], before[:5])
    with pytest.raises(InvalidRequest):
        pool.copy_out([0], [(memoryview(bytearray(ROW - 1)),)])
    pool.unlock_host()
    pool.unlock_host()
    assert not driver.registered
    arena.close()
