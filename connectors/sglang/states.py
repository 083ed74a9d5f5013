"""Recurrent states (Mamba, linear attention) beside full attention: where they are kept, and what a prompt needs.

A state is what a model's recurrent layers have made of all tokens before a boundary. SGLang's tree has one in a node
where a request left it there, at the node's end: at the end of a chunk of prefill, of a prompt or of an answer, or
where it was told to track one (its *extra buffer*, which tracks them at multiples of a grid). The tree offers it with
the node's pages, and gives it to a request in a slot of the request's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from kvtier.connectors.sglang.beside import BoundaryStore, PinnedBoundary, PoolBeside, terms_at
from kvtier.connectors.sglang.hooks import Checkpoint
from kvtier.connectors.sglang.pool import KVPools, block_of
from kvtier.connectors.sglang.state_pool import StatePart, spare_slots
from kvtier.connectors.sglang.transfers import PAGES, STATES, of_pool
from kvtier.identity.groups import boundary_keys
from kvtier.identity.keys import BlockKey
from kvtier.manager.manager import Manager
from kvtier.retention.ranges import ChainTerms

_NAMED = 32
"""Boundaries whose names are remembered: a state may have thousands of blocks, and is asked for in each step while a
request waits."""


class States(PoolBeside):
    """The states of one engine, each in one slot of SGLang's pool."""

    branch: ClassVar[str] = "mamba_branching_seqlen"

    def __init__(self, parts: Sequence[StatePart], page: int, grid: int, spare: int) -> None:
        """`grid`: tokens that a state's place is a multiple of where the tree is asked to track one; a multiple of
        `page`. Chunks of prefill that end elsewhere leave later ones off it. `spare`: see `spare_slots`."""
        self.spare = spare
        self._parts = tuple(parts)
        self._page = page
        self._count = sum(part.count for part in parts)
        self.step = grid // page
        self._names = lru_cache(maxsize=_NAMED)(lambda head: boundary_keys(head, [self._count]))

    @classmethod
    def of(cls, pool: KVPools, grid: int, requests: Any) -> States | None:
        """None for a pool without states. `requests` is SGLang's table of them. Raises IdentityError where it leaves no
        slot for copies."""
        return cls(pool.states, pool.page, grid, spare_slots(requests)) if pool.states else None

    def counts(self, depth: int) -> list[int]:
        return [self._count]

    def keys(self, chain: Sequence[BlockKey], depth: int) -> list[BlockKey]:
        return self._names(chain[depth - 1])

    def blocks(self, slot: int) -> list[int]:
        """Blocks of a slot of the pool, in the order of `keys`."""
        return [block_of(number, block) for number, part in enumerate(self._parts, 1) for block in part.blocks(slot)]

    def pin(
        self, manager: Manager, chain: Sequence[BlockKey], start: int, transfers: Sequence[Any]
    ) -> PinnedBoundary | None:
        slot = _slot_of(of_pool(transfers, STATES))
        lease = self._pinned(manager, self.keys(chain, len(chain))) if slot else None
        if lease is None:
            return None
        return PinnedBoundary(lease, list(zip(self.blocks(slot), lease.slots, strict=True)))

    def boundary(
        self,
        chain: Sequence[BlockKey],
        terms: ChainTerms,
        checkpoint: Checkpoint,
        path: Callable[[], Any],
        transfers: Sequence[Any],
    ) -> BoundaryStore | None:
        """The state that the tree offers with the chain's last page, if it does: others it has not."""
        state = next((transfer for transfer in transfers if transfer.name == STATES), None)
        depth = len(chain)
        if state is None or list(state.keys) != list(of_pool(transfers, PAGES).keys[-1:]):
            return None
        if not checkpoint.lasting and not self.is_due(checkpoint.begin // self._page, depth):
            return None
        slot = _slot_of(state)
        return BoundaryStore(self.keys(chain, depth), self.blocks(slot), terms_at(terms, depth)) if slot else None


def _slot_of(transfer: Any) -> int:
    """The one slot of a transfer of a state; 0, which no state has, where there is another number of them."""
    slots = transfer.device_indices.detach().to("cpu").view(-1).tolist()
    return int(slots[0]) if len(slots) == 1 else 0
