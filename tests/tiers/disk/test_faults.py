"""Failing system calls: misses and refusals, nothing wrong, nothing leaked, and back in use once they work again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import TierError
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.disk import quarantine, recovery, store, volumes
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.records import SlotReservation
from kvtier.tiers.disk.slab import SystemCalls
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Miss, Stored
from tests.support.waiting import until
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put
from tests.tiers.disk.support.subprocesses import need, need_strace, run, works

NAMESPACE = sample_namespace(BLOCK)
CHAINS = [chain_of(NAMESPACE, 3, seed) for seed in range(5)]
CAPACITY = 12


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe and rest a hundred times as often."""
    monkeypatch.setattr(quarantine, "PROBE_FIRST_S", 0.005)
    monkeypatch.setattr(store, "IDLE_S", 0.005)
    monkeypatch.setattr(volumes, "PAUSE_FIRST_S", 0.02)
    monkeypatch.setattr(volumes, "PAUSE_LAST_S", 0.02)


class FailingCalls(SystemCalls):
    """The kernel's calls, of which those of `verb` from the `first`-th to before the `last`-th fail.

    `number` 0: they move only half of the bytes.
    """

    def __init__(self, verb: str, number: int, first: int, last: int) -> None:
        self._verb = verb
        self._number = number
        self._span = range(first, last)
        self.count = 0

    def _fails(self, verb: str) -> bool:
        if verb != self._verb:
            return False
        self.count += 1
        if self.count not in self._span:
            return False
        if self._number:
            raise OSError(self._number, os.strerror(self._number))
        return True

    def open(self, path: Path, flags: int) -> int:
        self._fails("open")
        return super().open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._fails("preadv"):
            return super().preadv(fd, [buffers[0][: len(buffers[0]) // 2]], offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._fails("pwritev"):
            return super().pwritev(fd, [buffers[0][: len(buffers[0]) // 2]], offset)
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, length: int) -> None:
        self._fails("allocate")
        super().allocate(fd, length)

    def fdatasync(self, fd: int) -> None:
        self._fails("fdatasync")
        super().fdatasync(fd)


async def _exercise(tier: DiskTier) -> None:
    """Stores and reads whatever can be; anything but right bytes, a miss or a refusal fails the test."""
    for number, chain in enumerate(CHAINS):
        try:
            for result in await put(tier, chain):
                assert result in (Stored.STORED, Stored.PRESENT, Stored.FULL, Stored.FAILED)
            await get(tier, chain)
            await get(tier, CHAINS[number // 2])
        except TierError:
            await asyncio.sleep(0.002)


async def _works_again(tier: DiskTier) -> None:
    end = time.monotonic() + 60
    fresh = chain_of(NAMESPACE, CAPACITY, seed=77)
    while True:
        try:
            if all(one.durable for one in await put(tier, fresh)) and await get(tier, fresh) == [True] * CAPACITY:
                break
        except TierError:
            pass
        assert time.monotonic() < end, "the tier did not come back"
        await asyncio.sleep(0.01)
    await tier.flush(tier._clock.monotonic() + FAR_S)
    tier.check()
    assert not tier._store.index.has_reservations(), "a slot was leaked"


ERRNOS = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EDQUOT]


@pytest.mark.parametrize("verb", ["open", "preadv", "pwritev", "allocate", "fdatasync"])
@pytest.mark.parametrize("number", [*ERRNOS, 0], ids=[*(errno.errorcode[one] for one in ERRNOS), "short"])
@pytest.mark.parametrize(
    "firsts",
    [(1, 4), pytest.param((1, 2, 3, 4, 5), marks=[pytest.mark.long, pytest.mark.timeout(600)])],
    ids=["some", "all"],
)
async def test_every_nth_call_may_fail_for_a_while(
    tmp_path: Path, verb: str, number: int, firsts: Sequence[int]
) -> None:
    if number == 0 and verb not in ("preadv", "pwritev"):
        pytest.skip("moves no bytes")
    for first in firsts[:1] if verb in ("open", "allocate") else firsts:
        for length in (1, 3) if number in (errno.EIO, errno.ENOSPC, 0) else (2,):
            calls = FailingCalls(verb, number, first, first + length)
            path = tmp_path / f"{first}-{length}"
            async with opened(path, CAPACITY, clock=SystemClock(), calls=calls) as tier:
                await _exercise(tier)
                await _works_again(tier)
                assert calls.count >= first, "the fault never struck"
            async with opened(path, CAPACITY, clock=SystemClock()) as tier:
                assert await get(tier, chain_of(NAMESPACE, CAPACITY, seed=77)) == [True] * CAPACITY
            shutil.rmtree(path)


# A volume of a few megabytes that really is full.


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    point = tmp_path / "volume"
    point.mkdir()
    need(works("mount", "-t", "tmpfs", "-o", "size=3m", "kvtier-test", str(point)), "the right to mount a tmpfs")
    yield point
    subprocess.run(["umount", "-l", point], check=True)


def _fill(volume: Path) -> Path:
    """Use up the volume to its last byte."""
    filler = volume / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return filler


@pytest.mark.parametrize("step", range(8))
async def test_a_volume_that_fills_up_at_any_step_refuses_and_recovers(volume: Path, step: int) -> None:
    namespace = sample_namespace(64 << 10)
    chains = [chain_of(namespace, 2, seed) for seed in range(8)]
    clock = SystemClock()
    async with opened(volume / "g3", 16, block_bytes=64 << 10, namespace=namespace, clock=clock) as tier:
        filler = None
        stored: list[int] = []
        for number, chain in enumerate(chains):
            if number == step:
                filler = _fill(volume)
            results = await put(tier, chain)
            assert set(results) <= {Stored.STORED, Stored.FULL, Stored.FAILED}
            if all(one.durable for one in results):
                stored.append(number)
            for earlier in stored:
                assert await get(tier, chains[earlier]) == [True] * 2, "what is there must be readable on a full volume"
        assert filler is not None
        if step == 0:
            assert stored == [], "the control: a full volume must have refused something"
        filler.unlink()
        end = time.monotonic() + 60
        while {one.durable for chain in chains for one in await put(tier, chain)} != {True}:
            assert time.monotonic() < end, "room came back, but nothing can be stored"
            await asyncio.sleep(0.02)
        assert [await get(tier, chain) for chain in chains] == [[True] * 2] * 8
        await tier.flush(clock.monotonic() + FAR_S)
        assert not tier._store.index.has_reservations()


async def test_a_volume_smaller_than_the_capacity_is_used_as_far_as_it_goes(volume: Path) -> None:
    namespace = sample_namespace(64 << 10)
    clock = SystemClock()
    rng = random.Random(1)
    # Segments are 64 MiB at least, more than there is; the first one cannot be allocated.
    async with opened(volume / "g3", 4096, block_bytes=64 << 10, namespace=namespace, clock=clock) as tier:
        for seed in range(10):
            chain = chain_of(namespace, rng.randrange(1, 9), seed)
            assert set(await put(tier, chain)) <= {Stored.STORED, Stored.FULL}
            assert set(await get(tier, chain)) <= {True, Miss.ABSENT}


class FullPart(SystemCalls):
    """The kernel's calls; on one part's volume there is no space for another segment."""

    def __init__(self, part: Path) -> None:
        self._part = part
        self._full: set[int] = set()
        self.refused = 0

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        (self._full.add if path.is_relative_to(self._part) else self._full.discard)(fd)
        return fd

    def allocate(self, fd: int, length: int) -> None:
        if fd in self._full:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, length)


@pytest.mark.parametrize("full", [0, 1, 2])
async def test_a_full_path_leaves_the_others_to_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    monkeypatch.setattr(volumes, "PAUSE_FIRST_S", 60.0)
    monkeypatch.setattr(recovery, "SEGMENT_BYTES_SMALL", 1 << 20)
    namespace = sample_namespace(16 << 10)
    paths = [tmp_path / name for name in "abc"]
    calls = FullPart(paths[full])
    chains = [chain_of(namespace, 8, seed) for seed in range(56)]
    # Six segments of 64 blocks, two on each path: four are to be had.
    async with opened(paths, 384, block_bytes=16 << 10, namespace=namespace, calls=calls) as tier:
        results = [set(await put(tier, chain)) for chain in chains]
        assert results.count({Stored.FULL}) <= 1, "one write finds out"
        assert set.union(*results) <= {Stored.STORED, Stored.FULL}
        assert tier.usage().blocks >= 248, "segments on the other paths are used to the end"
        assert calls.refused <= 6, "by writes and by preallocation, for each of its segments"
        await tier.flush(tier._clock.monotonic() + FAR_S)
        tier.check()
    async with opened(paths, 384, block_bytes=16 << 10, namespace=namespace) as tier:
        for chain in chains:
            assert set(await put(tier, chain)) <= {Stored.STORED, Stored.PRESENT}
        assert tier.usage().blocks == 384, "room came back"


# The real system calls of a child, LMDB's included, made to fail by strace.

_CHILD = """
import asyncio, pathlib, sys
from kvtier.clock import SystemClock
from kvtier.errors import ConfigError, TierError
from tests.tiers.disk.support.subprocesses import need, need_strace, run, works
from tests.tiers.disk.support.store import opened
from tests.tiers.disk.test_faults import CAPACITY, _exercise

async def main():
    try:
        async with opened(pathlib.Path(sys.argv[1]), CAPACITY, clock=SystemClock()) as tier:
            for _ in range(3):
                await _exercise(tier)
            await tier.evict(None)
            await _exercise(tier)
    except (ConfigError, TierError) as refused:
        print("refused:", refused)

asyncio.run(main())
print("done")
"""
_INJECTIONS = [
    f"{call}:{fault}:when={when}"
    for call, fault in [
        ("fdatasync", "error=EIO"), ("fdatasync", "error=ENOSPC"), ("pwrite64", "error=EIO"),
        ("pwrite64", "error=ENOSPC"), ("pwrite64", "retval=100"), ("pwritev", "error=EIO"), ("pwritev", "retval=512"),
        ("preadv", "error=EIO"), ("preadv", "retval=512"), ("fallocate", "error=ENOSPC"), ("fsync", "error=EIO"),
    ]
    for when in ("1", "2", "5", "9", "3+4")
]  # fmt: skip
_QUICK = [one for one in _INJECTIONS if one.endswith("=5")]


def _inject(tmp_path: Path, injection: str) -> None:
    need_strace()
    path = tmp_path / "g3"
    words = ["strace", "-f", "-qq", "-o", str(tmp_path / "trace"), "-P", str(path), "-e", f"inject={injection}"]
    for name in ("index/data.mdb", "index.new/data.mdb", "slab/00000000.slab", "PROBE", "index"):
        words += ["-P", str(path / name)]
    words += [sys.executable, "-c", _CHILD, str(path)]
    done = run(words, timeout=60)
    assert done.returncode == 0 and "done" in done.stdout, f"{injection}: {done.returncode}\n{done.stderr}"


async def _inspect(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3", CAPACITY, clock=SystemClock()) as tier:
        for chain in CHAINS:
            assert set(await get(tier, chain)) <= {True, Miss.ABSENT}
        await _works_again(tier)


@pytest.mark.parametrize("injection", _QUICK)
async def test_an_injected_error_is_survived(tmp_path: Path, injection: str) -> None:
    _inject(tmp_path, injection)
    await _inspect(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("injection", [one for one in _INJECTIONS if one not in _QUICK])
async def test_any_injected_error_is_survived(tmp_path: Path, injection: str) -> None:
    _inject(tmp_path, injection)
    await _inspect(tmp_path)


async def test_a_store_that_goes_out_of_use_inside_a_transaction_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync fails on another thread. To look for damage all of the index would be read."""
    reserve, rejoin, damaged = WriteTxn.reserve, recovery.rejoin, list[bool]()

    async with opened(tmp_path / "g3") as tier:

        def out_of_use(self: WriteTxn, *arguments: Any, **named: Any) -> SlotReservation | Stored:
            monkeypatch.setattr(WriteTxn, "reserve", reserve)
            tier._store.quarantine("a sync failed")
            return self.reserve(*arguments, **named)

        def opened_anew(*arguments: Any, **keywords: Any) -> Index:
            damaged.append(keywords["damaged"])
            return rejoin(*arguments, **keywords)

        monkeypatch.setattr(WriteTxn, "reserve", out_of_use)
        monkeypatch.setattr(recovery, "rejoin", opened_anew)
        with contextlib.suppress(TierError):
            await put(tier, chain_of(NAMESPACE, 4))
        await until(lambda: bool(damaged) and tier._store.index_in_use is not None, "it is opened anew")
        assert damaged == [False]
        assert await put(tier, chain_of(NAMESPACE, 4, 1)) == [Stored.STORED] * 4
