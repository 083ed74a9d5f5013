"""Small caches over every kind of tiers, under everything at once; see support/hammer.py."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.manager.support.hammer import hammer
from tests.manager.support.hammer_patience import Share, TooLate, in_time
from tests.manager.support.hammer_world import STACKS


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("stack", "seed"),
    [
        ("memory", 2), ("memory", 3), ("disk", 1), ("objects", 2), ("both", 3), ("worker", 1), ("s3", 2), ("long", 1),
    ],
)  # fmt: skip
async def test_everything_at_once(stack: str, seed: int, tmp_path: Path) -> None:
    done = await hammer(seed, 1.5, stack, tmp_path)
    assert done.done > 10 and done.model.served > 0 and done.lives > 0


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("seed", range(100, 120))
async def test_everything_at_once_for_long(stack: str, seed: int, tmp_path: Path) -> None:
    done = await hammer(seed, 4.0, stack, tmp_path)
    assert done.done > 10 and done.model.served > 0 and done.lives > 0


def test_what_is_late_is_told_apart_from_what_had_no_time() -> None:
    in_time(time.monotonic() + 60, "there is time")
    with pytest.raises(TooLate, match="left"):
        in_time(time.monotonic() - 1, "left: 3")
    share = Share(3.0, 20.0).since(Share(1.0, 2.0))
    assert share == Share(2.0, 18.0) and share.starved and not Share(2.0, 7.0).starved
    assert Share.now().ran_s > 0
