"""The jobs by which one process makes room: for a class of blocks in segments of others, for a smaller capacity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier.tiers.disk.drain import EVICTIONS_PER_TXN, Drain
from kvtier.tiers.disk.group_commit import CommitJob
from kvtier.tiers.disk.index import Index, Use
from kvtier.tiers.disk.reserved_slots import ReservedSlots
from kvtier.tiers.disk.shrink import Shrink
from kvtier.times import Wall


class RoomMaker:
    """Used on the writer thread, but for `stop`. `busy`: another step should follow soon."""

    def __init__(
        self, reserved: ReservedSlots, shrink: Shrink, wall: Callable[[], Wall], may_write: Callable[[], bool]
    ) -> None:
        """`reserved`: slots that are held for writes are given back where they may be in the way. `may_write`: whether
        the budget allows a transaction; where it is spent, nothing leaves for another class."""
        self.busy = False
        self._drain = Drain()
        self._shrink = shrink
        self._reserved = reserved
        self._wall = wall
        self._may_write = may_write

    def stop(self) -> None:
        """Take no further step; the next process goes on. From any thread."""
        self._drain.stop()
        self._shrink.stop()

    def due_jobs(self, index: Index | None) -> list[CommitJob[Any]]:
        """The next steps: short reads, and at most one job, whose transaction evicts a bounded number of blocks."""
        jobs, self.busy = [], False
        try:
            if index is not None and self._may_write():
                if (work := self._drain.step(index, self._wall())) is not None:
                    jobs = [CommitJob(work, Use.DROP)]
                self.busy = self._drain.busy
        except Exception:  # from a damaged index: the next transaction raises it, too
            return []
        if self._drain.stuck:
            self._reserved.give_back(self._reserved.clear(), unused=True)
        jobs = jobs or self._shrink.due_jobs(index)
        self.busy |= self._shrink.busy
        return jobs

    def evictions(self) -> int:
        """How many blocks the next step may evict."""
        return EVICTIONS_PER_TXN if self.busy else 0

    def serves(self, index: Index, slot_cls: int) -> bool:
        """Whether further transactions may find a slot of the class that this one did not."""
        return self._may_write() and self._drain.serves(index, slot_cls)
