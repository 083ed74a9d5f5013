"""A file system on a block device with bad pages."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.testing import chain_of, payload_of, sample_namespace, seal
from kvtier.tiers.breaker import Health
from kvtier.tiers.disk.bad_places import bad_places
from kvtier.tiers.disk.worker.client import DiskWorkerClient
from kvtier.tiers.guard import Guarded
from kvtier.tiers.protocol import Loaded, Stored, Target
from tests.tiers.disk.support.store import FAR_S, get, opened, put
from tests.tiers.disk.support.subprocesses import ROOT, environment, need, program, works
from tests.tiers.disk.support.worker import Bounced, memory

BLOCK, SLOTS = 16 << 10, 3000
NAMESPACE = sample_namespace(BLOCK)


@contextlib.contextmanager
def _disk(scratch: Path) -> Iterator[tuple[Path, Path]]:
    """(mount point of ext4 on the device, file that names its bad pages)."""
    image, pages = scratch / "image", scratch / "pages"
    with image.open("wb") as file:
        file.truncate(200 << 20)
    fuse, point = scratch / "fuse", scratch / "ext4"
    fuse.mkdir()
    point.mkdir()
    with contextlib.ExitStack() as undo:
        words = program("bad_disk", fuse, image, pages)
        server = undo.enter_context(
            subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
        )
        undo.callback(subprocess.run, ["fusermount3", "-u", "-z", fuse])
        assert server.stdout is not None
        assert server.stdout.readline() == "mounted\n"
        words = ["losetup", "-f", "--show", "--direct-io=on", "-b", "4096", str(fuse / "disk")]
        device = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
        undo.callback(subprocess.run, ["losetup", "-d", device])
        subprocess.run(["mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", device], check=True)
        subprocess.run(["mount", device, point], check=True)
        undo.callback(subprocess.run, ["umount", "-l", point])
        yield point, pages


def _pages_of(file: Path) -> list[int]:
    """The device's pages that a file lies on, in the file's order."""
    out = subprocess.run(["filefrag", "-v", "-b4096", file], check=True, capture_output=True, text=True).stdout
    found: list[int] = []
    for line in out.splitlines():
        words = line.replace(":", " ").replace("..", " ").split()
        if len(words) > 5 and words[0].isdigit():
            found += range(int(words[3]), int(words[3]) + int(words[5]))
    return found


def _need_a_disk() -> None:
    need(importlib.util.find_spec("pyfuse3") is not None, "pyfuse3")
    need(works("losetup", "-f") and works("filefrag", "-V") and works("mkfs.ext4", "-V"), "loop devices and ext4")


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_bad_pages_of_a_device_cost_their_slots_and_nothing_else(tmp_path: Path) -> None:
    _need_a_disk()
    clock, chain = SystemClock(), chain_of(NAMESPACE, SLOTS)
    with _disk(tmp_path) as (point, pages):
        path = point / "g3"
        async with opened(path, SLOTS, block_bytes=BLOCK, namespace=NAMESPACE, clock=clock) as tier:
            await put(tier, chain, range(64))
            on_device = _pages_of(path / "slab" / "00000000.slab")
            bad = random.Random(3).sample(range(64 * 4, len(on_device)), len(on_device) // 1000)
            pages.write_text(" ".join(str(on_device[page]) for page in bad))
            slots = len({page // 4 for page in bad})
            guard = Guarded(tier, clock)
            for start in range(64, SLOTS, 64):
                sealed = seal(chain, range(start, min(SLOTS, start + 64)), BLOCK, clock.wall())
                assert set(await guard.write(sealed, clock.monotonic() + FAR_S)) == {Stored.STORED}
            assert (await get(tier, chain)).count(True) >= 0.99 * (SLOTS - slots)
            assert guard.breaker.health is Health.WELL and guard.breaker.opened == 0
            with tier._store.index.reading() as txn:
                assert len(bad_places(txn)) == slots
            bad = [page for page in range(len(on_device)) if page // 4 in (5, 77)]
            pages.write_text(" ".join(str(on_device[page]) for page in bad))  # written well, and unreadable now
            lost = [place for place, found in enumerate(await get(tier, chain)) if found is not True]
            assert set(await put(tier, chain, lost)) == {Stored.STORED}
            assert (await get(tier, chain)).count(True) >= SLOTS - slots - 2
            await asyncio.sleep(1.0)
            tier.check()


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_worker_process_lives_with_bad_pages(tmp_path: Path) -> None:
    _need_a_disk()
    clock, chain = SystemClock(), chain_of(NAMESPACE, SLOTS)
    with _disk(tmp_path) as (point, pages), memory(BLOCK) as arena:
        path = point / "g3"
        tier = DiskWorkerClient([path], SLOTS * BLOCK, NAMESPACE, clock=clock, arena=arena)
        await tier.open()
        guard = Guarded(Bounced(tier, arena), clock)

        async def write(start: int) -> None:
            sealed = seal(chain, range(start, min(SLOTS, start + 64)), BLOCK, clock.wall())
            assert set(await guard.write(sealed, clock.monotonic() + FAR_S)) == {Stored.STORED}

        await write(0)
        on_device = _pages_of(path / "slab" / "00000000.slab")
        bad = random.Random(4).sample(range(64 * 4, len(on_device)), len(on_device) // 1000)
        pages.write_text(" ".join(str(on_device[page]) for page in bad))
        slots = len({page // 4 for page in bad})
        for start in range(64, SLOTS, 64):
            await write(start)
        served = 0
        for start in range(0, SLOTS, 64):
            targets = [Target(one, (memoryview(bytearray(BLOCK)),)) for one in range(start, min(SLOTS, start + 64))]
            for target, found in zip(targets, await guard.read(chain, targets, clock.monotonic() + FAR_S), strict=True):
                if isinstance(found, Loaded):
                    assert bytes(target.into[0]) == payload_of(chain[target.index], BLOCK)
                    served += 1
        assert served >= 0.99 * (SLOTS - slots)
        assert tier.counters()["set_aside_slots"] == slots
        assert not tier.restarts() and guard.breaker.health is Health.WELL and guard.breaker.opened == 0
        await tier.close(clock.monotonic() + FAR_S)
