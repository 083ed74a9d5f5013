"""Purged tenants of a G3 store: per tenant the mark (`kvtier.retention.marks`) up to which its blocks are dead.

There are up to TOMBSTONES_MAX of them. Where more come, the older half gives way to one mark for the whole store, the
latest of theirs: what has that one or an earlier one is dead, whosesoever it is. Those that the purge log has refused
stay, and are not counted among them: by them the next process knows what it owes the log.

    meta key, after the "m"      value
    "purged" ‖ digest ‖ tenant   f64: blocks of the tenant with that mark or an earlier one are misses for ever
    "purged"                     f64: the same for every block of the store
    "purges"                     u32: how many tenants there are

A tenant is written as a scope without a variant. Earlier releases wrote the scope: such a tombstone covers that alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvtier.identity.keys import NAMESPACE_BYTES, tenant_of
from kvtier.retention.marks import is_refused
from kvtier.tiers.disk.purge_log import ALL
from kvtier.tiers.disk.records import META, PURGED_KEY, SCOPED_BYTES, TIME, rows, time_at
from kvtier.times import Wall

TOMBSTONES_MAX = 1 << 15
FOLDED_PER_COMMIT_MAX = 256  # a transaction must not hold the lock for long
COUNT_KEY = META + b"purges"


class PurgeRows(Protocol):
    """The part of `kvtier.tiers.disk.index.Index` that is used here."""

    def reading(self) -> AbstractContextManager[Any]: ...
    def rows(self, prefix: bytes) -> list[tuple[bytes, bytes]]: ...


def purged_until(txn: Any, scoped: bytes) -> Wall:
    """The latest mark at which blocks of namespace ‖ scope are dead; -inf where its tenant was never purged."""
    return max(time_at(txn, PURGED_KEY), *(time_at(txn, PURGED_KEY + each) for each in covering(scoped)))


def covering(scoped: bytes) -> tuple[bytes, ...]:
    """Whose tombstones cover namespace ‖ scope: its tenant's, and those that earlier releases wrote for the scope."""
    tenant = scoped[:NAMESPACE_BYTES] + tenant_of(scoped[NAMESPACE_BYTES:])
    return (tenant,) if tenant == scoped else (tenant, scoped)


def count_in(txn: Any) -> int:
    """How many scopes are purged."""
    raw = txn.get(COUNT_KEY)
    if raw is not None:
        return int.from_bytes(raw, "little")
    return sum(len(key) > len(PURGED_KEY) for key, _ in rows(txn, PURGED_KEY))


class Purged:
    """In an LMDB write transaction. Caches what it looked at: every call of LMDB gives up the interpreter lock."""

    def __init__(self, txn: Any, pending: Mapping[bytes, Wall]) -> None:
        """`pending`: purges that the index may not have yet."""
        self._txn = txn
        self._until: dict[bytes, Wall] = {}
        self._everything = time_at(txn, PURGED_KEY)
        for scoped, until in pending.items():
            self.apply(scoped, until)

    def apply(self, scoped: bytes, before: Wall) -> None:
        """Set the tombstone of namespace ‖ scope, unless a newer one is there."""
        if scoped == ALL:
            self.fold(before, ())
        elif before > self.until(scoped):
            new = self._txn.get(PURGED_KEY + scoped) is None
            if new:
                self._txn.put(COUNT_KEY, (count_in(self._txn) + 1).to_bytes(4, "little"))
            self._txn.put(PURGED_KEY + scoped, TIME.pack(before))
            self._until.clear()

    def fold(self, until: Wall, scopes: Sequence[bytes]) -> None:
        """Every block born until then is dead. Those of `scopes` (namespace ‖ scope) whose tombstones say no more than
        that need none."""
        if until > self._everything:
            self._everything = until
            self._txn.put(PURGED_KEY, TIME.pack(until))
            self._until.clear()
        left = count_in(self._txn)
        for scoped in scopes:
            if time_at(self._txn, PURGED_KEY + scoped) <= self._everything:
                left -= self._txn.delete(PURGED_KEY + scoped)
        self._txn.put(COUNT_KEY, left.to_bytes(4, "little"))

    def covers(self, name: bytes, mark: Wall) -> bool:
        """Whether a tombstone covers the block of this mark."""
        return mark <= self.until(name[:SCOPED_BYTES])

    def until(self, scoped: bytes) -> Wall:
        """The mark of the tombstone that counts for namespace ‖ scope; -inf where there is none."""
        if scoped not in self._until:
            self._until[scoped] = max(self._everything, purged_until(self._txn, scoped))
        return self._until[scoped]


class TombstoneFold:
    """Finds the older half of a store's tombstones when there are too many. Not thread-safe."""

    def __init__(self) -> None:
        self._until = Wall("-inf")
        self._left: list[bytes] = []
        self._allowed = TOMBSTONES_MAX  # with those that stay

    def step(self, index: PurgeRows) -> tuple[Wall, list[bytes]] | None:
        """Arguments for `Purged.fold`; None if there is nothing to do."""
        if not self._left:
            with index.reading() as txn:
                count = count_in(txn)
            if count <= self._allowed:
                return None
            rows_of = ((Wall(TIME.unpack(raw)[0]), key[len(PURGED_KEY) :]) for key, raw in index.rows(PURGED_KEY))
            found = sorted(one for one in rows_of if one[1] and not is_refused(one[0]))
            if len(found) <= TOMBSTONES_MAX:
                self._allowed = count + FOLDED_PER_COMMIT_MAX  # all are read again when there are so many more
                return None
            self._allowed, found = TOMBSTONES_MAX, found[: len(found) // 2]
            self._until = Wall(found[-1][0])
            self._left = [scoped for _, scoped in found]
        some, self._left = self._left[:FOLDED_PER_COMMIT_MAX], self._left[FOLDED_PER_COMMIT_MAX:]
        return self._until, some
