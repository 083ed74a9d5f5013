"""One small cache under everything at once; see support/hammer.py."""

from __future__ import annotations

import pytest

from tests.manager.support.hammer import hammer


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
async def test_everything_at_once(seed: int) -> None:
    assert await hammer(seed, 3.0) > 100


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(100, 200))
async def test_everything_at_once_for_long(seed: int) -> None:
    assert await hammer(seed, 6.0) > 100
