"""Retention classes: how long, and how deep, the blocks of a request are kept.

`Terms` is a retention class. A stored block carries them as stamps (`kvtier.retention.lifetime`).

    ttl        idle clock: servable while the last use is at most ttl ago; every use renews
    max_age    hard clock: since the stamp was made; never renewed
    guarantee  the bytes stay reserved until ttl ends
    ceiling    deepest tier the block may be copied to
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral
from types import MappingProxyType

from kvtier.errors import InvalidRequest

PRIORITY = 50
"""Priority of a class that names none, and of a block whose terms are not known."""

PRIORITY_MAX = 100


class Depth(IntEnum):
    """Tiers by distance from the GPU, for ceilings."""

    G1 = 1
    G2 = 2
    G3 = 3
    G4 = 4


@dataclass(frozen=True, slots=True)
class Terms:
    """A retention class. Times in seconds; None is no bound."""

    name: str
    ttl: float | None = None
    max_age: float | None = None
    guarantee: bool = False
    ceiling: Depth = Depth.G4
    priority: int = PRIORITY
    isolate: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidRequest(f"a retention class is named by a string, got {type(self.name).__name__}")
        for label in ("ttl", "max_age"):
            value = getattr(self, label)
            if value is not None and not (isinstance(value, int | float) and 0 < value < 2**32):
                raise InvalidRequest(f"retention {self.name!r}: {label} must be positive seconds, got {value!r}")
        if not (isinstance(self.priority, Integral) and 0 <= self.priority <= PRIORITY_MAX):
            raise InvalidRequest(f"retention {self.name!r}: priority must lie in 0 … 100, got {self.priority!r}")
        if not (isinstance(self.ceiling, Integral) and Depth.G1 <= self.ceiling <= Depth.G4):
            raise InvalidRequest(f"retention {self.name!r}: ceiling must be a Depth, got {self.ceiling!r}")


BUILTIN = MappingProxyType(
    {
        terms.name: terms
        for terms in (
            Terms("in_memory", ttl=600, max_age=3600, ceiling=Depth.G2, isolate=True),
            Terms("5m", ttl=300),
            Terms("1h", ttl=3600),
            Terms("24h", ttl=86400),
        )
    }
)
"""The classes every configuration has."""


def resolve(name: str, classes: Iterable[Terms]) -> Terms:
    """The class called `name`. Raises InvalidRequest that lists what exists."""
    known = {terms.name: terms for terms in classes}
    if name not in known:
        raise InvalidRequest(f"retention {name!r} is not a class; known: {', '.join(sorted(known))}")
    return known[name]
