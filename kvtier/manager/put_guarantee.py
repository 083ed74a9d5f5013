"""The guarantees of one put, from before its first block is stored until it is over."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import InvalidRequest
from kvtier.identity.keys import BlockKey
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.protection import Protection
from kvtier.manager.slices import slices
from kvtier.manager.work import Work
from kvtier.retention.ranges import ChainTerms
from kvtier.tiers.protocol import Miss

_LOST = frozenset({Miss.ABSENT, Miss.EXPIRED, Miss.EVICTED, Miss.PURGED})
"""Answers of a tier for a block that it does not have. (With others it may have it.)"""


class PutGuarantee:
    """Guarantees for a chain, head included, of which a put stores the blocks from `start` on. `terms` are those to
    store them on: without guarantees, and counted as refused, if a block before `start` is nowhere, for then they could
    not be reached."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        protection: Protection,
        chain: Sequence[BlockKey],
        start: int,
        terms: ChainTerms,
        work: Work,
    ) -> None:
        """Reserves the bytes; nothing if `terms` guarantee none. Raises as `Protection.guarantee`, and then nothing is
        reserved. Owner: the put, until `end`."""
        self.terms = terms
        self._protection, self._chain = protection, chain
        if not terms.guarantees:
            return
        if _lacks(hierarchy, protection, chain, start):
            with hierarchy.lock:
                protection.guarantees.refused += 1
            self.terms = terms.unguaranteed()
            return
        protection.claims.add(chain)
        try:
            protection.guarantee(chain, 0, terms, work)
        except InvalidRequest:
            protection.claims.remove(chain)
            raise

    def end(self, reached: int) -> None:
        """The put is over: its blocks from depth `reached` on were not stored."""
        if self.terms.guarantees:
            self._protection.claims.remove(self._chain)
            self._protection.release_guarantees(self._chain[reached:])


def _lacks(hierarchy: Hierarchy, protection: Protection, chain: Sequence[BlockKey], stop: int) -> bool:
    """Whether a block before depth `stop` is neither in G2 nor in the nearest tier, as far as that can tell at once,
    and no put under way is to store it."""
    nearest, now = hierarchy.nearest, hierarchy.clock.wall()
    for part in slices(range(stop)):
        with hierarchy.lock:
            away = [depth for depth in part if protection.is_gone(chain[depth], now)]
        if away and (nearest is None or not _LOST.isdisjoint(nearest.peek(chain, away))):
            return True
    return False
