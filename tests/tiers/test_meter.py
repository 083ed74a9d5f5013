"""What the wrappers of a lower tier say of it: its health, and the optional verbs that it has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import TierError
from kvtier.events import Notify
from kvtier.identity.keys import tenant_of
from kvtier.testing import Fault, FaultyTier, MemoryTier, VirtualClock, chain_of, sample_namespace, seal
from kvtier.tiers.guard import Guarded, Wrapper
from kvtier.tiers.meter import Latency, Metered
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target, Tier
from kvtier.times import Mono

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


@pytest.mark.parametrize("verb", ["read", "write"])
async def test_a_removal_while_blocks_are_found_is_later_than_the_report_of_them(verb: str) -> None:
    """The tier tells of a removal at once, and of a read or a write when it has ended."""
    clock = VirtualClock()
    chain = chain_of(NS, 3)
    tell: list[Notify] = []

    class Evicting(MemoryTier):
        """Loses the middle block while its answer is on the way."""

        def subscribe(self, notify: Notify | None) -> None:
            tell[:] = [] if notify is None else [notify]

        async def read(self, *asked: Any) -> list[Loaded | Miss]:
            results = await super().read(*asked)
            return await self._lose(results)

        async def write(self, *asked: Any) -> list[Stored]:
            return await self._lose(await super().write(*asked))

        async def _lose(self, results: Any) -> Any:
            if tell:
                await self.evict([chain[1]])
                await asyncio.to_thread(tell[0], [chain[1]], False)
            return results

    tier = metered(Evicting(NS, clock), clock)
    await tier.open()
    blocks = seal(chain, range(3), NS.block_bytes, clock.wall())
    if verb == "read":
        assert all(result.durable for result in await tier.write(blocks, Mono(9.0)))
    heard: list[tuple[bytes, bool]] = []
    tier.subscribe(lambda keys, stored: heard.extend((key, stored) for key in keys))
    if verb == "read":
        await tier.read(
            chain, [Target(index, (memoryview(bytearray(NS.block_bytes)),)) for index in range(3)], Mono(9.0)
        )
    else:
        await tier.write(blocks, Mono(9.0))
    assert dict(heard) == {chain[0]: True, chain[1]: False, chain[2]: True}, "the last word on each block"
    tier.subscribe(None)
    await tier.write(blocks, Mono(9.0))
    assert len(heard) == 3


async def test_nothing_is_read_of_a_tenant_whose_purge_is_owed() -> None:
    """It was found before: a lookup and its read are apart, and some read without one."""
    clock = VirtualClock()
    tier, chain = metered(MemoryTier(NS, clock), clock), chain_of(NS, 2)
    await tier.open()
    await tier.write(seal(chain, range(2), 4096, clock.wall()), clock.monotonic() + 1)

    async def read() -> list[bool]:
        targets = [Target(index, (memoryview(bytearray(4096)),)) for index in range(2)]
        results = await tier.read(chain, targets, clock.monotonic() + 1)
        return [isinstance(result, Loaded) for result in results]

    assert await read() == [True, True]
    tier.owed[tenant_of(chain[0])] = clock.wall()
    assert tier.behind and await read() == [False, False] and tier.misses[Miss.PURGED] == 2
    tier.owed.clear()
    tier.stale = True
    assert tier.behind and await read() == [False, False]
    assert tier.peek(chain, range(2)) == await tier.lookup(chain, range(2), clock.monotonic() + 1) == [Miss.PURGED] * 2
    tier.stale = False
    assert not tier.behind and await read() == [True, True]
    await tier.close(clock.monotonic() + 1)


async def test_a_tier_that_cannot_be_emptied_says_so() -> None:
    clock = VirtualClock()
    faulty = FaultyTier(MemoryTier(NS, clock), [Fault("evict", "crash")])
    tier = metered(faulty, clock)
    await tier.open()
    assert await tier.evict(None) == 0
    with pytest.raises(TierError):
        await tier.empty()
    faulty.faults.clear()
    assert await tier.empty() == 0
    await tier.close(clock.monotonic() + 1)
