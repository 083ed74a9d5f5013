"""G3 beside the raw disk: durable puts and verified gets against one O_DIRECT file of the same block size and depth.

    put     digest, reserve, write, sync, publish, in batches of BATCH_BYTES, IN_FLIGHT at a time; the store is full, so
            nearly every block evicts another, and was written through once, so no extent is new
    get     index, read, digest; O_DIRECT, so from the disk
    raw     the same blocks by THREADS threads into a file that was written through before, one sync at the end
    digested  raw writes, each after its block's digest by the same thread: the least that checked blocks take
    synced  raw writes that are as durable as puts: a sync per batch, IN_FLIGHT batches at a time

The first fill, which allocates, is a figure of its own. Latency is that of one block at a time, without writes and
beside continuous puts. `raw` shows the CPU time that the kernel takes to move the bytes.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.bench.record import summary
from kvtier.checksum import digest_of
from kvtier.clock import SystemClock
from kvtier.errors import InvalidRequest
from kvtier.identity.keys import SHARED, BlockKey, make_keys
from kvtier.identity.namespace import Namespace
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN
from kvtier.tiers.data_keys import DataKeys
from kvtier.tiers.disk.store import THREADS
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Loaded, Sealed, Stored, Target
from kvtier.units import format_size

BATCH_BYTES = 32 << 20
IN_FLIGHT = 4
DEADLINE_S = 120.0
GETS, GETS_MAX = 200, 5000  # of single blocks: without writes; beside a pass of them, at most
TARGETS = {
    "put_over_raw": 0.90, "get_over_raw": 0.95, "put_cpu_s_per_gb": 0.25, "put_cpu_beyond_digested_s_per_gb": 0.06,
    "get_cpu_s_per_gb": 0.25, "p99_under_writes_over_idle": 2.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over all blocks."""

    bytes_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True)
class Gets:
    """Single gets, one after another, and the rate of writes beside them."""

    milliseconds: Sequence[float]
    written_bytes_per_s: float

    def quantile(self, percent: int) -> float:
        """Milliseconds that `percent` of the gets did not exceed."""
        ordered = sorted(self.milliseconds)
        return ordered[min(len(ordered) - 1, percent * len(ordered) // 100)]


class Bench:
    """A full store and a raw file of the same size side by side in one directory."""

    def __init__(self, folder: Path, block_bytes: int, total_bytes: int, keys: DataKeys | None = None) -> None:
        """`keys`: the store is encrypted with these."""
        self._folder = folder
        self.block_bytes = block_bytes
        self.batch_blocks = max(1, BATCH_BYTES // block_bytes)
        self.batches = total_bytes // block_bytes // self.batch_blocks
        if self.batches < 2 * IN_FLIGHT or block_bytes % 4096:
            least = 2 * IN_FLIGHT * self.batch_blocks * block_bytes
            raise InvalidRequest(f"--size is {format_size(least)} at least, and --block a multiple of 4KiB")
        self.total_bytes = self.batches * self.batch_blocks * block_bytes
        self._namespace = Namespace("bench/model", "bench:1", "bfloat16", "L2HND", 16, block_bytes)
        self._clock = SystemClock()
        self.arena = memoryview(mmap.mmap(-1, IN_FLIGHT * self.batch_blocks * block_bytes))
        noise = random.Random(1).randbytes(1 << 20)
        for start in range(0, len(self.arena), len(noise)):
            end = min(len(self.arena), start + len(noise))
            self.arena[start:end] = noise[: end - start]
        self._generation = 0
        # Space for slots that a stream of writes reserves, so that a whole generation is there after its put.
        capacity = self.total_bytes + 2 * IN_FLIGHT * self.batch_blocks * block_bytes
        self.tier = DiskTier([folder / "g3"], capacity, self._namespace, clock=self._clock, keys=keys)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The tier open and the raw file made and written through."""
        await self.tier.open()
        self._raw = os.open(self._folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._raw, 0, self.total_bytes)
            self.raw_write()
            yield
        finally:
            os.close(self._raw)
            (self._folder / "raw").unlink()
            await self.tier.close(self._clock.monotonic() + DEADLINE_S)

    def chain(self, batch: int) -> list[BlockKey]:
        """Keys of one batch of the current generation."""
        seed = (self._generation << 32 | batch).to_bytes(16, "little")
        return make_keys(SHARED, [seed + number.to_bytes(16, "little") for number in range(self.batch_blocks)])

    def _blocks(self, lane: int) -> list[memoryview]:
        start = lane * self.batch_blocks * self.block_bytes
        return [
            self.arena[start + i * self.block_bytes : start + (i + 1) * self.block_bytes]
            for i in range(self.batch_blocks)
        ]

    async def _all(self, one: Callable[[int, int], Awaitable[None]]) -> Pass:
        """`one(batch, lane)` for every batch, IN_FLIGHT at a time."""
        todo = iter(range(self.batches))

        async def lane(number: int) -> None:
            for batch in todo:
                await one(batch, number)

        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*map(lane, range(IN_FLIGHT)))
        return self.pass_of(time.perf_counter() - began, time.process_time() - cpu)

    def pass_of(self, seconds: float, cpu_s: float) -> Pass:
        """Figures of one pass."""
        return Pass(self.total_bytes / seconds, cpu_s / (self.total_bytes / 1e9))

    async def put(self) -> Pass:
        """A whole new generation into the tier."""
        self._generation += 1
        return await self._all(self._put_batch)

    async def _put_batch(self, batch: int, lane: int) -> None:
        sealed = await asyncio.to_thread(self._seal, batch, lane)  # as write-behind does
        stored = await self.tier.write(sealed, self._clock.monotonic() + DEADLINE_S)
        assert stored == [Stored.STORED] * len(sealed), set(stored)

    def _seal(self, batch: int, lane: int) -> list[Sealed]:
        life = Lifetime.of(BUILTIN["24h"], self._clock.wall())
        sealed = []
        parent = None
        for number, (key, block) in enumerate(zip(self.chain(batch), self._blocks(lane), strict=True)):
            block[:48] = key
            sealed.append(Sealed(key, number, digest_of([block]), (block,), life, parent))
            parent = key
        return sealed

    async def get(self) -> Pass:
        """The whole generation from the tier."""
        return await self._all(self._get_batch)

    async def _get_batch(self, batch: int, lane: int) -> None:
        chain, blocks = self.chain(batch), self._blocks(lane)
        targets = [Target(number, (block,)) for number, block in enumerate(blocks)]
        results = await self.tier.read(chain, targets, self._clock.monotonic() + DEADLINE_S)
        for key, block, result in zip(chain, blocks, results, strict=True):
            assert isinstance(result, Loaded) and bytes(block[:48]) == key, result

    def raw_write(self) -> Pass:
        """Every block of the raw file, then one sync."""
        return self._raw_pass(os.pwritev, sync=True)

    def digested_write(self) -> Pass:
        """The same, each block after its digest."""

        def write(fd: int, pieces: list[memoryview], offset: int) -> int:
            digest_of(pieces)
            return os.pwritev(fd, pieces, offset)

        return self._raw_pass(write, sync=True)

    def raw_read(self) -> Pass:
        """Every block of the raw file."""
        return self._raw_pass(os.preadv, sync=False)

    def _raw_pass(self, call: Callable[[int, list[memoryview], int], int], *, sync: bool) -> Pass:
        lanes = [block for lane in range(IN_FLIGHT) for block in self._blocks(lane)]

        def one(number: int) -> None:
            moved = call(self._raw, [lanes[number % len(lanes)]], number * self.block_bytes)
            assert moved == self.block_bytes

        began, cpu = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(one, range(self.batches * self.batch_blocks)):
                pass
        if sync:
            os.fdatasync(self._raw)
        return self.pass_of(time.perf_counter() - began, time.process_time() - cpu)

    async def synced_write(self) -> Pass:
        """Every block of the raw file, a sync per batch."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(THREADS) as pool:

            async def one(batch: int, lane: int) -> None:
                offset = batch * self.batch_blocks * self.block_bytes
                writes = [
                    loop.run_in_executor(pool, os.pwritev, self._raw, [block], offset + number * self.block_bytes)
                    for number, block in enumerate(self._blocks(lane))
                ]
                await asyncio.gather(*writes)
                await loop.run_in_executor(pool, os.fdatasync, self._raw)

            return await self._all(one)

    async def single_gets(self, *, writing: bool) -> Gets:
        """One block at a time, with or without puts at full rate beside them. With them the generation is spoilt."""
        rng = random.Random(2)
        kept = [self.chain(batch) for batch in range(self.batches // 2, self.batches)]
        block = memoryview(mmap.mmap(-1, self.block_bytes))
        written = 0
        stop = False
        self._generation += writing

        todo = iter(range(self.batches // 2 - IN_FLIGHT))  # each evicts a batch of the half that is not read

        async def write(lane: int) -> None:
            nonlocal written
            for batch in todo:
                if stop:
                    break
                await self._put_batch(batch, lane)
                written += 1

        started = time.perf_counter()
        writer = asyncio.gather(*map(write, range(IN_FLIGHT))) if writing else None
        out = list[float]()
        while len(out) < GETS if writer is None else not writer.done():
            chain = rng.choice(kept)
            index = rng.randrange(len(chain))
            began = time.perf_counter()
            (result,) = await self.tier.read(chain, [Target(index, (block,))], self._clock.monotonic() + DEADLINE_S)
            out.append(1000 * (time.perf_counter() - began))
            assert isinstance(result, Loaded), result
            stop = len(out) >= GETS_MAX
        if writer is not None:
            await writer
        took = time.perf_counter() - started
        return Gets(out, written * self.batch_blocks * self.block_bytes / took)


async def _rounds(bench: Bench, rounds: int) -> dict[str, Any]:
    async with bench.opened():
        first = await bench.put()
        for _ in range(2):
            await bench.put()
        names = "raw_write", "digested_write", "synced_write", "put", "raw_read", "get"
        passes: dict[str, list[Pass]] = {name: [] for name in names}
        gets: dict[str, list[Gets]] = {"idle": [], "under_writes": []}

        async def measure(*names: str) -> None:
            for name in names:
                one = getattr(bench, name)
                passes[name].append(await (one() if asyncio.iscoroutinefunction(one) else asyncio.to_thread(one)))

        for number in range(rounds):
            # In turn: a device that bounds its rate has some in reserve for whichever comes first.
            turn = -1 if number % 2 else 1
            await measure(*("raw_write", "put")[::turn], "digested_write", *("raw_read", "get")[::turn])
            # Between reads at full rate and single ones, which a device that limits its read rate would slow down.
            await measure("synced_write")
            for name, many in gets.items():
                many.append(await bench.single_gets(writing=name == "under_writes"))
    figures: dict[str, Any] = {
        name: {
            "gb_per_s": summary([one.bytes_per_s / 1e9 for one in many]),
            "cpu_s_per_gb": summary([one.cpu_s_per_gb for one in many]),
        }
        for name, many in passes.items()
    }
    figures["first_fill_gb_per_s"] = first.bytes_per_s / 1e9
    figures["latency_ms"] = {
        name: {f"p{percent}": summary([one.quantile(percent) for one in many]) for percent in (50, 90, 99)}
        | {"gets": sum(len(one.milliseconds) for one in many)}
        for name, many in gets.items()
    }
    figures["written_beside_gets_gb_per_s"] = summary([one.written_bytes_per_s / 1e9 for one in gets["under_writes"]])
    ratio = partial(_ratio, passes)
    figures["ratios"] = {
        "put_over_raw": ratio("put", "raw_write"),
        "put_over_digested": ratio("put", "digested_write"),
        "put_over_synced": ratio("put", "synced_write"),
        "get_over_raw": ratio("get", "raw_read"),
        "put_cpu_s_per_gb": figures["put"]["cpu_s_per_gb"]["median"],
        "put_cpu_beyond_digested_s_per_gb": statistics.median(
            put.cpu_s_per_gb - bare.cpu_s_per_gb
            for put, bare in zip(passes["put"], passes["digested_write"], strict=True)
        ),
        "get_cpu_s_per_gb": figures["get"]["cpu_s_per_gb"]["median"],
        "p99_under_writes_over_idle": statistics.median(
            busy.quantile(99) / idle.quantile(99) for idle, busy in zip(gets["idle"], gets["under_writes"], strict=True)
        ),
    }
    return figures


def _ratio(passes: dict[str, list[Pass]], above: str, below: str) -> float:
    """Median over rounds of the ratio within each round."""
    pairs = zip(passes[above], passes[below], strict=True)
    return statistics.median(one.bytes_per_s / other.bytes_per_s for one, other in pairs)


def measure(folder: Path, block_bytes: int, total_bytes: int, rounds: int) -> dict[str, Any]:
    """All figures for one block size. Writes total_bytes × (4.5 × rounds + 5) into `folder`, which must exist, and
    needs twice total_bytes of space; leaves a store there, for the caller to delete. Blocks for minutes."""
    return asyncio.run(_rounds(Bench(folder, block_bytes, total_bytes), rounds))
