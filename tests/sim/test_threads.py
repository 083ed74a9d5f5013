"""Threads of simulated processes run one at a time, wait in virtual time, and end where their process is killed; disks
lose what was not synced, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvtier.sim.drive import Drive, DriveFault
from kvtier.sim.kernel import Kernel
from kvtier.sim.loop import VirtualLoop
from kvtier.sim.threads import Killed, Primitives, Threads

PROCESS = 7


def run(seed: int, main: Callable[[VirtualLoop, Threads, Primitives], Coroutine[Any, Any, None]]) -> VirtualLoop:
    """`main` outside, its threads in PROCESS or outside."""
    loop = VirtualLoop(seed)
    threads = Threads(loop, seed)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main(loop, threads, Primitives(threads)))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return loop


def order(seed: int) -> list[int]:
    """In which two threads came by, each of which waits between two steps."""
    seen: list[int] = []

    async def main(loop: VirtualLoop, threads: Threads, primitives: Primitives) -> None:
        lock = primitives.Lock()

        def work(number: int) -> None:
            for _ in range(10):
                with lock:
                    seen.append(number)
                    threads.sleep(0.001)
                    seen.append(number)

        both = [primitives.Thread(work, args=(number,)) for number in range(2)]
        for one in both:
            one.start()
        await asyncio.sleep(1.0)
        assert not any(one.is_alive() for one in both)

    run(seed, main)
    return seen


def test_a_lock_is_one_thread_s_and_the_seed_says_whose() -> None:
    orders = {tuple(order(seed)) for seed in range(8)}
    assert len(orders) > 4
    for seen in orders:
        assert all(first == second for first, second in zip(seen[::2], seen[1::2], strict=True)), "held across a wait"
    assert order(3) == order(3)


def test_a_condition_is_heard_or_times_out_in_virtual_time() -> None:
    async def main(loop: VirtualLoop, threads: Threads, primitives: Primitives) -> None:
        condition, heard, began = primitives.Condition(), list[tuple[bool, float]](), loop.time()

        def wait(timeout: float | None) -> None:
            with condition:
                heard.append((condition.wait(timeout), loop.time() - began))

        waiting = [primitives.Thread(wait, args=(timeout,)) for timeout in (5.0, None)]
        for one in waiting:
            one.start()
        await asyncio.sleep(10.0)
        assert heard == [(False, 5.0)]
        with condition:
            condition.notify_all()
        await asyncio.sleep(0.1)
        assert heard[1][0] and heard[1][1] == pytest.approx(10.0)

    run(1, main)


def test_a_killed_process_has_no_threads() -> None:
    """Each unwinds where it waits, and no line of it takes a lock any more."""
    ended: list[str] = []

    async def main(loop: VirtualLoop, threads: Threads, primitives: Primitives) -> None:
        lock, condition = primitives.Lock(), primitives.Condition()

        def sleep() -> None:
            try:
                with lock:
                    threads.sleep(100.0)
            finally:
                ended.append("sleep")
                with lock:
                    ended.append("never")

        def wait() -> None:
            try:
                with condition:
                    condition.wait()
            except Killed:
                ended.append("wait")
                raise

        async def start() -> None:
            for work in (sleep, wait, lambda: lock.acquire()):
                primitives.Thread(work).start()

        await loop.spawn(PROCESS, start())
        await asyncio.sleep(1.0)
        threads.kill(PROCESS)
        assert sorted(ended) == ["sleep", "wait"] and not threads._of[PROCESS]

    assert not run(2, main).errors


def test_a_thread_that_dies_is_an_error_and_an_event_loop_that_waits_for_the_disk_too() -> None:
    async def main(loop: VirtualLoop, threads: Threads, primitives: Primitives) -> None:
        primitives.Thread(lambda: 1 // 0, name="writer").start()
        lock = primitives.Lock()

        def hold() -> None:
            with lock:
                threads.sleep(1.0)

        primitives.Thread(hold).start()
        await asyncio.sleep(0.5)
        with pytest.raises(AssertionError, match="waits for a lock"), lock:
            pass

    died, waited = run(3, main).errors
    assert "writer ended: ZeroDivisionError" in died and "an event loop waits for a lock" in waited


def on_disk(folder: Path, seed: int, work: Callable[[Kernel, Drive, str], None]) -> Drive:
    """`work` on a thread, with a path on a disk; what it raised is raised."""
    drives: list[Drive] = []

    async def main(loop: VirtualLoop, threads: Threads, primitives: Primitives) -> None:
        kernel = Kernel(threads, random.Random(seed), lambda *_: None)
        drives.append(drive := Drive(folder, threads, random.Random(seed)))
        kernel.add(drive)
        primitives.Thread(lambda: work(kernel, drive, str(folder / "f"))).start()
        await asyncio.sleep(10.0)

    assert not run(seed, main).errors
    return drives[0]


@pytest.mark.parametrize("synced", [True, False])
def test_only_what_was_synced_is_there_after_a_loss_of_power(tmp_path: Path, synced: bool) -> None:
    kept = set()
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()

        def work(kernel: Kernel, drive: Drive, path: str, folder: Path = folder) -> None:
            fd = kernel.open(path, os.O_RDWR | os.O_CREAT)
            names = kernel.open(folder, os.O_RDONLY)
            kernel.pwritev(fd, [memoryview(b"a" * 4096)], 0)
            kernel.fdatasync(fd)
            kernel.fsync(names)
            kernel.pwritev(fd, [memoryview(b"b" * 4096)], 0)
            if synced:
                kernel.fdatasync(fd)
            assert kernel.preadv(fd, [memoryview(bytearray(4096))], 0) == 4096

        drive = on_disk(folder, seed, work)
        assert (folder / "f").read_bytes() == b"b" * 4096, "a process sees what was written"
        drive.lose_power()
        kept.add((folder / "f").read_bytes())
    assert kept == {b"b" * 4096} if synced else len(kept) > 5 and b"a" * 4096 in kept


def test_a_failed_sync_makes_nothing_durable_later(tmp_path: Path) -> None:
    lost = 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()

        def work(kernel: Kernel, drive: Drive, path: str, folder: Path = folder) -> None:
            fd = kernel.open(path, os.O_RDWR | os.O_CREAT)
            kernel.pwritev(fd, [memoryview(b"a" * 4096)], 0)
            drive.break_(DriveFault("sync", "error", 1.0))
            with pytest.raises(OSError, match="injected"):
                kernel.fdatasync(fd)
            drive.heal()
            kernel.fdatasync(fd)
            kernel.fsync(kernel.open(folder, os.O_RDONLY))

        on_disk(folder, seed, work).lose_power()
        lost += (folder / "f").read_bytes() != b"a" * 4096
    assert lost > 5


def test_what_a_failed_sync_lost_may_be_gone_at_once(tmp_path: Path) -> None:
    """It fails once. What is certain stays, and what was written since it began is there."""
    found = set()
    for seed in range(20):
        (folder := tmp_path / str(seed)).mkdir()

        def work(kernel: Kernel, drive: Drive, path: str) -> None:
            fd = kernel.open(path, os.O_RDWR | os.O_CREAT)
            kernel.pwritev(fd, [memoryview(b"a" * 4096)], 0)
            kernel.fdatasync(fd)
            kernel.pwritev(fd, [memoryview(b"b" * 4096)], 0)
            drive.break_(DriveFault("sync", "error", 1.0))
            with pytest.raises(OSError, match="injected"):
                kernel.fdatasync(fd)
            drive.heal()
            kernel.pwritev(fd, [memoryview(b"c" * 512)], 0)
            kernel.fdatasync(fd)

        on_disk(folder, seed, work)
        data = (folder / "f").read_bytes()
        assert data[:512] == b"c" * 512
        found.add(data[512:])
    assert found == {b"a" * 3584, b"b" * 3584}


@pytest.mark.parametrize("kind", ["damage", "drop", "bad", "worn", "nothing"])
def test_a_disk_counts_the_reads_for_which_it_is_to_blame(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.slab"

    def work(kernel: Kernel, drive: Drive, _: str) -> None:
        fd, block = kernel.open(path, os.O_RDWR | os.O_CREAT), bytes(range(256)) * 2
        kernel.pwritev(fd, [memoryview(block.ljust(4096))], 0)
        kernel.fdatasync(fd)
        content = drive.content_of(path)
        if kind == "drop":
            drive.break_(DriveFault("write", "drop", 1.0))
            block = bytes(512)
            kernel.pwritev(fd, [memoryview(block.ljust(4096))], 0)
            drive.heal()
        while kind == "damage" and not content.harmed:
            drive.damage()
        while kind == "bad" and not content.bad:
            drive.break_(DriveFault("*", "bad", 1.0))
        assert kind != "worn" or (drive.wear_out(block) and not drive.wear_out(b"another block"))
        assert content.holds(block, 0), "as it should be, or the disk is to blame"
        assert not content.holds(b"other" * 30, 8192)
        with contextlib.suppress(OSError):
            kernel.preadv(fd, [memoryview(bytearray(4096))], 0)
        assert drive.bad_reads == (kind != "nothing")
        content.bad.clear()
        kernel.pwritev(fd, [memoryview(bytes(4096))], 0)
        with contextlib.suppress(OSError):
            kernel.preadv(fd, [memoryview(bytearray(4096))], 0)
        assert drive.bad_reads == (kind != "nothing") + (kind == "worn"), "what is written anew is sound"

    on_disk(tmp_path, 4, work)


def test_what_was_lost_does_not_come_back_over_what_was_written_there_since(tmp_path: Path) -> None:
    def work(kernel: Kernel, drive: Drive, path: str) -> None:
        fd = kernel.open(path, os.O_RDWR | os.O_CREAT)
        kernel.fsync(kernel.open(drive.folder, os.O_RDONLY))
        kernel.pwritev(fd, [memoryview(b"a" * 8192)], 0)
        drive.break_(DriveFault("sync", "error", 1.0))
        with pytest.raises(OSError, match="injected"):
            kernel.fdatasync(fd)
        drive.heal()
        kernel.pwritev(fd, [memoryview(b"b" * 4096)], 2048)
        kernel.fdatasync(fd)

    for seed in range(10):
        (folder := tmp_path / str(seed)).mkdir()
        on_disk(folder, seed, work).lose_power()
        assert (folder / "f").read_bytes()[2048:6144] == b"b" * 4096


def test_a_new_file_is_gone_unless_its_folder_was_synced(tmp_path: Path) -> None:
    def work(kernel: Kernel, drive: Drive, path: str) -> None:
        kernel.fsync(kernel.open(path, os.O_RDWR | os.O_CREAT))

    there = set()
    for seed in range(10):
        (folder := tmp_path / str(seed)).mkdir()
        on_disk(folder, seed, work).lose_power()
        there.add((folder / "f").exists())
    assert there == {True, False}


@pytest.mark.parametrize(
    ("kind", "verb", "error"),
    [("error", "write", "injected"), ("full", "grow", "injected"), ("bad", "read", "bad page")],
)
def test_a_disk_fails_until_it_heals(tmp_path: Path, kind: str, verb: str, error: str) -> None:
    path = tmp_path / "x.slab"

    def work(kernel: Kernel, drive: Drive, _: str) -> None:
        fd = kernel.open(path, os.O_RDWR | os.O_CREAT)
        calls: dict[str, Callable[[], object]] = {
            "write": lambda: kernel.pwritev(fd, [memoryview(b"b" * 4096)], 0),
            "grow": lambda: kernel.posix_fallocate(fd, 0, 1 << 16),
            "read": lambda: kernel.preadv(fd, [memoryview(bytearray(4096))], 0),
        }
        calls["write"]()
        kernel.fdatasync(fd)
        while kind != "bad" or not drive.content(path.stat().st_ino).bad:
            drive.break_(DriveFault(verb, kind, 1.0))
            if kind != "bad":
                break
        with pytest.raises(OSError, match=error):
            calls[verb]()
        drive.heal()
        drive.mend_pages()
        calls[verb]()

    on_disk(tmp_path, 4, work)
