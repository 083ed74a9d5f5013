"""The reference tier passes the contract it is the reference for."""

import pytest

from kvtier.testing import Fault, MemoryTier, VirtualClock, check_tier
from kvtier.testing.memory import MemoryStore


@pytest.mark.parametrize("stride", [1, 4])
async def test_memory_tier_keeps_the_contract(stride: int) -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    await check_tier(lambda namespace: MemoryTier(namespace, clock, store=store, stride=stride), clock)


async def test_the_contract_notices_a_tier_that_forgets() -> None:
    clock = VirtualClock()
    with pytest.raises(AssertionError, match="restart"):
        await check_tier(lambda namespace: MemoryTier(namespace, clock), clock)


@pytest.mark.parametrize(("verb", "kind"), [("raed", "error"), ("read", "eror")])
def test_a_fault_that_would_never_strike_is_refused(verb: str, kind: str) -> None:
    with pytest.raises(ValueError, match="no fault"):
        Fault(verb, kind)
