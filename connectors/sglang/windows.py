"""Sliding windows beside full attention: which of their pages are kept, under which names, and what a prompt needs.

SGLang's tree gives a prompt back up to a *boundary*, a page's end before which a whole window is there in both pools;
pages of windows further back are freed while requests run, and the tree keeps *tombstones* for them. What a boundary
needs of the windows is one chain of blocks, named by the boundary (`kvtier.identity.groups.boundary_keys`): stored,
found and evicted together, and useless in parts. Boundaries are kept for the end of a prompt, for the end of an answer,
where a prompt was seen to leave a chain that is known, and now and then in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.connectors.boundaries import TRIED
from kvtier.connectors.sglang.hooks import Checkpoint
from kvtier.connectors.sglang.pool import KVPools, block_of
from kvtier.connectors.sglang.transfers import page_numbers
from kvtier.identity.groups import Group, Kind, boundary_keys, first_boundary_key
from kvtier.identity.keys import BlockKey
from kvtier.manager.lease import Lease
from kvtier.manager.manager import Manager
from kvtier.retention.ranges import ChainTerms, uniform
from kvtier.tiers.host.slot import Slot

_SPARSE = 4
"""Blocks of the chain for each block of boundaries in its middle, at least."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of one engine: `parts` blocks for each page that a boundary needs. `translate` has the slots in the
    pool of windows of slots in the full pool; 0 for those that were freed."""

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

    def keys(self, chain: Sequence[BlockKey], depth: int) -> list[BlockKey]:
        """Names of the blocks of the boundary after `depth` pages."""
        return boundary_keys(chain[depth - 1], self.counts(depth))

    def first(self, chain: Sequence[BlockKey], depth: int) -> BlockKey | None:
        return first_boundary_key(chain[depth - 1], self.counts(depth))

    def is_due(self, before: int, depth: int) -> bool:
        """Whether a boundary in the middle of a prompt is kept after `depth` pages, given that one may have been after
        `before`: so that all of them have a quarter of the blocks of the chain at most."""
        apart = _SPARSE * sum(self.counts(depth))
        return depth // apart > before // apart

    def holds(self, manager: Manager, chain: Sequence[BlockKey], depth: int) -> bool:
        """Whether G2 has all blocks of a boundary now."""
        first = self.first(chain, depth)
        if first is None or not manager.holds(first):
            return first is None
        keys = self.keys(chain, depth)
        return manager.prefix(keys) == len(keys)

    def boundaries(self, manager: Manager, chain: Sequence[BlockKey], start: int, stop: int) -> Iterator[int]:
        """Boundaries beyond `start` and up to `stop` pages that G2 can serve, of the last ones, from the longest on."""
        depths = range(stop, max(start, stop - TRIED), -1)
        return (depth for depth in depths if self.holds(manager, chain, depth))

    def blocks(self, pages: Sequence[int]) -> list[int]:
        """Blocks of all parts of these pages, in the order of `keys`."""
        return [block_of(1 + part, page) for part in range(self.parts) for page in pages]

    def pin(
        self, manager: Manager, chain: Sequence[BlockKey], start: int, pages: Sequence[int]
    ) -> PinnedBoundary | None:
        """Pin the boundary at the end of `chain`, to be loaded into these pages, the last ones before it; what lies
        before `start` the device has. None where they do not fit together, or G2 has not all of it."""
        needed = self.needed(len(chain))
        skipped = max(0, start - needed.start)
        if len(pages) + skipped != len(needed):
            return None
        keys = self.keys(chain, len(chain))
        lease = manager.pin(keys)
        if len(lease) != len(keys):
            lease.release()
            return None
        slots = [slot for place, slot in enumerate(lease.slots) if place % len(needed) >= skipped]
        return PinnedBoundary(lease, list(zip(self.blocks(pages), slots, strict=True)))

    def boundary(
        self, chain: Sequence[BlockKey], terms: ChainTerms, checkpoint: Checkpoint, path: Callable[[], Any]
    ) -> BoundaryStore | None:
        """What a prompt needs to go on after `chain`, where that is worth having: the tree's own pages, which it keeps
        while an offload lasts. `path()` are the slots in the full pool of all tokens of the chain. None where the tree
        has not the whole window any more."""
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
        _, _, last = next(iter(terms.spans(depth - 1, depth)))
        return BoundaryStore(self.keys(chain, depth), self.blocks(pages), uniform(last.terms))


@dataclass(frozen=True, slots=True)
class BoundaryStore:
    """The blocks of a boundary on the device, in the order of their names, with the terms of the chain's last block."""

    keys: list[BlockKey]
    blocks: list[int]
    terms: ChainTerms


@dataclass(frozen=True, slots=True)
class PinnedBoundary:
    """A boundary under a lease: `copies` are the blocks on the device that are loaded, and what comes into them."""

    lease: Lease
    copies: list[tuple[int, Slot]]
