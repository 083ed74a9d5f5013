"""The scheduler half of vLLM's connector over the cache of a simulated process: real, but for the thread that a cache
has in an engine's process. There the two run side by side; here they take turns on one loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from kvtier.cache import AsyncCache
from kvtier.clock import Clock
from kvtier.config import Offload
from kvtier.connectors.vllm.messages import ArenaHandle
from kvtier.connectors.vllm.requests import RequestReader
from kvtier.connectors.vllm.scheduler import SchedulerHalf
from kvtier.connectors.vllm.stores import ConnectorLimits
from kvtier.identity.keys import BlockKey
from kvtier.manager.manager import Manager
from kvtier.sim.history import EngineShape
from kvtier.sim.ledger import Ledger, bytes_of, name_of
from kvtier.tiers.host.slot import Slot

T = TypeVar("T")

ACK_S = 12.0
"""ack_timeout: less than the longest copy of a device that is sick."""
LOOKUP_S = 0.1


class SubmittingCache:
    """A cache with the verbs that a connector uses, on the loop that runs."""

    def __init__(self, cache: AsyncCache) -> None:
        self._loop = asyncio.get_running_loop()
        self.manager, self.namespace = cache.manager, cache.namespace
        self.journal, self.trace, self.stats = cache.journal, cache.trace, cache.stats

    def submit(
        self, work: Coroutine[Any, Any, T], trace: Mapping[str, str] | None = None
    ) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class Caches:
    """The one cache of a process, and its arena. Closed by whoever opened it."""

    def __init__(self, cache: AsyncCache) -> None:
        arena = cache.manager.host.arena
        files = tuple((fd, os.fstat(fd).st_ino) for fd in arena.fds())
        handle = ArenaHandle(1, os.getpid(), files, arena.slots, arena.slot_bytes, arena.piece_bytes)
        self.cache: SubmittingCache | None = SubmittingCache(cache)
        self.current = (self.cache, handle)
        self.config, self.namespace = cache.config, cache.namespace

    def close(self, timeout_s: float) -> bool:
        self.cache = None
        return True


def attach(cache: AsyncCache, clock: Clock, shape: EngineShape, ledger: Ledger) -> SchedulerHalf:
    """The half of an engine of this shape. What it stores is compared, block by block."""
    limits = ConnectorLimits(
        lookup_deadline_s=LOOKUP_S,
        prefetch_s=cache.config.deadlines.get,
        ack_timeout_s=ACK_S,
        step_bytes=shape.step_blocks * cache.namespace.block_bytes,
        link_bytes_s=math.inf,
        spill_ahead_blocks=shape.blocks // 4,
        decode=shape.stores_decoded,
        weighs_loads=shape.weighs,
        in_step_bytes=0 if shape.ahead else shape.in_step_blocks * cache.namespace.block_bytes,
        shares_cores=shape.shares_cores,
    )
    caches: Any = Caches(cache)
    _watch(cache.manager, ledger)
    return SchedulerHalf(caches, RequestReader(cache.config), Offload(mode=shape.mode), limits, shape.ranks, clock)


def _watch(manager: Manager, ledger: Ledger) -> None:
    """Compare what is published in G2 with what its name says, and note uses and stores."""
    reserve, commit = manager.reserve, manager.commit
    plain: Any = manager

    def noted(chain: Sequence[BlockKey], start: int, stop: int, *arguments: Any, **more: Any) -> Any:
        ledger.touched(chain[start:stop], stored=True)  # those that are here get the request's terms, too
        return reserve(chain, start, stop, *arguments, **more)

    def compared(chain: Sequence[BlockKey], slots: Sequence[Slot], generations: Sequence[int], **more: Any) -> Any:
        pairs = zip(slots, generations, strict=True)
        known = [(chain[slot.index], slot) for slot, generation in pairs if slot.generation == generation]
        for key, slot in known:
            if b"".join(slot.pieces) != bytes_of(key, manager.host.block_bytes):
                ledger.broken(f"block {name_of(key)} is stored with other bytes")
        ledger.touched([key for key, _ in known], stored=True)
        return commit(chain, slots, generations, **more)

    plain.reserve, plain.commit = noted, compared
