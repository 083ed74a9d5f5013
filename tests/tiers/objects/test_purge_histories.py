"""After a purge nothing of its tenant is served, in whatever history of the fleet (support/purge_world.py)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvtier.manager.hierarchy import Hierarchy
from kvtier.tiers.objects.purge_log import TenantLog
from tests.tiers.objects.support.purge_world import World

STEPS = 24


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("kvtier").setLevel(logging.CRITICAL)


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
