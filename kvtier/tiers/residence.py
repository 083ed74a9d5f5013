"""What a subscriber is told of one tier's blocks, in an order that ends with the truth.

A read or a write reports its blocks when it has ended, and the tier reports removals when they happen, on any thread.
A block that is removed after a read has found it, and before the read's report, would be taken to be there for ever.
So the report leaves out what was removed while its verb ran: a block too few costs a hit, one too many sends requests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtier.events import Notify
from kvtier.identity.keys import BlockKey


class Residence:
    """Passes reports on to `notify`, one at a time. Thread-safe."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._under_way: list[set[BlockKey]] = []  # per verb: the blocks removed since it began

    @contextmanager
    def verb(self) -> Iterator[set[BlockKey]]:
        """Around a verb, and the report of what it found; gives what `found` wants to know of it."""
        removed: set[BlockKey] = set()
        with self._lock:
            self._under_way.append(removed)
        try:
            yield removed
        finally:
            with self._lock:
                self._under_way = [other for other in self._under_way if other is not removed]

    def found(self, keys: Sequence[BlockKey], removed: set[BlockKey]) -> None:
        """The verb that was given `removed` has seen these blocks in the tier."""
        with self._lock:
            self._notify([key for key in keys if key not in removed], True)

    def gone(self, keys: Sequence[BlockKey], _stored: bool = False) -> None:
        """These blocks are not in the tier any more. A `Notify` for the tier."""
        with self._lock:
            for removed in self._under_way:
                removed.update(keys)
            self._notify(keys, False)
