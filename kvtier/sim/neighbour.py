"""Another model's blocks in the same G3 store, larger ones, so that classes of blocks compete for its segments."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier.clock import Clock
from kvtier.errors import KVTierError
from kvtier.sim.ledger import Wrong
from kvtier.testing.payload import chain_of, payload_of, sample_namespace, seal
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Loaded, Target
from kvtier.times import Mono

NAMESPACE = sample_namespace(8704, model="test/other")
"""Three pages: blocks of two classes do not share a slot."""
CALL_S = 2.0


class Neighbour:
    """A second tier on the store of a machine's G3, in the same process. Opened when it is first used. Its faults are
    nobody's; bytes that are not its blocks' are."""

    def __init__(self, folder: Path, capacity: int, clock: Clock) -> None:
        self._tier = DiskTier([folder], capacity, NAMESPACE, clock=clock)
        self._clock = clock

    async def do(self, args: Mapping[str, Any], told: Callable[[str], None]) -> None:
        """Write some blocks, or read them. Raises Wrong."""
        told(f"beside: {await self._do(args)}")

    async def _do(self, args: Mapping[str, Any]) -> str:
        chain = chain_of(NAMESPACE, args["blocks"], args["prompt"])
        deadline = Mono(self._clock.monotonic() + CALL_S)
        size = NAMESPACE.block_bytes
        try:
            await self._tier.open()
            if args["put"]:
                blocks = seal(chain, range(len(chain)), size, self._clock.wall(), parents=True)
                return " ".join(result.name for result in await self._tier.write(blocks, deadline))
            buffers = [bytearray(size) for _ in chain]
            targets = [Target(index, (memoryview(buffer),)) for index, buffer in enumerate(buffers)]
            results = await self._tier.read(chain, targets, deadline)
        except KVTierError as error:
            return type(error).__name__
        for key, buffer, result in zip(chain, buffers, results, strict=True):
            if isinstance(result, Loaded) and bytes(buffer) != payload_of(key, size):
                raise Wrong("a block of the neighbour has other bytes")
        return f"{sum(isinstance(result, Loaded) for result in results)} of {len(chain)}"

    async def close(self) -> None:
        """A fault of the disk may keep it from ending in time."""
        with contextlib.suppress(KVTierError, asyncio.TimeoutError):
            await self._tier.close(Mono(self._clock.monotonic() + CALL_S))
