"""A process that kills itself while it copies guests back among blocks of their own size.

    python -m tests.tiers.disk.support.crash_relocation DIRECTORY HIT

It dies at the HIT-th point that it passes after the first copy has begun: before or after a write, half of a write, a
sync, a commit. Ends well if there were fewer.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import idle_work
from kvtier.tiers.disk.relocation import Copied, Relocation, copy_block
from kvtier.tiers.disk.slab import Slab
from tests.tiers.disk.support.bad_medium import BadMedium
from tests.tiers.disk.support.crash import plant
from tests.tiers.disk.support.crash_mixed import CAPACITY, FAR, SIZES, both
from tests.tiers.disk.support.store import put

SMALL = list(chain_of(sample_namespace(SIZES[0]), CAPACITY // SIZES[0]))
KEPT = SMALL[:: SIZES[1] // SIZES[0]]
"""One lies on each slot of a larger block."""
LARGE = list(chain_of(sample_namespace(SIZES[1]), 12))


async def work(path: Path, hit: int) -> None:
    """Full of small blocks; the larger ones push retained ones together."""
    begun: list[Relocation] = []

    def copy(slab: Slab, one: Relocation) -> Copied:
        if not begun:
            plant("any", hit)
        begun.append(one)
        return copy_block(slab, one)

    idle_work.copy_block = copy  # type: ignore[attr-defined]
    async with both(path, VirtualClock(1_800_000_000.0), BadMedium(), CAPACITY) as (small, large):
        for start in range(0, len(SMALL), 64):
            await put(small, SMALL, range(start, start + 64))
        assert all(await small.retain(KEPT, FAR))
        for index in range(len(LARGE)):
            await put(large, LARGE, [index])
    assert begun, "nothing was copied"


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), int(sys.argv[2])))
