"""Requests of a model with windows or states: promoted and given back up to a boundary, with what it needs of them."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

from kvtier.cache import Cache
from kvtier.connectors.boundaries import promote_boundary
from kvtier.connectors.promoted import Promoted
from kvtier.connectors.sglang.beside import PoolBeside
from kvtier.connectors.sglang.requests import QueuedRequest, QueuedRequests


class BoundaryRequests(QueuedRequests):
    """See the module."""

    def __init__(self, beside: PoolBeside, alone: bool, *arguments: Any) -> None:
        """`alone`: no other rank must have the same boundaries, so the longest is all that is asked for."""
        super().__init__(*arguments)
        self._beside = beside
        self._alone = alone

    def restorable(self, queued: QueuedRequest, cache: Cache) -> list[int]:
        """As of other models, but only those that are boundaries; none while the request waits: it is passed over, and
        looked up again."""
        start, stop = queued.start, queued.start + self.resident(queued, cache)
        queued.known = max(stop, queued.promoted.matched) if queued.reads else 0
        if queued.waits:
            return []
        looked, holds = (start, stop, queued.promoted.done), partial(self._beside.holds, cache.manager, queued.chain)
        if looked != queued.looked or not all(map(holds, queued.boundaries)):
            found = self._beside.boundaries(cache.manager, queued.chain, start, stop)
            queued.looked, queued.boundaries = looked, tuple(islice(found, 1 if self._alone else None))[::-1]
        return [depth - start for depth in queued.boundaries]

    def _is_whole(self, queued: QueuedRequest, found: int, cache: Cache) -> bool:
        depth = queued.start + found
        return super()._is_whole(queued, found, cache) and self._beside.holds(cache.manager, queued.chain, depth)

    def _promote(self, queued: QueuedRequest, cache: Cache) -> Promoted:
        chain, beside = queued.chain, self._beside
        promoted = Promoted(start=queued.start)
        ends = partial(beside.first, chain), partial(beside.keys, chain)
        work = promote_boundary(cache.manager, chain, *ends, queued.until_s, promoted, beside.step)
        promoted.future = cache.submit(work)
        return promoted
