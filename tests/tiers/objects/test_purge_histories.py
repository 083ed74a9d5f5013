"""After a purge nothing of its tenant is served, in whatever history of the fleet (support/purge_world.py)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import TierTimeout
from kvtier.manager.hierarchy import Hierarchy
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.objects.purge_log import TenantLog
from tests.tiers.objects.support.purge_world import BOUND_S, Chain, World

STEPS = 24


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("kvtier").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvtier").setLevel(logging.NOTSET)


async def histories(seeds: range, folder: Path, disk_every: int) -> tuple[int, int, int]:
    """Run them, every other one strict. Returns how many purges returned, blocks were served, and looks had to miss."""
    purges = served = checked = 0
    for seed in seeds:
        root = folder / str(seed) if seed % disk_every < 2 else None
        if root is not None:
            root.mkdir()
        world = World(seed, ("strict", "available")[seed % 2], root)
        await world.run(STEPS)
        purges, served, checked = purges + world.purges, served + world.served, checked + world.checked
    return purges, served, checked


async def test_no_purged_byte_is_served(tmp_path: Path) -> None:
    purges, served, checked = await histories(range(80), tmp_path, 20)
    assert purges > 80 and served > 400 and checked > 160, "the histories say little"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(10))
async def test_no_purged_byte_is_served_in_ten_thousand_histories(part: int, tmp_path: Path) -> None:
    await histories(range(1000 * part, 1000 * (part + 1)), tmp_path, 8)


@pytest.mark.parametrize(("blind", "first"), [("log", 8), ("bound", 174)])
async def test_the_histories_would_show_it(
    blind: str, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`first`: a history that does; the others, for when the histories are made otherwise."""
    if blind == "log":
        monkeypatch.setattr(TenantLog, "covers", lambda *_: False)
    else:
        monkeypatch.setattr(Hierarchy, "unproven", False)
    with pytest.raises(AssertionError, match="blocks served at"):
        await histories(range(first, first + 200), tmp_path, 20)


@pytest.mark.parametrize("mode", ["strict", "available"])
async def test_a_disk_that_does_not_take_the_first_purges_serves_nothing_that_they_cover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Of a process that met no purge, and ended; then its tenant was purged elsewhere."""
    world = World(0, mode, tmp_path)
    for folder in ("0", "1"):
        (tmp_path / folder).mkdir(exist_ok=True)
    here, there = world.members[:2]
    chain, other = Chain("t", 0), Chain("u", 1)
    await here.start()
    await here.put(chain)
    await here.put(other)
    assert await here.get(chain) == len(chain.keys)
    await here.stop()
    await there.start()
    assert there.cache is not None
    await there.cache.purge("t")
    await there.stop()
    world.server.clock.advance(2 * BOUND_S)

    async def refuse(*_: Any) -> int:
        raise TierTimeout("g3", "purge", "another process stands still")

    with monkeypatch.context() as failing:
        failing.setattr(DiskTier, "purge", refuse)
        await here.start()
        assert await here.get(chain) == 0, "purged, and served"
        assert await here.get(other) == len(other.keys)
    await here.learn()
    assert await here.get(chain) == 0
    await here.stop()


async def test_what_came_up_before_the_log_was_first_read_is_purged_with_the_rest(tmp_path: Path) -> None:
    """In a process that met no purge before."""
    world = World(0, "available", tmp_path)
    for folder in ("0", "1"):
        (tmp_path / folder).mkdir(exist_ok=True)
    here, there = world.members[:2]
    chain = Chain("t", 0)
    await here.start()
    await here.put(chain)
    await here.stop()
    await there.start()
    assert there.cache is not None
    await there.cache.purge("t")
    await there.stop()
    here.line.cut = True
    await here.start()
    assert await here.get(chain) == len(chain.keys), "the bucket cannot be read: as the docs say"
    here.line.cut = False
    world.server.clock.advance(60)
    await here.learn()
    assert await here.get(chain) == 0
    await here.stop()


async def test_a_disk_that_lacks_a_purge_is_not_taken_for_one_that_has_it_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came up from it while the bucket could not be read is purged when the log is read again."""
    world = World(0, "available", tmp_path)
    for folder in ("0", "1"):
        (tmp_path / folder).mkdir(exist_ok=True)
    here, there = world.members[:2]
    chain = Chain("t", 0)
    await here.start()
    await here.put(chain)
    await there.start()
    assert there.cache is not None
    await there.cache.purge("t")
    await there.stop()

    async def refuse(*_: Any) -> int:
        raise TierTimeout("g3", "purge", "another process stands still")

    with monkeypatch.context() as failing:
        failing.setattr(DiskTier, "purge", refuse)
        await here.learn()
        assert await here.get(chain) == 0
        await here.stop()
    here.line.cut = True
    await here.start()
    await here.get(chain)
    here.line.cut = False
    world.server.clock.advance(BOUND_S)
    await here.learn()
    assert await here.get(chain) == 0, "purged, and served after the log was read"
    await here.stop()
