"""Power loss from the first call on, on a file system that logs what it may forget.

    python -m tests.tiers.disk.support.blackout DIRECTORY POINTS SEED [blocks|names|mixed]

A worker makes a store on a `forgetting_fs` mount and does 200 operations on it. At POINTS places (0: at every
sync, and at every change of a name) images of the disk are made and opened:

    nothing   what was synced, and nothing else: files by their own sync, names by the sync of their directory
    all       everything
    torn      of what was not synced: of each directory the first so many changes, of each file any sectors of any
              writes, in any order, and any of its changes of length

`blocks` and `names` leave out the worker's syncs of slab files, or of the directory they are in: the controls. `mixed`:
the worker is that of `crash_mixed`, which does all that a store can do.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tiers.disk.support import crash_mixed
from tests.tiers.disk.support.crash import inspect, recent, work

SECTOR = 512
PAGE = 4096
REPORTS = "REPORTS"
ROOT = 1
HOWS = ("nothing", "all", "torn", "torn")
NAMES = ("mkdir", "create", "unlink", "rename")


@dataclass(slots=True)
class Content:
    """A file's bytes; pages that were never written are zero."""

    size: int = 0
    pages: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> Content:
        return Content(self.size, dict(self.pages))

    def write(self, offset: int, data: bytes) -> None:
        self.size = max(self.size, offset + len(data))
        while data:
            page, start = divmod(offset, PAGE)
            some = data[: PAGE - start]
            old = self.pages.get(page, bytes(PAGE))
            self.pages[page] = old[:start] + some + old[start + len(some) :]
            offset, data = offset + len(some), data[len(some) :]

    def truncate(self, size: int) -> None:
        if size < self.size:
            last, rest = divmod(size, PAGE)
            self.pages = {number: page for number, page in self.pages.items() if number <= last}
            if last in self.pages:
                self.pages[last] = self.pages[last][:rest] + bytes(PAGE - rest)
        self.size = size

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            for number, page in self.pages.items():
                file.seek(number * PAGE)
                file.write(page[: max(0, self.size - number * PAGE)])
            file.truncate(self.size)


class Disk:
    """The content that is certain after a power loss, and the changes since, which may be lost."""

    def __init__(self) -> None:
        self._files: dict[int, Content] = defaultdict(Content)
        self._folders: dict[int, dict[str, int]] = defaultdict(dict)
        self._kinds: dict[int, str] = {ROOT: "mkdir"}
        self._loose: dict[int, list[list[Any]]] = defaultdict(list)

    def do(self, op: list[Any]) -> None:
        """Take note of one line of the log."""
        match op[0]:
            case "mkdir" | "create":
                self._kinds[op[3]] = op[0]
                self._loose[op[1]].append(op)
            case "rename":
                assert op[1] == op[3], "a rename between directories: not modelled"
                self._loose[op[1]].append(op)
            case "unlink" | "truncate":
                self._loose[op[1]].append(op)
            case "write":
                self._loose[op[1]].append(op)
                if op[4]:
                    self._settle(op[1])
            case "sync":
                self._settle(op[1])

    def _settle(self, inode: int) -> None:
        for op in self._loose.pop(inode, ()):
            if self._kinds[inode] == "mkdir":
                _rename(self._folders[inode], op)
            else:
                _change(self._files[inode], op)

    def image(self, path: Path, how: str, rng: random.Random) -> None:
        """Make the directory `path` what the disk may hold."""
        self._make(ROOT, path, how, rng)

    def _make(self, inode: int, path: Path, how: str, rng: random.Random) -> None:
        loose = self._loose.get(inode, [])
        if self._kinds[inode] == "mkdir":
            path.mkdir()
            names = dict(self._folders[inode])
            for op in loose[: {"nothing": 0, "all": len(loose)}.get(how, rng.randint(0, len(loose)))]:
                _rename(names, op)
            for name, child in names.items():
                if name != REPORTS:
                    self._make(child, path / name, how, rng)
            return
        content = self._files[inode].copy()
        for op in loose if how != "nothing" else []:
            if how == "all":
                _change(content, op)
            elif op[0] == "truncate":
                if rng.random() < 0.5:
                    _change(content, op)
            else:
                data = base64.b64decode(op[3])
                for start in range(0, len(data), SECTOR):
                    if rng.random() < 0.5:
                        content.write(op[2] + start, data[start : start + SECTOR])
        content.save(path)


def _rename(names: dict[str, int], op: list[Any]) -> None:
    """Apply a change of names to a directory."""
    if op[0] in ("mkdir", "create"):
        names[op[2]] = op[3]
    elif op[0] == "unlink":
        del names[op[2]]
    else:
        names[op[4]] = names.pop(op[2])


def _change(content: Content, op: list[Any]) -> None:
    if op[0] == "write":
        content.write(op[2], base64.b64decode(op[3]))
    else:
        content.truncate(op[2])


def record(scratch: Path, seed: int, sabotage: str) -> list[list[Any]]:
    """The log of a worker's calls, in order."""
    mountpoint, log = scratch / "mount", scratch / "log"
    mountpoint.mkdir()
    words = [sys.executable, "-m", "tests.tiers.disk.support.forgetting_fs", str(mountpoint), str(log)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"mounted\n"
        try:
            more = [str(mountpoint), str(seed), sabotage]
            done = subprocess.run(
                [sys.executable, "-m", "tests.tiers.disk.support.blackout", "worker", *more], timeout=300
            )
        finally:
            unmount = subprocess.run(["umount", mountpoint], timeout=30)
            if unmount.returncode:
                daemon.kill()
                subprocess.run(["umount", "--lazy", mountpoint], timeout=30)
        daemon.wait(60)
    assert done.returncode == 0, f"the worker failed with {done.returncode}"
    with log.open() as lines:
        return [json.loads(line) for line in lines]


def run(scratch: Path, points: int, seed: int, sabotage: str) -> dict[str, int]:
    """Raise AssertionError at the first image that is wrong."""
    log, rng = record(scratch, seed, sabotage), random.Random(seed)
    reports = next(op[3] for op in log if op[0] == "create" and op[2] == REPORTS)
    places = [n for n, op in enumerate(log) if (op[0] in ("sync", *NAMES) or op[-1] is True) and reports not in op[1:4]]
    chosen = set(places if points == 0 else rng.sample(places, min(points, len(places)))) | {len(log) - 1}
    disk, said = Disk(), b""
    images = durable_checked = 0
    for number, op in enumerate(log):
        if number in chosen:
            known = crash_mixed.Known()
            if sabotage == "mixed":
                known.learn(said, keeps=True)
                durable = [*known.kept]
            else:
                durable = recent(said)
            for how in HOWS:
                image = scratch / "image"
                shutil.rmtree(image, ignore_errors=True)
                disk.image(image, how, rng)
                try:
                    (image / "g3").mkdir(exist_ok=True)
                    if sabotage == "mixed":
                        asyncio.run(crash_mixed.inspect(image / "g3", 0, seed, crash_mixed.CAPACITY, known))
                    else:
                        asyncio.run(inspect(image / "g3", durable))
                except BaseException:
                    print(f"seed {seed}, before line {number} of the log, {op[:3]}: {how}", file=sys.stderr)
                    raise
                images += 1
                durable_checked += len(durable)
        if op[0] == "write" and op[1] == reports:
            said += base64.b64decode(op[3])
        else:
            disk.do(op)
    return {"places": len(places), "images": images, "operations": len(log), "durable_checked": durable_checked}


def work_on(mountpoint: Path, seed: int, sabotage: str) -> None:
    """The worker."""
    from kvtier.tiers.disk import slab

    if sabotage == "blocks":
        slab.SystemCalls.fdatasync = lambda self, fd: None  # type: ignore[method-assign]
    if sabotage == "names":
        slab.sync_directory = lambda path: None  # type: ignore[attr-defined]
    report = os.open(mountpoint / REPORTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if sabotage == "mixed":
        asyncio.run(crash_mixed.work(mountpoint / "g3", 0, 0, seed, crash_mixed.CAPACITY, report, 150))
    else:
        asyncio.run(work(mountpoint / "g3", seed, report, 100))
    os.close(report)


def main(words: list[str]) -> int:
    if words[0] == "worker":
        work_on(Path(words[1]), int(words[2]), words[3])
        return 0
    scratch = Path(words[0])
    try:
        print(json.dumps(run(scratch, int(words[1]), int(words[2]), words[3] if len(words) > 3 else "")))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError):
            (scratch / "log").unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
