"""Boundaries of prompts over all four tiers: found and read whole, kept whole.

The full group's chain is read and kept as any other; what the groups beside it hold at a boundary is a chain of its own
(`kvtier.identity.groups.boundary_keys`). A prompt is resumed at the longest boundary that both reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvtier.cache import Cache
from kvtier.clock import Clock
from kvtier.connectors.boundaries import TRIED, stored_boundary
from kvtier.connectors.transformers.chains import Chains
from kvtier.connectors.transformers.groups import LayerGroups
from kvtier.identity.groups import boundary_keys, first_boundary_key
from kvtier.identity.keys import BlockKey
from kvtier.retention.terms import Terms
from kvtier.tiers.device.torch_pool import DevicePool
from kvtier.times import Mono

if TYPE_CHECKING:
    import torch

_TRIES = 4
"""How often a boundary is looked for again after one that was found could not be read."""


@dataclass(frozen=True, slots=True)
class Found:
    """A prefix that can be resumed: the full group's blocks and those beside it, as rows of bytes and where each was.
    `known`: how many blocks of the full group there are by themselves."""

    rows: torch.Tensor
    tiers: list[str]
    known: int
    beside: torch.Tensor | None = None
    beside_tiers: tuple[str, ...] = ()


class Boundaries:
    """See the module. One owner thread, the pool's."""

    def __init__(
        self, groups: LayerGroups, block_tokens: int, pool: DevicePool, cache: Cache, chains: Chains, clock: Clock
    ) -> None:
        self._groups, self._block_tokens = groups, block_tokens
        self._pool, self._cache, self._chains, self._clock = pool, cache, chains, clock

    def counts(self, boundary: int) -> list[int]:
        """Blocks that each group beside the full one needs at a boundary of so many tokens."""
        return self._groups.counts(boundary, self._pool.block_bytes)

    def find(self, chain: Sequence[BlockKey], timeout: float | None) -> Found:
        """The longest prefix of `chain` that can be resumed. What fails or is late in the tiers makes it shorter."""
        limit_s = self._cache.config.deadlines.get if timeout is None else timeout
        deadline = Mono(self._clock.monotonic() + limit_s)
        known, usable = 0, len(chain)
        for _ in range(_TRIES):
            depth, reached = self._longest(chain[:usable], deadline)
            known = max(known, reached)
            if not depth:
                break
            rows, tiers = self._chains.read(chain[:depth], self._left(deadline))
            if len(tiers) < depth:
                usable = len(tiers)
                continue
            keys = self._keys(chain, depth)
            beside, beside_tiers = self._chains.read(keys, self._left(deadline), counted=False)
            if len(beside_tiers) == len(keys):
                return Found(rows, tiers, known, beside, tuple(beside_tiers))
            usable = depth - 1
        return Found(self._pool.rows[:0], [], known)

    def _left(self, deadline: Mono) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    def _longest(self, chain: Sequence[BlockKey], deadline: Mono) -> tuple[int, int]:
        """The longest boundary that all groups have in some mix of tiers, as a depth, and how far the full group's
        blocks reach by themselves."""
        manager, now = self._cache.manager, self._clock.wall()
        here = len(self._pool.match(chain, now))
        top = here + manager.prefix(chain[here:])
        if top < len(chain) and manager.lower:
            top = self._chains.ask(manager.match(chain, deadline, here), deadline, top)
        held: dict[int, int] = {}
        best = 0
        for depth in range(top, max(0, top - TRIED), -1):
            first = self._first_key(chain, depth)
            ours = bool(self._pool.match([first], now))
            if ours or manager.holds(first):
                keys = self._keys(chain, depth)
                leading = len(self._pool.match(keys, now))
                if leading + manager.prefix(keys[leading:]) == len(keys):
                    best = depth
                    break
                if ours:
                    held[depth] = leading
        if best == top or not manager.lower:
            return best, top
        names = (partial(self._first_key, chain), partial(self._keys, chain))
        deeper = range(top, max(best, top - TRIED), -1)
        stored = self._chains.ask(stored_boundary(manager, *names, deeper, deadline, held), deadline, None)
        return stored or best, top

    def _keys(self, chain: Sequence[BlockKey], depth: int) -> list[BlockKey]:
        return boundary_keys(chain[depth - 1], self.counts(depth * self._block_tokens))

    def _first_key(self, chain: Sequence[BlockKey], depth: int) -> BlockKey:
        first = first_boundary_key(chain[depth - 1], self.counts(depth * self._block_tokens))
        assert first is not None, "a group beside the full one needs nothing"
        return first

    def keep(
        self,
        chain: Sequence[BlockKey],
        boundary: int,
        taken: Sequence[Sequence[torch.Tensor]],
        terms: Terms,
        deadline: Mono,
    ) -> bool:
        """Keep what the groups beside the full one held at a boundary (`LayerGroups.take`): all of it, or none. Returns
        whether it is kept; `chain` is, up to there. `deadline`: see `Chains.keep`."""
        keys = tuple(self._keys(chain, boundary // self._block_tokens))
        rows = self._groups.pack(taken, self._pool.block_bytes)

        def write(slots: Sequence[int], start: int) -> None:
            self._pool.rows[slots] = rows[start : start + len(slots)]

        _, reached = self._chains.keep(keys, terms, deadline, write)
        if reached < len(keys):
            self._pool.evict(keys)
        return reached == len(keys)
