"""DevicePool: bytes of blocks in and out of a tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.arena import Arena
from kvtier.errors import CapacityError, InvalidRequest
from kvtier.testing import chain_of, payload_of, sample_namespace
from kvtier.tiers.device import DevicePool

torch = pytest.importorskip("torch")
BLOCK = 8192


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    memory = Arena(BLOCK, request.param, 8 * BLOCK)
    memory.open()
    yield memory
    memory.close()


def test_bytes_come_back_from_the_host_as_they_went_there(arena: Arena) -> None:
    pool = DevicePool(6, BLOCK)
    pool.attach(arena)
    chain = chain_of(sample_namespace(BLOCK), 4)
    payloads = [payload_of(key, BLOCK) for key in chain]
    slots = pool.allocate(4)
    for slot, payload in zip(slots, payloads, strict=True):
        pool.rows[slot] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    places = [(5, 0), (0, 0), (7, 0), (2, 0)]
    assert pool.copy_out(slots, places) == [True] * 4
    assert [b"".join(arena.pieces(number)) for number, _ in places] == payloads
    pool.free(slots)
    pool.rows.zero_()
    again = pool.allocate(4)
    assert pool.copy_in(places, again) == [True] * 4
    assert [bytes(pool.block(slot)) for slot in again] == payloads
    pool.detach()
    pool.detach()


def test_a_stale_place_is_refused_and_left_alone(arena: Arena) -> None:
    pool = DevicePool(2, BLOCK)
    pool.attach(arena)
    pool.rows.fill_(1)
    slots = pool.allocate(2)
    assert pool.copy_out(slots, [(0, 3), (1, 3)]) == [True, True]
    pool.rows.fill_(2)
    assert pool.copy_out(slots, [(0, 3), (1, 4)]) == [False, True]
    assert {bytes(piece)[0] for piece in arena.pieces(0)} == {1} and {bytes(p)[0] for p in arena.pieces(1)} == {2}
    pool.detach()


def test_copies_without_an_arena_or_a_place_are_refused(arena: Arena) -> None:
    pool = DevicePool(2, BLOCK)
    slots = pool.allocate(2)
    with pytest.raises(InvalidRequest, match="no arena"):
        pool.copy_out(slots, [(0, 0), (1, 0)])
    pool.attach(arena)
    with pytest.raises(InvalidRequest, match="2 blocks and 1 places"):
        pool.copy_in([(0, 0)], slots)
    pool.detach()


def test_a_typed_view_is_the_memory_itself() -> None:
    pool = DevicePool(3, BLOCK)
    blocks = pool.typed(torch.float32, (2, 2, 16, 32))
    blocks[1] = torch.arange(2048, dtype=torch.float32).view(2, 2, 16, 32)
    assert bytes(pool.block(1)) == torch.arange(2048, dtype=torch.float32).numpy().tobytes()
    with pytest.raises(InvalidRequest, match="8192"):
        pool.typed(torch.float32, (2, 2, 16, 31))


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match="g1"):
        DevicePool(16, 1 << 56)
