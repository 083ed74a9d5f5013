"""Preallocated segments: there before they are needed, and never in place of a file that is there."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.disk import recovery
from kvtier.tiers.disk.preallocate import Preallocator
from kvtier.tiers.disk.slab import DRAFT, Calls, Slab, SystemCalls
from kvtier.tiers.protocol import Stored
from tests.support.waiting import until
from tests.tiers.disk.support.store import get, opened, put, slabs

BLOCK = 64 << 10
SEGMENT = 1 << 20
NAMESPACE = sample_namespace(BLOCK)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slab").mkdir()
    return tmp_path / "slab"


def preallocator(folder: Path, calls: Calls | None = None) -> Preallocator:
    return Preallocator([folder.parent], lambda segment: SEGMENT, calls or SystemCalls())


def finish(draft: Preallocator) -> None:
    while draft.step():
        pass


def test_a_segment_gets_its_name_when_it_is_whole(folder: Path) -> None:
    draft = preallocator(folder)
    assert draft.start(1)
    assert [path.name for path in folder.iterdir()] == [DRAFT]
    finish(draft)
    assert [path.name for path in folder.iterdir()] == ["00000001.slab"]
    status = (folder / "00000001.slab").stat()
    assert (status.st_size, status.st_nlink, status.st_blocks * 512) == (SEGMENT, 1, SEGMENT)
    assert not draft.start(1), "it is there"


def test_who_needs_it_earlier_makes_it(folder: Path) -> None:
    draft = preallocator(folder)
    assert draft.start(1)
    assert draft.step()
    slab = Slab([folder.parent], lambda segment: SEGMENT, SystemCalls())
    slab.write(1, 0, [memoryview(b"x" * 4096)])
    assert [path.name for path in folder.iterdir()] == ["00000001.slab"], "no more than the segments' own files"
    assert not draft.step()
    slab.close()
    assert (folder / "00000001.slab").read_bytes()[:4096] == b"x" * 4096


def test_blocks_of_other_segments_are_read_while_a_file_is_made(folder: Path) -> None:
    """Which takes as long as a busy disk needs for a sync; and who comes to its segment meanwhile gets the same one."""
    begun, over, made = threading.Event(), threading.Event(), list[Path]()

    class Slow(SystemCalls):
        def open(self, path: Path, flags: int) -> int:
            made.append(path)
            return super().open(path, flags)

        def allocate(self, fd: int, length: int) -> None:
            if len(made) == 2:
                begun.set()
                assert over.wait(10)
            super().allocate(fd, length)

    slab = Slab([folder.parent], lambda segment: SEGMENT, Slow())
    piece, back = memoryview(b"x" * 4096), memoryview(bytearray(4096))
    slab.write(0, 0, [piece])
    with ThreadPoolExecutor(3) as pool:
        writes = [pool.submit(slab.write, 1, place * 4096, [piece]) for place in range(2)]
        assert begun.wait(10)
        pool.submit(slab.read, 0, 0, [back]).result(10)
        assert back == piece and not any(write.done() for write in writes)
        over.set()
        for write in writes:
            write.result(10)
    assert len(made) == 2
    slab.close()


def test_a_file_made_at_the_last_moment_is_not_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = preallocator(folder)
    assert draft.start(1)
    fsync = os.fsync

    def fsync_late(fd: int) -> None:
        fsync(fd)
        if not (folder / "00000001.slab").exists():
            (folder / "00000001.slab").write_bytes(b"x")

    monkeypatch.setattr(os, "fsync", fsync_late)
    finish(draft)
    assert (folder / "00000001.slab").read_bytes() == b"x"
    assert not (folder / DRAFT).exists()


def test_one_at_a_time(folder: Path) -> None:
    first, second = preallocator(folder), preallocator(folder)
    assert first.start(1)
    assert not second.start(1)
    first.stop()
    assert second.start(1)
    second.stop()
    assert list(folder.iterdir()) == []


def test_what_a_killed_process_left_is_the_next_ones(folder: Path) -> None:
    (folder / DRAFT).write_bytes(b"x" * (2 * SEGMENT))
    draft = preallocator(folder)
    assert draft.start(3)
    finish(draft)
    assert (folder / "00000003.slab").read_bytes() == bytes(SEGMENT)


def test_a_draft_that_became_a_segment_is_left_alone(folder: Path) -> None:
    """Its writer was killed between giving it one name and taking the other."""
    (folder / "00000001.slab").write_bytes(b"x" * SEGMENT)
    (folder / DRAFT).hardlink_to(folder / "00000001.slab")
    assert not preallocator(folder).start(2)
    assert not (folder / DRAFT).exists()
    assert (folder / "00000001.slab").read_bytes() == b"x" * SEGMENT


def test_a_draft_that_becomes_a_segment_while_it_is_opened_is_left_alone(folder: Path) -> None:
    class Slow(SystemCalls):
        def open(self, path: Path, flags: int) -> int:
            fd = super().open(path, flags)
            finish(first)
            (folder / "00000001.slab").write_bytes(b"x" * SEGMENT)
            return fd

    first = preallocator(folder)
    assert first.start(1)
    assert not preallocator(folder, Slow()).start(2)
    assert (folder / "00000001.slab").read_bytes() == b"x" * SEGMENT


@pytest.mark.parametrize("verb", ["open", "allocate", "pwritev", "fdatasync"])
def test_a_failure_leaves_nothing_behind(folder: Path, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    calls = SystemCalls()
    monkeypatch.setattr(calls, verb, fail)
    draft = Preallocator([folder.parent], lambda segment: 64 << 20, calls)
    if draft.start(1):
        finish(draft)
    assert verb == "fdatasync" or not (folder / "00000001.slab").exists()
    assert not (folder / DRAFT).exists()
    assert not draft.busy


async def test_an_idle_store_preallocates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SEGMENT_BYTES_SMALL", SEGMENT)
    path = tmp_path / "g3"
    chain = chain_of(NAMESPACE, 32)
    allocated: list[int] = []

    class Counting(SystemCalls):
        def allocate(self, fd: int, length: int) -> None:
            allocated.append(os.fstat(fd).st_ino)
            super().allocate(fd, length)

    async with opened(path, 64, block_bytes=BLOCK, namespace=NAMESPACE, calls=Counting()) as tier:
        await put(tier, chain, range(6))
        await asyncio.sleep(0.05)
        assert len(slabs(path)) == 1, "not half full"
        await put(tier, chain, range(6, 12))
        await until(lambda: len(slabs(path)) == 2)
        (_, second) = slabs(path)
        assert await put(tier, chain, range(12, 32)) == [Stored.STORED] * 20
        assert allocated.count(second.stat().st_ino) == 1
        assert await get(tier, chain) == [True] * 32
    assert not (path / "slab" / DRAFT).exists()


async def test_many_segments_under_churn_stay_within_the_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SEGMENT_BYTES_SMALL", SEGMENT)
    path = tmp_path / "g3"
    async with opened(path, 100, block_bytes=BLOCK, namespace=NAMESPACE) as tier:
        for seed in range(30):
            chain = chain_of(NAMESPACE, 8, seed)
            assert await put(tier, chain) == [Stored.STORED] * 8
            assert await get(tier, chain) == [True] * 8
            tier.check()
            assert sum(file.stat().st_size for file in (path / "slab").iterdir()) <= 100 * BLOCK
            await asyncio.sleep(0.002)
