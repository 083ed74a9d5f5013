"""This machine's disks: which mount a path is on, and where a cache may lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOCAL = frozenset({"bcachefs", "btrfs", "ext3", "ext4", "f2fs", "overlay", "xfs", "zfs"})
"""File systems that a G3 directory may lie on."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system. `spins`: whether its device is a hard disk; None where the kernel does not say."""

    point: Path
    source: str
    kind: str
    read_only: bool
    free_bytes: int
    spins: bool | None
    whole_bytes: int = 0

    def __str__(self) -> str:
        device = {True: ", a hard disk", False: ", an SSD", None: ""}[self.spins]
        return f"{self.point} ({self.kind} on {self.source}{device})"


def mounts(table: Path = Path("/proc/self/mounts")) -> Iterator[Mount]:
    """The local ones that can be asked, in the order of the table."""
    for line in table.read_text(errors="replace").splitlines():
        source, point, kind, options, *_ = line.split(" ")
        place = Path(point.encode().decode("unicode_escape"))
        if kind not in LOCAL:
            continue
        try:
            stat, device = os.statvfs(place), place.stat().st_dev
        except OSError:
            continue
        yield Mount(
            place, source, kind, "ro" in options.split(","), stat.f_bavail * stat.f_frsize, _spins(device),
            stat.f_blocks * stat.f_frsize,
        )  # fmt: skip


def mount_of(path: Path) -> Mount | None:
    """The local mount that `path`, or the nearest directory above it, is on; None for another kind."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists()).resolve()
    found = [each for each in mounts() if there.is_relative_to(each.point)]
    deepest = max(found, key=lambda each: len(each.point.parts), default=None)
    same = deepest is not None and deepest.point.stat().st_dev == there.stat().st_dev
    return deepest if same else None


def place_for_cache() -> tuple[Path, Mount] | None:
    """A directory for G3, on the writable local mount with the most free space, SSDs before hard disks. Containers
    mount single files: only directories count."""
    usable = [
        each for each in mounts() if not each.read_only and each.point.is_dir() and os.access(each.point, os.W_OK)
    ]
    best = max(usable, key=lambda each: (not each.spins, each.free_bytes), default=None)
    if best is None:
        return None
    return (Path("/var/tmp/kvtier") if best.point == Path("/") else best.point / "kvtier"), best


def _spins(device: int) -> bool | None:
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (block / "queue", block / ".." / "queue"):  # of a partition: the disk's
        try:
            return (queue / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None
