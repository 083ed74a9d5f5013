"""What a verb costs per block, and how long it holds the lock, as G2 grows to a million blocks of 64 bytes.

Chains of 100 blocks in 10,000 scopes, as many as fit; 1,000 blocks stay pinned, and 1,000 chains have names (pins)
for a while; one chain of 100,000 blocks where there is room. Then the same over a tier below: a long chain comes from
there, and one is guaranteed. All figures are thread CPU time: what else the machine does is not their cost, nor is
moving blocks in the tier below, which has threads for that as the real ones do. Each size has two processes of its
own, so that the memory of one is not reused by the next.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar, cast

from kvtier.clock import SystemClock
from kvtier.identity.key_map import KeyMap
from kvtier.identity.keys import BlockKey, Scope
from kvtier.manager.manager import Manager
from kvtier.manager.slices import slices
from kvtier.named_pins import AsyncNamedPins
from kvtier.policies.policy import make_policy
from kvtier.put import Put
from kvtier.retention.ranges import uniform
from kvtier.retention.terms import BUILTIN, Terms
from kvtier.testing.memory import MemoryStore, MemoryTier
from kvtier.testing.payload import sample_namespace, seal
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target
from kvtier.times import Mono, Wall

T = TypeVar("T")

SIZES = (10_000, 100_000, 1_000_000)
CHAIN_BLOCKS = 100
SCOPES_MAX = 10_000
PINNED_MAX = 1_000
LONG_CHAIN_BLOCKS = 100_000
GUARANTEED_BLOCKS = 16_384
REMEMBERED = 5  # times the capacity passes through: then as many evicted blocks are remembered as may be
SAMPLE_CHAINS = 100  # per verb
_BLOCK = bytes(64)
_PINNED_S = 3600.0
_DEADLINE_S = 600.0


class FlatArena(Arena):
    """Slots of 64 bytes side by side in plain memory: a real one gives each a page."""

    def __init__(self, slots: int) -> None:
        super().__init__(len(_BLOCK), 1, slots * 4096)
        self.slots = slots

    def open(self, *_: object, **__: object) -> None:
        self._memory = memoryview(bytearray(self.slots * len(_BLOCK)))

    def pieces(self, slot: int) -> tuple[memoryview, ...]:
        return (self._memory[slot * len(_BLOCK) : (slot + 1) * len(_BLOCK)],)


class Collector:
    """Watches Python's garbage collector: it stops whoever makes the object too many, in the middle of anything."""

    def __init__(self) -> None:
        self.longest_ns = self._began_ns = 0
        self._spent_ns = Counter[int]()  # by thread: it runs on whichever makes the object
        gc.callbacks.append(self._called)

    def thread_time_ns(self) -> int:
        """The CPU time of this thread without that of the collector."""
        return time.thread_time_ns() - self._spent_ns[threading.get_ident()]

    def _called(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began_ns = time.thread_time_ns()
        else:
            spent = time.thread_time_ns() - self._began_ns
            self._spent_ns[threading.get_ident()] += spent
            self.longest_ns = max(self.longest_ns, spent)

    def close(self) -> None:
        gc.callbacks.remove(self._called)


class ThreadedTier(MemoryTier):
    """Moves blocks on a thread."""

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        return await _elsewhere(super().read(chain, targets, deadline))

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        return await _elsewhere(super().write(blocks, deadline))


async def _elsewhere(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that awaits nothing."""

    def run() -> T:
        try:
            work.send(None)
        except StopIteration as end:
            return cast("T", end.value)
        raise AssertionError("it awaits something")

    return await asyncio.to_thread(run)


def same_work_ms(times: int = 3000) -> list[float]:
    """CPU time of one piece of work, over and over: the median, and the longest. All beyond the median is the machine's
    doing: so much may be in the longest hold, too, of a verb that takes the lock as often."""
    spent = list[int]()
    for _ in range(times):
        began = time.thread_time_ns()
        sum(range(10_000))
        spent.append(time.thread_time_ns() - began)
    return [round(ns / 1e6, 3) for ns in (sorted(spent)[times // 2], max(spent))]


class TimedLock:
    """A lock that knows the longest time for which it was held, in nanoseconds of `clock`."""

    def __init__(self, clock: Callable[[], int] = time.thread_time_ns) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._since = 0
        self.longest_ns = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since = self._clock()

    def __exit__(self, *_: object) -> None:
        self.longest_ns = max(self.longest_ns, self._clock() - self._since)
        self._lock.release()


class VerbTimes:
    """The figures of verbs over one lock, by name; without the garbage collector's time."""

    def __init__(self) -> None:
        self.collector = Collector()
        self.lock = TimedLock(self.collector.thread_time_ns)
        self.verbs: dict[str, dict[str, float]] = {}
        self._longest_ns = 0

    async def measure(self, name: str, blocks: int, work: Callable[[], Awaitable[object]]) -> None:
        """CPU time per block, the longest hold of the lock, and where the verb gives others their turn, the longest
        that they waited for it: the CPU time of one round of the loop."""
        self.lock.longest_ns = self._longest_ns = 0
        beside = asyncio.ensure_future(self._take_turns())
        await asyncio.sleep(0)
        began = self.collector.thread_time_ns()
        await work()
        spent_ns = self.collector.thread_time_ns() - began
        beside.cancel()
        figures = {"us_per_block": spent_ns / blocks / 1e3, "lock_ms": self.lock.longest_ns / 1e6}
        if self._longest_ns:
            figures["loop_ms"] = self._longest_ns / 1e6
        self.verbs[name] = {unit: round(figure, 3) for unit, figure in figures.items()}

    async def _take_turns(self) -> None:
        while True:
            began = self.collector.thread_time_ns()
            await asyncio.sleep(0)
            self._longest_ns = max(self._longest_ns, self.collector.thread_time_ns() - began)


def measure_scale(sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """One entry per size: blocks, bytes of bookkeeping per block when filled and when as many evicted ones are
    remembered as may be, the longest run of the garbage collector, `same_work_ms`, `bare_us_per_block` beside a match,
    and by verb `us_per_block`, `lock_ms` and perhaps `loop_ms`, without the collector's time. Blocks for three minutes
    per million."""
    figures = []
    for blocks in sizes:
        entry, below = _in_a_process(_measured, blocks), _in_a_process(_measured_below, blocks)
        entry["verbs"] |= below
        figures.append(entry)
    return figures


def _in_a_process(work: Callable[[int], dict[str, Any]], blocks: int) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(work, blocks).result()


def _measured(blocks: int) -> dict[str, Any]:
    return asyncio.run(_Subject(blocks).measure())


def _measured_below(blocks: int) -> dict[str, Any]:
    return asyncio.run(_Subject(blocks).measure_below())


def chain_of(number: int, blocks: int = CHAIN_BLOCKS, scopes: int = SCOPES_MAX) -> list[BlockKey]:
    """Keys of a chain that shares nothing with one of another number. Pure."""
    scope = scope_of_chain(number, scopes)
    return [
        BlockKey(scope + hashlib.blake2b(b"%d %d" % (number, depth), digest_size=32).digest())
        for depth in range(blocks)
    ]


def scope_of_chain(number: int, scopes: int = SCOPES_MAX) -> Scope:
    """The scope of `chain_of`, of a tenant of its own. Pure."""
    return Scope(hashlib.blake2b(b"scope %d" % (number % scopes), digest_size=16).digest())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Subject:
    """One manager over G2 alone, and the figures of its verbs."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._chains = blocks // CHAIN_BLOCKS
        self._times = VerbTimes()
        self._verb = self._times.measure

    async def measure(self) -> dict[str, Any]:
        gc.collect()
        before = _resident_bytes()
        host = HostTier(FlatArena(self._blocks), make_policy("auto", self._blocks))
        self._manager = manager = Manager(host, (), SystemClock(), lock=cast("threading.Lock", self._times.lock))
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
        bare = self._bare_us_per_block(host.index, chains)
        await self._verb("train", len(chains), lambda: self._each([None], lambda _: list(manager.hierarchy.trained())))
        await self._pins(chains[-1:] + [chain_of(number) for number in range(last - len(held), last - 1)])
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
        self._times.collector.close()
        return {
            "blocks": self._blocks,
            "bytes_per_block": round(used / self._blocks),
            "bytes_per_block_with_evicted": round(used_with_evicted / self._blocks),
            "collection_ms": round(self._times.collector.longest_ns / 1e6, 3),
            "same_work_ms": same_work_ms(),
            "bare_us_per_block": bare,
            "verbs": self._times.verbs,
        }

    def _bare_us_per_block(self, resident: Iterable[BlockKey], chains: Sequence[list[BlockKey]]) -> float:
        """CPU time per block of looking these chains up in one dictionary of the resident blocks' names: how much of a
        match, and of its growth, is the processor's waiting for memory."""
        bare = {key: number for number, key in enumerate(resident)}
        began = self._times.collector.thread_time_ns()
        found = sum(-1 not in [bare.get(key, -1) for key in chain] for chain in chains)
        spent_ns = self._times.collector.thread_time_ns() - began
        assert found == len(chains), "all of them are here"
        return round(spent_ns / 1e3 / sum(map(len, chains)), 3)

    def _used(self, before: int) -> int:
        gc.collect()
        return _resident_bytes() - before - self._blocks * len(_BLOCK)

    async def _long_chain(self, number: int) -> None:
        chain = chain_of(number, LONG_CHAIN_BLOCKS + 1)
        await self._verb("put 100k", len(chain) - 1, lambda: self._each([chain[:-1]], self._put))
        await self._verb("append to 100k", 1, lambda: self._each([chain], self._put))
        await self._verb("get 100k", len(chain), lambda: self._each([chain], lambda c: self._manager.pin(c).release()))
        await self._verb("purge 100k", len(chain), lambda: self._manager.purge([scope_of_chain(number)]))

    async def _pins(self, chains: Sequence[list[BlockKey]]) -> None:
        """As many named pins as there are chains."""
        protection, blocks = self._manager.protection, len(chains) * CHAIN_BLOCKS
        pins = AsyncNamedPins(protection, lambda keys: [BlockKey(key) for key in keys], 1)

        async def create() -> None:
            for number, chain in enumerate(chains):
                await pins.create(str(number), chain, _PINNED_S)

        async def delete() -> None:
            for number in range(len(chains)):
                await pins.delete(str(number))

        await self._verb("pin by name", blocks, create)
        await self._verb("list of pins", len(chains), pins.list)
        await self._verb("end of pins", blocks, delete)

    async def measure_below(self) -> dict[str, Any]:
        """The verbs that move blocks from and to a tier below, by name."""
        clock, namespace = SystemClock(), sample_namespace(len(_BLOCK))
        in_parts = cast("dict[bytes, Any]", KeyMap[Any]()), cast("dict[bytes, Wall]", KeyMap[Wall]())
        store = MemoryStore(in_parts[0], {}, in_parts[1])  # as a real tier: no table of it is moved on the loop
        tier, long = ThreadedTier(namespace, clock, store=store), min(LONG_CHAIN_BLOCKS, self._blocks // 10)
        below, sure = chain_of(1 << 30, long), chain_of(1 << 31, min(GUARANTEED_BLOCKS, self._blocks // 10))
        await tier.open()
        for part in slices(range(long)):
            await tier.write(seal(below, part, len(_BLOCK), clock.wall()), clock.monotonic() + _DEADLINE_S)
        host = HostTier(FlatArena(self._blocks), make_policy("auto", self._blocks))
        lock = cast("threading.Lock", self._times.lock)
        self._manager = manager = Manager(host, (tier,), clock, lock=lock)
        await manager.start()
        for number in range(self._chains):
            self._put(chain_of(number), BUILTIN["in_memory"])  # stays out of the tier below

        async def get() -> None:
            with await manager.promote(below, clock.monotonic() + _DEADLINE_S) as lease:
                assert len(lease) == long, "the chain is there"

        async def flush() -> None:
            await manager.flush(clock.monotonic() + _DEADLINE_S)

        terms = Terms("sure", ttl=_PINNED_S, guarantee=True)
        await self._verb("get from below", long, get)
        await self._verb("guaranteed put", len(sure), lambda: self._each([sure], lambda c: self._put(c, terms)))
        await self._verb("flush, taken over below", len(sure), flush)
        manager.check()
        await manager.close()
        self._times.collector.close()
        return self._times.verbs

    async def _each(self, subjects: Sequence[Any], work: Callable[[Any], object]) -> None:
        for subject in subjects:
            work(subject)

    async def _put_chains(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._put(chain_of(number))

    def _put(self, chain: list[BlockKey], terms: Terms = BUILTIN["24h"]) -> None:
        buffers = [_BLOCK] * len(chain)
        put = Put(self._manager, chain, buffers, uniform(terms), start=0, wait=False, request_id="")
        put.step()
        assert put.accepted == len(chain), "every block finds a place"
