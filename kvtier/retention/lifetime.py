"""The life of a stored block: how long, and in which tiers.

A `Lifetime` is what a block carries in every tier: one stamp per term that some request put on it, and the time of its
last use. A block may be served from a tier while some live stamp allows that tier; stamps of different requests never
shorten one another.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from kvtier.errors import CorruptError
from kvtier.retention.terms import Depth, Terms
from kvtier.times import Wall

FUTURE_S = 300.0
"""A stamp made this much in the future was made by a clock that is wrong, and allows nothing."""

STAMPS_MAX = 4
"""Of more stamps than this on one block, those that end first are dropped; see `Lifetime.join`."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """One request's terms on one block, made at `created`."""

    created: Wall
    ttl: float | None
    max_age: float | None
    ceiling: Depth

    def alive(self, last_use: Wall, wall_s: Wall) -> bool:
        """Whether this stamp lets the block be served at `wall_s`. Pure."""
        if self.created > wall_s + FUTURE_S:
            return False
        if self.ttl is not None and wall_s - last_use > self.ttl:
            return False
        return self.max_age is None or wall_s - self.created <= self.max_age

    def ends(self, last_use: Wall) -> Wall:
        """When it dies if the block is never used again; inf for never. Pure."""
        return min(last_use + _or_inf(self.ttl), self.created + _or_inf(self.max_age))

    def meet(self, other: Stamp) -> Stamp | None:
        """A stamp that is alive only while both are; None if there is none. Pure.

        As old as the older of the two, so that a tombstone that covers either covers it; and no longer than can be
        stored.
        """
        created = min(self.created, other.created)
        ttl = min((s.ttl for s in (self, other) if s.ttl is not None), default=None)
        end = min((s.created + s.max_age for s in (self, other) if s.max_age is not None), default=None)
        if end is not None and end - created < 1:
            return None
        age = None if end is None else min(end - created, _MAX_AGE)
        return Stamp(created, ttl, age, min(self.ceiling, other.ceiling))

    def covers(self, other: Stamp) -> bool:
        """Whether every use that `other` allows is allowed by this stamp too. Pure."""
        if self.ceiling < other.ceiling or _or_inf(self.ttl) < _or_inf(other.ttl):
            return False
        return self.created + _or_inf(self.max_age) >= other.created + _or_inf(other.max_age)


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else value


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The stamps on one stored block and its last use. A value: verbs return new ones.

    Encoded in LIFETIME_BYTES bytes (docs/format.md): last use f64, count u8, then STAMPS_MAX × (created f64,
    ttl u32 s, max_age u32 s, ceiling u8), little-endian; 0 stands for "no bound". Seconds are rounded down, which never
    lengthens a life; a stamp of less than one is left out.
    """

    last_use: Wall
    stamps: tuple[Stamp, ...] = field(default=())

    @classmethod
    def of(cls, terms: Terms, wall_s: Wall) -> Lifetime:
        """A block that a request under `terms` made at `wall_s`. Below G2 lives are in whole seconds: shorter ones stay
        in RAM."""
        brief = min(_or_inf(terms.ttl), _or_inf(terms.max_age)) < 1
        return cls(wall_s, (Stamp(wall_s, terms.ttl, terms.max_age, Depth.G2 if brief else terms.ceiling),))

    @classmethod
    def common(cls, lives: Sequence[Lifetime]) -> Lifetime:
        """The life that every one of `lives` allows: the life of one object that holds these blocks. Its last use is
        the earliest of theirs. Without stamps if they share none. Pure."""
        last_use = min(life.last_use for life in lives)
        stamps = list(dict.fromkeys(lives[0].stamps))
        for life in lives[1:]:
            if life.stamps == lives[0].stamps:
                continue
            stamps = [both for a in stamps for b in life.stamps if (both := a.meet(b)) is not None]
            stamps.sort(key=lambda stamp: stamp.ends(last_use), reverse=True)
            stamps = list(dict.fromkeys(stamps))[:STAMPS_MAX]
        return cls(last_use, tuple(stamps))

    @property
    def born(self) -> Wall:
        """When the youngest stamp was made, the last use where there is none: a tombstone of that time or later covers
        the whole life. Pure."""
        if len(self.stamps) == 1:  # nearly always
            return self.stamps[0].created
        return max((stamp.created for stamp in self.stamps), default=self.last_use)

    def servable(self, depth: Depth, wall_s: Wall) -> bool:
        """Whether a copy in the tier `depth` may be served at `wall_s`. Pure."""
        return any(s.ceiling >= depth and s.alive(self.last_use, wall_s) for s in self.stamps)

    def ends(self, depth: Depth) -> Wall:
        """When a copy in the tier `depth` dies if never used again; -inf if it may not be there. Pure."""
        if len(self.stamps) == 1 and self.stamps[0].ceiling >= depth:  # nearly always
            return self.stamps[0].ends(self.last_use)
        return max((s.ends(self.last_use) for s in self.stamps if s.ceiling >= depth), default=Wall("-inf"))

    def ceiling(self, wall_s: Wall) -> Depth | None:
        """The deepest tier that a live stamp allows; None if all are dead. Pure."""
        return max((s.ceiling for s in self.stamps if s.alive(self.last_use, wall_s)), default=None)

    def renewal_time(self, renewed: Wall, wall_s: Wall) -> Wall:
        """When the next use is worth a write, the last one written at `renewed`: at most once per half the ttl of the
        stamp that ends last. inf: never, since the life is over, or does not depend on its use. Pure."""
        alive = [stamp for stamp in self.stamps if stamp.alive(self.last_use, wall_s)]
        longest = max(alive, key=lambda stamp: stamp.ends(self.last_use), default=None)
        return Wall(math.inf) if longest is None or longest.ttl is None else renewed + longest.ttl / 2

    def dated_by(self, wall_s: Wall) -> Lifetime:
        """As a machine dates it whose time is `wall_s`: a stamp or use later than that was made by a clock that is
        ahead, and counts as made FUTURE_S before, which may only shorten the life. Pure."""
        if self.last_use <= wall_s and all(stamp.created <= wall_s for stamp in self.stamps):
            return self
        earlier = Wall(wall_s - FUTURE_S)
        stamps = (replace(s, created=earlier) if s.created > wall_s else s for s in self.stamps)
        return Lifetime(min(self.last_use, wall_s), tuple(stamps))

    def used(self, wall_s: Wall) -> Lifetime:
        """After a use at `wall_s`. Stamps that died before are dropped: a use renews, it does not revive."""
        alive = tuple(s for s in self.stamps if s.alive(self.last_use, wall_s))
        return Lifetime(max(self.last_use, wall_s), alive)

    def add(self, terms: Terms, wall_s: Wall) -> Lifetime:
        """After a request under `terms` stored or wanted the block at `wall_s`.

        A stamp that the new one covers goes; a new one that is covered is not added. Past STAMPS_MAX the
        stamp that ends first is dropped: that can only shorten, never lengthen, what was asked for.
        """
        return self.join(Lifetime.of(terms, wall_s), wall_s)

    def extend_until(self, end: Wall, ceiling: Depth, wall_s: Wall) -> Lifetime:
        """Servable until `end`, too, down to `ceiling`, whatever its use; what is dead at `wall_s` stays so.

        The stamp is as old as the youngest that lives: a purge that covers the block still covers it.
        """
        created = max((s.created for s in self.stamps if s.alive(self.last_use, wall_s)), default=None)
        if created is None or end <= wall_s:
            return self
        return self.join(Lifetime(self.last_use, (Stamp(created, None, math.ceil(end - created), ceiling),)), wall_s)

    def join(self, other: Lifetime, wall_s: Wall) -> Lifetime:
        """A life that allows all that either allows at `wall_s`: for one block found with two lifetimes.

        Stamps that are dead by their own last use are dropped first: the younger use must not revive them.
        """
        last_use = max(self.last_use, other.last_use)
        alive = [s for life in (self, other) for s in life.stamps if s.alive(life.last_use, wall_s)]
        kept: list[Stamp] = []
        for stamp in alive:
            if any(old.covers(stamp) for old in kept):
                continue
            kept = [old for old in kept if not stamp.covers(old)] + [stamp]
        kept.sort(key=lambda s: s.ends(last_use), reverse=True)
        return Lifetime(last_use, tuple(kept[:STAMPS_MAX]))

    def encode(self, *, short: bool = False) -> bytes:
        """LIFETIME_BYTES bytes; `short`: without those of stamps that are not there, which releases before format 3 of
        G3's index cannot read."""
        lasting = [s for s in self.stamps if min(_or_inf(s.ttl), _or_inf(s.max_age)) >= 1]
        out = [_HEAD.pack(self.last_use, len(lasting) | (_SHORT if short else 0))]
        out += [_STAMP.pack(s.created, int(s.ttl or 0), int(s.max_age or 0), s.ceiling) for s in lasting]
        return b"".join(out) if short else b"".join(out).ljust(LIFETIME_BYTES, b"\0")

    @staticmethod
    def length_in(raw: bytes, offset: int) -> int:
        """Bytes of the encoded lifetime that begins at `offset`; LIFETIME_BYTES_MIN of them must be there. Pure."""
        _last_use, count = _HEAD.unpack_from(raw, offset)
        return _HEAD.size + (count - _SHORT) * _STAMP.size if count & _SHORT else LIFETIME_BYTES

    @classmethod
    @lru_cache(maxsize=64)  # blocks of one put have one life
    def decode(cls, raw: bytes) -> Lifetime:
        """The inverse of `encode`. Raises CorruptError for anything `encode` cannot have written."""
        if len(raw) < LIFETIME_BYTES_MIN or len(raw) != cls.length_in(raw, 0):
            raise CorruptError(f"a lifetime has {LIFETIME_BYTES} bytes, or says how many, got {len(raw)}")
        last_use, count = _HEAD.unpack_from(raw)
        count &= ~_SHORT
        if count > STAMPS_MAX or not 0 <= last_use < 2**40:
            raise CorruptError("a lifetime with impossible fields")
        stamps = []
        for index in range(count):
            created, ttl, max_age, ceiling = _STAMP.unpack_from(raw, _HEAD.size + index * _STAMP.size)
            if not 1 <= ceiling <= 4 or not 0 <= created < 2**40:
                raise CorruptError("a retention stamp with impossible fields")
            stamps.append(Stamp(created, ttl or None, max_age or None, Depth(ceiling)))
        return cls(last_use, tuple(stamps))


_MAX_AGE = 2.0**32 - 1
"""Seconds, of what is stored; where stamps meet, that of the older might have to last longer."""
_HEAD = struct.Struct("<dB")
_STAMP = struct.Struct("<dIIB")
LIFETIME_BYTES = _HEAD.size + STAMPS_MAX * _STAMP.size
LIFETIME_BYTES_MIN = _HEAD.size
_SHORT = 0x80
"""With the count of stamps, in the short form."""
