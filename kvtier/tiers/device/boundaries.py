"""Boundaries of prompts in one pool: found, held, kept and dropped as sets.

A model may have groups of layers beside the one of full attention: windows, and states (`kvtier.identity.groups`). All
blocks of the pool have one size. The full group's lie under the names of a prompt's chain, as those of any model; what
the others need after `depth` blocks of it lies under a chain of its own:

    boundary_keys(chain[depth - 1], counts(depth))        first all blocks of the first group, then of the next …

A prompt can go on after `depth` blocks only where all of both are here. A part of a set is of no use: so a set is
confirmed whole, used whole, and its blocks lie next to one another in the pool's queue, before those of the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvtier.errors import InvalidRequest
from kvtier.identity.groups import boundary_keys
from kvtier.identity.keys import BlockKey
from kvtier.retention.lifetime import Lifetime
from kvtier.tiers.device.block_pool import BlockPool
from kvtier.times import Mono, Wall

TRIED = 512
"""Depths that are tried for one prompt, from the deepest on: each costs a hash and a look-up, or a few."""


@dataclass(frozen=True, slots=True)
class PoolBoundary:
    """A boundary that its owner holds: a reference to each of these slots. `beside` has a list for each group."""

    full: list[int]
    beside: list[list[int]]

    @property
    def depth(self) -> int:
        """Blocks of the full group before it."""
        return len(self.full)


class PoolBoundaries:
    """See the module. `counts(depth)`: blocks that each group beside the full one needs after so many of its blocks, at
    least one of each; it must not change while the pool lives. One owner thread, the pool's."""

    def __init__(self, pool: BlockPool, counts: Callable[[int], Sequence[int]]) -> None:
        self._pool, self._counts = pool, counts

    def match(self, chain: Sequence[BlockKey], wall_s: Wall) -> int:
        """The depth of the longest boundary of `chain` that is here and may be served at `wall_s`; 0 for none. Leave
        out what must be computed: a prompt's last token. Changes nothing and promises nothing, as `BlockPool.match`."""
        top = len(self._pool.match(chain, wall_s))
        return next((depth for depth in range(top, max(0, top - TRIED), -1) if self._whole(chain, depth, wall_s)), 0)

    def pin(self, chain: Sequence[BlockKey], wall_s: Wall) -> PoolBoundary | None:
        """The boundary that `match` finds, with a reference to each slot, until `free`; None where there is none. A use
        of all its blocks at `wall_s`, and of no other's."""
        depth = self.match(chain, wall_s)
        if not depth:
            return None
        beside = self._pool.pin(self._keys(chain, depth), wall_s)
        return PoolBoundary(self._pool.pin(chain[:depth], wall_s), self._by_group(beside, depth))

    def confirm(
        self,
        slots: Sequence[Sequence[int]],
        chain: Sequence[BlockKey],
        depth: int,
        life: Lifetime,
        wall_s: Wall,
        *,
        dirty_since: Mono | None = None,
    ) -> bool:
        """The pass that filled `slots`, a list for each group, has completed: they hold what the groups need after
        `depth` blocks of `chain`. Returns whether they can be found from now on: not, with nothing changed, where the
        chain is not here that far. `life` and `dirty_since` are `BlockPool.confirm`'s.

        Raises InvalidRequest, with nothing changed, for other numbers of slots than `counts` says, and as
        `BlockPool.confirm` does.
        """
        if not 0 < depth <= len(chain):
            raise InvalidRequest(f"depth {depth} is no boundary of a chain of {len(chain)} blocks")
        given, wanted = [len(part) for part in slots], list(self._counts(depth))
        if given != wanted:
            raise InvalidRequest(f"a boundary after {depth} blocks has {wanted} blocks by group, {given} were given")
        if len(self._pool.match(chain[:depth], wall_s)) < depth:
            return False
        flat = [slot for part in slots for slot in part]
        self._pool.confirm(flat, tuple(self._keys(chain, depth)), life, dirty_since=dirty_since)
        return True

    def free(self, boundary: PoolBoundary) -> None:
        """Give back what `pin` returned. What lies beside the chain is handed out before it: a window or a state is
        never left without its chain."""
        self._pool.free([slot for part in boundary.beside for slot in part])
        self._pool.free(boundary.full)

    def evict(self, chain: Sequence[BlockKey], depth: int) -> int:
        """Drop what the groups beside the full one have after `depth` blocks of `chain`. Returns how many were here."""
        return self._pool.evict(self._keys(chain, depth))

    def _keys(self, chain: Sequence[BlockKey], depth: int) -> list[BlockKey]:
        return boundary_keys(chain[depth - 1], self._counts(depth))

    def _whole(self, chain: Sequence[BlockKey], depth: int, wall_s: Wall) -> bool:
        keys = self._keys(chain, depth)
        return len(self._pool.match(keys, wall_s)) == len(keys)

    def _by_group(self, slots: Sequence[int], depth: int) -> list[list[int]]:
        ends = accumulate(self._counts(depth), initial=0)
        return [list(slots[begin:end]) for begin, end in pairwise(ends)]
