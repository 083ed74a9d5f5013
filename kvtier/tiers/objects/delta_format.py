"""The body of a delta, before its signature (kvtier.tiers.objects.signed).

    offset size
    0      8     magic "KVTDELTA"
    8      2     version (3)
    10     2     count of contexts
    12     4     count of units
    16     32·c  contexts: scope (16) ‖ position in the purge log (8) ‖ ttl (4) ‖ max age (4), in seconds, 0: none
    …            units: context u16 ‖ blocks u16 ‖ depth u32 ‖ KiB u32 ‖ time of the stamp f64 ‖ last use f64 ‖
                 hash of the last block (32) ‖ four bytes of the hash of each other block

All integers little-endian. A unit of 16 blocks takes 120 bytes. Its life is the stamp that ends last.

Version 2, of which the replicas of earlier releases write deltas, is read: a count of zero contexts, and per unit
header length u32 ‖ etag length u16 ‖ last use f64 ‖ header without its zero end ‖ etag.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import suppress

from kvtier.errors import CorruptError
from kvtier.identity.keys import Scope
from kvtier.keyring import Keyring
from kvtier.retention.lifetime import Lifetime, Stamp
from kvtier.retention.terms import Depth
from kvtier.tiers.objects.frame import COUNT_MAX, HEADER_BYTES_MAX, decode, header_bytes_of
from kvtier.tiers.objects.hints import PRINT_BYTES, UnitHint, longest, prints_of
from kvtier.times import Wall

MAGIC = b"KVTDELTA"
VERSION, OLD_VERSION = 3, 2
UNITS_MAX = 16 << 10
"""Of one delta, merged or not."""

_TIME_MAX = 2**40
_HEAD = struct.Struct("<8sHHI")
_CONTEXT = struct.Struct("<16sQII")
_UNIT = struct.Struct("<HHIIdd32s")
_OLD_UNIT = struct.Struct("<IHd")


def encode(hints: Sequence[UnitHint]) -> bytearray:
    """The body of a delta with these units, at most UNITS_MAX. Pure."""
    contexts: dict[bytes, int] = {}
    rows = [_row(hint, contexts) for hint in hints]
    return _body(contexts, rows)


def _row(hint: UnitHint, contexts: dict[bytes, int]) -> bytes:
    """A unit's bytes; its context joins `contexts`, which have their numbers."""
    stamp = longest(hint.life)
    context = _CONTEXT.pack(hint.scope, hint.position, int(stamp.ttl or 0), int(stamp.max_age or 0))
    number = contexts.setdefault(context, len(contexts))
    row = _UNIT.pack(number, hint.blocks, hint.depth, hint.kib, stamp.created, hint.life.last_use, hint.last_hash)
    return row + hint.prints


def _body(contexts: Collection[bytes], rows: Sequence[bytes]) -> bytearray:
    return bytearray(b"".join([_HEAD.pack(MAGIC, VERSION, len(contexts), len(rows)), *contexts, *rows]))


def parse(raw: bytes | bytearray, namespace: bytes, keyring: Keyring) -> Iterator[UnitHint]:
    """The units of a delta, lazily, some microseconds each. Raises CorruptError for anything `encode` cannot have
    written; of version 2, for units of another namespace, and for what the keyring does not accept."""
    if len(raw) < _HEAD.size:
        raise CorruptError("a delta without a head")
    magic, version, contexts, count = _HEAD.unpack_from(raw)
    if magic != MAGIC or version not in (VERSION, OLD_VERSION) or count > UNITS_MAX:
        raise CorruptError("no delta of a version that this code reads")
    if version == OLD_VERSION:
        if contexts:
            raise CorruptError("a delta of version 2 with contexts")
        yield from _parse_old(memoryview(raw), count, namespace, keyring)
    else:
        yield from _parse(memoryview(raw), contexts, count)


def join(deltas: Sequence[bytes], namespace: bytes, keyring: Keyring) -> Generator[None, None, bytearray]:
    """Returns the bodies of several deltas as one, each unit's last; of more than UNITS_MAX units the last are kept, in
    memory, too. What cannot be parsed is left out. Yields after each unit: all may take a second, and the caller's
    event loop has other work."""
    units: OrderedDict[tuple[bytes, bytes], UnitHint] = OrderedDict()
    for raw in deltas:
        with suppress(CorruptError):
            for hint in parse(raw, namespace, keyring):
                units[hint.scope, hint.last_hash] = hint
                if len(units) > UNITS_MAX:
                    units.popitem(last=False)
                yield
    contexts: dict[bytes, int] = {}
    rows = []
    for hint in units.values():
        rows.append(_row(hint, contexts))
        yield
    return _body(contexts, rows)


def _parse(view: memoryview, contexts: int, count: int) -> Iterator[UnitHint]:
    offset = _HEAD.size + contexts * _CONTEXT.size
    if offset > len(view):
        raise CorruptError("a delta that ends inside its contexts")
    known = list(_CONTEXT.iter_unpack(view[_HEAD.size : offset]))
    for _ in range(count):
        if offset + _UNIT.size > len(view):
            raise CorruptError("a delta that ends inside a unit")
        number, blocks, depth, kib, created, used, last = _UNIT.unpack_from(view, offset)
        start = offset + _UNIT.size
        offset = start + (blocks - 1) * PRINT_BYTES
        times = 0 <= created < _TIME_MAX and 0 <= used < _TIME_MAX
        if number >= contexts or not 1 <= blocks <= COUNT_MAX or offset > len(view) or not times:
            raise CorruptError("a delta unit with impossible fields")
        scope, position, ttl, max_age = known[number]
        life = Lifetime(Wall(used), (Stamp(Wall(created), ttl or None, max_age or None, Depth.G4),))
        yield UnitHint(Scope(scope), depth, last, bytes(view[start:offset]), life, position, kib * 1024)
    if offset != len(view):
        raise CorruptError("a delta that goes on behind its units")


def _parse_old(view: memoryview, count: int, namespace: bytes, keyring: Keyring) -> Iterator[UnitHint]:
    offset = _HEAD.size
    for _ in range(count):
        if offset + _OLD_UNIT.size > len(view):
            raise CorruptError("a delta that ends inside an entry")
        header_length, etag_length, used = _OLD_UNIT.unpack_from(view, offset)
        start, offset = offset + _OLD_UNIT.size, offset + _OLD_UNIT.size + header_length + etag_length
        if header_length > HEADER_BYTES_MAX or offset > len(view) or not 0 <= used < _TIME_MAX:
            raise CorruptError("a delta entry with impossible fields")
        header = bytes(view[start : start + header_length])
        # Restores the zeros that were cut off: the header has a count of its blocks, which fixes its length.
        blocks = int.from_bytes(header[10:12], "little")
        frame = decode(header.ljust(header_bytes_of(min(blocks, COUNT_MAX)), b"\0"), keyring)
        if frame.namespace != namespace:
            raise CorruptError("a delta of another namespace")
        life = Lifetime(Wall(used), frame.life.stamps)
        yield UnitHint(
            frame.scope, frame.depth, frame.hashes[-1], prints_of(frame.hashes), life, frame.position, frame.total_bytes
        )
