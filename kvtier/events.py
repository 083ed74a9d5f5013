"""What came to be, and ceased to be, in each tier: for routers that send a request to where its prefix lies.

Hints, not a ledger: what other processes do to a shared tier is not seen here, and when nobody takes them for long,
the oldest are dropped and counted. Only a read says what is there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtier.identity.keys import BlockKey

Notify = Callable[[Sequence[BlockKey], bool], None]
"""Takes keys, and whether they are there from now on. Must not block, lock anything else, or raise."""


class Change(NamedTuple):
    """Blocks that are in a tier from now on, or are not any more."""

    tier: str
    keys: tuple[BlockKey, ...]
    stored: bool


class Events:
    """At most `keys_max` keys wait to be taken. Thread-safe."""

    def __init__(self, keys_max: int = 1 << 16) -> None:
        self._keys_max = keys_max
        self._lock = threading.Lock()
        self._changes: deque[Change] = deque()
        self._waiting = 0
        self.dropped = 0  # keys whose change was never taken

    def of(self, tier: str) -> Notify:
        """What a tier calls."""

        def told(keys: Sequence[BlockKey], stored: bool) -> None:
            if not keys:
                return
            with self._lock:
                self._changes.append(Change(tier, tuple(keys), stored))
                self._waiting += len(keys)
                while self._waiting > self._keys_max:
                    lost = len(self._changes.popleft().keys)
                    self._waiting -= lost
                    self.dropped += lost

        return told

    def take(self) -> list[Change]:
        """Everything since the last call, in order; changes of one kind that follow each other are one."""
        with self._lock:
            changes, self._changes, self._waiting = self._changes, deque(), 0
        merged: list[tuple[str, list[BlockKey], bool]] = []
        for tier, keys, stored in changes:
            if merged and (merged[-1][0], merged[-1][2]) == (tier, stored):
                merged[-1][1].extend(keys)
            else:
                merged.append((tier, list(keys), stored))
        return [Change(tier, tuple(keys), stored) for tier, keys, stored in merged]
