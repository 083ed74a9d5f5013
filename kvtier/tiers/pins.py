"""Named pins as objects: what is pinned is served and kept until its pin ends, whatever its other terms say.

    {prefix}/{namespace hex}/pins/{first 32 hex digits of SHA-256 of the name}

    offset size
    0      8     magic "KVTPINS1"
    8      8     until: wall time, f64
    16     2     length of the name
    18     4     count of units
    22           name, UTF-8
    …      48·n  last block of each unit
    …      16    XXH3-128 of everything before

All integers little-endian. Every replica reads the pins as often as the tombstones. A purge ends what a pin keeps.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

from kvtier.block import KEY_BYTES, BlockKey
from kvtier.clock import Clock
from kvtier.errors import CorruptError, InvalidRequest
from kvtier.integrity import DIGEST_BYTES, digest_of
from kvtier.tiers.bucket import Bucket, Stat
from kvtier.tiers.strides import Names

MAGIC = b"KVTPINS1"
NAME_BYTES_MAX = 1024
UNITS_MAX = 100_000
_HEAD = struct.Struct("<8sdHI")
_BYTES_MAX = _HEAD.size + NAME_BYTES_MAX + UNITS_MAX * KEY_BYTES + DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Pin:
    """A name for units that are kept until wall time `until`. `lasts`: each unit's last block."""

    name: str
    until: float
    lasts: tuple[BlockKey, ...]

    def __post_init__(self) -> None:
        length = len(self.name.encode())
        if not 1 <= length <= NAME_BYTES_MAX:
            raise InvalidRequest(f"a pin's name has 1 … {NAME_BYTES_MAX} bytes, got {length}")
        if not math.isfinite(self.until) or self.until < 0:
            raise InvalidRequest(f"pin {self.name!r}: until must be a time, got {self.until}")
        if len(self.lasts) > UNITS_MAX:
            raise InvalidRequest(f"pin {self.name!r}: {len(self.lasts)} units, at most {UNITS_MAX} in one pin")

    def encode(self) -> bytearray:
        """The object's bytes."""
        name = self.name.encode()
        out = bytearray(_HEAD.pack(MAGIC, self.until, len(name), len(self.lasts))) + name + b"".join(self.lasts)
        return out + digest_of([out])

    @classmethod
    def decode(cls, raw: bytes | bytearray) -> Pin:
        """The inverse of `encode`. Raises CorruptError for anything it cannot have written."""
        if len(raw) < _HEAD.size + DIGEST_BYTES or digest_of([raw[:-DIGEST_BYTES]]) != raw[-DIGEST_BYTES:]:
            raise CorruptError("a pin that does not match its checksum")
        magic, until, length, count = _HEAD.unpack_from(raw)
        start = _HEAD.size + length
        if magic != MAGIC or start + count * KEY_BYTES + DIGEST_BYTES != len(raw):
            raise CorruptError("a pin with impossible fields")
        lasts = (BlockKey(bytes(raw[at : at + KEY_BYTES])) for at in range(start, len(raw) - DIGEST_BYTES, KEY_BYTES))
        try:
            return cls(bytes(raw[_HEAD.size : start]).decode(), until, tuple(lasts))
        except (InvalidRequest, UnicodeDecodeError):
            raise CorruptError("a pin with impossible fields") from None


class Pins:
    """The namespace's pins, as last read. `kept` says of a unit until when some pin keeps it."""

    def __init__(self, bucket: Bucket, names: Names, clock: Clock) -> None:
        self._bucket = bucket
        self._names = names
        self._clock = clock
        self._known: dict[str, tuple[str, Pin]] = {}
        self._until: dict[BlockKey, float] = {}

    def kept(self, last: BlockKey, now: float) -> bool:
        """Whether a pin keeps the unit at `now`. Pure."""
        return self._until.get(last, 0.0) > now

    def list(self) -> list[Pin]:
        """The pins that have not ended, by name."""
        now = self._clock.wall()
        return sorted((pin for _, pin in self._known.values() if pin.until > now), key=lambda pin: pin.name)

    async def refresh(self) -> None:
        """Read what changed. A pin that cannot be read is as if it were not there. Raises TierError."""
        found: list[Stat] = []
        async for page in self._bucket.list(self._names.pins):
            found += page
        known: dict[str, tuple[str, Pin]] = {}
        for stat in found:
            old = self._known.get(stat.name)
            if old is not None and old[0] == stat.etag != "":
                known[stat.name] = old
            elif (pin := await self._read(stat)) is not None:
                known[stat.name] = (stat.etag, pin)
        self._take(known)

    async def _read(self, stat: Stat) -> Pin | None:
        if stat.size > _BYTES_MAX:
            return None
        raw = bytearray(stat.size)
        try:
            there = await self._bucket.read(stat.name, 0, [memoryview(raw)])
            return Pin.decode(raw) if there is not None else None
        except CorruptError:
            return None

    def _take(self, known: dict[str, tuple[str, Pin]]) -> None:
        until: dict[BlockKey, float] = {}
        for _, pin in known.values():
            for last in pin.lasts:
                until[last] = max(pin.until, until.get(last, 0.0))
        self._known, self._until = known, until

    async def put(self, pin: Pin) -> None:
        """Create a pin, or give the one of that name other units and another end. Raises TierError."""
        name = self._name(pin.name)
        stat = await self._bucket.replace(name, pin.encode(), self._clock.wall(), None)
        self._take({**self._known, name: (stat.etag if stat is not None else "", pin)})

    async def delete(self, name: str) -> bool:
        """Whether there was such a pin. Raises TierError."""
        place = self._name(name)
        await self._bucket.delete(place)
        there = place in self._known
        self._take({at: entry for at, entry in self._known.items() if at != place})
        return there

    async def sweep(self) -> int:
        """Delete pins that have ended; returns how many."""
        now = self._clock.wall()
        ended = [at for at, (_, pin) in self._known.items() if pin.until <= now]
        await self._bucket.delete_many(ended)
        self._take({at: entry for at, entry in self._known.items() if at not in ended})
        return len(ended)

    def _name(self, name: str) -> str:
        return f"{self._names.pins}{hashlib.sha256(name.encode()).hexdigest()[:32]}"
