"""A G3 tier on a directory of the test's own, and what the tests do with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kvtier.clock import Clock
from kvtier.identity.keys import BlockKey
from kvtier.identity.namespace import Namespace
from kvtier.retention.terms import BUILTIN, Terms
from kvtier.testing import VirtualClock, payload_of, sample_namespace, seal
from kvtier.tiers.data_keys import DataKeys
from kvtier.tiers.disk.slab import Calls
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target

BLOCK = 4096
FAR_S = 60.0


@asynccontextmanager
async def opened(
    path: Path | Sequence[Path],
    blocks: int = 16,
    *,
    block_bytes: int = BLOCK,
    clock: Clock | None = None,
    namespace: Namespace | None = None,
    calls: Calls | None = None,
    keys: DataKeys | None = None,
) -> AsyncIterator[DiskTier]:
    """An open tier with room for `blocks` blocks; its invariants hold when it closes."""
    clock = clock or VirtualClock()
    paths = [path] if isinstance(path, Path) else list(path)
    namespace = namespace or sample_namespace(block_bytes)
    tier = DiskTier(paths, blocks * block_bytes, namespace, clock=clock, calls=calls, keys=keys)
    await tier.open()
    try:
        yield tier
        tier.check()
    finally:
        await tier.close(clock.monotonic() + FAR_S)


async def put(
    tier: DiskTier,
    chain: Sequence[BlockKey],
    indices: Sequence[int] | None = None,
    *,
    terms: Terms = BUILTIN["24h"],
    ranks: int = 1,
    parents: bool = False,
) -> list[Stored]:
    """Write blocks of a chain with their own payload."""
    wanted = range(len(chain)) if indices is None else indices
    blocks = seal(chain, wanted, tier.block_bytes, tier._clock.wall(), terms, ranks, parents=parents)
    return await tier.write(blocks, tier._clock.monotonic() + FAR_S)


async def get(tier: DiskTier, chain: Sequence[BlockKey], *, check: bool = True) -> list[bool | Miss]:
    """Read a whole chain: True where a block came back, else the reason. Wrong bytes fail the test, if `check`."""
    buffers = [bytearray(tier.block_bytes) for _ in chain]
    targets = [Target(i, (memoryview(b),)) for i, b in enumerate(buffers)]
    results = await tier.read(chain, targets, tier._clock.monotonic() + FAR_S)
    out: list[bool | Miss] = []
    for key, buffer, result in zip(chain, buffers, results, strict=True):
        if isinstance(result, Loaded):
            same = buffer == payload_of(key, tier.block_bytes)
            assert same or not check, "wrong bytes were served"
            out.append(same)
        else:
            out.append(result)
    return out


async def shrunk(tier: DiskTier) -> None:
    """Wait until the store is as small as its capacity."""
    for _ in range(int(FAR_S * 100)):
        if not tier._store.shrink.active:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it shrinks for ever")


def slabs(*paths: Path) -> list[Path]:
    """The segment files of a store."""
    return sorted(file for path in paths for file in (path / "slab").glob("*.slab"))
