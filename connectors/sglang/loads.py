"""Loads of one rank between the tree's call and the end of the batch they belong to.

    add       a request's blocks are pinned, and its pages known
    start     all that was added goes to the device; SGLang's counter says which batch waits for it
    (layers)  the batch's forward comes to a layer: its stream is ordered behind the pages of that layer
    finish    whether it is there. SGLang asks before it launches another batch

Used from the scheduler's thread only. Only `finish` waits, bounded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvtier.connectors.sglang.beside import PinnedBoundary
from kvtier.connectors.sglang.copies import PageCopies, PageLoad
from kvtier.manager.lease import Lease
from kvtier.tiers.host.slot import Slot

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WantedPages:
    """A request's leased blocks, and the pages they are for."""

    rid: str
    lease: Lease
    pages: Sequence[int]
    boundary: PinnedBoundary | None = None  # at their end, where there are windows or states

    @property
    def leases(self) -> list[Lease]:
        return [self.lease] if self.boundary is None else [self.lease, self.boundary.lease]

    def copies(self) -> Iterable[tuple[int, Slot]]:
        """Blocks on the device, and what comes into them."""
        pages = zip(self.pages, self.lease.slots, strict=True)
        return pages if self.boundary is None else (*pages, *self.boundary.copies)

    def release(self) -> None:
        for lease in self.leases:
            lease.release()


class PageLoads:
    """Loads that are queued or under way. Owns their leases."""

    def __init__(self, counter: Any, pages: Callable[[], PageCopies | None]) -> None:
        """`counter` is SGLang's LayerWiseLoadCounter; `pages` has those of the moment, None while there are none.

        The counter's futures are host-side, and complete once the copies are enqueued; the order on the device is made
        where a forward asks for a layer.
        """
        self._counter = counter
        counter.on_layer_ready = self._order
        self._pages = pages
        self._queue: list[WantedPages] = []
        self._under_way: dict[int, tuple[PageCopies, PageLoad, int]] = {}  # and how many requests
        self.events: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._queue) + len(self._under_way)

    def add(self, wanted: WantedPages) -> None:
        self._queue.append(wanted)

    def cancel(self, rid: str) -> bool:
        """Drop the queued loads of a request; whether there were any."""
        dropped = [wanted for wanted in self._queue if wanted.rid == rid]
        self._queue = [wanted for wanted in self._queue if wanted.rid != rid]
        _release(dropped)
        return bool(dropped)

    def start(self) -> int:
        """Start the queued loads; the counter's index, -1 if there are none. `finish` reports errors."""
        queue, self._queue = self._queue, []
        if not queue:
            return -1
        index: int = self._counter.update_producer()
        try:
            pages = self._pages()
            if pages is None:
                raise RuntimeError("the cache is being replaced")
            self._under_way[index] = pages, _load(pages, queue), len(queue)
            for layer in range(self._counter.num_layers):
                self._counter.complete(index, layer)
        except Exception as error:
            log.exception("a load of %d requests could not be started", len(queue))
            _release(queue)
            self.events["load_failures"] += len(queue)
            self._counter.fail(index, error)
        return index

    def _order(self, index: int, layer: int) -> None:
        if index in self._under_way:
            pages, load, _ = self._under_way[index]
            pages.order(load, layer)

    def finish(self, index: int) -> bool:
        """Wait until nothing of that start writes any more; whether every page holds its block. Raises KVTierError
        where something goes on writing (see `PageCopies.landed`)."""
        started = bool(self._counter.finish(index))
        pages, load, requests = self._under_way.pop(index, (None, None, 0))
        if pages is None or load is None:
            return started
        landed = pages.landed(load)
        self.events["load_failures"] += 0 if landed else requests
        return landed and started

    def clear(self) -> None:
        """Forget all of it. Loads under way must have ended."""
        _release(self._queue)
        self._queue.clear()
        self._under_way.clear()
        self._counter.reset()


def _release(queue: Sequence[WantedPages]) -> None:
    for wanted in queue:
        wanted.release()


def _load(pages: PageCopies, queue: Sequence[WantedPages]) -> PageLoad:
    leases = [lease for wanted in queue for lease in wanted.leases]
    return pages.load(leases, chain.from_iterable(wanted.copies() for wanted in queue))
