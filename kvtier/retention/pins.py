"""Named pins: prefixes that stay until a time, by name, over restarts.

A state machine and its encoding: the owner exempts the blocks that pins cover from eviction, and stores the pins as
`encode` writes them. A pin names a whole chain, whether or not all of it is here yet.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvtier.checksum import DIGEST_BYTES, digest_of
from kvtier.errors import CorruptError, InvalidRequest
from kvtier.identity.keys import KEY_BYTES, BlockKey, Scope, scope_of_key
from kvtier.times import Wall

PINS_MAX = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}", re.ASCII)
_MAGIC = b"KVPINS01"
_FOREVER = Wall(math.inf)


@dataclass(frozen=True, slots=True)
class Pin:
    """A named prefix; `until` is when it ends by itself."""

    name: str
    chain: tuple[BlockKey, ...]
    created: Wall
    until: Wall
    tokens: int = 0


def check_name(name: str) -> None:
    """Raises InvalidRequest unless `name` may be a pin's."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"pin {name[:40]!r}: a name has 1 … 128 of A-Z a-z 0-9 _ . : / -")


def encode(pins: Sequence[Pin]) -> bytes:
    """Pins as bytes: magic, msgpack of (name, keys, created, until, tokens) each, XXH3-128 of both. Pure."""
    body = _MAGIC + msgspec.msgpack.encode([(p.name, list(p.chain), p.created, p.until, p.tokens) for p in pins])
    return body + digest_of([body])


def decode(raw: bytes) -> list[Pin]:
    """The inverse of `encode`. Raises CorruptError for anything it cannot have written."""
    body = raw[:-DIGEST_BYTES]
    if not raw.startswith(_MAGIC) or digest_of([body]) != raw[-DIGEST_BYTES:]:
        raise CorruptError("not a list of pins")
    try:
        rows = msgspec.msgpack.decode(body[len(_MAGIC) :], type=list[tuple[str, list[bytes], Wall, Wall, int]])
    except msgspec.MsgspecError as wrong:
        raise CorruptError(f"not a list of pins: {wrong}") from None
    pins = []
    for name, chain, created, until, tokens in rows:
        if not _NAME.fullmatch(name) or not chain or any(len(key) != KEY_BYTES for key in chain):
            raise CorruptError("a pin with impossible fields")
        if not (math.isfinite(created) and math.isfinite(until)):
            raise CorruptError("a pin with impossible times")
        pins.append(Pin(name, tuple(map(BlockKey, chain)), created, until, tokens))
    return pins


class Pins:
    """All named pins of a cache, over at most `limit_blocks` distinct blocks. No lock of its own; no I/O."""

    def __init__(self, limit_blocks: int) -> None:
        self.limit_blocks = limit_blocks
        self._pins: dict[str, Pin] = {}
        self._counts: Counter[BlockKey] = Counter()

    def create(self, name: str, chain: list[BlockKey], wall_s: Wall, ttl: float, tokens: int = 0) -> Pin:
        """Pin a chain under a new name for `ttl` seconds. Raises InvalidRequest, and then nothing has changed, if the
        name is malformed or taken, the chain empty, or too much is pinned already."""
        self.expire(wall_s)
        check_name(name)
        if name in self._pins:
            raise InvalidRequest(f"pin {name!r} exists already; extend it, or delete it first")
        if not chain or not ttl > 0:
            raise InvalidRequest(f"pin {name!r}: needs at least one block and a ttl above 0, got {len(chain)}, {ttl}")
        new = sum(key not in self._counts for key in set(chain))
        if len(self._counts) + new > self.limit_blocks or len(self._pins) >= PINS_MAX:
            raise InvalidRequest(
                f"pin {name!r} is refused: {new} more blocks, {len(self._counts)} of {self.limit_blocks} are pinned "
                f"by {len(self._pins)} of at most {PINS_MAX} names"
            )
        self._pins[name] = Pin(name, tuple(chain), wall_s, wall_s + ttl, tokens)
        self._counts.update(set(chain))
        return self._pins[name]

    def extend(self, name: str, wall_s: Wall, ttl: float) -> Pin:
        """Let a pin end `ttl` seconds from now: later, or sooner. Raises InvalidRequest if there is none."""
        self.expire(wall_s)
        pin = self._named(name)
        if not ttl > 0:
            raise InvalidRequest(f"pin {name!r}: ttl must be above 0, got {ttl}; delete it instead")
        self._pins[name] = replace(pin, until=wall_s + ttl)
        return self._pins[name]

    def adopt(self, pin: Pin) -> None:
        """Take over a pin that was made elsewhere or earlier, in place of one of that name: beyond the limit, too."""
        self.delete(pin.name)
        self._pins[pin.name] = pin
        self._counts.update(set(pin.chain))

    def get(self, name: str) -> Pin | None:
        """The pin of that name."""
        return self._pins.get(name)

    def untils(self, keys: Iterable[BlockKey]) -> dict[BlockKey, Wall]:
        """When the last pin of each of these blocks ends, for those that some pin names. O(blocks of all pins)."""
        wanted = {key for key in keys if key in self._counts}
        out: dict[BlockKey, Wall] = {}
        for pin in self._pins.values() if wanted else ():
            for key in wanted.intersection(pin.chain):
                out[key] = max(pin.until, out.get(key, pin.until))
        return out

    def delete(self, name: str) -> list[BlockKey]:
        """End a pin; returns the blocks that no other pin names. Idempotent."""
        pin = self._pins.pop(name, None)
        free = []
        for key in set(pin.chain) if pin is not None else ():
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                free.append(key)
        return sorted(free)

    def expire(self, wall_s: Wall) -> list[BlockKey]:
        """End the pins whose time is over; returns the blocks that no other pin names."""
        ended = [pin.name for pin in self._pins.values() if pin.until < wall_s]
        return [key for name in ended for key in self.delete(name)]

    def purge(self, scope: Scope, before: Wall = _FOREVER) -> list[BlockKey]:
        """End the pins of a scope made until `before`: a purge is stronger than a pin. Returns as `expire`."""
        mine = (pin for pin in self._pins.values() if scope_of_key(pin.chain[0]) == scope)
        ended = [pin.name for pin in mine if pin.created <= before]
        return [key for name in ended for key in self.delete(name)]

    def covers(self, key: BlockKey) -> bool:
        """Whether some pin names this block."""
        return key in self._counts

    def __len__(self) -> int:
        """Distinct blocks that some pin names."""
        return len(self._counts)

    @property
    def names(self) -> int:
        """How many pins there are."""
        return len(self._pins)

    def listed(self) -> list[Pin]:
        """All pins, by name."""
        return sorted(self._pins.values(), key=lambda pin: pin.name)

    def check(self) -> None:
        """Assert that each block is counted as often as pins name it."""
        assert self._counts == Counter(key for pin in self._pins.values() for key in set(pin.chain))

    def _named(self, name: str) -> Pin:
        if name not in self._pins:
            raise InvalidRequest(f"pin {name[:40]!r} does not exist; there are {len(self._pins)} others")
        return self._pins[name]
