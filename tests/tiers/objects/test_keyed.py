"""G4 with keys passes the contract, and records uses with a proof wherever the bucket can keep one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.keyring import Key, Keyring
from kvtier.retention.terms import Terms
from kvtier.testing import VirtualClock, chain_of, check_tier
from kvtier.testing.faults_s3 import FaultyS3
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded
from tests.tiers.objects.support.replicas import NS, S, Site

pytest.importorskip("cryptography")

KEYS = Keyring([Key(bytes([1]) * 8, bytes([2]) * 32)], bytes([3]) * 32)


async def test_a_directory_with_keys_passes_the_contract(tmp_path: Path) -> None:
    clock = VirtualClock()
    await check_tier(lambda ns: ObjectTier(f"file://{tmp_path}/g4", ns, clock=clock, stride=4, keyring=KEYS), clock)


@pytest.mark.parametrize("client", ["file", "s3fs", "obstore"])
async def test_a_use_here_keeps_it_alive_for_others(site: Site, client: str) -> None:
    with FaultyS3().running() as server:
        place = {} if client == "file" else {"url": "s3://bucket/p", "options": server.options, "client": client}
        one, two = await site.replica(keyring=KEYS, **place), await site.replica(keyring=KEYS, **place)
        chain = chain_of(NS, S)
        assert all(result.durable for result in await site.store(one, chain, Terms("short", ttl=300)))
        for _ in range(3):
            site.clock.advance(200)
            one.touch(chain, site.clock.wall())
            await one.flush(site.deadline)
            assert all(isinstance(result, Loaded) for result in await site.read(two, chain))
        assert one.counters()["renewed_units"] == 3
        site.clock.advance(301)
        assert not any(isinstance(result, Loaded) for result in await site.read(two, chain))
        for tier in site.tiers:
            await tier.close(site.deadline)
        site.tiers.clear()
