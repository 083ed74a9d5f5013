"""`security.purge: strict`: nothing is served by purges that are older than the bound, whatever is reachable."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import kvtier
from kvtier.errors import ConfigError
from kvtier.identity.keys import BlockKey, scope_of
from kvtier.manager.plan import Where
from kvtier.testing import VirtualClock, chain_of, payloads_of, sample_namespace
from kvtier.times import Mono

NS = sample_namespace(4096)
CHAIN, TENANT = chain_of(NS, 8, 1), chain_of(NS, 8, 2, scope_of("t"))


def opened(root: Path, name: str, clock: VirtualClock, purge: str = "strict") -> kvtier.AsyncCache:
    raw = {
        "tiers": {
            "g2": {"capacity": 64 * 4096},
            "g3": {"path": str(root / name), "capacity": "4MiB"},
            "g4": {"url": f"file://{root}/bucket", "stride": 4},
        },
        "security": {"purge": purge, "purge_bound": "60s"},
        "deadlines": {"lookup": "20s", "get": "20s"},
    }
    return kvtier.aopen(kvtier.Config.parse(raw), NS, clock=clock)


async def put(cache: kvtier.AsyncCache, keys: list[bytes]) -> None:
    assert await cache.put(keys, payloads_of(keys, 4096)) == len(keys)
    await cache.flush()


async def test_no_tier_serves_while_the_log_cannot_be_read(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with opened(tmp_path, "a", clock) as one, opened(tmp_path, "b", clock, "available") as other:
        await other.purge("somebody")
        for cache in (one, other):
            await cache.manager._purger.sync()
            await put(cache, CHAIN)
        assert await one.match(CHAIN) == 8
        shutil.move(tmp_path / "bucket", tmp_path / "gone")
        (tmp_path / "bucket").write_text("no directory")
        clock.advance(30)
        for cache in (one, other):
            await cache.manager._purger.sync()
        assert await one.match(CHAIN) == 8, "within the bound"
        clock.advance(31)
        assert await one.match(CHAIN) == 0
        async with one.get(CHAIN) as hit:
            assert len(hit) == 0 and hit.miss == "unproven"
        assert await other.match(CHAIN) == 8, "the control: available serves through the outage"
        (tmp_path / "bucket").unlink()
        shutil.move(tmp_path / "gone", tmp_path / "bucket")
        clock.advance(10)
        await one.manager._purger.sync()
        assert await one.match(CHAIN) == 8


async def test_a_purge_elsewhere_holds_here_before_the_bound(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with opened(tmp_path, "a", clock) as one, opened(tmp_path, "b", clock) as two:
        await put(one, TENANT)
        assert one.manager.hierarchy.limits.tombstones_s <= 20
        assert await two.match(TENANT) == 8
        await two.purge("t")
        served = 0
        for second in range(1, 70):  # every poll of the first fails
            clock.advance(1)
            served = second if await one.match(TENANT) else served
        assert 0 < served <= 60
        await one.manager._purger.sync()
        assert await one.match(TENANT) == 0


def test_strict_needs_a_bucket() -> None:
    with pytest.raises(ConfigError, match=r"security\.purge: strict needs tiers\.g4"):
        kvtier.Config.parse({"security": {"purge": "strict"}})


async def test_the_bound_passes_during_a_request_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    async with opened(tmp_path, "a", clock) as cache:
        promoter = cache.manager.promoter
        locate = promoter.locate

        async def slow(chain: Sequence[BlockKey], deadline: Mono | None = None, start: int = 0) -> list[Where]:
            clock.advance(61)
            return await locate(chain, deadline, start)

        monkeypatch.setattr(promoter, "locate", slow)
        await cache.manager._purger.sync()
        async with cache.get([]) as hit:
            assert len(hit) == 0 and hit.miss == "unproven"
