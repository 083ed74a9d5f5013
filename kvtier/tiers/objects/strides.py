"""Arithmetic of strides: S consecutive blocks of a chain, aligned in depth, the unit of object storage.

Pure. A *unit* is what one object holds: a full stride, or a *tail* of fewer blocks,
which starts at a multiple of S too.

    {prefix}/{namespace hex}/{scope hex}/{hh}/{hash hex}     a unit, named by the hash of its last block;
                                                             hh = the first two digits of that hash
    {prefix}/{namespace hex}/delta/{µs hex}-{replica hex}    what a replica wrote (kvtier.tiers.objects.deltas)
    {prefix}/{namespace hex}/pins/{hash of the name}         what is kept (kvtier.tiers.objects.pins)
    {prefix}/{namespace hex}/purged/{scope hex}-{µs hex}     a tombstone: what the scope wrote until then is gone
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import SCOPE_BYTES, BlockKey, Scope, scope_of_key

STRIDE_BYTES = 32 << 20
STRIDE_MAX = 16
PROBES_MIN = 8
"""Probes of one round that cost nothing extra: one round trip takes as long for eight as for one."""


def default_stride(block_bytes: int) -> int:
    """About 32 MiB, 1 … 16 blocks."""
    return max(1, min(STRIDE_MAX, STRIDE_BYTES // block_bytes))


@dataclass(frozen=True, slots=True)
class ObjectNames:
    """Object names of one namespace below `prefix` ("" or without slashes at its ends)."""

    prefix: str
    namespace: bytes

    @property
    def root(self) -> str:
        """What every name of the namespace starts with, slash included."""
        return f"{self.prefix}/{self.namespace.hex()}/" if self.prefix else f"{self.namespace.hex()}/"

    def unit(self, last: BlockKey) -> str:
        """The object of the unit whose last block is `last`."""
        digest = last[SCOPE_BYTES:].hex()
        return f"{self.scope(scope_of_key(last))}{digest[:2]}/{digest}"

    def scope(self, scope: Scope) -> str:
        """What every unit of `scope` starts with, slash included."""
        return f"{self.root}{scope.hex()}/"

    @property
    def pins(self) -> str:
        return f"{self.root}pins/"

    @property
    def deltas(self) -> str:
        return f"{self.root}delta/"

    @property
    def tombstones(self) -> str:
        return f"{self.root}purged/"

    def tombstone(self, scope: Scope, before: float) -> str:
        """The tombstone of everything that `scope` wrote until wall time `before`, rounded up to a microsecond."""
        return f"{self.tombstones}{scope.hex()}-{math.ceil(before * 1e6):016x}"

    def parse_tombstone(self, name: str) -> tuple[Scope, float] | None:
        """The inverse; None for a name that `tombstone` cannot have made."""
        scope, _, stamp = name.removeprefix(self.tombstones).partition("-")
        try:
            if len(scope) != 2 * SCOPE_BYTES or len(stamp) != 16:
                return None
            return Scope(bytes.fromhex(scope)), int(stamp, 16) / 1e6
        except ValueError:
            return None

    def parse_unit(self, name: str) -> BlockKey | None:
        """The last block of the unit called `name`; None for any other name."""
        parts = name.removeprefix(self.root).split("/")
        if len(parts) != 3 or len(parts[0]) != 2 * SCOPE_BYTES or len(parts[2]) != 2 * HASH_BYTES:
            return None
        try:
            return BlockKey(bytes.fromhex(parts[0]) + bytes.fromhex(parts[2])) if parts[2][:2] == parts[1] else None
        except ValueError:
            return None


def spread(low: int, high: int, width: int) -> list[int]:
    """At most `width` points of [low, high), evenly spaced, `low` among them: one round of a k-ary search."""
    span = high - low
    return list(range(low, high)) if span <= width else sorted({low + span * i // width for i in range(width)})


def probe_width(count: int) -> int:
    """Probes per round that find the end of `count` prefix-closed units in two rounds."""
    return max(PROBES_MIN, math.isqrt(max(count - 1, 0)) + 1)


def narrow(low: int, high: int, found: dict[int, bool]) -> tuple[int, int]:
    """The bounds of the first absent unit after one round's answers; the units before `low` are there.

    Assumes prefix closure: what lies before a unit that is there is there too, unless a probe said no.
    """
    for point in sorted(found):
        if not found[point]:
            return low, point
        low = point + 1
    return low, high


def runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as half-open ranges of neighbours."""
    out: list[tuple[int, int]] = []
    for index in indices:
        if out and out[-1][1] == index:
            out[-1] = (out[-1][0], index + 1)
        else:
            out.append((index, index + 1))
    return out
