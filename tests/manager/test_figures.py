"""A tier's figures equal what an observer below them has counted, while the tier fails in every way that answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvtier.testing import Fault, FaultyTier, MemoryTier, VirtualClock, chain_of, payloads_of
from kvtier.tiers.protocol import Miss, Stored
from tests.manager.test_housekeeping import BLOCK, NS, opened


class Counting(FaultyTier):
    """Counts blocks by the answer that left the tier."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read_blocks, self.written_blocks = Counter[str](), Counter[str]()

    async def read(self, chain: Any, targets: Sequence[Any], deadline: Any) -> Any:
        try:
            results = await super().read(chain, targets, deadline)
        except Exception:
            self.read_blocks["error"] += len(targets)
            raise
        self.read_blocks.update(one.value if isinstance(one, Miss) else "loaded" for one in results)
        return results

    async def write(self, blocks: Sequence[Any], deadline: Any) -> Any:
        try:
            results = await super().write(blocks, deadline)
        except Exception:
            self.written_blocks["failed"] += len(blocks)
            raise
        self.written_blocks.update(one.value for one in results)
        return results


@pytest.mark.parametrize("seed", range(6))
async def test_figures_equal_an_independent_count(seed: int) -> None:
    rng, clock = random.Random(seed), VirtualClock()
    faults = [Fault(verb, kind, 0.2) for verb in ("read", "write") for kind in ("error", "crash", "drop")]
    tier = Counting(MemoryTier(NS, clock), faults, seed)
    given = 0
    async with opened(clock, [tier]) as cache:
        for _ in range(60):
            chain = list(chain_of(NS, rng.randint(1, 12), seed=rng.randrange(8)))
            await cache.put(chain, payloads_of(chain, BLOCK))
            await cache.flush()
            await cache.evict("g2")
            async with cache.get(chain) as hit:
                assert [bytes(block) for block in hit.blocks] == payloads_of(chain[: len(hit.blocks)], BLOCK)
                given += len(hit.blocks)
            clock.advance(rng.choice([0.1, 60]))  # a breaker that has opened looks again
        figures = cache.stats()["g3"]
    assert figures["read_bytes"] == figures["loaded"] * BLOCK
    assert figures["written_bytes"] == figures["stored"]["stored"] * BLOCK
    misses, stored = Counter(figures["misses"]), Counter(figures["stored"])
    del misses["breaker"]  # the tier was not asked
    assert figures["loaded"] == tier.read_blocks.pop("loaded") >= given > 0
    assert +misses == +tier.read_blocks and misses["error"] > 0 < misses["absent"]
    assert stored["failed"] >= tier.written_blocks["failed"] > 0, "some were refused without asking the tier"
    del stored["failed"], tier.written_blocks["failed"]
    assert +stored == +tier.written_blocks and stored["stored"] > 0


async def test_figures_are_told_while_the_loop_counts_on() -> None:
    """`stats()` runs on any thread. A reason that the loop counts first meanwhile made the table of reasons grow under
    it: RuntimeError, in the middle of a scrape."""

    class Counted(str):
        __slots__ = ()

        def __str__(self) -> str:
            figures.misses[Miss.LATE] += 1
            figures.stored[Stored.FULL] += 1
            return "counted"

    async with opened(VirtualClock(), [MemoryTier(NS, VirtualClock())]) as cache:
        figures = cache.manager.lower["g3"]
        figures.misses[cast(Miss, Counted())] += 1
        figures.stored[cast(Stored, Counted())] += 1
        assert cache.stats()["g3"]["misses"]["counted"] == 1
        assert figures.misses[Miss.LATE] and figures.stored[Stored.FULL]
