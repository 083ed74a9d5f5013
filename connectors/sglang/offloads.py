"""Offloads of one rank: what the tree says of the pages that it is about to offload, and the completions that it takes.

    are_of      the request whose tokens enter the tree, and up to where
    follow      the pages before those that come next
    begin       the pages: copied to G2 where it lacks them, and at a boundary what it needs of windows or states
    completed   offloads that are over, in the order in which they began; every rank has equally many

Used from the scheduler's thread only; nothing here waits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.connectors.control import Control
from kvtier.connectors.fallback import falls_back_to, or_fallback
from kvtier.connectors.identity import engine_keys
from kvtier.connectors.sglang.beside import BoundaryStore, PoolBeside
from kvtier.connectors.sglang.copies import PageCopies
from kvtier.connectors.sglang.hooks import NO_CHECKPOINT, Checkpoint
from kvtier.connectors.sglang.transfers import PAGES, of_pool, page_numbers
from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.ranges import ChainTerms

log = logging.getLogger(__name__)

_Remember = Callable[[Any, Control | None, Sequence[BlockKey], int], None]


class PageOffloads:
    """See the module."""

    def __init__(
        self,
        page: int,
        beside: PoolBeside | None,
        control_of: Callable[[Any], tuple[Control, Scope | None]],
        remember: _Remember,
        copies: Callable[[], PageCopies | None],
    ) -> None:
        """`remember` is told of each request's blocks, from a depth on. `copies` has those of the moment, None while
        there are none."""
        self._page = page
        self._beside = beside
        self._control_of = control_of
        self._remember = remember
        self._copies = copies
        self._req: Any = None
        self._checkpoint = NO_CHECKPOINT
        self._head: list[str] = []
        self._path: Callable[[], Any] | None = None
        self.events: Counter[str] = Counter()
        self._lost = 0  # offloads that are answered as failed, before all others

    def are_of(self, req: Any | None, checkpoint: Checkpoint) -> None:
        """Offloads from now on are of this request; None: of no request."""
        self._req, self._checkpoint = req, checkpoint

    def follow(self, head: list[str], path: Callable[[], Any] | None) -> None:
        """The next pages follow these. `path()` are the slots in the full pool of all tokens up to their end."""
        self._head, self._path = head, path

    def begin(self, transfers: Sequence[Any]) -> bool:
        """Copy a node's pages to G2 where it lacks them. False: the request does not want it, there is none, or enough
        nodes wait for their copies, and the tree offers it again. Later errors are in the completion."""
        (head, self._head), (path, self._path) = (self._head, []), (self._path, None)
        transfer = of_pool(transfers, PAGES)
        if self._req is None or not transfer.keys:
            return False
        known = or_fallback(self._control_of, self._req, fallback=None)
        if known is None:
            return False
        control, scope = known
        named = scope is not None or getattr(self._req, "lora_id", None) is not None
        if not control.store or not named:
            return False
        copies = self._copies()
        if not self._has_spare(copies):
            return False
        if copies is None:
            self._lost += 1
            return True
        if scope is None:  # an adapter that has no name here may have one on other ranks, which read its files, too
            copies.fail()
            return True
        before = copies.outstanding()
        try:
            chain = engine_keys(scope, [bytes.fromhex(page) for page in (*head, *transfer.keys)])
            numbers = page_numbers(transfer.device_indices, self._page)
            self._remember(self._req, control, chain, len(head))
            terms = control.chain_terms(self._page)
            copies.offload(chain, len(head), numbers, terms, self._boundary(chain, terms, path, transfers))
        except Exception:
            log.exception("an offload of %d pages failed", len(transfer.keys))
        if copies.outstanding() == before:
            copies.fail()
        return True

    def _has_spare(self, copies: PageCopies | None) -> bool:
        """Whether the tree may keep another node until its completion is taken: one that has no state may be given one
        meanwhile. Each rank says the same: completions are taken when all have them."""
        spare = self._beside.spare if self._beside is not None else None
        if spare is None or self._lost + (copies.outstanding() if copies is not None else 0) < spare:
            return True
        self.events["stores_put_off"] += 1
        return False

    @falls_back_to(None)
    def _boundary(
        self, chain: Sequence[BlockKey], terms: ChainTerms, path: Callable[[], Any] | None, transfers: Sequence[Any]
    ) -> BoundaryStore | None:
        if self._beside is None or path is None:
            return None
        return self._beside.boundary(chain, terms, self._checkpoint, path, transfers)

    def completed(self) -> int:
        """How many of the oldest offloads are over."""
        copies = self._copies()
        return self._lost + (copies.completed() if copies is not None else 0)

    def pop(self) -> bool:
        """Take the oldest completion; whether all its pages are in G2."""
        if self._lost:
            self._lost -= 1
            return False
        copies = self._copies()
        return copies is not None and copies.pop()

    def lose(self, count: int) -> None:
        """So many offloads will have no completion: they have failed."""
        self._lost += count

    def clear(self) -> None:
        """No completion will be asked for."""
        self._lost = 0
