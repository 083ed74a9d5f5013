"""A volume that turns read-only, as ext4 does after an error: misses meanwhile, and warm once it is mounted again."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import TierUnavailable
from kvtier.testing import chain_of, sample_namespace, seal
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.guard import Guarded
from kvtier.tiers.protocol import Stored
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put
from tests.tiers.disk.support.subprocesses import need, works

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 64)


def _run(*words: object) -> str:
    return subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def _volume(scratch: Path) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Where ext4 is mounted, and what mounts it anew with options."""
    need(os.geteuid() == 0 and works("losetup", "-f") and works("mkfs.ext4", "-V"), "root, loop devices and ext4")
    image, point = scratch / "image", scratch / "ext4"
    with image.open("wb") as file:
        file.truncate(128 << 20)
    point.mkdir()
    device = _run("losetup", "-f", "--show", image)

    def mount(options: str) -> None:
        subprocess.run(["umount", "-l", point], capture_output=True)
        _run("mount", "-o", options, device, point)

    try:
        _run("mkfs.ext4", "-q", device)
        mount("rw")
        yield point, mount
    finally:
        subprocess.run(["umount", "-l", point], capture_output=True)
        subprocess.run(["losetup", "-d", device], capture_output=True)


async def test_a_read_only_volume_leaves_the_tier_out_with_that_reason(tmp_path: Path) -> None:
    with _volume(tmp_path) as (point, mount):
        async with opened(point / "g3", 256) as tier:
            await put(tier, CHAIN)
        mount("ro")
        tier = DiskTier([point / "g3"], 256 * BLOCK, NAMESPACE, clock=SystemClock())
        with pytest.raises(TierUnavailable, match=r"(?i)read-only"):
            await tier.open()
        mount("rw")
        async with opened(point / "g3", 256) as tier:
            assert await get(tier, CHAIN) == [True] * 64


async def test_a_volume_that_turns_read_only_costs_misses_and_is_warm_when_it_is_mounted_anew(tmp_path: Path) -> None:
    clock = SystemClock()
    with _volume(tmp_path) as (point, mount):
        tier = DiskTier([point / "g3"], 256 * BLOCK, NAMESPACE, clock=clock)
        await tier.open()
        guard = Guarded(tier, clock)
        assert set(await put(tier, CHAIN)) == {Stored.STORED}
        _run("mount", "-o", "remount,abort", point)  # as ext4 does by itself after an error
        more = seal(chain_of(NAMESPACE, 8, seed=1), range(8), BLOCK, clock.wall())
        for _ in range(3):
            assert set(await guard.write(more, clock.monotonic() + FAR_S)) <= {Stored.FAILED, Stored.FULL}
        await tier.close(clock.monotonic() + FAR_S)
        mount("rw")
        async with opened(point / "g3", 256, clock=clock) as tier:
            assert await get(tier, CHAIN) == [True] * 64
            assert set(await tier.write(more, clock.monotonic() + FAR_S)) == {Stored.STORED}
