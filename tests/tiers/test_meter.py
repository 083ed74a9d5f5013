"""What the wrappers of a lower tier say of it: its health, and the optional verbs that it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import TierError
from kvtier.testing import Fault, FaultyTier, MemoryTier, VirtualClock, sample_namespace
from kvtier.tiers.guard import Guarded, Wrapper
from kvtier.tiers.meter import Latency, Metered
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Tier

NS = sample_namespace(4096)


def metered(tier: Tier, clock: VirtualClock) -> Metered:
    return Metered(Guarded(tier, clock), clock)


def test_a_duration_is_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    latency = Latency()
    for seconds in (0.0001, 0.00011, 0.02, 0.03, 11.0):
        latency.add(seconds)
    filled = {place: bucket for place, bucket in enumerate(latency.buckets()) if bucket != (0, 0.0)}
    assert filled == {0: (1, 0.0001), 1: (1, 0.00011), 5: (2, pytest.approx(0.05)), 11: (1, 11.0)}


def test_optional_verbs_are_those_of_the_tier_itself(tmp_path: Path) -> None:
    clock = VirtualClock()

    def offered(tier: Tier) -> list[bool]:
        asked = metered(tier, clock)
        return [verbs is not None for verbs in (asked.retaining(), asked.notebook(), asked.pinning())]

    memory = MemoryTier(NS, clock)
    assert offered(memory) == [True, True, False]
    assert offered(ObjectTier(f"file://{tmp_path}", NS, clock=clock)) == [False, False, True]
    assert offered(Wrapper(memory)) == [False, False, False], "some of the verbs are not all"


async def test_optional_verbs_suffer_from_faults() -> None:
    clock = VirtualClock()
    faulty = FaultyTier(MemoryTier(NS, clock), [Fault("write_note", "error", times=1)])
    tier = metered(faulty, clock)
    await tier.open()
    notebook = tier.notebook()
    assert notebook is not None and tier.retaining() is not None and tier.pinning() is None
    with pytest.raises(TierError, match="injected"):
        await notebook.write_note("name", b"value")
    await notebook.write_note("name", b"value")
    assert await notebook.read_notes("name") == {"name": b"value"}


async def test_a_tier_that_fails_is_not_healthy_until_it_answers() -> None:
    clock = VirtualClock()
    faulty = FaultyTier(MemoryTier(NS, clock), [Fault("evict", "error")])
    tier = metered(faulty, clock)
    await tier.open()
    assert tier.healthy()
    for _ in range(5):
        assert await tier.evict(None) == 0
    assert not tier.healthy()
    clock.advance(2)
    assert await tier.lookup([], [], clock.monotonic() + 1) == []
    assert tier.healthy()
