"""Ways to damage a file."""

from __future__ import annotations

import os
import random
from pathlib import Path


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file, past the page cache of whoever reads it directly."""
    fd = os.open(path, os.O_RDWR)
    byte = os.pread(fd, 1, offset)[0]
    os.pwrite(fd, bytes([byte ^ (1 << bit)]), offset)
    os.fsync(fd)
    os.close(fd)


def truncate(path: Path) -> None:
    """To half of what it occupies: a sparse file's unused end is no loss."""
    os.truncate(path, path.stat().st_blocks * 512 // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zero(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(min(size, 1 << 20)))


def garbage(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(random.Random(2).randbytes(min(size, 1 << 20)))


def delete(path: Path) -> None:
    path.unlink()


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere" / "else")


DAMAGES = [truncate, empty, zero, garbage, delete]


REPLACEMENTS = [directory, fifo, dangling]
