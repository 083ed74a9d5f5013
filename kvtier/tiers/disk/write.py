"""Reserved blocks on their way into their slots, and the runs of neighbours that one system call moves."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from kvtier.clock import Clock
from kvtier.tiers.disk.io_scheduler import Work
from kvtier.tiers.disk.records import SLOT_ALIGN, SlotReservation
from kvtier.tiers.disk.store import Store
from kvtier.tiers.protocol import Sealed, Stored

T = TypeVar("T")

RUN_BYTES_MAX = 4 << 20  # neighbouring blocks are moved by one system call up to this size
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class WriteBatch:
    """One `write` between reserving and publishing. `jobs` run on I/O threads; who finishes a segment syncs it.

    `failed` tells, by place in the batch, what became of blocks that are not durable once all jobs are done.
    """

    def __init__(
        self, store: Store, blocks: Sequence[Sealed], held: Mapping[int, SlotReservation], clock: Clock
    ) -> None:
        self.failed: dict[int, Stored] = {}
        self._store = store
        self._blocks = blocks
        self._held = held
        self._clock = clock
        self._lock = threading.Lock()

    def jobs(self, deadline: float) -> list[Work]:
        """One job per run of neighbouring slots. A job that has not begun by the deadline fails its blocks."""
        block_bytes = sum(map(len, self._blocks[0].pieces)) if self._blocks else 0
        runs = list(neighbours(list(self._held), lambda place: self._place(place), block_bytes))
        self._left = Counter(self._held[run[0]].segment for run in runs)
        return [partial(self._write, run, deadline) for run in runs]

    def _place(self, place: int) -> tuple[int, int]:
        return self._held[place].segment, self._held[place].slot

    def _write(self, run: Sequence[int], deadline: float) -> None:
        first = self._held[run[0]]
        try:
            if self._clock.monotonic() > deadline:
                self._fail(run, Stored.FAILED)
            else:
                pieces = [piece for place in run for piece in self._blocks[place].pieces]
                self._store.slab.write(first.segment, first.slot * first.slot_class * SLOT_ALIGN, pieces)
        except OSError as error:
            self._fail(run, self._outcome(error))
        with self._lock:
            self._left[first.segment] -= 1
            last = self._left[first.segment] == 0
        if last:
            self._sync(first.segment)

    def _sync(self, segment: int) -> None:
        written = [place for place, one in self._held.items() if one.segment == segment and place not in self.failed]
        if not written:
            return
        try:
            self._store.slab.sync(segment)
        except OSError as error:
            outcome = self._outcome(error)
            self._fail(written, outcome)
            if outcome is Stored.FAILED:
                # A sync that failed says nothing about the next one: the store is opened anew.
                self._store.quarantine(f"fdatasync of segment {segment}: {error}")

    def _fail(self, places: Sequence[int], outcome: Stored) -> None:
        with self._lock:
            self.failed.update(dict.fromkeys(places, outcome))

    def _outcome(self, error: OSError) -> Stored:
        if error.errno in _NO_ROOM:
            self._store.volume_full()
            return Stored.FULL
        return Stored.FAILED


def neighbours(items: Sequence[T], place_of: Callable[[T], tuple[int, int]], block_bytes: int) -> Iterator[list[T]]:
    """Items in neighbouring slots, up to RUN_BYTES_MAX together; one by one where slots have padding."""
    run: list[T] = []
    last = (-1, -1)
    limit = 1 if block_bytes % SLOT_ALIGN else max(1, RUN_BYTES_MAX // max(1, block_bytes))
    for item in sorted(items, key=place_of):
        segment, slot = place_of(item)
        if run and ((segment, slot) != (last[0], last[1] + 1) or len(run) == limit):
            yield run
            run = []
        run.append(item)
        last = segment, slot
    if run:
        yield run
