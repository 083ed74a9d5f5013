"""Hints: all that a replica knows of most units, packed, some 360 bytes each with 16 blocks.

A hint has the unit's last block in full, which names the object, and four bytes of the hash of each block before it. By
these a lookup finds units that hold a block of its chain; one in four billion is another's, so nobody may serve a
block before the header has named it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from kvtier.identity.keys import SCOPE_BYTES, BlockKey, Scope
from kvtier.retention.lifetime import Lifetime, Stamp
from kvtier.retention.terms import Depth
from kvtier.times import Wall

HINTS_MAX = 1 << 20
"""They stand for 32 TiB in strides of 32 MiB; past it one that was not found lately makes room."""
BYTES_MAX = 400 << 20
"""Of memory: of units of more than 16 blocks there are fewer hints."""

PRINT_BYTES = 4

_RECORD = struct.Struct("<16s32sIHIddIIQIIB")  # scope … position, next and previous of the first block, whether found
_NEXT_AT, _BEFORE_AT, _FOUND_AT = _RECORD.size - 9, _RECORD.size - 5, _RECORD.size - 1
_CHUNK_BYTES = 1 << 19
"""Of records that are allocated at a time."""
_TABLE_BYTES = 200
"""What the two tables take per record, about."""
_SHARDS = 64
"""Tables of names: one would take 30 ms to grow at a million."""
_TRIES = 64

WALK_MAX = 64
"""Units of one first block that a lookup goes through, the latest first. Of a prompt that all users share there may be
hundreds of thousands."""

_NONE = 0xFFFFFFFF
_LINK = struct.Struct("<I")
_DEAD = Stamp(Wall(0.0), None, 1, Depth.G4)


class UnitHint(NamedTuple):
    """One unit. `prints`: PRINT_BYTES of each block's hash but the last's. `life` has one stamp, the one that ends last
    in this tier. `size`: of the object, to a KiB."""

    scope: Scope
    depth: int
    last_hash: bytes
    prints: bytes
    life: Lifetime
    position: int
    size: int

    @property
    def blocks(self) -> int:
        return len(self.prints) // PRINT_BYTES + 1

    @property
    def kib(self) -> int:
        """`size` in KiB, rounded up; a frame may claim more than 4 TiB, of which this is all that is told."""
        return min(-(-self.size // 1024), 0xFFFFFFFF)

    @property
    def last(self) -> BlockKey:
        return BlockKey(self.scope + self.last_hash)

    @property
    def first_print(self) -> bytes:
        return (self.prints or self.last_hash)[:PRINT_BYTES]

    def holds(self, key: BlockKey, depth: int) -> bool:
        """Whether the block `key` at `depth` of its chain seems to be in the unit."""
        index = depth - self.depth
        if not 0 <= index < self.blocks or key[:SCOPE_BYTES] != self.scope:
            return False
        if index == self.blocks - 1:
            return key[SCOPE_BYTES:] == self.last_hash
        return self.prints.startswith(print_of(key), index * PRINT_BYTES)

    def may_hold(self, key: BlockKey) -> bool:
        """Whether the block seems to be in the unit, at any depth."""
        return seeming(key) in self.seemings

    @property
    def seemings(self) -> list[bytes]:
        """`seeming` of each block."""
        prints = self.prints + self.last_hash[:PRINT_BYTES]
        return [self.scope + prints[at : at + PRINT_BYTES] for at in range(0, len(prints), PRINT_BYTES)]


def print_of(key: BlockKey) -> bytes:
    """What a hint keeps of a block's hash. Pure."""
    return key[SCOPE_BYTES : SCOPE_BYTES + PRINT_BYTES]


def seeming(key: BlockKey) -> bytes:
    """Scope and print of a block: nearly always no other's. Pure."""
    return key[: SCOPE_BYTES + PRINT_BYTES]


def prints_of(hashes: Sequence[bytes]) -> bytes:
    """`UnitHint.prints` of a unit of blocks with these hashes. Pure."""
    return b"".join(each[:PRINT_BYTES] for each in hashes[:-1])


def longest(life: Lifetime) -> Stamp:
    """The stamp that ends last in this tier; a dead one if none allows it. Pure."""
    stamps = [stamp for stamp in life.stamps if stamp.ceiling >= Depth.G4]
    return max(stamps, key=lambda stamp: stamp.ends(life.last_use), default=_DEAD)


class UnitHints:
    """Hints by the first block and by the name of the unit. Not thread-safe."""

    def __init__(self, stride: int, fingerprint: Callable[[BlockKey], int], most: int = HINTS_MAX) -> None:
        """`stride`: the most blocks of a unit. `fingerprint`: eight bytes of the name of the object with this last
        block."""
        self._fingerprint = fingerprint
        self._width = _RECORD.size + PRINT_BYTES * (stride - 1)
        self._most = min(most, BYTES_MAX // (self._width + _TABLE_BYTES))
        self._per_chunk = _CHUNK_BYTES // self._width
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._chunks: list[bytearray] = []
        self._free: list[int] = []
        self._by_name: list[dict[int, int]] = [{} for _ in range(_SHARDS)]  # slots
        self._by_first: list[dict[int, int]] = [{} for _ in range(_SHARDS)]  # the latest slot
        self._hand = 0
        self.count = self.blocks = self.bytes = 0

    def put(self, hint: UnitHint) -> None:
        """Add a hint, or replace that of the same name."""
        name = self._fingerprint(hint.last)
        slot = self._by_name[name % _SHARDS].get(name)
        if slot is None:
            slot = self._room()
        else:
            self._unlink(slot)
        stamp, first = longest(hint.life), self._first(hint)
        shard = self._by_first[first % _SHARDS]
        chunk, at = self._place(slot)
        _RECORD.pack_into(
            chunk, at, hint.scope, hint.last_hash, hint.depth, hint.blocks, hint.kib,
            stamp.created, hint.life.last_use, int(stamp.ttl or 0), int(stamp.max_age or 0), hint.position,
            after := shard.get(first, _NONE), _NONE, 0,
        )  # fmt: skip
        self._link(after, _BEFORE_AT, slot)
        chunk[at + _RECORD.size : at + _RECORD.size + len(hint.prints)] = hint.prints
        shard[first] = self._by_name[name % _SHARDS][name] = slot
        self._count(hint, 1)

    def find(self, first: BlockKey, key: BlockKey, depth: int, but: Container[BlockKey] = ()) -> UnitHint | None:
        """The longest unit that seems to begin with the block `first` and to hold `key` at `depth` of the chain, among
        the WALK_MAX latest with that first block and the one that ends with `key`. `but`: last blocks of units that are
        left out."""
        best: UnitHint | None = None
        head = hash(first[:SCOPE_BYTES] + print_of(first))
        slot = self._by_first[head % _SHARDS].get(head, _NONE)
        for _ in range(WALK_MAX):
            if slot == _NONE:
                return best
            hint, after = self._read(slot)
            if (best is None or hint.blocks > best.blocks) and hint.holds(key, depth) and hint.last not in but:
                best = hint
                self._mark_found(slot)
            slot = after
        if best is None and key not in but:
            name = self._fingerprint(key)
            slot = self._by_name[name % _SHARDS].get(name, _NONE)
            if slot != _NONE and (hint := self._read(slot)[0]).holds(key, depth):
                best = hint
                self._mark_found(slot)
        return best

    def _mark_found(self, slot: int) -> None:
        chunk, at = self._place(slot)
        chunk[at + _FOUND_AT] = 1

    def named(self, fingerprint: int) -> UnitHint | None:
        """The unit whose name has this fingerprint."""
        slot = self._by_name[fingerprint % _SHARDS].get(fingerprint)
        return None if slot is None else self._read(slot)[0]

    def knows(self, last: BlockKey) -> bool:
        """Whether there is a hint of the unit that ends with this block."""
        name = self._fingerprint(last)
        return name in self._by_name[name % _SHARDS]

    def drop(self, last: BlockKey) -> None:
        """The unit that ends with this block is not in the bucket any more."""
        name = self._fingerprint(last)
        slot = self._by_name[name % _SHARDS].get(name)
        if slot is not None:
            self._remove(slot)

    def sample(self, rng: random.Random) -> UnitHint | None:
        """A random one; None if there is none."""
        shards = [shard for shard in self._by_name if shard]
        if not shards:
            return None
        shard = rng.choice(shards)
        return self._read(next(iter(shard.values())))[0]

    def _room(self) -> int:
        """A slot that is free now."""
        if self.count >= self._most:
            self._make_room()
        if not self._free:
            start = len(self._chunks) * self._per_chunk
            self._chunks.append(bytearray(self._width * self._per_chunk))
            self._free = list(range(start + self._per_chunk - 1, start - 1, -1))
        return self._free.pop()

    def _make_room(self) -> None:
        """Remove the next one that was not found since the hand last came by. All slots are taken."""
        for tries in range(_TRIES + 1):
            slot, self._hand = self._hand, (self._hand + 1) % self._most
            chunk, at = self._place(slot)
            if not chunk[at + _FOUND_AT] or tries == _TRIES:
                self._remove(slot)
                return
            chunk[at + _FOUND_AT] = 0

    def _place(self, slot: int) -> tuple[bytearray, int]:
        return self._chunks[slot // self._per_chunk], slot % self._per_chunk * self._width

    def _read(self, slot: int) -> tuple[UnitHint, int]:
        chunk, at = self._place(slot)
        scope, last, depth, blocks, kib, created, used, ttl, max_age, position, after, _, _ = _RECORD.unpack_from(
            chunk, at
        )
        prints = bytes(chunk[at + _RECORD.size : at + _RECORD.size + (blocks - 1) * PRINT_BYTES])
        life = Lifetime(used, (Stamp(created, ttl or None, max_age or None, Depth.G4),))
        return UnitHint(Scope(scope), depth, last, prints, life, position, kib * 1024), after

    def _first(self, hint: UnitHint) -> int:
        return hash(hint.scope + hint.first_print)

    def _remove(self, slot: int) -> None:
        name = self._fingerprint(self._read(slot)[0].last)
        self._unlink(slot)
        del self._by_name[name % _SHARDS][name]
        self._free.append(slot)

    def _unlink(self, slot: int) -> None:
        """Out of the list of its first block, and of the counts."""
        hint, after = self._read(slot)
        first = self._first(hint)
        shard = self._by_first[first % _SHARDS]
        chunk, at = self._place(slot)
        (before,) = _LINK.unpack_from(chunk, at + _BEFORE_AT)
        self._link(after, _BEFORE_AT, before)
        self._link(before, _NEXT_AT, after)
        if before == _NONE and after == _NONE:
            del shard[first]
        elif before == _NONE:
            shard[first] = after
        self._count(hint, -1)

    def _link(self, slot: int, field: int, other: int) -> None:
        """Let that field of `slot`, if it is one, name `other`."""
        if slot != _NONE:
            chunk, at = self._place(slot)
            _LINK.pack_into(chunk, at + field, other)

    def _count(self, hint: UnitHint, sign: int) -> None:
        self.count += sign
        self.blocks += sign * hint.blocks
        self.bytes += sign * hint.kib * 1024

    def check(self, stride: int) -> None:
        """Assert the invariants."""
        found = [self._read(slot)[0] for shard in self._by_name for slot in shard.values()]
        linked = 0
        for shard in self._by_first:
            for slot in shard.values():
                while slot != _NONE:
                    slot, linked = self._read(slot)[1], linked + 1
        assert len(found) == linked == self.count <= self._most, "hints and their lists disagree"
        assert sum(hint.blocks for hint in found) == self.blocks, "block count drifted"
        assert all(hint.depth % stride == 0 and hint.blocks <= stride for hint in found), "a hint of no stride"
