"""Named pins: prefixes that stay until a time, by name, over restarts.

A state machine and its encoding; the owner keeps the blocks (it leaves out of eviction what `held` names) and writes
`encode` next to its index. A pin holds a chain as it was named, whether or not all of it is here yet.
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

PINS_MAX = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}", re.ASCII)
_MAGIC = b"KVPINS01"


@dataclass(frozen=True, slots=True)
class Pin:
    """A named prefix. Times in seconds since the epoch; `until` is when it ends by itself."""

    name: str
    chain: tuple[BlockKey, ...]
    created: float
    until: float
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
        raise CorruptError("no list of pins")
    try:
        rows = msgspec.msgpack.decode(body[len(_MAGIC) :], type=list[tuple[str, list[bytes], float, float, int]])
    except msgspec.MsgspecError as wrong:
        raise CorruptError(f"no list of pins: {wrong}") from None
    pins = []
    for name, chain, created, until, tokens in rows:
        if not _NAME.fullmatch(name) or not chain or any(len(key) != KEY_BYTES for key in chain):
            raise CorruptError("a pin with impossible fields")
        if not (math.isfinite(created) and math.isfinite(until)):
            raise CorruptError("a pin with impossible times")
        pins.append(Pin(name, tuple(BlockKey(key) for key in chain), created, until, tokens))
    return pins


class Pins:
    """All named pins of a cache, over at most `limit_blocks` distinct blocks. No lock of its own; no I/O."""

    def __init__(self, limit_blocks: int) -> None:
        self.limit_blocks = limit_blocks
        self._pins: dict[str, Pin] = {}
        self._holds: Counter[BlockKey] = Counter()

    def create(self, name: str, chain: list[BlockKey], now: float, ttl: float, tokens: int = 0) -> Pin:
        """Pin a chain under a new name for `ttl` seconds. Raises InvalidRequest, and then nothing has changed, if the
        name is malformed or taken, the chain empty, or too much is pinned already."""
        self.expire(now)
        check_name(name)
        if name in self._pins:
            raise InvalidRequest(f"pin {name!r} exists already; extend it, or delete it first")
        if not chain or not ttl > 0:
            raise InvalidRequest(f"pin {name!r}: needs at least one block and a ttl above 0, got {len(chain)}, {ttl}")
        new = sum(key not in self._holds for key in set(chain))
        if len(self._holds) + new > self.limit_blocks or len(self._pins) >= PINS_MAX:
            raise InvalidRequest(
                f"pin {name!r} is refused: {new} more blocks, {len(self._holds)} of {self.limit_blocks} are pinned "
                f"by {len(self._pins)} of at most {PINS_MAX} names"
            )
        self._pins[name] = Pin(name, tuple(chain), now, now + ttl, tokens)
        self._holds.update(set(chain))
        return self._pins[name]

    def extend(self, name: str, now: float, ttl: float) -> Pin:
        """Let a pin end `ttl` seconds from now: later, or sooner. Raises InvalidRequest if there is none."""
        self.expire(now)
        pin = self._named(name)
        if not ttl > 0:
            raise InvalidRequest(f"pin {name!r}: ttl must be above 0, got {ttl}; delete it instead")
        self._pins[name] = replace(pin, until=now + ttl)
        return self._pins[name]

    def adopt(self, pin: Pin) -> None:
        """Take in a pin that was made elsewhere or earlier, instead of one of that name. Beyond the limit, too: it was
        promised."""
        self.delete(pin.name)
        self._pins[pin.name] = pin
        self._holds.update(set(pin.chain))

    def get(self, name: str) -> Pin | None:
        """The pin of that name."""
        return self._pins.get(name)

    def untils(self, keys: Iterable[BlockKey]) -> dict[BlockKey, float]:
        """When the last pin of each of these blocks ends, for those that some pin names. O(blocks of all pins)."""
        wanted = {key for key in keys if key in self._holds}
        out: dict[BlockKey, float] = {}
        for pin in self._pins.values() if wanted else ():
            for key in wanted.intersection(pin.chain):
                out[key] = max(pin.until, out.get(key, pin.until))
        return out

    def delete(self, name: str) -> list[BlockKey]:
        """End a pin; gives the blocks that nothing holds any more. Idempotent."""
        pin = self._pins.pop(name, None)
        return [] if pin is None else self._let_go(pin)

    def expire(self, now: float) -> list[BlockKey]:
        """End the pins whose time is over; gives the blocks that nothing holds any more."""
        free: list[BlockKey] = []
        for pin in [pin for pin in self._pins.values() if pin.until < now]:
            del self._pins[pin.name]
            free += self._let_go(pin)
        return free

    def purge(self, scope: Scope, before: float = math.inf) -> list[BlockKey]:
        """End every pin of a scope that was made until `before`: a purge is stronger than a pin."""
        free: list[BlockKey] = []
        mine = (pin for pin in self._pins.values() if scope_of_key(pin.chain[0]) == scope)
        for pin in [pin for pin in mine if pin.created <= before]:
            del self._pins[pin.name]
            free += self._let_go(pin)
        return free

    def held(self, key: BlockKey) -> bool:
        """Whether some pin names this block."""
        return key in self._holds

    def __len__(self) -> int:
        """Distinct blocks that some pin names."""
        return len(self._holds)

    def listed(self) -> list[Pin]:
        """All pins, by name."""
        return sorted(self._pins.values(), key=lambda pin: pin.name)

    def encode(self) -> bytes:
        """All pins, to be written next to the index."""
        return encode(self.listed())

    @classmethod
    def decode(cls, raw: bytes, limit_blocks: int) -> Pins:
        """The inverse of `encode`. Raises CorruptError. Pins beyond the limit stay: they were promised."""
        pins = cls(limit_blocks)
        for pin in decode(raw):
            pins.adopt(pin)
        return pins

    def check(self) -> None:
        """Assert that holds are what the pins say."""
        assert self._holds == Counter(key for pin in self._pins.values() for key in set(pin.chain))

    def _named(self, name: str) -> Pin:
        if name not in self._pins:
            raise InvalidRequest(f"pin {name[:40]!r} does not exist; there are {len(self._pins)} others")
        return self._pins[name]

    def _let_go(self, pin: Pin) -> list[BlockKey]:
        free = []
        for key in set(pin.chain):
            self._holds[key] -= 1
            if not self._holds[key]:
                del self._holds[key]
                free.append(key)
        return sorted(free)
