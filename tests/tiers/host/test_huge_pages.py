"""The arena in huge pages: used where all of it fits, given up for ordinary pages where the kernel gives less."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from kvtier.kernels import memory
from kvtier.kernels.memory import HugePages, huge_pages
from kvtier.tiers.host import arena as module
from kvtier.tiers.host.arena import Arena

MIB = 1 << 20
HUGE = HugePages(2 * MIB, 4)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each memfd was asked for in huge pages; ordinary ones are given, since this machine may have none."""
    asked: list[bool] = []
    create = os.memfd_create

    def ordinary(name: str, flags: int) -> int:
        asked.append(bool(flags & os.MFD_HUGETLB))
        return create(name, flags & ~os.MFD_HUGETLB)

    monkeypatch.setattr(os, "memfd_create", ordinary)
    return asked


def test_huge_pages_are_used_where_all_of_the_arena_fits(made: list[bool]) -> None:
    arena = Arena(8192, 2, 2 * 3 * MIB)
    arena.open(free=lambda: 0, reserved=lambda: HUGE)  # the kernel counts them as used memory
    assert made == [True, True]
    length = arena.slots * arena.slot_bytes
    assert length == 3 * MIB and [len(view) for view in arena.views()] == [length] * 2
    assert [os.fstat(fd).st_size for fd in arena.fds()] == [4 * MIB] * 2, "whole pages, so that they can be given back"
    arena.pieces(arena.slots - 1)[1][:] = b"x" * 4096
    whole = mmap.mmap(arena.fds()[1], 0)
    assert whole[length - 4096 : length] == b"x" * 4096 and whole[length:] == bytes(MIB)
    arena.close()


@pytest.mark.parametrize("free", [0, 3])
def test_fewer_than_the_arena_needs_are_left_to_others(made: list[bool], free: int) -> None:
    arena = Arena(8192, 2, 2 * 3 * MIB)
    arena.open(reserved=lambda: HugePages(2 * MIB, free))
    assert made == [False, False] and os.fstat(arena.fds()[0]).st_size == 3 * MIB
    arena.close()


def test_pages_that_the_kernel_does_not_give_are_replaced_by_ordinary_ones(
    made: list[bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = iter([4 * MIB, MIB])
    real = memory.populate
    monkeypatch.setattr(module, "populate", lambda view, *a, **o: next(given, None) or real(view, *a, **o))
    arena = Arena(8192, 2, 2 * 3 * MIB)
    arena.open(reserved=lambda: HUGE)
    assert made == [True, True, False, False] and "ordinary ones serve" in caplog.text
    assert len(arena.fds()) == 2 and [len(view) for view in arena.views()] == [3 * MIB] * 2
    arena.close()


def test_what_the_kernel_says_of_its_pages(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(
        "MemFree: 5 kB\nHugePages_Total: 9\nHugePages_Free: 7\nHugePages_Rsvd: 2\nHugepagesize: 2048 kB\n"
    )
    assert huge_pages(meminfo) == HugePages(2 * MIB, 5)
    assert huge_pages(meminfo).pages(2 * MIB + 1) == 2
    for text in ("", "HugePages_Free: x"):
        meminfo.write_text(text)
        assert huge_pages(meminfo).free == 0
    assert huge_pages(tmp_path / "absent").free == 0
