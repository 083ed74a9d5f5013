"""Changes of residence per tier, for routers that send a request to the replica that holds its prefix.

Hints only: changes that other processes make to a shared tier are not seen here, and where changes are not taken for
long, the oldest are dropped and counted. Who was told of a block and not of its removal believes in it for ever, so
`Lost` says where removals are missing among the changes. Only a read says which blocks are there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from kvtier.identity.keys import BlockKey

Notify = Callable[[Sequence[BlockKey], bool], None]
"""Called with keys and whether they are resident from now on. Must not block, take another lock, or raise."""


_MERGED_KEYS = 1024
"""A change that waits takes in the next one of its kind until it has so many keys: bounds what moves when one is
dropped."""


class Change(NamedTuple):
    """Blocks that are resident in a tier from now on, or not any more."""

    tier: str
    keys: tuple[BlockKey, ...]
    stored: bool


class Lost(NamedTuple):
    """Blocks have left a tier, and nobody knows which: any that was told of before this may be among them."""

    tier: str


class Events:
    """The changes not yet taken, of at most `keys_max` keys. Thread-safe."""

    def __init__(self, keys_max: int = 1 << 16) -> None:
        self._keys_max = keys_max
        self._lock = threading.Lock()
        self._changes: deque[tuple[str, list[BlockKey], bool]] = deque()  # without keys: `Lost`
        self._waiting = 0
        self._removals_dropped: dict[str, None] = {}  # tiers: they are lost before the oldest change that waits
        self.dropped = 0  # keys whose change was never taken

    def lose(self, tier: str) -> None:
        """Blocks have left the tier of this name, and nobody knows which."""
        with self._lock:
            latest = takewhile(lambda change: not change[1], reversed(self._changes))
            if all(lost != tier for lost, _, _ in latest):  # else it is lost there, and nothing has come since
                self._changes.append((tier, [], False))

    def of(self, tier: str) -> Notify:
        """The callback for the tier of this name."""

        def record(keys: Sequence[BlockKey], stored: bool) -> None:
            if not keys:
                return
            with self._lock:
                latest = self._changes[-1] if self._changes else None
                if latest is not None and latest[1] and latest[2] is stored and latest[0] == tier \
                        and len(latest[1]) < _MERGED_KEYS:  # fmt: skip
                    latest[1].extend(keys)
                else:
                    self._changes.append((tier, list(keys), stored))
                self._waiting += len(keys)
                self._drop_oldest()

        return record

    def _drop_oldest(self) -> None:
        """Keep to `keys_max`. Under the lock."""
        while (excess := self._waiting - self._keys_max) > 0:
            tier, oldest, came = self._changes[0]
            count = min(excess, len(oldest))
            if not came:
                self._removals_dropped[tier] = None
            del oldest[:count]
            if not oldest:
                self._changes.popleft()
            self._waiting -= count
            self.dropped += count

    def take(self) -> list[Change | Lost]:
        """All changes since the last call, in order; consecutive changes of one kind and tier are merged."""
        with self._lock:
            changes, self._changes, self._waiting = self._changes, deque(), 0
            lost, self._removals_dropped = self._removals_dropped, {}
        merged: list[tuple[str, list[BlockKey], bool]] = [(tier, [], False) for tier in lost]
        for tier, keys, stored in changes:
            if merged and keys and merged[-1][1] and (merged[-1][0], merged[-1][2]) == (tier, stored):
                merged[-1][1].extend(keys)
            else:
                merged.append((tier, keys, stored))
        return [Change(tier, tuple(keys), stored) if keys else Lost(tier) for tier, keys, stored in merged]
