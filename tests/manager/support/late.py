"""Loads that come too late because their tier does not answer."""

from __future__ import annotations

from collections.abc import Sequence

import kvtier


async def give_up(cache: kvtier.AsyncCache, chain: Sequence[bytes], blocks: int | None = None) -> None:
    """Get a chain whose reads do not end, with ever more patience, until so many of its blocks (all) are read in vain:
    on a loaded machine a short deadline may be over before they begin."""
    patience_s = 0.05
    while cache.manager.promoter.overdue < (len(chain) if blocks is None else blocks):
        assert patience_s < 60, "its reads do not begin"
        async with cache.get(chain, patience_s) as hit:
            assert len(hit.blocks) == 0 and hit.miss == "late"
        patience_s *= 2
