"""Sliding windows beside full attention: which of their pages are kept, under which names, and what a prompt needs.

SGLang's tree gives a prompt back up to a boundary before which a whole window is there in both pools; pages of windows
further back are freed while requests run, and the tree keeps *tombstones* for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvtier.connectors.sglang.beside import BoundaryStore, PinnedBoundary, PoolBeside, terms_at
from kvtier.connectors.sglang.hooks import Checkpoint
from kvtier.connectors.sglang.pool import KVPools, block_of
from kvtier.connectors.sglang.transfers import WINDOWS, of_pool, page_numbers
from kvtier.identity.groups import Group, Kind
from kvtier.identity.keys import BlockKey
from kvtier.manager.manager import Manager
from kvtier.retention.ranges import ChainTerms


@dataclass(frozen=True)
class Windows(PoolBeside):
    """The windows of one engine: `parts` blocks for each page that a boundary needs. `translate` has the slots in the
    pool of windows of slots in the full pool; 0 for those that were freed."""

    branch: ClassVar[str] = "swa_branching_seqlen"

    group: Group
    parts: int
    translate: Callable[[Any], Any]

    @classmethod
    def of(cls, pool: KVPools, allocator: Any) -> Windows | None:
        """None for a pool without windows. A token attends to `pool.window` tokens and itself."""
        if not pool.beside:
            return None
        group = Group(Kind.WINDOW, pool.page, pool.window + 1)
        return cls(group, len(pool.beside), allocator.translate_swa_indices_for_transfer)

    def needed(self, depth: int) -> range:
        """Depths of the pages that a prompt needs of the windows to go on after `depth` pages."""
        return self.group.needed(depth * self.group.block_tokens)

    def counts(self, depth: int) -> list[int]:
        return [len(self.needed(depth))] * self.parts

    def blocks(self, pages: Sequence[int]) -> list[int]:
        """Blocks of all parts of these pages, in the order of `keys`."""
        return [block_of(1 + part, page) for part in range(self.parts) for page in pages]

    def pin(
        self, manager: Manager, chain: Sequence[BlockKey], start: int, transfers: Sequence[Any]
    ) -> PinnedBoundary | None:
        pages = page_numbers(of_pool(transfers, WINDOWS).device_indices, self.group.block_tokens)
        needed = self.needed(len(chain))
        skipped = max(0, start - needed.start)
        if len(pages) + skipped != len(needed):
            return None
        lease = self._pinned(manager, self.keys(chain, len(chain)))
        if lease is None:
            return None
        slots = [slot for place, slot in enumerate(lease.slots) if place % len(needed) >= skipped]
        return PinnedBoundary(lease, list(zip(self.blocks(pages), slots, strict=True)))

    def boundary(
        self,
        chain: Sequence[BlockKey],
        terms: ChainTerms,
        checkpoint: Checkpoint,
        path: Callable[[], Any],
        transfers: Sequence[Any],
    ) -> BoundaryStore | None:
        page, depth = self.group.block_tokens, len(chain)
        if depth != checkpoint.end // page:
            return None
        if not checkpoint.lasting and not self.is_due(checkpoint.begin // page, depth):
            return None
        full = path()
        if len(full) != depth * page:
            return None
        slots = self.translate(full[self.needed(depth).start * page :]).detach().to("cpu")
        pages = page_numbers(slots, page)
        if not pages or 0 in pages:  # page 0 is what the tree's tombstones stand for
            return None
        return BoundaryStore(self.keys(chain, depth), self.blocks(pages), terms_at(terms, depth))
