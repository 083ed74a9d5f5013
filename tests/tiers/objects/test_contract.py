"""G4 passes the contract of a tier on a directory and in memory; test_s3.py has the servers."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from kvtier.testing import VirtualClock, chain_of, check_tier, payload_of, sample_namespace, seal
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target


@pytest.mark.parametrize("stride", [1, 4])
async def test_a_directory_passes_the_contract(tmp_path: Path, stride: int) -> None:
    clock = VirtualClock()
    await check_tier(lambda ns: ObjectTier(f"file://{tmp_path}/g4", ns, clock=clock, stride=stride), clock)


@pytest.mark.parametrize("stride", [1, 4])
async def test_memory_passes_the_contract(stride: int) -> None:
    clock, place = VirtualClock(), uuid4().hex
    await check_tier(lambda ns: ObjectTier(f"memory://{place}/g4", ns, clock=clock, stride=stride), clock)


async def test_any_other_fsspec_file_system_serves(tmp_path: Path) -> None:
    """Best effort, since its writes may be neither exclusive nor atomic: what was stored comes back, after a restart
    too, and what was evicted does not."""
    clock, ns = VirtualClock(), sample_namespace(4096)
    chain = chain_of(ns, 6)
    for attempt in range(2):
        tier = ObjectTier(f"local://{tmp_path}/g4", ns, clock=clock, stride=4, options={"auto_mkdir": True})
        await tier.open()
        deadline = clock.monotonic() + 30
        written = await tier.write(seal(chain, range(6), 4096, clock.wall()), deadline)
        assert written == [Stored.PRESENT if attempt else Stored.STORED] * 6
        buffers = [bytearray(4096) for _ in chain]
        targets = [Target(i, (memoryview(b),)) for i, b in enumerate(buffers)]
        assert all(isinstance(r, Loaded) for r in await tier.read(chain, targets, deadline))
        assert [bytes(b) for b in buffers] == [payload_of(key, 4096) for key in chain]
        clock.advance(50_000)
        tier.touch(chain, clock.wall())
        await tier.flush(clock.monotonic() + 30)
        if attempt:
            assert await tier.evict(None) == 6
            assert await tier.read(chain, targets, clock.monotonic() + 30) == [Miss.ABSENT] * 6
        await tier.close(clock.monotonic() + 30)
