"""A medium with bad places, below a slab: the kernel's calls, of which those that touch certain pages fail."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvtier.tiers.disk.slab import SystemCalls

PAGE = 4096
Place = tuple[str, int]
"""A file's name and the number of a page in it."""


class BadMedium(SystemCalls):
    """`unwritable` and `unreadable` pages of slab files answer EIO; `dead`: every call does. `tries` counts calls that
    reached a bad page, by verb and page. `remaps`: the drive puts a good sector in the place of an unreadable one that
    is written to."""

    def __init__(self) -> None:
        self.unwritable: set[Place] = set()
        self.unreadable: set[Place] = set()
        self.dead = False
        self.sync_fails = 0
        self.remaps = False
        self.tries: Counter[tuple[str, Place]] = Counter()
        self._names: dict[int, str] = {}

    def spoil(self, share: float, segments: int, pages: int, seed: int) -> None:
        """Make a share of all pages unwritable and as many others unreadable."""
        rng = random.Random(seed)
        places = [(f"{segment:08x}.slab", page) for segment in range(segments) for page in range(pages)]
        chosen = rng.sample(places, 2 * max(1, int(len(places) * share)))
        self.unwritable.update(chosen[::2])
        self.unreadable.update(chosen[1::2])

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        self._names[fd] = path.name
        return fd

    def _check(self, verb: str, bad: set[Place], fd: int, size: int, offset: int) -> None:
        if self.dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        name = self._names[fd]
        hit = [(name, page) for page in range(offset // PAGE, -(-(offset + size) // PAGE)) if (name, page) in bad]
        self.tries.update((verb, place) for place in hit)
        if hit:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check("read", self.unreadable, fd, sum(map(len, buffers)), offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check("write", self.unwritable, fd, size := sum(map(len, buffers)), offset)
        if self.remaps:
            name, first = self._names[fd], offset // PAGE
            self.unreadable.difference_update((name, page) for page in range(first, first + size // PAGE))
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        if self.dead or self.sync_fails:
            self.sync_fails -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fdatasync(fd)
