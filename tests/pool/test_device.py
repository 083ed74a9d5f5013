"""DevicePool: bytes of blocks in and out of a tensor."""

from __future__ import annotations

import pytest

from kvtier.errors import CapacityError, InvalidRequest
from kvtier.terms import BUILTIN, Lifetime
from kvtier.testing import chain_of, payload_of, sample_namespace
from kvtier.tiers.device import DevicePool

torch = pytest.importorskip("torch")
BLOCK = 4096


def views(*payloads: bytes, ranks: int = 1) -> list[tuple[memoryview, ...]]:
    step = BLOCK // ranks
    return [tuple(memoryview(p)[r * step : (r + 1) * step] for r in range(ranks)) for p in payloads]


@pytest.mark.parametrize("ranks", [1, 2])
def test_bytes_come_out_as_they_went_in(ranks: int) -> None:
    pool = DevicePool(6, BLOCK)
    chain = chain_of(sample_namespace(BLOCK), 4)
    payloads = [payload_of(key, BLOCK) for key in chain]
    slots = pool.allocate(4)
    pool.copy_in(views(*payloads, ranks=ranks), slots)
    pool.confirm(slots, chain, Lifetime.of(BUILTIN["24h"], 0.0))
    pool.free(slots)
    found = pool.pin(chain, 1.0)
    out = [bytearray(BLOCK) for _ in found]
    pool.copy_out(
        found,
        [tuple(memoryview(o)[r * (BLOCK // ranks) : (r + 1) * (BLOCK // ranks)] for r in range(ranks)) for o in out],
    )
    assert [bytes(o) for o in out] == payloads
    assert [bytes(pool.pieces(slot)[0]) for slot in found] == payloads
    assert bytes(pool.pieces(found[0])[0]) != payloads[1]


def test_a_typed_view_is_the_memory_itself() -> None:
    pool = DevicePool(3, BLOCK)
    blocks = pool.typed(torch.float32, (2, 2, 8, 32))
    blocks[1] = torch.arange(1024, dtype=torch.float32).view(2, 2, 8, 32)
    assert bytes(pool.pieces(1)[0]) == torch.arange(1024, dtype=torch.float32).numpy().tobytes()
    with pytest.raises(InvalidRequest, match="4096"):
        pool.typed(torch.float32, (2, 2, 8, 31))


def test_pieces_of_another_size_are_refused_and_change_nothing() -> None:
    pool = DevicePool(2, BLOCK)
    slots = pool.allocate(1)
    pool.copy_in(views(b"x" * BLOCK), slots)
    for wrong in ([(memoryview(b"y" * (BLOCK - 1)),)], [], views(b"y" * BLOCK, b"y" * BLOCK)):
        with pytest.raises(InvalidRequest):
            pool.copy_in(wrong, slots)
    assert bytes(pool.pieces(slots[0])[0]) == b"x" * BLOCK


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match="g1"):
        DevicePool(16, 1 << 56)
