"""A cache under an engine's namespace, opened anew off the engine's thread when the engine's weights change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvtier.config import Config
from kvtier.connectors.identity import epoch_after_reset
from kvtier.identity.namespace import Namespace

log = logging.getLogger(__name__)

T = TypeVar("T")


class Rotation(Generic[T]):
    """At most one is open; `current` is None while there is none. Thread-safe; only `open`, `join` and `close` wait."""

    def __init__(
        self, config: Config, namespace: Namespace, opener: Callable[[Namespace], T], closer: Callable[[T], object]
    ) -> None:
        """`opener` and `closer` may take seconds; after `open` they are called on threads of this object's."""
        self.namespace = namespace
        self.current: T | None = None
        self.config = config
        """What the next one is opened with; follows what was reloaded."""
        self._opener = opener
        self._closer = closer
        self._lock = threading.Lock()
        self._old: list[T] = []  # to be closed by `_replace`
        self._thread: threading.Thread | None = None  # of `_replace`, until it has decided to end
        self._closed = False

    def follow(self, config: Config) -> None:
        """The current one has taken over this configuration."""
        self.config = config

    def open(self) -> T:
        """Open for the first time, on the caller's thread. Raises what `opener` raises."""
        opened = self._opener(self.namespace)
        with self._lock:
            self.current = opened
        return opened

    def rotate(self, to: Namespace | None = None) -> T | None:
        """New weights: go on in the namespace `to`, or else in one of this process alone (see `epoch_after_reset`).
        Returns at once, with the one that was current and is being closed; until the next is open there is none."""
        with self._lock:
            if self._closed:
                return None
            old, self.current = self.current, None
            self.namespace = to or epoch_after_reset(self.config, self.namespace)
            if old is not None:
                self._old.append(old)
            if self._thread is None:
                self._thread = threading.Thread(target=self._replace, name="kvtier-rotate", daemon=True)
                self._thread.start()
        name = self.namespace.digest.hex()[:16] if to else "of this process alone"
        log.warning("new weights: the cache goes on in a namespace %s, and misses until it is open", name)
        return old

    def _replace(self) -> None:
        while True:
            with self._lock:
                stale, self._old = self._old, []
                wanted = self.namespace
            for old in stale:
                self._close_one(old)
            opened = None if self._closed else self._open_one(wanted)
            with self._lock:
                if self.namespace is wanted and not self._old and not self._closed:
                    self.current, self._thread = opened, None
                    return
                if opened is not None:
                    self._old.append(opened)
                if not self._old and self._closed:
                    self._thread = None
                    return

    def _open_one(self, namespace: Namespace) -> T | None:
        try:
            return self._opener(namespace)
        except Exception:
            log.exception("no cache after new weights; the engine goes on without one")
            return None

    def _close_one(self, opened: T) -> None:
        try:
            self._closer(opened)
        except Exception:
            log.exception("closing the cache")

    def join(self, timeout_s: float) -> bool:
        """Wait for a rotation that is under way, at most `timeout_s`; whether none is any more."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return self._thread is None

    def close(self, timeout_s: float) -> bool:
        """Close for good, within `timeout_s`; False if that was not enough (the process's end does it)."""
        with self._lock:
            self._closed = True
            old, self.current = self.current, None
            rotating = self._thread

        def run() -> None:
            if rotating is not None:
                rotating.join()
            if old is not None:
                self._close_one(old)

        closing = threading.Thread(target=run, name="kvtier-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            log.warning("the cache did not close within %.1f s; what was not written yet is lost", timeout_s)
        return not closing.is_alive()
