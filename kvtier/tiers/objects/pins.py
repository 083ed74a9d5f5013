"""Named pins as objects: pinned blocks are served and kept until their pin ends, whatever their other terms.

    {prefix}/{namespace hex}/pins/{first 32 hex digits of SHA-256 of the name}

One object per pin, the bytes of `kvtier.retention.pins.encode`. Every replica reads the pins as often as the
tombstones. A purge ends the pins of its scope.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvtier.clock import Clock
from kvtier.errors import CorruptError, InvalidRequest
from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.retention import pins as codec
from kvtier.retention.pins import PINS_MAX, Pin
from kvtier.retention.trusted_clock import deletion_time
from kvtier.tiers.objects.bucket.protocol import Bucket, Stat
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.names import ObjectNames
from kvtier.times import Wall

PIN_BYTES_MAX = 16 << 20
"""One pin's object: about 300,000 blocks."""


class SharedPins:
    """The namespace's pins, as last read."""

    def __init__(self, bucket: Bucket, names: ObjectNames, clock: Clock) -> None:
        self._bucket = bucket
        self._names = names
        self._clock = clock
        self._known: dict[str, tuple[str, Pin]] = {}
        self._until: dict[BlockKey, Wall] = {}
        self._ends: dict[BlockKey, Wall] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def cover(self, entry: ObjectEntry, wall_s: Wall) -> bool:
        """Whether a pin holds a block of the object at `wall_s`: the object ends inside a pinned chain, or the chain
        ends inside the object. Pure."""
        if self._until.get(entry.last, 0.0) > wall_s:
            return True
        return bool(self._ends) and any(self._ends.get(key, 0.0) > wall_s for key in entry.frame.keys)

    def list(self) -> list[Pin]:
        """The pins that have not ended, by name."""
        now = self._clock.wall()
        return sorted((pin for _, pin in self._known.values() if pin.until > now), key=lambda pin: pin.name)

    async def refresh(self) -> None:
        """Read new and changed pins. One that cannot be read does not count. Raises TierError."""
        found: list[Stat] = []
        async for page in self._bucket.list(self._names.pins):
            found += page
            if len(found) >= PINS_MAX:
                break
        known: dict[str, tuple[str, Pin]] = {}
        for stat in found[:PINS_MAX]:
            old = self._known.get(stat.name)
            if old is not None and old[0] == stat.etag != "":
                known[stat.name] = old
            elif (pin := await self._read(stat)) is not None:
                known[stat.name] = (stat.etag, pin)
        self._set(known)

    async def _read(self, stat: Stat) -> Pin | None:
        if stat.size > PIN_BYTES_MAX:
            return None
        raw = bytearray(stat.size)
        try:
            if await self._bucket.read(stat.name, 0, [memoryview(raw)]) is None:
                return None
            pins = codec.decode(bytes(raw))
        except CorruptError:
            return None
        return pins[0] if len(pins) == 1 and self._name(pins[0].name) == stat.name else None

    def _set(self, known: dict[str, tuple[str, Pin]]) -> None:
        until: dict[BlockKey, Wall] = {}
        ends: dict[BlockKey, Wall] = {}
        for _, pin in known.values():
            for key in pin.chain:
                until[key] = max(pin.until, until.get(key, pin.until))
            ends[pin.chain[-1]] = max(pin.until, ends.get(pin.chain[-1], pin.until))
        self._known, self._until, self._ends = known, until, ends

    async def put(self, pin: Pin) -> None:
        """Create a pin, or replace the one of that name. Raises InvalidRequest or TierError."""
        codec.check_name(pin.name)
        raw = bytearray(codec.encode([pin]))
        if not pin.chain or len(raw) > PIN_BYTES_MAX:
            raise InvalidRequest(f"pin {pin.name!r}: {len(pin.chain)} blocks; one pin has 1 … {PIN_BYTES_MAX // 50}")
        name = self._name(pin.name)
        stat = await self._bucket.replace(name, raw, self._clock.wall(), None)
        self._set({**self._known, name: (stat.etag if stat is not None else "", pin)})

    async def delete(self, name: str) -> bool:
        """Whether there was such a pin. Raises TierError."""
        place = self._name(name)
        await self._bucket.delete(place)
        there = place in self._known
        self._set({at: known for at, known in self._known.items() if at != place})
        return there

    async def purge(self, scope: Scope, before: Wall) -> None:
        """End the scope's pins that were made until wall time `before`. Raises TierError."""
        ended = [
            at for at, (_, pin) in self._known.items() if scope_of_key(pin.chain[0]) == scope and pin.created <= before
        ]
        await self._drop(ended)

    async def sweep(self) -> int:
        """Delete pins that have ended; returns how many."""
        now = deletion_time(self._clock)
        if now is None:
            return 0
        ended = [at for at, (_, pin) in self._known.items() if pin.until <= now]
        await self._drop(ended)
        return len(ended)

    async def _drop(self, objects: Sequence[str]) -> None:
        await self._bucket.delete_many(objects)
        self._set({at: known for at, known in self._known.items() if at not in objects})

    def _name(self, name: str) -> str:
        return f"{self._names.pins}{hashlib.sha256(name.encode()).hexdigest()[:32]}"
