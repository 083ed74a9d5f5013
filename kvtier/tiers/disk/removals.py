"""What leaves an index in the background: expired and purged blocks, and tombstones that count no more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvtier.tiers.disk.expired import FOUND_PER_STEP_MAX, ExpiredScan, remove_expired
from kvtier.tiers.disk.group_commit import CommitJob
from kvtier.tiers.disk.index import Index, Use
from kvtier.tiers.disk.purged import TombstoneFold
from kvtier.tiers.disk.touches import Touches
from kvtier.times import Wall

SCAN_FIRST_S, SCAN_EVERY_S = 10.0, 1.0


class Removals:
    """Used on the writer thread."""

    def __init__(self, touches: Touches, wall: Callable[[], Wall], may_write: Callable[[], bool]) -> None:
        """A block in `touches` is not expired before they are written; `may_write`: whether the budget allows it."""
        self._touches = touches
        self._wall = wall
        self._may_write = may_write
        self._scan = ExpiredScan()
        self._fold = TombstoneFold()
        self._scan_at = time.monotonic() + SCAN_FIRST_S

    def due_jobs(self, index: Index) -> list[CommitJob[Any]]:
        """Every SCAN_EVERY_S: jobs that remove the expired among the next entries, write purges that wait, and remove
        tombstones if there are many."""
        if time.monotonic() < self._scan_at or not self._may_write():
            return []
        self._scan_at = time.monotonic() + SCAN_EVERY_S
        try:
            found = self._scan.step(index, self._wall())
            if len(found) == FOUND_PER_STEP_MAX:
                self._scan_at = 0.0  # there are more: a step per transaction
            expired = [name for name in found if not self._touches.of(name)]
            fold = self._fold.step(index)
            pending = index.purges.pending()
        except Exception:  # from a damaged index: the next transaction raises it, too
            return []
        jobs: list[CommitJob[Any]] = []
        if expired:
            jobs.append(CommitJob(lambda txn: remove_expired(txn, expired, self._wall()), Use.DROP, len(expired)))
        if pending:  # any transaction carries them into the index
            jobs.append(CommitJob(lambda txn: None, Use.PURGE))
        if fold is not None:
            jobs.append(CommitJob(lambda txn: txn.purged.fold(*fold), Use.DROP))
        return jobs
