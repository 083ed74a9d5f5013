"""What a model keeps beside full attention, of which SGLang's tree gives a prompt back at *boundaries* alone: sliding
windows in a pool of their own, or recurrent states.

A boundary is a page's end before which all that is needed is there. What it needs beside the chain is a chain of its
own, named by the boundary (`kvtier.identity.groups.boundary_keys`): stored, found and evicted together, and useless in
parts. Boundaries are kept for the end of a prompt, for the end of an answer, where a prompt was seen to leave a chain
that is known, and now and then in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvtier.connectors.boundaries import depths_below
from kvtier.connectors.sglang.hooks import Checkpoint
from kvtier.identity.groups import boundary_keys, first_boundary_key
from kvtier.identity.keys import BlockKey
from kvtier.manager.lease import Lease
from kvtier.manager.manager import Manager
from kvtier.retention.ranges import ChainTerms, uniform
from kvtier.tiers.host.slot import Slot

_SPARSE = 4
"""Blocks of the chain for each block of boundaries in its middle, at least."""


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


class PoolBeside(ABC):
    """What boundaries need beside the chain. Stateless but for memory of names."""

    branch: ClassVar[str] = ""
    """The field of SGLang's match result that says where a prompt leaves what is known, and has the tree keep it."""

    spare: int | None = None
    """Nodes of the tree that may be kept at once for their copies; None: any number."""

    step = 1
    """Most boundaries lie at multiples of so many pages, and one that a prompt is to leave does."""

    @abstractmethod
    def counts(self, depth: int) -> list[int]:
        """How many blocks a boundary after `depth` pages needs, by group."""

    @abstractmethod
    def pin(
        self, manager: Manager, chain: Sequence[BlockKey], start: int, transfers: Sequence[Any]
    ) -> PinnedBoundary | None:
        """Pin the boundary at the end of `chain`, to be loaded where the tree's transfers say; what lies before `start`
        the device has. None where they do not fit together, or G2 has not all of it."""

    @abstractmethod
    def boundary(
        self,
        chain: Sequence[BlockKey],
        terms: ChainTerms,
        checkpoint: Checkpoint,
        path: Callable[[], Any],
        transfers: Sequence[Any],
    ) -> BoundaryStore | None:
        """What a prompt needs to go on after `chain`, where the tree has that and it is worth having: the tree's own
        memory, which it keeps while an offload lasts. `path()` are the slots in the full pool of all tokens of the
        chain, `transfers` what the tree offers of its last node."""

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
        return (depth for depth in depths_below(start, stop, self.step) if self.holds(manager, chain, depth))

    def _pinned(self, manager: Manager, keys: Sequence[BlockKey]) -> Lease | None:
        """All of these blocks, or none."""
        lease = manager.pin(keys)
        if len(lease) == len(keys):
            return lease
        lease.release()
        return None


def terms_at(terms: ChainTerms, depth: int) -> ChainTerms:
    """Those of the chain's last block, for all blocks of a boundary at its end."""
    _, _, last = next(iter(terms.spans(depth - 1, depth)))
    return uniform(last.terms)
