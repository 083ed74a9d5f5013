"""Entries that are dead: their terms ended, or a purge covers them. Nobody is served them, but they hold slots."""

from __future__ import annotations

from kvtier.identity.keys import NAMESPACE_BYTES, SCOPE_BYTES
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.records import BLOCKS, SPAN, rows
from kvtier.tiers.disk.write_txn import purged_until

ENTRIES_PER_STEP = 1024
DEAD_FOR_S = 60.0  # so that who looks soon after still learns that it expired
_SCOPED = NAMESPACE_BYTES + SCOPE_BYTES


class ExpiredScan:
    """A walk over all entries of an index, some at a time, round and round. Not thread-safe."""

    def __init__(self) -> None:
        self._next = BLOCKS

    def step(self, index: Index, now: float) -> list[bytes]:
        """Names of the dead among the next ENTRIES_PER_STEP entries. A read transaction of about a millisecond."""
        found: list[bytes] = []
        purged: dict[bytes, float] = {}
        start, self._next = self._next, BLOCKS
        with index.reading() as txn:
            for seen, (key, raw) in enumerate(rows(txn, BLOCKS, start)):
                if seen == ENTRIES_PER_STEP:
                    self._next = key
                    break
                scoped = key[len(BLOCKS) : len(BLOCKS) + _SCOPED]
                if scoped not in purged:
                    purged[scoped] = purged_until(txn, scoped)
                if len(raw) < SPAN.size:
                    continue  # damage is for who reads it
                ends, birth = SPAN.unpack_from(raw)
                if ends < now - DEAD_FOR_S or birth <= purged[scoped]:
                    found.append(key[len(BLOCKS) :])
        return found
