"""The stores that this process has open, by their first directory: LMDB allows it one environment per file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from kvtier.errors import ClosedError, TierUnavailable
from kvtier.tiers.disk.owner import Owner


class _Shared(Protocol):
    owner: Owner
    users: int
    closing: bool


S = TypeVar("S", bound=_Shared)


class OpenStores(Generic[S]):
    """Thread-safe. `lock` guards `users` and `closing` of every store, and is held for microseconds: one that opens
    slowly keeps no other waiting."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self._opening: dict[tuple[int, int], int] = {}  # by which process: a fork has none of its threads
        self._stores: dict[tuple[int, int], S] = {}  # (device, inode)

    def share(self, first: Path, opener: Callable[[], S]) -> S:
        """The store of this directory, with one user more; `opener` opens it where it is not open. Raises what that
        does, ClosedError in a forked child, TierUnavailable while the store is being closed."""
        status = first.stat()
        key = (status.st_dev, status.st_ino)
        with self.lock:
            self.lock.wait_for(lambda: self._opening.get(key) != os.getpid())
            store = self._stores.get(key)
            if store is not None and store.owner.pid != os.getpid():
                raise ClosedError(
                    f"{first} was opened by the process that forked this one; open it after the fork, or start "
                    "processes by spawn"
                )
            if store is not None and store.closing:
                raise TierUnavailable("g3", "open", f"{first} is still being closed by this process")
            if store is not None:
                store.users += 1
                return store
            self._opening[key] = os.getpid()
        try:
            store = opener()
            with self.lock:
                self._stores[key] = store
                store.users += 1
            return store
        finally:
            self._opening.pop(key, None)
            with self.lock:
                self.lock.notify_all()

    def forget(self, matching: Callable[[S], bool]) -> None:
        """These are closed."""
        with self.lock:
            for key in [key for key, store in self._stores.items() if matching(store)]:
                del self._stores[key]
