"""Records of the G3 index, byte by byte. All lie in LMDB's one main tree; a key's first byte names its table.

    table         key after the first byte                                     value
    b  blocks     name as written (54, or 80)                                  Entry
    c  fill       class (big-endian)                                           key of the segment it fills
    f  free       class ‖ segment ‖ slot (big-endian)                          empty
    m  meta       see below                                                    …
    o  order      class ‖ rank ‖ 2^32-1-depth ‖ segment ‖ slot (big-endian)    name as written
    p  pulse      "counters", "budget": what every commit changes               as below
    r  reserved   segment ‖ slot (big-endian)                                  SlotReservation
    s  segments   segment (big-endian)                                         Segment
    v  spare      segment (big-endian)                                         empty

    meta key, after the "m"     value
    "format"                    u32: FORMAT
    "uuid"                      16 bytes, the same as in every part's STORE.json
    "geometry", "shrinks"       see kvtier.tiers.disk.geometry
    "counters"                  Counters; in the table `pulse` since SHORT_FORMAT
    "namespace" ‖ digest        the namespace's fields as JSON
    "purged" ‖ digest ‖ scope   f64: the tombstone; blocks born until then are misses for ever
    "kept" ‖ name (80)          f64: the block is retained, not evicted before that time
    "note" ‖ digest ‖ text      saved state of a namespace's manager
    "bad" …                     see kvtier.tiers.disk.bad_places
    "shares" …                  see kvtier.tiers.disk.quota
    "worth" …                   see kvtier.tiers.disk.class_worth
    "unfilled" ‖ class ‖ segment, "draining" ‖ segment
                                see kvtier.tiers.disk.allocator

LMDB's named databases are not used: py-lmdb opens their handles under the write lock, which a stopped process may hold.
A name is namespace ‖ scope ‖ hash (80); `kvtier.tiers.disk.layout` says how it is written. `order` sorts by class, then
by rank (priority, then tick), leaves before their parents. A class is a slot size in units of 4 KiB. Values are
little-endian. `docs/format.md` describes the whole store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import xxhash

from kvtier.checksum import DIGEST_BYTES
from kvtier.encryption import DataKey, EncryptionHeader
from kvtier.errors import CorruptError
from kvtier.identity.keys import NAMESPACE_BYTES, SCOPE_BYTES
from kvtier.keyring import KEY_ID_BYTES
from kvtier.retention.lifetime import LIFETIME_BYTES_MIN, Lifetime
from kvtier.retention.marks import mark_of, position_of
from kvtier.retention.terms import PRIORITY, Depth
from kvtier.tiers.disk.owner import OWNER_BYTES, Owner
from kvtier.times import Wall

FIRST_FORMAT = 1
ENCRYPTED_FORMAT = 2
"""What an index of the first format has from its first encrypted block on."""
SHORT_FORMAT = 3
"""Names and entries are written short (`kvtier.tiers.disk.layout`). A new index has this format."""
FORMATS = (FIRST_FORMAT, ENCRYPTED_FORMAT, SHORT_FORMAT)
SLOT_ALIGN = 4096
SCOPED_BYTES = NAMESPACE_BYTES + SCOPE_BYTES
"""The part of a block's name that says its namespace and scope."""
_U32_MAX = 0xFFFF_FFFF
_TICK_BITS = 56
_MARK_END = 2.0**53  # from here on a float tells no two positions apart

_BODY = struct.Struct(f"<ddQIIQIQ{DIGEST_BYTES}s")
_CHECK = struct.Struct("<Q")
_ORDER = struct.Struct(">cIQIII")
_FREE = struct.Struct(">cIII")
_PLACE = struct.Struct(">cII")
_NUMBER = struct.Struct(">cI")
_SEGMENT = struct.Struct("<HIIII")
_RESERVED = struct.Struct(f"<QQI{OWNER_BYTES}s")
_COUNTERS = struct.Struct("<QQQQI")
TIME = struct.Struct("<d")

SPAN = struct.Struct(f"<dd{_BODY.size - 16}xd")
"""The fields of an entry that a lookup needs: (ends, mark, last use). No stamp was made after the last use."""

ENTRY_BYTES_MIN = _BODY.size + LIFETIME_BYTES_MIN + _CHECK.size

BLOCKS, FILL, FREE, META, ORDER, PULSE, RESERVED, SEGMENTS, SPARE = b"b", b"c", b"f", b"m", b"o", b"p", b"r", b"s", b"v"
UUID_KEY, FORMAT_KEY = META + b"uuid", META + b"format"
GEOMETRY_KEY = META + b"geometry"
NAMESPACE_KEY, PURGED_KEY = META + b"namespace", META + b"purged"
RETAINED_KEY, NOTE_KEY = META + b"kept", META + b"note"


def rows(txn: Any, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a transaction whose keys begin with `prefix`, from `start` on."""
    cursor = txn.cursor()
    if cursor.set_range(max(prefix, start)):
        for key, value in cursor:
            if not key.startswith(prefix):
                return
            yield key, value


def time_at(txn: Any, key: bytes) -> Wall:
    """The time stored under a key of "purged" or "kept"; -inf if there is none."""
    raw = txn.get(key)
    return Wall("-inf") if raw is None else Wall(TIME.unpack(raw)[0])


def rank_of(priority: int, tick: int) -> int:
    """Place in the order of eviction: the lower priority first, then the older tick. Pure."""
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


class Counters(NamedTuple):
    """Of a whole store: the last serial and tick, blocks, bytes of their slots, segments in use."""

    serial: int = 0
    tick: int = 0
    blocks: int = 0
    slot_bytes: int = 0
    segments: int = 0

    def encode(self) -> bytes:
        return _COUNTERS.pack(*self)

    @classmethod
    def decode(cls, raw: bytes) -> Counters:
        """The inverse of `encode`. Raises struct.error."""
        return cls(*_COUNTERS.unpack(raw))


class NewBlock(NamedTuple):
    """A block to be stored. `name` and `parent` are full names, namespace ‖ key. `key`: what it is encrypted with, and
    `encryption` once it is."""

    name: bytes
    length: int
    life: Lifetime
    depth: int = 0
    digest: bytes = b""
    parent: bytes | None = None
    priority: int = PRIORITY
    key: DataKey | None = None
    encryption: EncryptionHeader | None = None
    position: int = 0

    @property
    def mark(self) -> Wall:
        """What tombstones are compared with."""
        return mark_of(self.life, self.position)

    @property
    def key_id(self) -> bytes | None:
        """Of the key that it is encrypted with; None if it is plain."""
        return None if self.key is None else self.key.id

    def entry(self, at: SlotReservation, rank: int) -> Entry:
        """The block as it is durable in the slot `at`."""
        return Entry(
            at.serial, at.segment, at.slot, self.length, self.depth, rank, self.digest, self.life, self.encryption,
            self.position,
        )  # fmt: skip


class Entry(NamedTuple):
    """A durable block: where its bytes are and what they must look like. An encrypted one has a header, and zeros for a
    digest, which would tell about its plain bytes.

    `serial` is unique within a store: two entries are the same write, in the same slot, if and only if it is equal.
    `mark` is what tombstones are compared with (`kvtier.retention.marks`), `ends` when it dies unused.
    """

    serial: int
    segment: int
    slot: int
    length: int
    depth: int
    rank: int
    digest: bytes
    life: Lifetime
    encryption: EncryptionHeader | None = None
    position: int = 0

    @property
    def mark(self) -> Wall:
        """What tombstones are compared with."""
        return mark_of(self.life, self.position)

    @property
    def key_id(self) -> bytes | None:
        """Of the key that it is encrypted with; None if it is plain."""
        return None if self.encryption is None else self.encryption.key_id

    @property
    def slot_class(self) -> int:
        return slot_class(self.length)

    @property
    def slot_bytes(self) -> int:
        return self.slot_class * SLOT_ALIGN

    @property
    def offset(self) -> int:
        """Where the slot begins in its segment's file."""
        return self.slot * self.slot_bytes

    def encode(self, name: bytes, *, short: bool) -> bytes:
        """The last 8 bytes are XXH3-64 over `name` and the rest. `short`: as SHORT_FORMAT has it; earlier releases
        would take that for damage."""
        body = _BODY.pack(
            self.life.ends(Depth.G3), self.mark, self.serial, self.segment, self.slot,
            self.length, self.depth, self.rank, self.digest,
        )  # fmt: skip
        body += self.life.encode(short=short)
        if self.encryption is not None:
            body += self.encryption.encode()
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(name + body))

    @classmethod
    def decode(cls, name: bytes, raw: bytes) -> Entry:
        """The inverse of `encode`. Raises CorruptError unless `raw` was encoded for this very name."""
        if len(raw) < ENTRY_BYTES_MIN:
            raise CorruptError(f"an index entry has {ENTRY_BYTES_MIN} bytes at least, got {len(raw)}")
        body = raw[: -_CHECK.size]
        if _CHECK.unpack_from(raw, len(body))[0] != xxhash.xxh3_64_intdigest(name + body):
            raise CorruptError("an index entry does not match its check")
        _ends, mark, serial, segment, slot, length, depth, rank, digest = _BODY.unpack_from(body)
        if not 0 <= mark < _MARK_END or length > _U32_MAX * SLOT_ALIGN:
            raise CorruptError("an index entry with impossible fields")
        end = _end_of_life(raw)
        header = EncryptionHeader.decode(body[end:]) if end < len(body) else None
        life = Lifetime.decode(body[_BODY.size : end])
        return cls(serial, segment, slot, length, depth, rank, digest, life, header, position_of(mark))

    def order_key(self) -> bytes:
        """The key of its row in `order`."""
        place = _U32_MAX - self.depth, self.segment, self.slot
        return _ORDER.pack(ORDER, -(-self.length // SLOT_ALIGN), self.rank, *place)


def _end_of_life(raw: bytes) -> int:
    return _BODY.size + Lifetime.length_in(raw, _BODY.size)


def is_encrypted(raw: bytes) -> bool:
    """Whether an encoded entry is that of an encrypted block. Pure."""
    return len(raw) >= ENTRY_BYTES_MIN and len(raw) > _end_of_life(raw) + _CHECK.size


def key_id_in(raw: bytes) -> bytes:
    """The id of the key that an encrypted block was encrypted with, by its encoded entry. Pure."""
    end = _end_of_life(raw)
    return raw[end : end + KEY_ID_BYTES]


def same_write(name: bytes, raw: bytes, current: bytes) -> bool:
    """Whether two encoded entries of a block are of one write: equal, or one is the other renewed. Pure."""
    try:
        return raw == current or Entry.decode(name, raw).serial == Entry.decode(name, current).serial
    except CorruptError:
        return False


class FreeSlot(NamedTuple):
    """The `slot`-th slot, free or about to be, of a segment that is cut into slots of `slot_class`."""

    slot_class: int
    segment: int
    slot: int


def order_parts(key: bytes) -> tuple[int, int, int, int]:
    """(class, rank, segment, slot) of an order key."""
    _table, slot_cls, rank, _depth, segment, slot = _ORDER.unpack(key)
    return slot_cls, rank, segment, slot


def order_key_in(raw: bytes) -> bytes | None:
    """The order key of an encoded entry, whether or not its check agrees; None where it can have none. Pure."""
    if len(raw) < _BODY.size:
        return None
    _ends, _mark, _serial, segment, slot, length, depth, rank, _digest = _BODY.unpack_from(raw)
    units = slot_class(length)
    return _ORDER.pack(ORDER, units, rank, _U32_MAX - depth, segment, slot) if units <= _U32_MAX else None


def segment_in(key: bytes) -> int:
    """The segment of an order key."""
    return int.from_bytes(key[-8:-4], "big")


def free_key(slot_cls: int, segment: int, slot: int) -> bytes:
    return _FREE.pack(FREE, slot_cls, segment, slot)


def free_prefix(slot_cls: int, segment: int) -> bytes:
    """The beginning of the keys of a segment's free slots."""
    return _PLACE.pack(FREE, slot_cls, segment)


def free_slot(key: bytes) -> FreeSlot:
    """The slot that a key of `free` names."""
    return FreeSlot(*_FREE.unpack(key)[1:])


def reserved_key(segment: int, slot: int) -> bytes:
    return _PLACE.pack(RESERVED, segment, slot)


def reserved_in(txn: Any, segment: int, slots: range) -> list[int]:
    """Those of a segment's slots whose numbers are reserved."""
    found = []
    for key, _ in rows(txn, number_key(RESERVED, segment), reserved_key(segment, slots.start)):
        slot: int = _PLACE.unpack(key)[2]
        if slot >= slots.stop:
            break
        found.append(slot)
    return found


def number_key(table: bytes, number: int) -> bytes:
    """Key of a segment in SEGMENTS or SPARE, or of a class in FILL; beginning of a class's keys in FREE or ORDER."""
    return _NUMBER.pack(table, number)


def number_of(key: bytes) -> int:
    """The segment that a key of SEGMENTS or SPARE names."""
    number: int = _NUMBER.unpack(key)[1]
    return number


class Segment(NamedTuple):
    """Use of one slab file: `slots` of one class, of which the first `fresh` were handed out at least once and
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


class SlotReservation(NamedTuple):
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

    @staticmethod
    def class_of(raw: bytes) -> int:
        """The class of an encoded reservation's slot."""
        return int(_RESERVED.unpack(raw)[2])

    @property
    def offset(self) -> int:
        """Where the slot begins in its segment's file."""
        return self.slot * self.slot_class * SLOT_ALIGN

    @property
    def key(self) -> bytes:
        """The key of its row in `reserved`."""
        return reserved_key(self.segment, self.slot)
