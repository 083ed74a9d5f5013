"""G4 passes the contract of a tier on a directory and in memory; test_s3.py has the servers."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from kvtier.testing import VirtualClock, check_tier
from kvtier.tiers.objects import ObjectTier


@pytest.mark.parametrize("stride", [1, 4])
async def test_a_directory_passes_the_contract(tmp_path: Path, stride: int) -> None:
    clock = VirtualClock()
    await check_tier(lambda ns: ObjectTier(f"file://{tmp_path}/g4", ns, clock=clock, stride=stride), clock)


@pytest.mark.parametrize("stride", [1, 4])
async def test_memory_passes_the_contract(stride: int) -> None:
    clock, place = VirtualClock(), uuid4().hex
    await check_tier(lambda ns: ObjectTier(f"memory://{place}/g4", ns, clock=clock, stride=stride), clock)


async def test_any_fsspec_file_system_passes_the_contract(tmp_path: Path) -> None:
    clock = VirtualClock()
    url = f"local://{tmp_path}/g4"
    await check_tier(lambda ns: ObjectTier(url, ns, clock=clock, stride=2, options={"auto_mkdir": True}), clock)
