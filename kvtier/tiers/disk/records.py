"""Records of the G3 index, byte by byte. All lie in LMDB's one main tree; a key's first byte names its table.

    table         key after the first byte                                     value
    b  blocks     namespace ‖ scope ‖ hash (80)                                Entry
    c  fill       class (big-endian)                                           key of the segment it fills
    f  free       class ‖ segment ‖ slot (big-endian)                          empty
    m  meta       see kvtier.tiers.disk.write_txn                                      …
    o  order      class ‖ rank ‖ 2^32-1-depth ‖ segment ‖ slot (big-endian)    name (80)
    r  reserved   segment ‖ slot (big-endian)                                  SlotReservation
    s  segments   segment (big-endian)                                         Segment
    v  spare      segment (big-endian)                                         empty

(LMDB's named databases are not used: py-lmdb opens their handles under the write lock, which a stopped neighbour
may hold.) `order` sorts by class, then by rank (priority, then tick), leaves before their parents. A class is a slot
size in units of 4 KiB. Values are little-endian. `docs/format.md` describes the whole store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from kvtier.checksum import DIGEST_BYTES
from kvtier.errors import CorruptError
from kvtier.retention.lifetime import LIFETIME_BYTES, Lifetime
from kvtier.retention.terms import Depth
from kvtier.tiers.disk.owner import OWNER_BYTES, Owner

SLOT_ALIGN = 4096
_U32_MAX = 0xFFFF_FFFF
_TICK_BITS = 56

_BODY = struct.Struct(f"<ddQIIQIQ{DIGEST_BYTES}s{LIFETIME_BYTES}s")
_CHECK = struct.Struct("<Q")
_LINE = struct.Struct(">cIQIII")
_FREE = struct.Struct(">cIII")
_PLACE = struct.Struct(">cII")
_NUMBER = struct.Struct(">cI")
_SEGMENT = struct.Struct("<HIIII")
_RESERVED = struct.Struct(f"<QQI{OWNER_BYTES}s")

SPAN = struct.Struct("<dd")
"""The first two fields of an entry, (ends, born): all that a lookup needs."""

ENTRY_BYTES = _BODY.size + _CHECK.size

BLOCKS, FILL, FREE, META, ORDER, RESERVED, SEGMENTS, SPARE = b"b", b"c", b"f", b"m", b"o", b"r", b"s", b"v"


def rows(txn: Any, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a transaction whose keys begin with `prefix`, from `start` on."""
    cursor = txn.cursor()
    if cursor.set_range(max(prefix, start)):
        for key, value in cursor:
            if not key.startswith(prefix):
                return
            yield key, value


def rank_of(priority: int, tick: int) -> int:
    """Whose leaves first: what has the lower priority, then what was used longer ago. Pure."""
    return priority << _TICK_BITS | tick


def priority_in(rank: int) -> int:
    """The priority that a rank was made of. Pure."""
    return rank >> _TICK_BITS


def tick_in(rank: int) -> int:
    """The tick that a rank was made of. Pure."""
    return rank & ((1 << _TICK_BITS) - 1)


def slot_class(length: int) -> int:
    """The class of blocks of `length` bytes: their slot's size in units of SLOT_ALIGN. Pure."""
    return -(-length // SLOT_ALIGN)


@dataclass(frozen=True, slots=True)
class Entry:
    """A durable block: where its bytes are and what they must look like.

    `serial` is unique within a store: two entries are the same write if and only if it is equal.
    `born` is the creation of its youngest stamp (what tombstones are compared with), `ends` when it dies unused.
    """

    serial: int
    segment: int
    slot: int
    length: int
    depth: int
    rank: int
    digest: bytes
    life: Lifetime

    @property
    def slot_class(self) -> int:
        return slot_class(self.length)

    def encode(self, name: bytes) -> bytes:
        """ENTRY_BYTES bytes, the last 8 of them XXH3-64 over `name` and the rest."""
        body = _BODY.pack(
            self.life.ends(Depth.G3), self.life.born, self.serial, self.segment, self.slot, self.length, self.depth,
            self.rank, self.digest, self.life.encode(),
        )  # fmt: skip
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(name + body))

    @classmethod
    def decode(cls, name: bytes, raw: bytes) -> Entry:
        """The inverse of `encode`. Raises CorruptError unless `raw` was encoded for this very name."""
        if len(raw) != ENTRY_BYTES:
            raise CorruptError(f"an index entry has {ENTRY_BYTES} bytes, got {len(raw)}")
        body = raw[: _BODY.size]
        if _CHECK.unpack_from(raw, _BODY.size)[0] != xxhash.xxh3_64_intdigest(name + body):
            raise CorruptError("an index entry does not match its check")
        _ends, _born, serial, segment, slot, length, depth, rank, digest, life = _BODY.unpack(body)
        return cls(serial, segment, slot, length, depth, rank, digest, Lifetime.decode(life))

    def order_key(self) -> bytes:
        """This block's place in the line to leave."""
        return _LINE.pack(ORDER, self.slot_class, self.rank, _U32_MAX - self.depth, self.segment, self.slot)


def order_start(slot_cls: int) -> bytes:
    """The smallest order key of a class."""
    return _LINE.pack(ORDER, slot_cls, 0, 0, 0, 0)


def order_parts(key: bytes) -> tuple[int, int, int, int]:
    """(class, rank, segment, slot) of an order key."""
    _table, slot_cls, rank, _depth, segment, slot = _LINE.unpack(key)
    return slot_cls, rank, segment, slot


def free_key(slot_cls: int, segment: int, slot: int) -> bytes:
    return _FREE.pack(FREE, slot_cls, segment, slot)


def free_parts(key: bytes) -> tuple[int, int, int]:
    """(class, segment, slot) of a key of `free`."""
    _table, slot_cls, segment, slot = _FREE.unpack(key)
    return slot_cls, segment, slot


def number_key(table: bytes, number: int) -> bytes:
    """Key of a segment in SEGMENTS or SPARE, or of a class in FILL."""
    return _NUMBER.pack(table, number)


def number_of(key: bytes) -> int:
    """The segment that a key of SEGMENTS or SPARE names."""
    number: int = _NUMBER.unpack(key)[1]
    return number


@dataclass(frozen=True, slots=True)
class Segment:
    """A slab file's use: `slots` of one class, of which the first `fresh` were handed out at least once and
    `used` hold an entry or a reservation. `part` is the index of the path it lies in."""

    part: int
    slot_class: int
    slots: int
    fresh: int
    used: int

    def encode(self) -> bytes:
        return _SEGMENT.pack(self.part, self.slot_class, self.slots, self.fresh, self.used)

    @classmethod
    def decode(cls, raw: bytes) -> Segment:
        return cls(*_SEGMENT.unpack(raw))


@dataclass(frozen=True, slots=True)
class SlotReservation:
    """A slot that a process is writing to. Not visible to lookups; its owner's death gives it back."""

    serial: int
    tick: int
    slot_class: int
    segment: int
    slot: int
    owner: Owner

    def encode(self) -> bytes:
        return _RESERVED.pack(self.serial, self.tick, self.slot_class, self.owner.encode())

    @classmethod
    def decode(cls, key: bytes, raw: bytes) -> SlotReservation:
        _table, segment, slot = _PLACE.unpack(key)
        serial, tick, slot_cls, owner = _RESERVED.unpack(raw)
        return cls(serial, tick, slot_cls, segment, slot, Owner.decode(owner))

    @staticmethod
    def serial_of(raw: bytes) -> int:
        """The serial of an encoded reservation."""
        return int.from_bytes(raw[:8], "little")

    @property
    def place(self) -> bytes:
        """Key of `reserved`."""
        return _PLACE.pack(RESERVED, self.segment, self.slot)
