"""The cache inside vLLM's scheduler process: opened at start, opened anew after new weights, closed within a bound."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
from collections.abc import Collection, Sequence

import kvtier
from kvtier.cache import Cache
from kvtier.config import calibration_folder
from kvtier.connectors.common import Settings, epoch_after_reset
from kvtier.connectors.vllm_messages import ArenaHandle
from kvtier.errors import KVTierError
from kvtier.events import Events
from kvtier.namespace import Namespace

log = logging.getLogger(__name__)


class Core:
    """At most one open cache and the handle of its arena. `current` is None while there is none.

    `rotate` works on a thread of its own: the engine's thread never waits for a tier. Thread-safe.
    """

    def __init__(
        self,
        settings: Settings,
        namespace: Namespace,
        near: Sequence[Collection[int]] = (),
        events: Events | None = None,
    ) -> None:
        """`near`: CPUs beside each rank's GPU, for `kvtier.open`. `events` hears of every cache's blocks."""
        self._settings = settings
        self._near = near
        self._events = events
        self._namespace = namespace
        self._lock = threading.Lock()
        self._current: tuple[Cache, ArenaHandle] | None = None
        self._arenas = 0
        self._rotation: threading.Thread | None = None
        self._again = False
        self._closed = False

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def current(self) -> tuple[Cache, ArenaHandle] | None:
        return self._current

    def open(self) -> None:
        """Attach to the tiers. Takes as long as populating the arena does. Raises ConfigError, FormatError."""
        cache = kvtier.open(self._settings.config, self._namespace, near=self._near)
        if self._events is not None:
            cache.manager.watch(self._events)
        arena = cache.manager.host.arena
        self._arenas += 1
        handle = ArenaHandle(
            number=self._arenas,
            pid=os.getpid(),
            files=tuple((fd, os.fstat(fd).st_ino) for fd in arena.fds()),
            slots=arena.slots,
            slot_bytes=arena.slot_bytes,
            piece_bytes=arena.piece_bytes,
            copy_by=self._settings.config.offload.copy_by,
            calibration=str(calibration_folder() or ""),
        )
        with self._lock:
            self._current = (cache, handle)

    def rotate(self) -> None:
        """The engine has new weights: nothing stored until now may be found again. Returns at once; until the
        new cache is open there is none."""
        with self._lock:
            old, self._current = self._current, None
            if self._closed:
                return
            if old is not None and self._events is not None:
                old[0].manager.watch(None)
            if self._rotation is not None and self._rotation.is_alive():
                self._again = True
                return
            self._rotation = threading.Thread(target=self._reopen, args=(old,), name="kvtier-rotate", daemon=True)
            self._rotation.start()

    def _reopen(self, old: tuple[Cache, ArenaHandle] | None) -> None:
        try:
            while True:
                if old is not None:
                    old[0].close()
                self._namespace = epoch_after_reset(self._settings.config, self._namespace)
                self.open()
                with self._lock:
                    if not self._again and not self._closed:
                        return
                    self._again = False
                    old, self._current = self._current, None
                    if self._closed:
                        break
            if old is not None:
                old[0].close()
        except KVTierError:
            log.exception("no cache after the engine's reset: the engine runs without one")

    def close(self, timeout: float) -> bool:
        """Flush and let go, at most `timeout` seconds; False if that was not enough (the process's end does it)."""
        with self._lock:
            self._closed = True
            old, self._current = self._current, None
        if old is None:
            return True
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            try:
                old[0].close()
                done.set_result(None)
            except BaseException as error:  # handed to the waiter, whatever it is
                done.set_exception(error)

        threading.Thread(target=run, name="kvtier-close", daemon=True).start()
        try:
            done.result(timeout)
        except TimeoutError:
            log.warning("the cache did not close within %.1f s; what was not written yet is lost", timeout)
            return False
        except Exception:
            log.exception("closing the cache")
            return False
        return True
