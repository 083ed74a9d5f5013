"""The jobs that take back what processes held that have ended: slots reserved in the index, places in LMDB's table of
readers. Under load as well as at rest."""

from __future__ import annotations

import time
from typing import Any

from kvtier.tiers.disk.group_commit import CommitJob
from kvtier.tiers.disk.index import Index, Use
from kvtier.tiers.disk.write_txn import WriteTxn

RECLAIM_EVERY_S = 5.0
SLOTS_PER_COMMIT_MAX = 32


class DeadOwners:
    """Used on the writer thread."""

    def __init__(self) -> None:
        self._due_at = 0.0

    def due_jobs(self, index: Index) -> list[CommitJob[Any]]:
        """Every RECLAIM_EVERY_S: a job that frees SLOTS_PER_COMMIT_MAX slots; where there are more, again at once. None
        where all owners live: their slots alone are worth no commit."""
        if time.monotonic() < self._due_at:
            return []
        self._due_at = time.monotonic() + RECLAIM_EVERY_S
        index.clear_dead_readers()
        return [CommitJob(self._reclaim, Use.DROP)] if index.has_dead_owners() else []

    def _reclaim(self, txn: WriteTxn) -> None:
        if txn.reclaim(SLOTS_PER_COMMIT_MAX) == SLOTS_PER_COMMIT_MAX:
            self._due_at = 0.0
