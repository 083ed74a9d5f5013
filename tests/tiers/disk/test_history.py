"""Random histories of a directory: what may not be served is not, what must be is, and each with its own bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.tiers.disk.support.history import History

DRAWN = ("_put", "_get", "_retain", "_evict", "_purge", "_destroy", "_jump", "_maintain", "hit", "put present")


async def test_histories_of_sessions_keys_purges_and_clocks(tmp_path: Path) -> None:
    seen = Counter[str]()
    for seed in (0, 1):
        history = History(tmp_path / str(seed), seed)
        await history.run(sessions=3, steps=25)
        seen += history.seen
    assert not [one for one in DRAWN if not seen[one]], seen


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 140))
async def test_histories_for_long(tmp_path: Path, seed: int) -> None:
    await History(tmp_path, seed).run(sessions=8, steps=120)
