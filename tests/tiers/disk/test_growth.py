"""A store in use that is to become larger: once no other process uses it. Where it cannot, it is used as it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtier.errors import TierError
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.disk import quarantine, store
from kvtier.tiers.disk.directory import DirectoryLock
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Stored
from tests.support.waiting import until
from tests.tiers.disk.support.store import BLOCK, get, opened, put

CHAINS = [chain_of(sample_namespace(BLOCK), 4, seed) for seed in range(4)]
SMALL, LARGE = 16 * BLOCK, 32 * BLOCK
VAST = 64 << 30
"""The index of so much has a larger map."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe and rest a hundred times as often."""
    monkeypatch.setattr(quarantine, "PROBE_FIRST_S", 0.005)
    monkeypatch.setattr(store, "IDLE_S", 0.005)


async def works(tier: DiskTier) -> None:
    """With the capacity that it had."""
    await until(lambda: tier._store.index_in_use is not None, "it stays out of use")
    assert await put(tier, CHAINS[1]) == [Stored.STORED] * 4
    assert await get(tier, CHAINS[0]) == [True] * 4
    assert tier.usage().capacity_bytes == SMALL


async def test_an_index_that_cannot_be_as_large_leaves_the_store_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its file would be larger than the file system allows: each commit tried it, and put the store out."""
    async with opened(tmp_path / "g3", 16) as tier:
        await put(tier, CHAINS[0])
        real, data = os.fsync, (tmp_path / "g3" / "index" / "data.mdb")
        size = data.stat().st_size

        def too_large(fd: int) -> None:
            if os.fstat(fd).st_size > size:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            real(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", too_large)
            with pytest.raises(TierError, match="File too large"):
                await tier.resize(VAST, 0.0)
            assert data.stat().st_size == size
            await works(tier)
        assert await tier.resize(VAST, 0.0)
        assert await get(tier, CHAINS[0]) == [True] * 4


async def test_a_map_that_cannot_be_as_large_costs_no_more_than_the_growth(tmp_path: Path) -> None:
    """LMDB has lost its map then: the index is opened anew, with the one that it had."""

    class Narrow:
        def __init__(self, env: Any) -> None:
            self._env = env

        def __getattr__(self, name: str) -> Any:
            return getattr(self._env, name)

        def set_mapsize(self, _size: int) -> None:
            raise lmdb.MemoryError("mdb_env_set_mapsize: Cannot allocate memory")

    async with opened(tmp_path / "g3", 16) as tier:
        await put(tier, CHAINS[0])
        index = tier._store.index
        index._env = Narrow(index._env)
        with pytest.raises(TierError):
            await tier.resize(VAST, 0.0)
        await until(lambda: tier._store.index_in_use not in (None, index), "it stays out of use")
        await works(tier)


async def test_a_growth_that_is_not_wanted_any_more_does_not_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that is wanted, while it waits, keep a store from becoming smaller."""
    async with opened(tmp_path / "g3", 16) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(DirectoryLock, "try_exclusive", lambda self: False)  # another process uses it
            assert not await tier.resize(LARGE, 0.0)
            begun: list[object] = []
            patch.setattr(tier._store.shrink, "begin", begun.append)
            await put(tier, CHAINS[1])
            assert not begun
            assert await tier.resize(SMALL, 0.0)
        await put(tier, CHAINS[0])
        assert tier.usage().capacity_bytes == SMALL
        assert await tier.resize(LARGE, 0.0)
        assert tier.usage().capacity_bytes == LARGE
