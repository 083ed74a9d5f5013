"""Purges that the log did not take: each is owed until it has an entry of its own, whatever other replicas write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kvtier
from kvtier.errors import TierError
from kvtier.identity.keys import scope_of
from kvtier.testing import chain_of
from kvtier.tiers.meter import Metered
from kvtier.tiers.objects.bucket.protocol import Bucket
from kvtier.tiers.objects.tier import ObjectTier
from tests.tiers.objects.support.caches import NS, Fleet, fail, found, learn, put

T = scope_of("t")


def bucket_of(cache: kvtier.AsyncCache) -> Any:
    return cache.manager.lower["g4"].inner.inner._store.bucket  # type: ignore[attr-defined]


async def never(*_: object) -> None:
    await asyncio.Event().wait()


async def entries_of(tier: Metered, tenant: str) -> int:
    """How many entries of the log are purges of this tenant."""
    store, wanted = tier.inner.inner._store, scope_of(tenant)[:8]  # type: ignore[attr-defined]
    bodies = [raw async for raw in raws(store.bucket, store.names.log)]
    return sum(raw[44:52] == wanted for raw in bodies)


async def raws(bucket: Bucket, prefix: str) -> AsyncIterator[bytes]:
    async for page in bucket.list(prefix):
        for stat in page:
            raw = bytearray(stat.size)
            assert await bucket.read(stat.name, 0, [memoryview(raw)])
            yield bytes(raw)


@pytest.mark.parametrize("others", [0, 2], ids=["same-number", "newer"])
@pytest.mark.parametrize("restarts", [False, True], ids=["goes-on", "restarted"])
@pytest.mark.parametrize("read", [False, True], ids=["log-unread", "log-read"])
async def test_a_purge_that_was_refused_is_settled_by_no_entry_of_others(
    tmp_path: Path, read: bool, restarts: bool, others: int
) -> None:
    """Another replica purges the tenant and stores blocks of it, before this one purges it and cannot tell the log."""
    fleet = Fleet(tmp_path)
    chain = chain_of(NS, 8, 1, T)
    async with fleet.open("b", g3=False) as two:
        async with fleet.open("a") as one:
            if read:
                await two.purge("first")
                await learn(fleet, one)
            bucket = bucket_of(one)
            create, bucket.create = bucket.create, fail
            for each in range(others):
                await two.purge(f"other {each}")
            await two.purge("t")
            await put(two, chain)
            fleet.clock.advance(1)
            for _ in range(1 + others):
                with pytest.raises(TierError):
                    await one.purge("t")
            await learn(fleet, one)  # the entry of the other replica is read, and this one's still refused
            assert await found(one, chain) == []
            if not restarts:
                bucket.create = create
                await settled(fleet, one, two, chain)
        if restarts:
            async with fleet.open("a") as one:
                await settled(fleet, one, two, chain)


async def settled(fleet: Fleet, one: kvtier.AsyncCache, two: kvtier.AsyncCache, chain: Sequence[bytes]) -> None:
    """The refused purge has an entry of its own, and only one: what is stored now is kept."""
    for _ in range(2):
        await learn(fleet, one)
        assert await found(one, chain) == []
    await learn(fleet, two)
    assert await found(two, chain) == []
    assert not one.manager._purger.owed() and await entries_of(one.manager.lower["g4"], "t") == 2
    await put(one, chain)
    for _ in range(3):
        await learn(fleet, one)
    for served in ("g2", "g3", "g4"):
        assert await found(one, chain) == [served] * 8
        for name in ("g2", "g3")[: 1 + (served == "g3")]:
            await one.evict(name)
    assert await entries_of(one.manager.lower["g4"], "t") == 2


async def test_a_purge_that_was_cancelled_is_settled_by_no_entry_of_others(tmp_path: Path) -> None:
    fleet, chain = Fleet(tmp_path), chain_of(NS, 8, 1, T)
    async with fleet.open("a") as one, fleet.open("b", g3=False) as two:
        await two.purge("t")
        await put(two, chain)
        fleet.clock.advance(1)
        bucket = bucket_of(one)
        create, bucket.create = bucket.create, never
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.purge("t"), 0.2)
        bucket.create = create
        await settled(fleet, one, two, chain)


@pytest.mark.parametrize("g3", [False, True])
async def test_a_purge_while_g4_is_left_out_is_settled_by_no_entry_of_others(tmp_path: Path, g3: bool) -> None:
    fleet, chain = Fleet(tmp_path), chain_of(NS, 8, 1, T)
    async with fleet.open("b", g3=False) as two:
        await two.purge("t")
        await put(two, chain)
        fleet.clock.advance(1)
        with mock.patch.object(ObjectTier, "open", fail):
            one = fleet.open("a", g3=g3)
            await one.__aenter__()
        try:
            with pytest.raises(TierError, match="not open"):
                await one.purge("t")
            for _ in range(200):
                fleet.clock.advance(1)
                await asyncio.sleep(0.02)
                if not one.manager.lower.out:
                    break
            assert not one.manager.lower.out and await found(one, chain) == []
            await learn(fleet, one)
            assert await found(one, chain) == [] and await entries_of(one.manager.lower["g4"], "t") == 2
        finally:
            await one.__aexit__(None, None, None)


async def test_a_purge_is_remembered_as_refused_over_one_of_a_process_that_had_read_further(tmp_path: Path) -> None:
    """Both share a G3, which has the other's purge already, by a later number than the refused one expects."""
    fleet, chain = Fleet(tmp_path), chain_of(NS, 8, 1, T)
    async with fleet.open("a") as two:
        async with fleet.open("a") as one:
            bucket_of(one).create = fail
            await two.purge("t")
            await put(two, chain)
            fleet.clock.advance(1)
            with pytest.raises(TierError):
                await one.purge("t")
        async with fleet.open("a") as one:
            for cache in (one, two, one, two):
                await learn(fleet, cache)
            assert await found(one, chain) == await found(two, chain) == []


async def test_a_purge_that_is_asked_for_again_has_one_entry(tmp_path: Path) -> None:
    """It was refused, and the tier that was told so is not taken for one that knows of another."""
    fleet, chain = Fleet(tmp_path), chain_of(NS, 8, 1, T)
    async with fleet.open("a") as one:
        bucket = bucket_of(one)
        create, bucket.create = bucket.create, fail
        with pytest.raises(TierError):
            await one.purge("t")
        bucket.create = create
        await one.purge("t")
        fleet.clock.advance(1)
        await put(one, chain)
        for _ in range(2):
            await learn(fleet, one)
        assert await entries_of(one.manager.lower["g4"], "t") == 1
        assert await found(one, chain) == ["g2"] * 8


async def test_an_entry_that_was_begun_before_a_purge_is_not_its_own(tmp_path: Path) -> None:
    """Blocks may be stored behind it before the purge is asked for."""
    async with Fleet(tmp_path).open("a") as one:
        log, bucket = one.manager.lower["g4"].inner.inner._store.purges, bucket_of(one)  # type: ignore[attr-defined]
        create, landed = bucket.create, []

        async def held_meanwhile(*arguments: object) -> object:
            landed.append(await create(*arguments))
            log.hold(T)
            return landed[-1]

        await one.purge("another")
        log.hold(T)
        bucket.create = held_meanwhile
        await log.append(T)
        assert log.holds(T)
        bucket.create = create
        await log.append(T)
        assert not log.holds(T)
