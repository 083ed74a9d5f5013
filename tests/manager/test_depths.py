"""Blocks that a caller names from another than the first one on: never the bytes of one under the name of another."""

from __future__ import annotations

import pytest

from kvtier.manager.write_behind import ChainBatch, seal
from kvtier.retention.terms import Depth
from kvtier.testing import MemoryTier, VirtualClock, chain_of, payloads_of
from kvtier.tiers.protocol import Tier
from tests.retention.support.requests import BLOCK, NS, opened, served

CHAIN = list(chain_of(NS, 16))
PAYLOADS = payloads_of(CHAIN, BLOCK)


def below(clock: VirtualClock, stride: int) -> list[Tier]:
    """G3, and G4 of strides; with a stride below 0 G4 alone."""
    deep = MemoryTier(NS, clock, name="g4", depth=Depth.G4, stride=abs(stride))
    return [deep] if stride < 0 else [MemoryTier(NS, clock), deep]


@pytest.mark.parametrize("first", [1, 2, 4, 5])
@pytest.mark.parametrize("stride", [1, 4, -1, -2, -4])
def test_a_part_of_a_chain_that_is_put_as_a_chain_of_its_own(stride: int, first: int) -> None:
    """Its blocks that were here were written below under the names that the part has at their depths: wrong bytes for
    whoever asked for those, from then on."""
    clock = VirtualClock()
    with opened(clock, below(clock, stride), blocks=64) as cache:
        cache.put(CHAIN[:8], PAYLOADS[:8], retention="5m")
        cache.flush()
        part = slice(first, first + 8)  # it forgot `start`
        cache.put(CHAIN[part], PAYLOADS[part], retention="1h")
        cache.flush()
        for start in (0, first):
            cache.evict("g2")
            assert served(cache, CHAIN[start:]) >= 8 - start
        cache.evict("g2")
        assert cache.put(CHAIN, PAYLOADS) == 16
        cache.flush()
        cache.evict("g2")
        assert served(cache, CHAIN) == 16


@pytest.mark.parametrize("stride", [1, 4, -1, -2, -4])
def test_a_part_of_a_chain_that_is_read_as_a_chain_of_its_own(stride: int) -> None:
    """What it brought up was written under the names of the prompt's head when the whole prompt was put again."""
    clock = VirtualClock()
    with opened(clock, below(clock, stride), blocks=64) as cache:
        cache.put(CHAIN, PAYLOADS, retention="5m")
        cache.flush()
        cache.evict("g2")
        assert served(cache, CHAIN[4:]) == 12
        for name in cache.manager.lower:
            cache.evict(name)
        assert cache.put(CHAIN, PAYLOADS) == 16 == served(cache, CHAIN)
        cache.flush()
        cache.evict("g2")
        served(cache, CHAIN)  # asserts the bytes


def test_no_block_is_sealed_under_the_name_of_another() -> None:
    with opened(VirtualClock(), []) as cache:
        cache.put(CHAIN[:4], PAYLOADS[:4])
        slots = [cache.manager.host.index[key] for key in CHAIN[:4]]  # type: ignore[index]
        assert [sealed.key for sealed in seal(ChainBatch.of(CHAIN, slots))] == CHAIN[:4]  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="another's name"):
            seal(ChainBatch.of(CHAIN[1:], slots))  # type: ignore[arg-type]
