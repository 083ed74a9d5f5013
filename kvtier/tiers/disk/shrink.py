"""Makes a store smaller while it is used: what lies beyond its new capacity leaves in slices.

    sweep     `order` from its coldest row on, in short reads; each find is evicted by the next transaction
    trim      slots beyond the capacity that nobody holds are never-used again, from the last on
    cut       files are shortened or removed, one after another
    end       the store reaches no further than its capacity

Each step is durable, and none needs to know of an earlier one: a process that is killed leaves a store that goes on to
shrink when it is opened with this capacity, or has all its slots with a larger one. All processes that use the store
know its capacity, since it gets another only while nobody else uses it. So none stores anything beyond, or makes a file
longer than that, and several of them may do these steps at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.tiers.disk.geometry import geometry_in, reach_in
from kvtier.tiers.disk.group_commit import CommitJob
from kvtier.tiers.disk.index import Index, Use
from kvtier.tiers.disk.records import order_parts
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.disk.write_txn import WriteTxn

log = logging.getLogger(__name__)

ROWS_PER_STEP = 1024
"""Rows read in one transaction: about a millisecond."""
EVICTIONS_PER_TXN = 64
RETRY_S, RETRY_LAST_S = 1.0, 60.0
"""After which a store is swept again that a write or an error keeps from becoming smaller, at first and at last."""


class Shrink:
    """The part of one process. On the writer thread, but for `stop`, and for the attributes, which all may read."""

    def __init__(self, slab: Slab, path: Path, may_write: Callable[[], bool]) -> None:
        """`may_write`: whether the budget allows a transaction; where it is spent, nothing leaves."""
        self.active = False
        """Whether the store shrinks, as far as this process knows."""
        self.steps = 0
        self.evicted = 0
        self._slab = slab
        self._path = path
        self._may_write = may_write
        self._step: Callable[[Index], CommitJob[Any] | None] = self._sweep
        self._next = b""
        self._files: Iterator[None] = iter(())
        self._due_at = 0.0
        self._rest_s = RETRY_S
        self._stopped = False

    def begin(self, index: Index) -> None:
        """The store has another capacity, or was opened."""
        self.active = index.geometry() != index.reach()
        self._due_at, self._rest_s = 0.0, RETRY_S
        self._begin_sweep()

    def stop(self) -> None:
        """Take no further step; the next process goes on. From any thread."""
        self._stopped = True

    @property
    def busy(self) -> bool:
        """Whether the next step has something to do now."""
        return self.active and not self._stopped and time.monotonic() >= self._due_at and self._may_write()

    def due_jobs(self, index: Index) -> list[CommitJob[Any]]:
        """The next step: one short read, or a file, and at most one job. Raises nothing."""
        if not self.busy:
            return []
        self.steps += 1
        try:
            job = self._step(index)
        except OSError as error:
            log.warning("g3: %s does not become smaller yet: %s", self._path, error)
            self._rest()
            return []
        except Exception:  # from a damaged index: the next transaction raises it, too
            self._rest()
            return []
        return [] if job is None else [job]

    def _rest(self) -> None:
        self._due_at = time.monotonic() + self._rest_s
        self._rest_s = min(2 * self._rest_s, RETRY_LAST_S)
        self._begin_sweep()

    def _begin_sweep(self) -> None:
        self._step, self._next = self._sweep, b""

    def _sweep(self, index: Index) -> CommitJob[Any] | None:
        found: list[bytes] = []
        with index.reading() as txn:
            geometry = geometry_in(txn)
            if geometry == reach_in(txn):  # another process came to the end
                self._begin_cut()
                return None
            for seen, (key, name) in enumerate(index.layout.ordered(txn, None, self._next)):
                if seen == ROWS_PER_STEP or len(found) == EVICTIONS_PER_TXN:
                    break
                self._next = key + b"\0"
                slot_cls, _rank, segment, slot = order_parts(key)
                if not geometry.holds(slot_cls, segment, slot):
                    found.append(name)
            else:
                self._step = self._trim
        if not found:
            return None
        job = CommitJob(partial(evict_beyond, names=found), Use.DROP, len(found))
        job.future.add_done_callback(self._swept)
        return job

    def _swept(self, done: Future[int]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._rest()
        else:
            self.evicted += done.result()
            self._rest_s = RETRY_S if done.result() else self._rest_s

    def _trim(self, index: Index) -> CommitJob[Any]:
        job = CommitJob(lambda txn: (txn.segments.trim(), txn.segments.trimmed), Use.DROP)
        job.future.add_done_callback(self._trimmed)
        return job

    def _trimmed(self, done: Future[tuple[bool, bool]]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._rest()
            return
        clear, more = done.result()
        if clear:
            self._begin_cut()
        elif not more:
            self._rest()

    def _begin_cut(self) -> None:
        self._step, self._files = self._cut, self._slab.cut()

    def _cut(self, index: Index) -> CommitJob[Any] | None:
        if next(self._files, self) is not self:
            return None
        job = CommitJob(WriteTxn.end_shrink, Use.DROP)
        job.future.add_done_callback(self._ended)
        return job

    def _ended(self, done: Future[bool]) -> None:
        if done.cancelled() or done.exception() is not None or not done.result():
            self._rest()
            return
        self.active = False
        log.info("g3: %s is as small as its capacity now", self._path)


def evict_beyond(txn: WriteTxn, names: list[bytes]) -> int:
    """Evict those of `names` that lie beyond the capacity, retained or not. Returns how many."""
    count = 0
    for name in names:
        entry = txn.find(name)
        if entry is None or txn.geometry.holds(entry.slot_class, entry.segment, entry.slot):
            continue
        if txn.drop(name):
            txn.left(name, entry.slot_class)
            count += 1
    return count
