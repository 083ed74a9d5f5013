"""What a clock stamped that was days ahead is purged like the rest, though nobody can tell when it was made."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtier
from kvtier.identity.keys import scope_of
from kvtier.testing import VirtualClock, chain_of, payloads_of, sample_namespace
from tests.tiers.objects.support.virtual_bucket import SkewedClock

DAY_S = 86_400.0
NS = sample_namespace(4096)


async def test_it_does_not_come_to_life_when_its_time_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kvtier.Config.parse(
        {"tiers": {"g2": {"capacity": 32 * 4096}, "g3": {"path": str(tmp_path / "g3"), "capacity": "4MiB"}}}
    )
    clock = VirtualClock()
    mine, other = (list(chain_of(NS, 4, scope=scope_of(tenant))) for tenant in ("mine", "other"))
    async with kvtier.aopen(config, NS, clock=SkewedClock(clock, 2 * DAY_S)) as cache:
        for chain in (mine, other):
            assert await cache.put(chain, payloads_of(chain, 4096), "24h") == 4
        await cache.flush()
    monkeypatch.setattr("kvtier.manager.saved_state.boot_id", lambda: b"another")
    async with kvtier.aopen(config, NS, clock=clock) as cache:
        assert await cache.match(mine) == 0, "it is from the future"
        await cache.purge("mine")
        clock.advance(2 * DAY_S)
        assert await cache.match(mine) == 0, "a purged block is served"
        assert await cache.match(other) == 4, "which shows that it could have been"
