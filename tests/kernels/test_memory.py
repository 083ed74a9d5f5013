"""Host memory for copies: mapped from a memfd, populated in parallel and near the GPU."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from kvtier.kernels import memory
from kvtier.kernels.copy import Moves, Outcome
from kvtier.kernels.engine import open_pool_engine
from kvtier.kernels.memory import attach, node_cpus, populate

MIB = 1 << 20


def memfd(nbytes: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def resident_pages(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512 // mmap.PAGESIZE


def test_attached_memory_is_shared_with_every_holder_of_the_fd() -> None:
    fd = memfd(8192)
    one, two = attach(fd), attach(fd)
    one[5] = 77
    assert two[5] == 77 and len(two) == 8192
    os.close(fd)
    one[6] = 78
    assert two[6] == 78


def test_populating_faults_every_page_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "POPULATE_STEP_BYTES", MIB)
    fd = memfd(5 * MIB + 4096)
    view = attach(fd)
    assert resident_pages(fd) == 0
    seen: list[tuple[str, int, int]] = []
    done = populate(view, threads=2, progress=lambda *step: seen.append(step))
    assert done == view.nbytes == resident_pages(fd) * mmap.PAGESIZE
    assert seen[-1] == ("populate", view.nbytes, view.nbytes)
    assert [step[1] for step in seen] == sorted(step[1] for step in seen)
    os.close(fd)


def test_a_small_memory_is_populated_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is started for each replica, test and simulated process: it takes longer than the memory."""
    monkeypatch.setattr(Thread, "start", lambda thread: pytest.fail("a thread was started"))
    fd = memfd(MIB)
    assert populate(attach(fd)) == MIB
    os.close(fd)


def test_populating_from_given_cpus_leaves_the_caller_where_it_was() -> None:
    fd = memfd(MIB)
    before = os.sched_getaffinity(0)
    assert populate(attach(fd), cpus={min(before)}) == MIB
    assert populate(attach(fd), cpus={100_000}) == MIB, "a CPU that is not there is no reason to fail"
    assert os.sched_getaffinity(0) == before
    os.close(fd)


def test_missing_memory_is_a_smaller_arena_not_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file ends before the mapping does: its last pages cannot be had."""
    monkeypatch.setattr(memory, "POPULATE_STEP_BYTES", MIB)
    fd = memfd(4 * MIB)
    view = attach(fd)
    os.ftruncate(fd, 2 * MIB)
    assert populate(view) == 2 * MIB
    os.close(fd)


def test_a_kernel_that_cannot_populate_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = memfd(MIB)
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)  # what an older kernel answers to an unknown advice
    with pytest.raises(OSError) as caught:
        populate(attach(fd))
    assert caught.value.errno == errno.EINVAL
    assert populate(memoryview(bytearray(0))) == 0
    os.close(fd)


def test_progress_is_logged_by_tenths(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    reporter = memory.Reporter(least_bytes=1000)
    for done in range(0, 1001, 50):
        reporter("register", done, 1000)
        reporter("populate", done // 2, 500)
    assert len(caplog.messages) == 10 and "register" in caplog.messages[0]


def test_the_cpus_near_a_device_come_from_sysfs(tmp_path: Path) -> None:
    device = tmp_path / "bus" / "pci" / "devices" / "0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (device / "local_cpulist").write_text("0-2,8,10-11\n")
    assert node_cpus("0000:1b:00.0", tmp_path) == {0, 1, 2, 8, 10, 11}
    (device / "numa_node").write_text("-1\n")
    assert node_cpus("0000:1b:00.0", tmp_path) == frozenset()
    assert node_cpus("0000:ff:00.0", tmp_path) == frozenset()


def test_a_pool_on_the_cpu_gets_an_engine_over_attached_memory() -> None:
    fds = [memfd(8 * 4096) for _ in range(2)]
    pool = torch.arange(4 * 6000, dtype=torch.int64).remainder(253).to(torch.uint8).reshape(4, 6000)
    views = [attach(fd) for fd in fds]
    engine = open_pool_engine(pool, views, slot_bytes=4096)
    engine.store(Moves.of([(2, 7, 1), (3, 0, 1)]))
    assert [ack.outcome for ack in engine.poll()] == [Outcome.DONE]
    for block, slot in ((2, 7), (3, 0)):
        got = b"".join(bytes(view[slot * 4096 : slot * 4096 + 3000]) for view in views)
        assert got == np.asarray(pool[block]).tobytes()
    assert engine.close(1.0)
    for view, fd in zip(views, fds, strict=True):
        view.release()
        os.close(fd)
