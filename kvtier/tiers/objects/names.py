"""Names of the objects in a bucket.

{prefix}/{namespace hex}/{scope hex}/{hh}/{hash hex}     a stride, named by the hash of its last block;
                                                         hh = the first two digits of that hash
{prefix}/{namespace hex}/delta/{µs hex}-{replica hex}    a list of objects written (kvtier.tiers.objects.deltas)
{prefix}/{namespace hex}/pins/{hash of the name}         a pin (kvtier.tiers.objects.pins)
{prefix}/{namespace hex}/purged/{scope hex}-{µs hex}     a tombstone: blocks of the scope made until then are purged
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import SCOPE_BYTES, BlockKey, Scope, scope_of_key
from kvtier.times import Wall


@dataclass(frozen=True, slots=True)
class ObjectNames:
    """The names of one namespace below `prefix` ("" or without slashes at its ends)."""

    prefix: str
    namespace: bytes

    @property
    def root(self) -> str:
        """Common start of all names of the namespace, slash included."""
        return f"{self.prefix}/{self.namespace.hex()}/" if self.prefix else f"{self.namespace.hex()}/"

    def scope(self, scope: Scope) -> str:
        """Common start of the names of the scope's strides, slash included."""
        return f"{self.root}{scope.hex()}/"

    def stride(self, last: BlockKey) -> str:
        """The object whose last block is `last`."""
        digest = last[SCOPE_BYTES:].hex()
        return f"{self.scope(scope_of_key(last))}{digest[:2]}/{digest}"

    def parse_stride(self, name: str) -> BlockKey | None:
        """The last block of the object called `name`; None if `stride` cannot have made the name."""
        parts = name.removeprefix(self.root).split("/")
        if len(parts) != 3 or len(parts[0]) != 2 * SCOPE_BYTES or len(parts[2]) != 2 * HASH_BYTES:
            return None
        try:
            return BlockKey(bytes.fromhex(parts[0]) + bytes.fromhex(parts[2])) if parts[2][:2] == parts[1] else None
        except ValueError:
            return None

    @property
    def deltas(self) -> str:
        return f"{self.root}delta/"

    @property
    def control(self) -> str:
        """Every name of a pin or tombstone sorts behind this, and no name of the namespace behind those."""
        return f"{self.root}p"

    def behind(self, name: str) -> str:
        """Where a walk over strides goes on after `name`: behind the deltas if it is one, "" if no stride follows."""
        if name.startswith(self.deltas):
            return f"{self.deltas[:-1]}0"  # "0" is the character behind the slash
        return "" if name > f"{self.root}g" else name

    @property
    def pins(self) -> str:
        return f"{self.root}pins/"

    @property
    def tombstones(self) -> str:
        return f"{self.root}purged/"

    def tombstone(self, scope: Scope, before: Wall) -> str:
        """The tombstone of blocks that `scope` made until wall time `before`, rounded up to a microsecond."""
        return f"{self.tombstones}{scope.hex()}-{math.ceil(before * 1e6):016x}"

    def parse_tombstone(self, name: str) -> tuple[Scope, Wall] | None:
        """The inverse; None if `tombstone` cannot have made the name."""
        scope, _, stamp = name.removeprefix(self.tombstones).partition("-")
        try:
            if len(scope) != 2 * SCOPE_BYTES or len(stamp) != 16:
                return None
            return Scope(bytes.fromhex(scope)), Wall(int(stamp, 16) / 1e6)
        except ValueError:
            return None
