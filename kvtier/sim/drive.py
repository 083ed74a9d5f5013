"""The disk of one machine: real files in a folder, of which it may lose what was not synced, and devices that fail.

    content    what a process reads is in the files; what is certain after a loss of power is remembered beside them,
               and each write and change of length since, which is kept sector by sector or lost, in any order
    names      a file that was made is gone after a loss of power unless its directory was synced; renamed and removed
               names count at once (`tests/tiers/disk/test_blackout.py` forgets those, too)
    index      a commit of LMDB is whole or not there; one that was answered is there
    faults     calls that fail, hang, take long, find no space, or write nothing; pages that cannot be read or written

A sector has SECTOR bytes, since blocks are as small as a real one.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.sim.threads import Thread, Threads

SECTOR = 64
PAGE = 4096
HEAD = 512
"""So much of a page do blocks have, at its beginning."""
DEVICE_S = (0.0, 0.0, 0.0002, 0.001, 0.02)
"""How long a call takes."""
SLOW_S = 0.1
KINDS = ("error", "error", "error", "slow", "hang", "full", "drop", "bad", "bad", "bad")
"""As often as they are drawn. `drop`: writes are answered and not made; `bad`: some pages are, until they are written
to. A failed sync loses of what was written before it: some at once, some with the power, some not; the next one is
answered, and saves none of it."""
VERBS = ("read", "write", "sync", "sync", "sync", "commit", "*")


@dataclass
class DriveFault:
    """Calls of `verb` are hit at `rate`."""

    verb: str
    kind: str
    rate: float


@dataclass
class _Change:
    """A write of `data`, or a new length `size`, that may be lost. `lost`: a sync failed since: none saves it any
    more."""

    offset: int = 0
    data: bytes = b""
    size: int | None = None
    lost: bool = False


@dataclass
class Content:
    """Of a file: the certain bytes, and what changed since."""

    certain: bytearray = field(default_factory=bytearray)
    loose: list[_Change] = field(default_factory=list)
    bad: set[int] = field(default_factory=set)
    """Pages that cannot be read or written."""
    worn: set[int] = field(default_factory=set)
    """Pages that can be written, and never read."""
    harmed: set[int] = field(default_factory=set)
    """Sectors that the device has damaged, or said to have written and has not."""

    def harm(self, span: range) -> None:
        """The device breaks its word about these bytes."""
        self.harmed.update(_sectors(span))

    def is_harmed(self, span: range) -> bool:
        """Whether it did about one of these."""
        return bool(self.harmed) and not self.harmed.isdisjoint(_sectors(span))

    def holds(self, data: bytes, offset: int) -> bool:
        """Whether these bytes are durable there, or the device is to blame that they are not."""
        span = range(offset, offset + len(data))
        return self.certain[offset : span.stop] == data or self.is_harmed(span)

    def seen(self, offset: int, size: int) -> bytes:
        """What a process finds there: what is certain, and what was written over it."""
        data = bytearray(self.certain[offset : offset + size].ljust(size, b"\0"))
        for change in self.loose:
            start, end = max(offset, change.offset), min(offset + size, change.offset + len(change.data))
            if start < end:
                data[start - offset : end - offset] = change.data[start - change.offset : end - change.offset]
        return bytes(data)

    def settle(self, changes: Sequence[_Change]) -> None:
        """These are certain now: what was lost before them in the same place does not come back."""
        waiting = set(map(id, self.loose))  # another sync may have come first
        settled = [change for change in changes if not change.lost and id(change) in waiting]
        for change in settled:
            _apply(self.certain, change)
            before = self.loose[: next(n for n, one in enumerate(self.loose) if one is change)]
            rest = [piece for one in before for piece in (_outside(one, change) if one.lost else [one])]
            self.loose[: len(before)] = rest
        kept = set(map(id, settled))
        self.loose = [change for change in self.loose if id(change) not in kept]

    def after_loss(self, rng: random.Random) -> bytes:
        """What is left of it."""
        how = rng.choice(("nothing", "torn", "torn", "all"))
        for change in self.loose:
            if how == "nothing":
                break
            if change.size is not None:
                if how == "all" or rng.random() < 0.5:
                    _apply(self.certain, change)
                continue
            for start in range(0, len(change.data), SECTOR):
                if how == "all" or rng.random() < 0.5:
                    piece = change.data[start : start + SECTOR]
                    _apply(self.certain, _Change(change.offset + start, piece))
        self.loose.clear()
        return bytes(self.certain)


def _is_there(path: Path, inode: int) -> bool:
    return path.exists() and path.stat().st_ino == inode


def _pages(span: range) -> range:
    return range(span.start // PAGE, -(-span.stop // PAGE))


def _sectors(span: range) -> range:
    return range(span.start // SECTOR, -(-span.stop // SECTOR))


def _outside(old: _Change, new: _Change) -> list[_Change]:
    """What a later change that is certain leaves of an earlier one that was lost."""
    if old.size is not None or new.size is not None:
        return [old] if old.size is None else []
    start, end = new.offset - old.offset, new.offset + len(new.data) - old.offset
    if end <= 0 or start >= len(old.data):
        return [old]
    left, right = old.data[: max(0, start)], old.data[end:]
    pieces = [_Change(old.offset, left, lost=True), _Change(old.offset + end, right, lost=True)]
    return [piece for piece in pieces if piece.data]


def _apply(data: bytearray, change: _Change) -> None:
    if change.size is not None:
        del data[change.size :]
        data.extend(bytes(change.size - len(data)))
        return
    data.extend(bytes(max(0, change.offset + len(change.data) - len(data))))
    data[change.offset : change.offset + len(change.data)] = change.data


class Drive:
    """Of the files below `folder`."""

    def __init__(self, folder: Path, threads: Threads, rng: random.Random) -> None:
        self.folder = folder
        self.faults: list[DriveFault] = []
        self.bad_reads = 0
        """Reads that failed, or gave bytes that it has damaged."""
        self.threads = threads
        self._rng = rng
        self._contents: dict[int, Content] = {}  # by inode
        self._paths: dict[int, Path] = {}  # the name that a file was last opened by
        self._new: dict[Path, list[str]] = {}  # folder → names in it that are not durable, in order
        self._hanging: list[Thread] = []

    # -- what happens to it -----------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Every call is answered from now on, those that hang included. Pages that are bad stay so."""
        self.faults.clear()
        hanging, self._hanging = self._hanging, []
        for thread in hanging:
            thread.wake()

    def mend_pages(self) -> None:
        """No page is bad any more."""
        for content in self._contents.values():
            content.bad.clear()
            content.worn.clear()

    def wear_out(self, block: bytes) -> bool:
        """The page on which these bytes lie can be written from now on, and never read. Whether there is one."""
        for _, content in self._slabs():
            for start in range(0, len(content.certain), PAGE):
                if content.certain[start : start + len(block)] == block:
                    content.worn.add(start // PAGE)
                    return True
        return False

    def break_(self, fault: DriveFault) -> None:
        """From now on, until `heal` or another fault."""
        self.faults = [] if fault.kind == "bad" else [fault]
        if fault.kind == "bad":
            for _, content in self._slabs():
                pages = range(-(-len(content.certain) // PAGE))
                content.bad.update(page for page in pages if self._rng.random() < fault.rate / 3)
        hanging, self._hanging = self._hanging, []
        for thread in hanging:
            thread.wake()

    def damage(self) -> None:
        """In a segment a bit flips in half of the blocks."""
        slabs = self._slabs()
        if not slabs:
            return
        path, content = self._rng.choice(slabs)
        data = bytearray(path.read_bytes())
        for start in range(0, len(data), PAGE):
            if self._rng.random() < 0.5:
                offset, bit = start + self._rng.randrange(HEAD), 1 << self._rng.randrange(8)
                data[offset] ^= bit
                content.harm(range(offset, offset + 1))
                if offset < len(content.certain):
                    content.certain[offset] ^= bit
        with path.open("r+b") as file:  # the file that processes have open
            file.write(data)

    def lose_power(self) -> None:
        """No process runs. What is not certain is lost, or not."""
        for inode, content in sorted(self._contents.items(), key=lambda item: self._paths[item[0]]):
            path = self._paths[inode]
            if content.loose and _is_there(path, inode):
                path.write_bytes(content.after_loss(self._rng))
        for folder in sorted(self._new):
            names = self._new[folder]
            for name in names[self._rng.randint(0, len(names)) :]:
                (folder / name).unlink(missing_ok=True)
        self._new.clear()

    def slab_bytes(self) -> int:
        """Of all files beside the index in which blocks are, or will be."""
        return sum(path.stat().st_size for path in sorted(self.folder.glob("g3/slab/*")))

    def _slabs(self) -> list[tuple[Path, Content]]:
        """Those that are there: a name that a loss of power took may be another file's by now."""
        found = [(self._paths[inode], inode, content) for inode, content in self._contents.items()]
        there = [(path, one) for path, inode, one in found if path.suffix == ".slab" and _is_there(path, inode)]
        return sorted(there, key=lambda pair: pair[0])

    # -- calls ------------------------------------------------------------------------------------------------------

    def opened(self, path: Path, inode: int, *, made: bool) -> None:
        """A process has opened the file, and made it."""
        if made:
            self._contents[inode] = Content()
            self._new.setdefault(path.parent, []).append(path.name)
        elif inode not in self._contents:
            self._contents[inode] = Content(bytearray(path.read_bytes()))
        self._paths[inode] = path

    def linked(self, path: Path, inode: int) -> None:
        """A file has this name, too."""
        self._new.setdefault(path.parent, []).append(path.name)
        self._paths[inode] = path

    def names_synced(self, folder: Path) -> None:
        """The names in a folder are durable."""
        self._new.pop(folder, None)

    def content_of(self, path: Path) -> Content:
        """Of a file that is there, or was until somebody removed it."""
        if path.exists():
            inode = path.stat().st_ino
            self.opened(path, inode, made=False)
            return self._contents[inode]
        return Content()

    def content(self, inode: int) -> Content:
        """Of an open file."""
        return self._contents[inode]

    def move(self, verb: str, content: Content | None = None, span: range = range(0)) -> str:
        """A call on the way to the device: it takes its time. `span`: bytes of the file. Returns the kind of the fault
        that hit it and left it to the caller: "", "drop", or "torn" of a write that then fails. Raises OSError."""
        threads = self.threads
        threads.alive()
        here = threads.here()
        if here is None:
            return ""  # an event loop asks for what is in memory
        here.wait(self._rng.choice(DEVICE_S))
        fault = self._drawn(verb)
        if fault is not None and fault.kind == "slow":
            here.wait(SLOW_S)
        while fault is not None and fault.kind == "hang":
            self._hanging.append(here)
            here.wait()
            fault = self._drawn(verb)
        if content is not None and content.bad:
            bad = content.bad.intersection(_pages(span))
            if verb == "write" and self._rng.random() < 0.5:
                content.bad -= bad  # the device writes to spare ones
            elif bad:
                self.bad_reads += verb == "read"
                raise OSError(errno.EIO, "a bad page")
        if fault is None or fault.kind == "slow":
            return ""
        if fault.kind == "error":
            if verb in ("write", "sync", "commit") and self._rng.random() < 0.5:
                return "torn"
            self.bad_reads += verb == "read"
            raise OSError(errno.EIO, "injected")
        if fault.kind == "full":
            if verb in ("grow", "commit"):
                raise OSError(errno.ENOSPC, "injected")
            return ""
        return "drop" if verb == "write" else ""

    def _drawn(self, verb: str) -> DriveFault | None:
        for fault in self.faults:
            if (fault.verb in (verb, "*") or fault.kind == "full") and self._rng.random() < fault.rate:
                return fault
        return None

    @property
    def full(self) -> bool:
        """Whether the volume has no space."""
        return any(fault.kind == "full" for fault in self.faults)

    def has_read(self, content: Content, span: range) -> None:
        """A call gives these bytes. Raises OSError."""
        if not content.worn.isdisjoint(_pages(span)):
            self.bad_reads += 1
            raise OSError(errno.EIO, "a worn page")
        self.bad_reads += content.is_harmed(span)

    def write(self, fd: int, content: Content, data: bytes, offset: int, how: str = "") -> None:
        """Into the file as processes see it. `how`: "torn": some sectors of it; "drop": nothing."""
        if how == "drop":
            content.harm(range(offset, offset + len(data)))
            return
        for start in range(0, len(data), SECTOR) if how == "torn" else [0]:
            piece = data[start : start + SECTOR] if how == "torn" else data
            if how == "torn" and self._rng.random() < 0.5:
                continue
            os.pwrite(fd, piece, offset + start)
            content.loose.append(_Change(offset + start, piece))
            content.harmed.difference_update(_sectors(range(offset + start, offset + start + len(piece))))

    def resized(self, content: Content, size: int) -> None:
        """The file has another length."""
        content.loose.append(_Change(size=size))

    def sync(self, fd: int, content: Content) -> None:
        """Make certain what was written before. Raises OSError, once for what that lost; no later sync saves it."""
        begun = list(content.loose)
        try:
            how = self.move("sync")
        except OSError:
            self._lose(fd, content, begun)
            raise
        if how == "torn":
            content.settle([change for change in begun if self._rng.random() < 0.5])
            self._lose(fd, content, begun)
            raise OSError(errno.EIO, "injected")
        content.settle(begun)

    def _lose(self, fd: int, content: Content, changes: Sequence[_Change]) -> None:
        """These never become certain. Some are gone at once: memory keeps no page for long that counts as written."""
        gone = [change for change in changes if change.size is None and self._rng.random() < 0.5]
        for change in changes:
            change.lost = True
        ids = set(map(id, gone))
        gone = [change for change in content.loose if id(change) in ids]
        content.loose = [change for change in content.loose if id(change) not in ids]
        for change in gone:
            size = min(len(change.data), os.fstat(fd).st_size - change.offset)
            if size > 0:
                os.pwrite(fd, content.seen(change.offset, size), change.offset)

    def killed_inside(self, fd: int, content: Content, data: bytes, offset: int) -> None:
        """A process ended within a write: a part of it is made."""
        self.write(fd, content, data, offset, self._rng.choice(("torn", "")))
