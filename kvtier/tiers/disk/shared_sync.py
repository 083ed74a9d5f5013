"""fdatasyncs that writes share: one covers whatever was written to its segment before it began.

A sync costs a flush of the device, for one page as for a thousand. So a write joins the next sync of its segment, and
has none of its own; while one runs, those that come meanwhile wait for the one after it. What a failed sync has lost is
not known, and the kernel tells it once: every write that was under way then has failed. Of another process's failed
sync nothing is known here: what it lost of our blocks is a miss, by their digests.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from kvtier.errors import TierError
from kvtier.tiers.disk.faults import NO_SPACE
from kvtier.tiers.disk.io_scheduler import IOScheduler
from kvtier.tiers.disk.slab import Slab

Outcome = Exception | None


class SyncedStore(Protocol):
    """What is needed of `kvtier.tiers.disk.store.Store`."""

    io: IOScheduler
    slab: Slab

    def moving(self) -> AbstractContextManager[None]: ...
    def quarantine(self, reason: str) -> None: ...


class SharedSyncs:
    """Of one store, by segment. Thread-safe."""

    def __init__(self, store: SyncedStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._waiting: dict[int, list[Future[Outcome]]] = {}
        self._busy: set[int] = set()  # segments with a job
        self.failures = 0
        """Syncs that failed. A write during which it changed is not durable, whatever its own sync came to."""

    def request(self, segment: int) -> Future[Outcome]:
        """Ends with the error, or None, of a sync of the segment that begins after this call. Cannot be cancelled.
        Never blocks."""
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._waiting.setdefault(segment, []).append(future)
            if segment in self._busy:
                return future
            self._busy.add(segment)
        try:
            self._store.io.sync(lambda: self._run(segment))
        except TierError as error:  # no thread can be started
            while found := self._next(segment):
                _end(found, error)
        return future

    def request_all(self, segments: Collection[int], ended: Future[dict[int, Outcome]]) -> None:
        """`request` of each; their outcomes, by segment, are the result of `ended`. Never blocks."""
        outcomes: dict[int, Outcome] = {}

        def add(segment: int, request: Future[Outcome]) -> None:
            with self._lock:
                outcomes[segment] = request.result()
                last = len(outcomes) == len(segments)
            if last:
                ended.set_result(outcomes)

        for segment in segments:
            self.request(segment).add_done_callback(partial(add, segment))
        if not segments:
            ended.set_result(outcomes)

    def _next(self, segment: int) -> list[Future[Outcome]]:
        """Those whom the sync that begins now is for. Where there are none the job has ended."""
        with self._lock:
            found = self._waiting.pop(segment, [])
            if not found:
                self._busy.discard(segment)
            return found

    def _run(self, segment: int) -> None:
        """Syncs until nobody waits. On an I/O thread."""
        unexpected: Exception | None = None
        while found := self._next(segment):
            outcome = self._sync(segment)
            if outcome is not None:
                with self._lock:
                    self.failures += 1
                unexpected = unexpected if isinstance(outcome, (OSError, TierError)) else outcome
            _end(found, outcome)
        if unexpected is not None:
            raise unexpected

    def _sync(self, segment: int) -> Outcome:
        """After a failed sync the next one proves nothing: the store is opened anew, before anybody hears of it."""
        try:
            with self._store.moving():
                self._store.slab.sync(segment)
        except OSError as error:
            if error.errno not in NO_SPACE:
                self._store.quarantine(f"fdatasync of segment {segment}: {error}")
            return error
        except Exception as error:
            return error
        return None


def _end(futures: list[Future[Outcome]], outcome: Outcome) -> None:
    for future in futures:
        future.set_result(outcome)
