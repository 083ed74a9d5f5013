"""Another model's blocks in the same G3 store, larger ones, so that classes of blocks compete for its segments. No
cache lies between: the tier alone keeps what a purge promises.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvtier.clock import Clock
from kvtier.errors import KVTierError
from kvtier.identity.keys import BlockKey, scope_of_key
from kvtier.retention.terms import BUILTIN, Terms
from kvtier.sim.drive import Drive
from kvtier.sim.ledger import Wrong, name_of
from kvtier.sim.real_disk import RealDisk
from kvtier.testing.payload import chain_of, payload_of, sample_namespace, seal
from kvtier.tiers.protocol import Loaded, Sealed, Target
from kvtier.times import Mono

NAMESPACE = sample_namespace(8704, model="test/other")
"""Three pages: blocks of two classes do not share a slot."""
CALL_S = 2.0
QUEUE_S = 0.01
_LATE, *_FRESH = (chain_of(NAMESPACE, 1, prompt) for prompt in range(1000, 1009))
"""Prompts that are in no history."""
_URGENT = Terms("urgent", ttl=3600.0, priority=90)
"""No block of the machine's cache is worth more."""


@dataclass
class Offers:
    """What a machine's neighbours have offered and purged; outlives their processes."""

    marks: dict[BlockKey, float] = field(default_factory=dict)
    """The latest of each block."""
    purged: float = -inf
    """That of the latest purge that was confirmed."""
    late: list[Sealed] = field(default_factory=list)
    """Made before that, and offered behind it."""
    worn: bool = False
    """Whether a place can be read no more, and is the only one."""


class Neighbour:
    """A second tier on the store of a machine's G3, in the same process. Opened when it is first used. Its faults are
    nobody's; bytes that are not its blocks', and blocks that were purged, are."""

    def __init__(self, drive: Drive, capacity: int, clock: Clock, offers: Offers) -> None:
        self._drive = drive
        self._tier = RealDisk(drive, capacity, NAMESPACE, clock)
        self._clock = clock
        self._offers = offers

    async def do(self, args: Mapping[str, Any], told: Callable[[str], None]) -> None:
        """Write some blocks, or read them, or purge them all; or write some behind a purge that were made before it.
        Raises Wrong."""
        chain = chain_of(NAMESPACE, args["blocks"], args["prompt"])
        verbs: Mapping[str, Callable[[], Coroutine[Any, Any, str]]] = {
            "put": lambda: self._put(chain, args["waits"]), "get": lambda: self._get(chain),
            "purge": lambda: self._purge(chain), "late": lambda: self._late(chain),
        }  # fmt: skip
        try:
            await self._tier.open()
            result = await verbs[args["does"]]()
        except KVTierError as error:
            result = type(error).__name__
        told(f"beside: {args['does']} {result}")

    async def _put(self, chain: Sequence[BlockKey], waits: float) -> str:
        """`waits`: for so long the blocks are in a queue."""
        blocks = self._made(chain)
        await asyncio.sleep(waits)
        return await self._write(blocks)

    async def _late(self, chain: Sequence[BlockKey]) -> str:
        blocks = self._made(chain)
        await asyncio.sleep(QUEUE_S)
        return f"{await self._purge(chain)} {await self._write(blocks)} {await self._get(chain)}"

    def _made(self, chain: Sequence[BlockKey], terms: Terms = BUILTIN["24h"]) -> list[Sealed]:
        """Blocks of now."""
        size, now, marks = NAMESPACE.block_bytes, self._clock.wall(), self._offers.marks
        marks.update((key, max(now, marks.get(key, now))) for key in chain)
        return seal(chain, range(len(chain)), size, now, terms, parents=True)

    async def _write(self, blocks: Sequence[Sealed]) -> str:
        return " ".join(result.name for result in await self._tier.write(blocks, self._deadline()))

    async def _get(self, chain: Sequence[BlockKey]) -> str:
        size, offers = NAMESPACE.block_bytes, self._offers
        purged = offers.purged
        buffers = [bytearray(size) for _ in chain]
        targets = [Target(index, (memoryview(buffer),)) for index, buffer in enumerate(buffers)]
        results = await self._tier.read(chain, targets, self._deadline())
        for key, buffer, result in zip(chain, buffers, results, strict=True):
            if not isinstance(result, Loaded):
                continue
            if bytes(buffer) != payload_of(key, size):
                raise Wrong(f"block {name_of(key)} of the neighbour has other bytes")
            if offers.marks[key] <= purged:
                raise Wrong(f"block {name_of(key)} of the neighbour is served, and was purged later")
        return f"{sum(isinstance(result, Loaded) for result in results)} of {len(chain)}"

    async def _purge(self, chain: Sequence[BlockKey]) -> str:
        before = self._clock.wall()
        count = await self._tier.purge(scope_of_key(chain[0]), before)
        self._offers.purged = max(self._offers.purged, before)
        return str(count)

    async def test(self) -> None:
        """While all is well: what is written late, behind a purge, is a miss, and so is a block whose place can be read
        no more. Raises Wrong or KVTierError."""
        await self._tier.open()
        self._offers.late = self._made(_LATE)
        await asyncio.sleep(QUEUE_S)
        await self._purge(_LATE)
        await self._test_late()
        self._offers.worn = await self._lose_a_place()

    async def test_again(self) -> None:
        """In the next process: the same, and no block is put where nothing can be read. Raises Wrong or KVTierError."""
        await self._tier.open()
        await self._test_late()
        for chain in _FRESH if self._offers.worn else ():
            if await self._write(self._made(chain, _URGENT)) == "STORED" and await self._get(chain) != "1 of 1":
                raise Wrong("a block is lost: its place was known to be bad")

    async def _test_late(self) -> None:
        await self._write(self._offers.late)
        await self._get(_LATE)

    async def _lose_a_place(self) -> bool:
        """False where there are bad ones already, or there is no room."""
        chain = _FRESH[0]
        if self._tier.bad_places() or await self._write(self._made(chain, _URGENT)) != "STORED":
            return False
        if not self._drive.wear_out(payload_of(chain[0], NAMESPACE.block_bytes)):
            return False
        if await self._get(chain) != "0 of 1":
            raise Wrong("a block is read from where nothing can be")
        await asyncio.sleep(CALL_S)
        return True

    def _deadline(self) -> Mono:
        return Mono(self._clock.monotonic() + CALL_S)

    async def close(self) -> None:
        """A fault of the disk may keep it from ending in time."""
        with contextlib.suppress(KVTierError, asyncio.TimeoutError):
            await self._tier.close(self._deadline())
