"""The cache inside vLLM's scheduler process: opened at start, opened anew after new weights, closed within a bound."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

import kvtier
from kvtier.cache import Cache
from kvtier.config import cache_folder
from kvtier.connectors.announcer import Announcer, start_first, write_last
from kvtier.connectors.rotation import Rotation
from kvtier.connectors.settings import Settings
from kvtier.connectors.vllm.messages import ArenaHandle
from kvtier.events import Events
from kvtier.identity.namespace import Namespace
from kvtier.manager.hierarchy import Hierarchy


class SchedulerCache(Rotation[tuple[Cache, ArenaHandle]]):
    """At most one open cache and the handle of its arena. `current` is None while there is none.

    The engine's thread never waits for a tier: the cache is replaced on a thread of its own. Thread-safe.
    """

    def __init__(
        self,
        settings: Settings,
        namespace: Namespace,
        near: Sequence[Collection[int]] = (),
        events: Events | None = None,
        *,
        computes: bool = False,
        announcer_of: Callable[[Hierarchy], Announcer] | None = None,
    ) -> None:
        """`near`, `computes`: for `kvtier.open`. `events` collects the changes of every cache's blocks; `announcer_of`
        makes what announces those that an earlier process left."""
        super().__init__(settings.config, namespace, self._attach, self._close)
        self._source = settings.source
        self._announcer_of = announcer_of
        self._announcers: dict[int, Announcer] = {}  # by the number of the cache's arena
        self._near = near
        self._computes = computes
        self._events = events
        self._arenas = 0

    @property
    def cache(self) -> Cache | None:
        current = self.current  # one reading: another thread replaces it
        return None if current is None else current[0]

    def _attach(self, namespace: Namespace) -> tuple[Cache, ArenaHandle]:
        cache = kvtier.open(self.config, namespace, near=self._near, computes=self._computes)
        cache.source, cache.on_reload = self._source, self.follow
        if self._events is not None:
            cache.manager.subscribe(self._events)
        arena = cache.manager.host.arena
        self._arenas += 1
        if self._announcer_of is not None:
            announcer = self._announcers[self._arenas] = self._announcer_of(cache.manager.hierarchy)
            start_first(cache, announcer)
        return cache, ArenaHandle(
            number=self._arenas,
            pid=os.getpid(),
            files=tuple((fd, os.fstat(fd).st_ino) for fd in arena.fds()),
            slots=arena.slots,
            slot_bytes=arena.slot_bytes,
            piece_bytes=arena.piece_bytes,
            copy_by=self.config.offload.copy_by,
            calibration=str(cache_folder() or ""),
        )

    def _close(self, current: tuple[Cache, ArenaHandle]) -> None:
        cache, arena = current
        if (announcer := self._announcers.pop(arena.number, None)) is not None:
            write_last(cache, announcer)
        cache.close()

    def rotate(self, to: Namespace | None = None) -> tuple[Cache, ArenaHandle] | None:
        if (cache := self.cache) is not None and self._events is not None:
            cache.manager.subscribe(None)
        return super().rotate(to)
