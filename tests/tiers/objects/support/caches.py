"""Whole caches of several replicas over one bucket, in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import kvtier
from kvtier.errors import TierError
from kvtier.testing import VirtualClock, payloads_of, sample_namespace
from tests.tiers.objects.support.virtual_bucket import SkewedClock

NS = sample_namespace(4096)
SECRET = "5f" * 32


class Fleet:
    """Replicas with a G3 each on one bucket. `key`: whether they have one."""

    def __init__(self, root: Path, key: bool = False) -> None:
        self.root = root
        self.clock = VirtualClock()
        self.key = key

    def config(self, name: str, away: bool = False, g3: bool = True) -> kvtier.Config:
        g4 = {"url": f"file://{self.root / ('away' if away else 'bucket')}", "stride": 4}
        tiers = {"g2": {"capacity": 64 * 4096}, "g4": g4}
        if g3:
            tiers["g3"] = {"path": str(self.root / name), "capacity": "4MiB"}
        security = {"key": SECRET} if self.key else {}
        limits = {"lookup": "20s", "get": "20s", "put": "20s"}
        return kvtier.Config.parse({"tiers": tiers, "security": security, "deadlines": limits})

    def open(self, name: str, ahead_s: float = 0.0, **more: bool) -> kvtier.AsyncCache:
        if more.get("away"):
            (self.root / "away").mkdir(exist_ok=True)
            (self.root / "away").chmod(0o700)
        clock = SkewedClock(self.clock, ahead_s) if ahead_s else self.clock
        return kvtier.aopen(self.config(name, **more), NS, clock=clock)


async def put(cache: kvtier.AsyncCache, keys: Sequence[bytes]) -> None:
    assert await cache.put(keys, payloads_of(list(keys), 4096)) == len(keys)
    assert (await cache.flush()).pending == 0


async def learn(fleet: Fleet, cache: kvtier.AsyncCache) -> None:
    """What housekeeping does every twenty seconds."""
    fleet.clock.advance(50)
    await cache.manager._purger.sync()


async def found(cache: kvtier.AsyncCache, keys: Sequence[bytes]) -> list[str]:
    """Tiers that serve a chain, its bytes compared."""
    async with cache.get(keys) as hit:
        assert [bytes(block) for block in hit.blocks] == payloads_of(list(keys)[: len(hit)], 4096)
        return list(hit.tiers)


async def fail(*_: object) -> None:
    raise TierError("g4", "put", "no")
