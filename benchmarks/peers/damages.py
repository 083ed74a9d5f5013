"""What can be done to the bytes that a store has written, whatever its files look like.

A store's blocks are found by their bytes: payloads are not compressible and differ, so the beginning of one occurs
once. A block is `alone` if its file has no other; then the file is damaged, else the part of the file that the block
lies in. Functions change files in place, of blocks at even positions: their neighbours stay as they are.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
_PROBE = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block's payload lies."""

    file: Path
    offset: int
    length: int
    alone: bool

    def bytes_now(self) -> bytes:
        """What a damage of this block replaces: its file, or its part of it."""
        whole = self.file.read_bytes()
        return whole if self.alone else whole[self.offset : self.offset + self.length]

    def replace(self, content: bytes) -> None:
        """Put other bytes in their place, of the same length where the file is shared."""
        if self.alone:
            self.file.write_bytes(content)
            return
        with self.file.open("r+b") as stream:
            stream.seek(self.offset)
            stream.write(content)


def places_of(folder: Path, payloads: Sequence[bytes]) -> list[Place]:
    """Where each payload lies below `folder`. Raises LookupError where one is not found."""
    found: dict[int, tuple[Path, int]] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for number, payload in enumerate(payloads):
            at = content.find(payload[:_PROBE])
            if at >= 0 and number not in found:
                found[number] = (file, at)
    if missing := [number for number in range(len(payloads)) if number not in found]:
        raise LookupError(f"blocks {missing} of {len(payloads)} lie in no file")
    shared = Counter(file for file, _ in found.values())
    return [
        Place(file, at, len(payload), shared[file] == 1)
        for payload, (file, at) in ((payload, found[number]) for number, payload in enumerate(payloads))
    ]


def flip(places: Sequence[Place]) -> None:
    """64 bytes in the middle of a payload get other values."""
    for place in places[::2]:
        _patch(place, place.length // 2, lambda old: bytes(byte ^ 0xA5 for byte in old), 64)


def zero_page(places: Sequence[Place]) -> None:
    """A page of 4096 bytes reads as zeros, as after a write that never reached the disk."""
    for place in places[::2]:
        _patch(place, place.length // 2, lambda old: bytes(len(old)), PAGE)


def truncate(places: Sequence[Place]) -> None:
    """The file ends in the middle of the payload; with a shared file, in the middle of the block in its middle."""
    if places[0].alone:
        for place in places[::2]:
            _cut(place.file, place.offset + place.length // 2)
        return
    middle = sorted(places, key=lambda place: (place.file, place.offset))[len(places) // 2]
    _cut(middle.file, middle.offset + middle.length // 2)


def extend(places: Sequence[Place]) -> None:
    """A page of other bytes follows at the end of the file."""
    for file in sorted({place.file for place in (places[::2] if places[0].alone else places)}):
        with file.open("ab") as stream:
            stream.write(random.Random(1).randbytes(PAGE))


def swap(places: Sequence[Place]) -> None:
    """Two blocks have each other's bytes."""
    for one, other in zip(places[::4], places[2::4], strict=True):
        ours, theirs = one.bytes_now(), other.bytes_now()
        one.replace(theirs)
        other.replace(ours)


def misdirect(places: Sequence[Place]) -> None:
    """A block was written over another one."""
    for one, other in zip(places[1::2], places[::2], strict=True):
        other.replace(one.bytes_now())


def put_back(places: Sequence[Place], older: Sequence[bytes]) -> None:
    """Blocks have the bytes that were stored under their names before. `older` comes from `Place.bytes_now`."""
    for place, content in zip(places[::2], older[::2], strict=True):
        place.replace(content)


def _patch(place: Place, within: int, change: Callable[[bytes], bytes], length: int) -> None:
    with place.file.open("r+b") as stream:
        stream.seek(place.offset + within)
        old = stream.read(length)
        stream.seek(place.offset + within)
        stream.write(change(old))


def _cut(file: Path, length: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(length)


BYTES: dict[str, Callable[[Sequence[Place]], None]] = {
    "flip": flip, "zero page": zero_page, "truncate": truncate, "extend": extend, "swap": swap, "misdirect": misdirect,
}  # fmt: skip
"""Damages of stored bytes that need nothing but the places."""
