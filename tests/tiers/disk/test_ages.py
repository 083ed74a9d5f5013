from __future__ import annotations

import random
from collections import Counter

from kvtier.tiers.disk.ages import AGES_MAX, Ages


def test_depths_are_those_of_the_blocks_themselves() -> None:
    rng = random.Random(7)
    ages, used = Ages([], []), Counter[int]()
    for tick in range(1, 2000):
        for _ in range(rng.randrange(4)):
            ages.add(tick, 10)
            used[tick] += 10
        if sum(used.values()) > 3000:
            gone = min(used) if rng.random() < 0.5 else rng.choice(list(used))
            ages.remove(gone, 10)
            used[gone] -= 10
            used += Counter()
        ages = Ages(list(ages.starts), list(ages.sizes))  # as from the index, one transaction later
    assert ages.total == sum(used.values())
    assert len(ages.starts) <= AGES_MAX
    for tick in rng.sample(sorted(used), 50):
        older = sum(size for other, size in used.items() if other < tick)
        assert abs(ages.depth(tick) - older) <= 3000 / 8
    for depth in range(100, 2500, 100):
        tick = ages.tick_at(depth, 2000)
        assert abs(sum(size for other, size in used.items() if other < tick) - depth) <= 3000 / 8
    assert ages.tick_at(10**6, 2000) == 2000
