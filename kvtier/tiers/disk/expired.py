"""Entries that are expired or purged: they are never served, but they hold slots."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.retention.terms import Depth
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.purged import purged_until
from kvtier.tiers.disk.records import SCOPED_BYTES, SPAN, Entry
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.times import Wall

ENTRIES_PER_STEP = 1024
FOUND_PER_STEP_MAX = 64
EXPIRED_FOR_S = 60.0  # so that a lookup soon after still finds that it expired


class ExpiredScan:
    """A walk over all entries of an index, some at a time, again and again. Not thread-safe."""

    def __init__(self) -> None:
        self._next = b""

    def step(self, index: Index, wall_s: Wall) -> list[bytes]:
        """Names of the next FOUND_PER_STEP_MAX expired and purged blocks, as far as they are among the next
        ENTRIES_PER_STEP. A read transaction of about 1 ms."""
        found: list[bytes] = []
        purged: dict[bytes, Wall] = {}
        start, self._next = self._next, b""
        with index.reading() as txn:
            for seen, (name, raw) in enumerate(index.layout.entries(txn, start=start)):
                if seen == ENTRIES_PER_STEP or len(found) == FOUND_PER_STEP_MAX:
                    self._next = name
                    break
                scoped = name[:SCOPED_BYTES]
                if scoped not in purged:
                    purged[scoped] = purged_until(txn, scoped)
                if len(raw) < SPAN.size:
                    continue  # damaged: left to the next read of it
                ends, mark, _last_use = SPAN.unpack_from(raw)
                if ends < wall_s - EXPIRED_FOR_S or mark <= purged[scoped]:
                    found.append(name)
        return found


def is_over(txn: WriteTxn, name: bytes, entry: Entry, deletion_s: Wall) -> bool:
    """Whether the block is purged, or expired by a time for deletions: -inf while the clock is in doubt, when nothing
    could be served yet, but nothing is known to be expired either."""
    return entry.life.ends(Depth.G3) < deletion_s or txn.purged.covers(name, entry.mark)


def remove_expired(txn: WriteTxn, names: Sequence[bytes], wall_s: Wall) -> int:
    """Remove those of `names` that are expired or purged, and not retained. Returns how many."""
    count = 0
    for name in names:
        entry = txn.find(name)
        if entry is not None and not txn.must_stay(name, wall_s):
            count += is_over(txn, name, entry, wall_s) and txn.drop(name)
    return count
