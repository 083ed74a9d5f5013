"""What a verb costs per block, and how long it holds the lock, as G2 grows to a million blocks of 64 bytes.

Chains of 100 blocks in 10,000 scopes, as many as fit; 1,000 blocks stay pinned; one chain of 100,000 blocks where there
is room. Both figures are thread CPU time: what else the machine does is not their cost. Each size has a process of its
own, so that the memory of one is not reused by the next.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

from kvtier.clock import SystemClock
from kvtier.identity.keys import BlockKey, Scope
from kvtier.manager.manager import Manager
from kvtier.policies.policy import make_policy
from kvtier.put import Put
from kvtier.retention.ranges import uniform
from kvtier.retention.terms import BUILTIN
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.tier import HostTier

SIZES = (10_000, 100_000, 1_000_000)
CHAIN_BLOCKS = 100
SCOPES_MAX = 10_000
PINNED_MAX = 1_000
LONG_CHAIN_BLOCKS = 100_000
REMEMBERED = 6  # times the capacity passes through: then as many evicted blocks are remembered as may be
SAMPLE_CHAINS = 100  # per verb
_BLOCK = bytes(64)


class FlatArena(Arena):
    """Slots of 64 bytes side by side in plain memory: a real one gives each a page."""

    def __init__(self, slots: int) -> None:
        super().__init__(len(_BLOCK), 1, slots * 4096)
        self.slots = slots

    def open(self, *_: object, **__: object) -> None:
        self._memory = memoryview(bytearray(self.slots * len(_BLOCK)))

    def pieces(self, slot: int) -> tuple[memoryview, ...]:
        return (self._memory[slot * len(_BLOCK) : (slot + 1) * len(_BLOCK)],)


class TimedLock:
    """A lock that knows the longest thread CPU time for which it was held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = 0
        self.longest_ns = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since = time.thread_time_ns()

    def __exit__(self, *_: object) -> None:
        self.longest_ns = max(self.longest_ns, time.thread_time_ns() - self._since)
        self._lock.release()


def measure_scale(sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """One entry per size: blocks, bytes of bookkeeping per block when filled and when as many evicted ones are
    remembered as may be, and by verb `us_per_block` and `lock_ms`. Blocks for two minutes per million."""
    figures = []
    for blocks in sizes:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            figures.append(process.submit(_measured, blocks).result())
    return figures


def _measured(blocks: int) -> dict[str, Any]:
    return asyncio.run(_Subject(blocks).measure())


def chain_of(number: int, blocks: int = CHAIN_BLOCKS, scopes: int = SCOPES_MAX) -> list[BlockKey]:
    """Keys of a chain that shares nothing with one of another number. Pure."""
    scope = scope_of_chain(number, scopes)
    return [
        BlockKey(scope + hashlib.blake2b(b"%d %d" % (number, depth), digest_size=32).digest())
        for depth in range(blocks)
    ]


def scope_of_chain(number: int, scopes: int = SCOPES_MAX) -> Scope:
    """The scope of `chain_of`. Pure."""
    return Scope((number % scopes + 1).to_bytes(16, "big"))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Subject:
    """One manager over G2 alone, and the figures of its verbs."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._chains = blocks // CHAIN_BLOCKS
        self._lock = TimedLock()
        self._verbs: dict[str, dict[str, float]] = {}

    async def measure(self) -> dict[str, Any]:
        gc.collect()
        before = _resident_bytes()
        host = HostTier(FlatArena(self._blocks), make_policy("auto", self._blocks))
        self._manager = manager = Manager(host, (), SystemClock(), lock=cast("threading.Lock", self._lock))
        await manager.start()
        await self._verb("fill", self._blocks, lambda: self._put_chains(range(self._chains)))
        first, sample = self._chains, min(SAMPLE_CHAINS, self._chains // 4)
        held = [manager.pin(chain_of(number)[:1]) for number in range(min(PINNED_MAX, self._chains // 10))]
        blocks = sample * CHAIN_BLOCKS
        await self._verb("put", blocks, lambda: self._put_chains(range(first, first + sample)))
        used = self._used(before)
        await self._put_chains(range(first + sample, REMEMBERED * first))
        used_with_evicted, last = self._used(before), REMEMBERED * first
        chains = [chain_of(number) for number in range(last - sample, last)]
        await self._verb("get", blocks, lambda: self._each(chains, lambda chain: manager.pin(chain).release()))
        await self._verb("match", blocks, lambda: self._each(chains, manager.prefix))
        await self._verb("stats", 1, lambda: self._each([None], lambda _: manager.stats()))
        await self._verb("space", 1, lambda: self._each([None], lambda _: manager.hierarchy._may_free()))
        if self._blocks > 2 * LONG_CHAIN_BLOCKS:
            await self._long_chain(last)
        await self._verb("purge", CHAIN_BLOCKS, lambda: manager.purge([scope_of_chain(last - 1)]))
        await self._verb("evict", self._blocks, lambda: manager.evict("g2"))
        for lease in held:
            lease.release()
        manager.check()
        await manager.close()
        return {
            "blocks": self._blocks,
            "bytes_per_block": round(used / self._blocks),
            "bytes_per_block_with_evicted": round(used_with_evicted / self._blocks),
            "verbs": self._verbs,
        }

    def _used(self, before: int) -> int:
        gc.collect()
        return _resident_bytes() - before - self._blocks * len(_BLOCK)

    async def _long_chain(self, number: int) -> None:
        chain = chain_of(number, LONG_CHAIN_BLOCKS + 1)
        await self._verb("put 100k", len(chain) - 1, lambda: self._each([chain[:-1]], self._put))
        await self._verb("append to 100k", 1, lambda: self._each([chain], self._put))
        await self._verb("get 100k", len(chain), lambda: self._each([chain], lambda c: self._manager.pin(c).release()))
        await self._verb("purge 100k", len(chain), lambda: self._manager.purge([scope_of_chain(number)]))

    async def _verb(self, name: str, blocks: int, work: Callable[[], Awaitable[object]]) -> None:
        self._lock.longest_ns = 0
        began = time.thread_time()
        await work()
        seconds = time.thread_time() - began
        self._verbs[name] = {
            "us_per_block": round(seconds / blocks * 1e6, 3),
            "lock_ms": round(self._lock.longest_ns / 1e6, 3),
        }

    async def _each(self, subjects: Sequence[Any], work: Callable[[Any], object]) -> None:
        for subject in subjects:
            work(subject)

    async def _put_chains(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._put(chain_of(number))

    def _put(self, chain: list[BlockKey]) -> None:
        buffers = [_BLOCK] * len(chain)
        put = Put(self._manager, chain, buffers, uniform(BUILTIN["24h"]), start=0, wait=False, request_id="")
        put.step()
        assert put.accepted == len(chain), "every block finds a place"
