"""A volume without space: known, told, and tried again, soon at first and ever more rarely."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtier.clock import SystemClock
from kvtier.errors import TierError
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.disk import quarantine, recovery, store, volumes, write
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.slab import SystemCalls
from kvtier.tiers.disk.slot_health import PROBE
from kvtier.tiers.disk.volumes import PAUSE_FIRST_S, PAUSE_LAST_S, Volumes
from kvtier.tiers.protocol import Miss, Stored
from tests.support.waiting import until
from tests.tiers.disk.support.bad_medium import BadMedium
from tests.tiers.disk.support.store import BLOCK, get, opened, put

SEGMENT = 1 << 20


class FullVolume(SystemCalls):
    """The kernel's calls; while `full` no file gets longer and, where `to_the_last_page`, no page is written. `tries`
    counts both."""

    def __init__(self, full: bool = False, *, to_the_last_page: bool = True) -> None:
        self.full = full
        self.tries = 0
        self._to_the_last_page = to_the_last_page

    def _refuse(self) -> None:
        self.tries += 1
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._to_the_last_page:
            self._refuse()
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, length: int) -> None:
        self._refuse()
        super().allocate(fd, length)


class Time:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def test_a_full_volume_is_tried_with_one_page_ever_more_rarely(tmp_path: Path) -> None:
    time, calls = Time(), FullVolume(full=True)
    seen = Volumes([tmp_path], calls, time)
    seen.found_full(0)
    tried = []
    for _ in range(1200):
        time.s += 0.1
        before = calls.tries
        seen.try_again()
        tried += [time.s - 1000.0] * (calls.tries - before)
    pauses = [now - then for then, now in zip([0.0, *tried], tried, strict=False)]
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0], abs=0.15)
    assert not seen.may_grow(0)
    calls.full = False
    time.s += PAUSE_LAST_S
    seen.try_again()
    assert seen.may_grow(0) and seen.why_full() == ""


def test_a_volume_that_takes_a_page_and_no_segment_is_tried_as_rarely(tmp_path: Path) -> None:
    """Each try costs a put."""
    time = Time()
    seen = Volumes([tmp_path], FullVolume(), time)
    found = []
    for _ in range(1200):
        if seen.may_grow(0):
            seen.found_full(0)
            found.append(time.s)
        time.s += 0.1
        seen.try_again()
    pauses = [now - then for then, now in pairwise(found)]
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0], abs=0.15)
    assert seen.counts == {"volume_full": len(found)}
    time.s += 2 * PAUSE_LAST_S
    seen.try_again()
    time.s += PAUSE_LAST_S + 1
    seen.found_full(0)
    time.s += PAUSE_FIRST_S
    seen.try_again()
    assert seen.may_grow(0), "what was long ago does not count"


def test_a_full_volume_says_so_and_leaves_the_others_alone(tmp_path: Path) -> None:
    time, parts = Time(), [tmp_path / name for name in "ab"]
    seen = Volumes(parts, FullVolume(), time)
    assert seen.why_full() == ""
    seen.found_full(1)
    assert seen.may_grow(0) and not seen.may_grow(1)
    assert seen.why_full() == f"no space left on the volume of {parts[1]}: no new segments there; next try in 0.5 s"


async def test_space_that_comes_back_is_used_at_once(tmp_path: Path) -> None:
    """One refusal, at the first segment of a store: it was refused for half a minute, and called well."""
    calls, namespace = FullVolume(full=True), sample_namespace(4096)
    chain, rest = chain_of(namespace, 4, seed=1), chain_of(namespace, 1, seed=2)
    async with opened(tmp_path / "g3", 16, clock=SystemClock(), namespace=namespace, calls=calls) as tier:
        assert await put(tier, chain) == [Stored.FULL] * 4
        assert str(tmp_path / "g3") in tier.usage().why_full
        assert tier.counters()["volume_full"] == 1
        calls.full = False
        tier._store.volumes._volumes[0].try_at = 0.0  # half a second later
        assert await put(tier, chain) == [Stored.STORED] * 4
        assert tier.usage().why_full == ""
        assert await put(tier, rest) == [Stored.STORED]
        assert await get(tier, chain) == [True] * 4


async def test_slots_held_in_a_segment_that_cannot_be_made_fail_one_put_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stream: they were reserved for later writes, in the last segment and the next."""
    monkeypatch.setattr(recovery, "SEGMENT_BYTES_SMALL", SEGMENT)
    monkeypatch.setattr(volumes, "PAUSE_FIRST_S", 60.0)
    monkeypatch.setattr(write, "SMALL_SHARE", 128)
    namespace, calls = sample_namespace(4096), FullVolume(to_the_last_page=False)
    blocks = SEGMENT // 4096
    async with opened(tmp_path / "g3", 8 * blocks, clock=SystemClock(), namespace=namespace, calls=calls) as tier:
        assert await put(tier, chain_of(namespace, 1, seed=8000)) == [Stored.STORED]
        calls.full = True
        assert set(await put(tier, chain_of(namespace, blocks - 25, seed=0))) == {Stored.STORED}
        held, seed = tier._store.reserved._held, 0
        while not any(slot.segment for slot in held):
            seed += 1
            assert await put(tier, chain_of(namespace, 1, seed=seed)) == [Stored.STORED]
            held = tier._store.reserved._held
        results = [await put(tier, chain_of(namespace, 1, seed=9000 + seed)) for seed in range(2 * len(held) + 4)]
        assert results.count([Stored.FULL]) <= 1 and results.count([Stored.STORED]) >= len(results) - 1


class FullMedium(BadMedium):
    """A medium on whose volume there is no space for another page while `full`; what is there can be overwritten."""

    full = False

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.full and self._names[fd] == PROBE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, buffers, offset)


async def test_a_bad_place_on_a_full_volume_costs_its_block_and_nothing_else(tmp_path: Path) -> None:
    """There is no space for a page beside it, which says nothing about the device: the store went out of use."""
    medium, namespace = FullMedium(), sample_namespace(BLOCK)
    chain = chain_of(namespace, 20)
    async with opened(tmp_path / "g3", 200, calls=medium) as tier:
        await put(tier, chain)
        medium.full, medium.unreadable = True, {("00000000.slab", 7)}
        assert await get(tier, chain) == [True] * 7 + [Miss.CORRUPT] + [True] * 12
        medium.unwritable = {("00000000.slab", 20)}
        assert await put(tier, chain_of(namespace, 3, seed=1)) == [Stored.STORED] * 3
        assert tier._store.index_in_use is not None


async def test_a_store_on_a_full_volume_comes_back_into_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as there was no space for a page it stayed out of use, to be read, too."""
    monkeypatch.setattr(quarantine, "PROBE_FIRST_S", 0.005)
    monkeypatch.setattr(store, "IDLE_S", 0.005)
    medium, chain = FullMedium(), chain_of(sample_namespace(BLOCK), 20)
    async with opened(tmp_path / "g3", 200, calls=medium) as tier:
        await put(tier, chain)
        medium.full = True
        tier._store.quarantine("a sync failed")
        await until(lambda: tier._store.index_in_use is not None, "it stays out of use")
        assert await get(tier, chain) == [True] * 20


async def test_a_spent_quota_is_a_full_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume has space, but not for this user: the store went out of use, to be read, too."""
    chain, error = chain_of(sample_namespace(BLOCK), 4), f"mdb_txn_commit: {os.strerror(errno.EDQUOT)}"
    async with opened(tmp_path / "g3", 16) as tier:
        await put(tier, chain)

        def spent(*_arguments: object, **_named: object) -> None:
            raise lmdb.Error(error)

        with monkeypatch.context() as patch:
            patch.setattr(Index, "transact", spent)
            assert await put(tier, chain_of(sample_namespace(BLOCK), 4, seed=1)) == [Stored.FULL] * 4
        assert await get(tier, chain) == [True] * 4
        assert tier.usage().why_full != ""


async def test_an_index_whose_last_page_found_no_space_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB refuses to read it, too, once the write of a meta page has failed, as on a file system that copies on write.
    The volume being full, the store stayed as it was, and reads raised what LMDB does."""
    monkeypatch.setattr(quarantine, "PROBE_FIRST_S", 0.005)
    monkeypatch.setattr(store, "IDLE_S", 0.005)

    class Panicking:
        def __init__(self, env: Any) -> None:
            self.close = env.close

        def begin(self, **_: object) -> None:
            raise lmdb.PanicError("mdb_txn_renew: MDB_PANIC")

    medium, chain = FullMedium(), chain_of(sample_namespace(BLOCK), 4)
    async with opened(tmp_path / "g3", 16, calls=medium) as tier:
        await put(tier, chain)
        medium.full, index = True, tier._store.index

        def unwritten(self: Index, *_arguments: object, **_named: object) -> None:
            self._env = Panicking(self._env)  # type: ignore[assignment]
            raise lmdb.DiskError(f"mdb_txn_commit: {os.strerror(errno.ENOSPC)}")

        with monkeypatch.context() as patch:
            patch.setattr(Index, "transact", unwritten)
            with pytest.raises(TierError):
                await put(tier, chain_of(sample_namespace(BLOCK), 4, seed=1))
        await until(lambda: tier._store.index_in_use not in (None, index), "it stays out of use")
        assert await get(tier, chain) == [True] * 4
