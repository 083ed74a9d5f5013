"""The jobs by which one process makes room: for a class of blocks in segments of others, for a smaller capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from kvtier.tiers.disk.drain import EVICTIONS_PER_TXN, Drain
from kvtier.tiers.disk.group_commit import CommitJob
from kvtier.tiers.disk.index import Index, Use
from kvtier.tiers.disk.relocation import Relocation
from kvtier.tiers.disk.reserved_slots import ReservedSlots
from kvtier.tiers.disk.shrink import Shrink
from kvtier.times import Wall


class RoomMaker:
    """Used on the writer thread, but for `stop`."""

    def __init__(
        self,
        reserved: ReservedSlots,
        shrink: Shrink,
        wall: Callable[[], Wall],
        may_write: Callable[[], bool],
        relocate: Callable[[Sequence[Relocation]], None],
    ) -> None:
        """`reserved`: slots that are held for writes are given back where they may be in the way. `may_write`: whether
        the budget allows a transaction; where it is spent, nothing leaves for another class. `relocate`: copies blocks
        to the slots that were reserved for them, and ends their relocations."""
        self._drain = Drain()
        self._shrink = shrink
        self._goes_on = False
        self._reserved = reserved
        self._wall = wall
        self._may_write = may_write
        self._relocate = relocate

    @property
    def busy(self) -> bool:
        """Whether another step should follow soon."""
        return self._goes_on and (self._shrink.busy or (self._drain.busy and self._may_write()))

    def stop(self) -> None:
        """Take no further step; the next process goes on. From any thread."""
        self._drain.stop()
        self._shrink.stop()

    def due_jobs(self, index: Index | None) -> list[CommitJob[Any]]:
        """The next steps: short reads, and at most one job, whose transaction evicts a bounded number of blocks."""
        self._goes_on = False
        if index is None:
            return []
        try:
            work = self._drain.step(index, self._wall()) if self._may_write() else None
        except Exception:  # from a damaged index: the next transaction raises it, too
            return []
        self._goes_on = True
        if self._drain.stuck:
            self._reserved.return_held()
        if work is None:
            return self._shrink.due_jobs(index)
        job: CommitJob[Any] = CommitJob(work, Use.DROP)
        job.future.add_done_callback(self._committed)
        return [job]

    def _committed(self, done: Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None and isinstance(done.result(), list):
            self._drain.relocations.began(done.result())
            self._relocate(done.result())

    def evictions(self) -> int:
        """How many blocks the next step may evict."""
        return EVICTIONS_PER_TXN if self.busy else 0

    def serves(self, index: Index, slot_cls: int) -> bool:
        """Whether further transactions may find a slot of the class that this one did not."""
        return self._may_write() and self._drain.serves(index, slot_cls)
