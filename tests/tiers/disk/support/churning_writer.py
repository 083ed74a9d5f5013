"""One of several processes that turn over a store of many small blocks, until it is killed.

    python -m tests.tiers.disk.support.churning_writer DIRECTORY BLOCKS PER_DAY SEED

PER_DAY: the write budget in bytes, 0 for none. Puts of a few to hundreds of blocks in two sizes, uses of thousands at
once, purges and removals; all it reads is compared. Ends by itself only where something is wrong.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from kvtier.clock import SystemClock
from kvtier.identity.keys import BlockKey
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Miss, Stored
from tests.tiers.disk.support.store import BLOCK, get, put

LARGE = 16 * BLOCK
CHAINS_KEPT = 256


async def work(path: Path, blocks: int, per_day: float, seed: int) -> None:
    rng, clock = random.Random(seed), SystemClock()
    tiers = [
        DiskTier([path], blocks * BLOCK, sample_namespace(size), clock=clock, write_budget=per_day)
        for size in (BLOCK, LARGE)
    ]
    for tier in tiers:
        await tier.open()
    kept: list[tuple[DiskTier, list[BlockKey]]] = []
    for number in range(1 << 40):
        tier = tiers[rng.random() < 0.1]
        chain = chain_of(tier._namespace, rng.choice((1, 8, 64, 256 * BLOCK // tier.block_bytes)), seed << 24 | number)
        results = await put(tier, chain)
        assert Stored.FAILED not in results
        if Stored.BUDGET in results:
            await asyncio.sleep(0.2)
        kept = [*kept[-CHAINS_KEPT:], (tier, chain)]
        other, chain = rng.choice(kept)
        assert Miss.CORRUPT not in await get(other, chain)
        if number % 16 == 0:
            for other, chain in kept:
                other.touch(chain, clock.wall())
        if rng.random() < 0.05:
            await other.evict(chain)


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
