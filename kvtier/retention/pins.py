"""Named pins: prefixes that stay until a time, by name, over restarts.

A state machine and its encoding: the owner exempts the blocks that pins cover from eviction, and stores the pins as
`encode` writes them. A pin names a whole chain, whether or not all of it is here yet.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvtier.checksum import DIGEST_BYTES, digest_of
from kvtier.errors import CorruptError, InvalidRequest
from kvtier.identity.key_map import KeyMap
from kvtier.identity.keys import KEY_BYTES, BlockKey, Scope, tenant_of
from kvtier.times import Wall

PINS_MAX = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}", re.ASCII)
_MAGIC = b"KVPINS01"
_FOREVER, _NEVER = Wall(math.inf), Wall(-math.inf)


@dataclass(frozen=True, slots=True)
class Pin:
    """A named prefix; `until` is when it ends by itself. `position`: of the replicas' purge log when it was made."""

    name: str
    chain: tuple[BlockKey, ...]
    created: Wall
    until: Wall
    tokens: int = 0
    position: int = 0


def check_name(name: object) -> None:
    """Raises InvalidRequest unless `name` may be a pin's. The message, which is logged, does not repeat what a client
    took for a name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest("pin: a name has 1 … 128 of A-Z a-z 0-9 _ . : / -")


class _PinRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    chain: list[bytes]
    created: float
    until: float
    tokens: int
    position: int = 0


def encode(pins: Sequence[Pin]) -> bytes:
    """Pins as bytes: magic, msgpack of (name, keys, created, until, tokens) each, then the position if there is one,
    XXH3-128 of both. Pure."""
    rows = [(p.name, list(p.chain), p.created, p.until, p.tokens, *([p.position] if p.position else [])) for p in pins]
    body = _MAGIC + msgspec.msgpack.encode(rows)
    return body + digest_of([body])


def decode(raw: bytes) -> list[Pin]:
    """The inverse of `encode`. Raises CorruptError for anything it cannot have written."""
    body = raw[:-DIGEST_BYTES]
    if not raw.startswith(_MAGIC) or digest_of([body]) != raw[-DIGEST_BYTES:]:
        raise CorruptError("not a list of pins")
    try:
        rows = msgspec.msgpack.decode(body[len(_MAGIC) :], type=list[_PinRow])
    except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        raise CorruptError(f"not a list of pins: {wrong}") from None
    pins = []
    for row in rows:
        name, chain, created, until = row.name, row.chain, Wall(row.created), Wall(row.until)
        if not _NAME.fullmatch(name) or not chain or any(len(key) != KEY_BYTES for key in chain):
            raise CorruptError("a pin with impossible fields")
        if not (math.isfinite(created) and math.isfinite(until)):
            raise CorruptError("a pin with impossible times")
        pins.append(Pin(name, tuple(map(BlockKey, chain)), created, until, row.tokens, row.position))
    return pins


class Pins:
    """All named pins of a cache, over at most `limit_blocks` distinct blocks. No lock of its own; no I/O.

    A long pin begins and ends in slices: `admit` it, then `cover` its blocks part by part; `end` it, then `uncover`
    until nothing is left. One that has ended has no say any more, though it covers blocks until then.
    """

    def __init__(self, limit_blocks: int) -> None:
        self.limit_blocks = limit_blocks
        self._pins: dict[str, Pin] = {}
        self._numbers: dict[str, int] = {}  # of each pin, never given twice
        self._until: dict[int, Wall] = {}  # number → end, of pins that have not ended
        self._naming = KeyMap[tuple[int, ...]]()  # numbers of the pins that cover a block
        self._ended: deque[tuple[int, Sequence[BlockKey], int]] = deque()  # number, chain, blocks of it still covered
        self._count = 0

    def create(self, name: str, chain: list[BlockKey], wall_s: Wall, ttl: float, tokens: int = 0) -> Pin:
        """Pin a chain under a new name for `ttl` seconds. Raises InvalidRequest, and then nothing has changed, if the
        name is malformed or taken, the chain empty, or too much is pinned already."""
        self.expire(wall_s)
        pin = self.admit(name, chain, wall_s, ttl, tokens, self.uncovered(set(chain)))
        self.cover(name, chain)
        return pin

    def uncovered(self, keys: Iterable[BlockKey]) -> int:
        """How many of these blocks no pin names."""
        return sum(key not in self._naming for key in keys)

    def admit(self, name: str, chain: Sequence[BlockKey], wall_s: Wall, ttl: float, tokens: int, new: int) -> Pin:
        """`create` of a pin that covers nothing yet, and `new` blocks that no other covers. Raises likewise."""
        check_name(name)
        if name in self._pins:
            raise InvalidRequest(f"pin {name!r} exists already; extend it, or delete it first")
        if not chain or not ttl > 0:
            raise InvalidRequest(f"pin {name!r}: needs at least one block and a ttl above 0, got {len(chain)}, {ttl}")
        if len(self._naming) + new > self.limit_blocks or len(self._pins) >= PINS_MAX:
            raise InvalidRequest(
                f"pin {name!r} is refused: {new} more blocks, {len(self._naming)} of {self.limit_blocks} are pinned "
                f"by {len(self._pins)} of at most {PINS_MAX} names"
            )
        pin = Pin(name, tuple(chain), wall_s, wall_s + ttl, tokens)
        self.enter(pin)
        return pin

    def enter(self, pin: Pin) -> None:
        """Take over a pin that was made elsewhere or earlier, in place of one of that name: beyond the limit, too. It
        covers nothing yet."""
        self.end(pin.name)
        self._count += 1
        self._pins[pin.name], self._numbers[pin.name] = pin, self._count
        self._until[self._count] = pin.until

    def cover(self, name: str, keys: Sequence[BlockKey]) -> None:
        """Let a pin cover these blocks of its chain. A pin that has ended meanwhile covers none."""
        number = self._numbers.get(name)
        if number is None:
            return
        naming, alone = self._naming, (number,)
        for key in keys:
            others = naming.get(key, ())
            if number not in others:
                naming[key] = (*others, number) if others else alone

    def adopt(self, pin: Pin) -> None:
        """`enter` and `cover`."""
        self.delete(pin.name)
        self.enter(pin)
        self.cover(pin.name, pin.chain)

    def extend(self, name: str, wall_s: Wall, ttl: float) -> Pin:
        """Let a pin end `ttl` seconds from now: later, or sooner. Raises InvalidRequest if there is none."""
        self.end_due(wall_s)
        pin = self._named(name)
        if not ttl > 0:
            raise InvalidRequest(f"pin {name!r}: ttl must be above 0, got {ttl}; delete it instead")
        self._pins[name] = replace(pin, until=wall_s + ttl)
        self._until[self._numbers[name]] = wall_s + ttl
        return self._pins[name]

    def get(self, name: str) -> Pin | None:
        """The pin of that name."""
        return self._pins.get(name)

    def untils(self, keys: Iterable[BlockKey]) -> dict[BlockKey, Wall]:
        """When the last pin of each of these blocks ends, for those that some pin names."""
        out: dict[BlockKey, Wall] = {}
        for key in keys:
            ends = [self._until[number] for number in self._naming.get(key, ()) if number in self._until]
            if ends:
                out[key] = max(ends)
        return out

    def end(self, name: str) -> bool:
        """End a pin, whose blocks are to be uncovered. Whether there was one. O(1)."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            number = self._numbers.pop(name)
            del self._until[number]
            self._ended.append((number, pin.chain, len(pin.chain)))
        return pin is not None

    def end_due(self, wall_s: Wall) -> list[Pin]:
        """End the pins whose time is over, and return them. O(pins)."""
        due = [pin for pin in self._pins.values() if pin.until < wall_s]
        return [pin for pin in due if self.end(pin.name)]

    def end_scopes(self, scopes: Mapping[Scope, Wall]) -> list[Pin]:
        """End the pins that these scopes' tenants made until then: a purge is stronger than a pin. Returns as
        `end_due`."""
        pins = self._pins.values() if scopes else ()
        tenants = {tenant_of(scope): before for scope, before in scopes.items()}
        covered = [pin for pin in pins if pin.created <= tenants.get(tenant_of(pin.chain[0]), _NEVER)]
        return [pin for pin in covered if self.end(pin.name)]

    @property
    def ending(self) -> bool:
        """Whether `uncover` has something to do."""
        return bool(self._ended)

    def uncover(self, most: int | None = None) -> list[BlockKey]:
        """Go through blocks, at most so many, of pins that have ended; returns those that no other pin names."""
        free: list[BlockKey] = []
        while self._ended and most != 0:
            number, chain, stop = self._ended.popleft()
            start = 0 if most is None else max(0, stop - most)  # from the end: parents are covered longest
            most = None if most is None else most - (stop - start)
            if start:
                self._ended.appendleft((number, chain, start))
            part = chain[start:stop]
            for key in part:
                left = tuple(other for other in self._naming.get(key, ()) if other != number)
                if left:
                    self._naming[key] = left
                elif self._naming.pop(key, None) is not None:
                    free.append(key)
        return free

    def delete(self, name: str) -> list[BlockKey]:
        """End a pin; returns the blocks that no other pin names. Idempotent."""
        return sorted(self.uncover()) if self.end(name) else []

    def expire(self, wall_s: Wall) -> list[BlockKey]:
        """End the pins whose time is over; returns the blocks that no other pin names."""
        return sorted(self.uncover()) if self.end_due(wall_s) else []

    def purge(self, scope: Scope, before: Wall = _FOREVER) -> list[BlockKey]:
        """End the pins of a scope made until `before`. Returns as `expire`."""
        return sorted(self.uncover()) if self.end_scopes({scope: before}) else []

    def covers(self, key: BlockKey) -> bool:
        """Whether some pin names this block."""
        return key in self._naming

    def __len__(self) -> int:
        """Distinct blocks that some pin names."""
        return len(self._naming)

    @property
    def names(self) -> int:
        """How many pins there are."""
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        """All pins, in no order that counts."""
        return iter(self._pins.values())

    def listed(self) -> list[Pin]:
        """All pins, by name."""
        return sorted(self, key=lambda pin: pin.name)

    def check(self) -> None:
        """Assert that each block is covered by those pins that name it, and by ended ones."""
        ending = {number for number, _, _ in self._ended}
        assert self._until == {self._numbers[name]: pin.until for name, pin in self._pins.items()}
        expected = {(self._numbers[pin.name], key) for pin in self._pins.values() for key in pin.chain}
        covered = {(number, key) for key, numbers in self._naming.items() for number in numbers if number not in ending}
        assert covered == expected, "blocks are covered by other pins than name them"

    def _named(self, name: str) -> Pin:
        if name not in self._pins:
            raise InvalidRequest(f"pin {name[:40]!r} does not exist")
        return self._pins[name]
