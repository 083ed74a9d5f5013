"""A G3 store of many small blocks: how long it takes to open, its index, its puts beside `kvtier g3 verify`, and its
transactions while every block is replaced by another.

All blocks are zeros, and so are the slab files: the entries are made without puts, which would take minutes. Keys are
digests, so that they come into the index in no order, as those of a model's blocks do.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import mmap
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.checksum import digest_of
from kvtier.clock import SystemClock
from kvtier.identity.keys import SHARED, BlockKey, make_keys
from kvtier.identity.namespace import Namespace
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN
from kvtier.tiers.disk.maintenance import looking_after
from kvtier.tiers.disk.records import NewBlock, SlotReservation
from kvtier.tiers.disk.slab import WRITE_BYTES_MAX, SystemCalls
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Loaded, Sealed, Stored, Target

BLOCK_BYTES = 4096
BATCH_BLOCKS, IN_FLIGHT = 256, 4
DEADLINE_S = 120.0
ALONE_S, BESIDE_S = 12.0, 12.0
VERIFY_BYTES_PER_S = 100 << 20
LONE_PUTS, PUTS_AT_ONCE, ROUNDS_AT_ONCE = 512, 32, 32
TARGETS = {
    "open_s": 0.05, "beside_verify_over_alone": 0.8, "index_bytes_per_block": 650,
    "index_bytes_written_per_lone_put": 70e3, "index_bytes_written_per_put_of_32": 25e3,
    "turnover": {"index_bytes_per_block": 650, "transaction_cpu_ms_p99": 20},
    "shrink": {"transaction_cpu_ms_p99": 20},
}  # fmt: skip
_ENTRIES_PER_COMMIT = 20_000
_IO = Path("/proc/self/io")
_NAMESPACE = Namespace("bench/large", "bench:1", "bfloat16", "L2HND", 16, BLOCK_BYTES)


def measure(folder: Path, blocks: int) -> dict[str, Any]:
    """What `fill` and `measure_filled` do. Leaves a store in `folder`, for the caller to delete. Blocks for minutes."""
    fill(folder, blocks)
    return measure_filled(folder, blocks)


def fill(folder: Path, blocks: int) -> None:
    """Make a full store of so many blocks."""
    _fill(folder / "large", _NAMESPACE, _keys(b"filled", 0, blocks))


def measure_filled(folder: Path, blocks: int) -> dict[str, Any]:
    """Of the store that `fill` made: seconds from a closed store to an open one, and on to the first block from it;
    bytes of the index in used pages per block, and bytes written to it per put, of one put at a time and of
    PUTS_AT_ONCE; puts per second alone, and while another process verifies the store: its index first, then its blocks
    at VERIFY_BYTES_PER_S; at last, while all blocks are replaced, puts per second, milliseconds of the clock and of the
    processor per transaction, bytes written to the index per put, and the index's bytes per block when it is over.
    Then the store is opened with half the capacity, and puts go on until it is as small: seconds, puts and their rate,
    transactions, blocks, and the files' bytes. Blocks for minutes."""
    return asyncio.run(_measure(folder / "large", blocks))


def _keys(kind: bytes, start: int, count: int) -> list[BlockKey]:
    return make_keys(SHARED, [hashlib.sha256(b"%s %d" % (kind, start + number)).digest() for number in range(count)])


async def _measure(path: Path, blocks: int) -> dict[str, Any]:
    gc.freeze()  # as the store's own process does
    clock, keys = SystemClock(), _keys(b"filled", 0, 1)
    tier = DiskTier([path], _capacity(blocks), _NAMESPACE, clock=clock)
    used = _index_bytes(path)
    into = np.zeros(BLOCK_BYTES, np.uint8).data
    began = time.perf_counter()
    await tier.open()
    opened = time.perf_counter()
    (result,) = await tier.read(keys[:1], [Target(0, (into,))], clock.monotonic() + DEADLINE_S)
    first = time.perf_counter()
    assert isinstance(result, Loaded), result
    puts = _Puts(tier, clock)
    held = tier.usage().blocks
    await puts.rate(ALONE_S / 2)  # from now on every put evicts
    lone = await puts.index_bytes(LONE_PUTS, 1)
    at_once = await puts.index_bytes(ROUNDS_AT_ONCE, PUTS_AT_ONCE)
    before = await puts.rate(ALONE_S)
    beside_index, beside_blocks, verified = await _beside_verify(path, puts)
    after = await puts.rate(ALONE_S)
    turnover = await _turnover(path, puts, held)
    await tier.close(clock.monotonic() + DEADLINE_S)
    turnover["index_bytes_per_block"] = _index_bytes(path) / held
    shrink = await _shrink(path, blocks // 2, clock)
    return {
        "blocks": held,
        "open_s": opened - began,
        "first_hit_after_open_s": first - opened,
        "index_bytes_per_block": used / held,
        "index_bytes_written_per_lone_put": lone,
        "index_bytes_written_per_put_of_32": at_once,
        "puts_per_s": {
            "alone": (before + after) / 2,
            "beside_verify_of_index": beside_index,
            "beside_verify": beside_blocks,
        },
        "beside_verify_of_index_over_alone": 2 * beside_index / (before + after),
        "beside_verify_over_alone": 2 * beside_blocks / (before + after),
        "blocks_verified": verified,
        "turnover": turnover,
        "shrink": shrink,
        "targets": TARGETS,
    }


def _capacity(blocks: int) -> int:
    return (blocks + 2 * BATCH_BLOCKS * IN_FLIGHT) * BLOCK_BYTES


def _fill(path: Path, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
    """Entries of blocks of zeros, and files of zeros."""
    life = Lifetime.of(BUILTIN["24h"], SystemClock().wall())
    digest = digest_of([memoryview(bytes(BLOCK_BYTES))])
    store = Store.attach([path], _capacity(len(keys)), BLOCK_BYTES, SystemCalls())
    for start in range(0, len(keys), _ENTRIES_PER_COMMIT):
        names = [namespace.digest + key for key in keys[start : start + _ENTRIES_PER_COMMIT]]
        store.submit(partial(_enter, names=names, digest=digest, life=life)).future.result()
    geometry, zeros = store.geometry, mmap.mmap(-1, WRITE_BYTES_MAX)
    store.release(DEADLINE_S)
    for segment in range(geometry.segments):
        fd = os.open(path / "slab" / f"{segment:08x}.slab", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for offset in range(0, size := geometry.size_of(segment), WRITE_BYTES_MAX):
                os.pwrite(fd, memoryview(zeros)[: size - offset], offset)
            os.fsync(fd)
        finally:
            os.close(fd)


def _enter(txn: WriteTxn, names: Sequence[bytes], digest: bytes, life: Lifetime) -> None:
    """Index entries without payload."""
    for name in names:
        block = NewBlock(name, BLOCK_BYTES, life, digest=digest)
        reservation = txn.reserve(block, life.last_use)
        assert isinstance(reservation, SlotReservation)
        txn.publish(reservation, block, life.last_use)


class _Puts:
    """New blocks into a full store, IN_FLIGHT batches at a time."""

    def __init__(self, tier: DiskTier, clock: SystemClock, kind: bytes = b"put") -> None:
        self._tier = tier
        self._clock = clock
        self._kind = kind
        self._next = 0
        self._zeros = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        self._digest = digest_of([self._zeros])

    async def rate(self, seconds: float) -> float:
        """Blocks per second, of so many seconds."""
        began, stored = time.perf_counter(), 0
        while time.perf_counter() < began + seconds:
            stored += await self.round()
        return stored / (time.perf_counter() - began)

    async def round(self) -> int:
        """A batch for each of those in flight. Returns how many blocks that were."""
        return sum(await asyncio.gather(*(self._batch(BATCH_BLOCKS) for _ in range(IN_FLIGHT))))

    async def index_bytes(self, rounds: int, at_once: int) -> float:
        """Bytes written to the index per put of one block, `at_once` of them in each round."""
        before = _bytes_written()
        for _ in range(rounds):
            await asyncio.gather(*(self._batch(1) for _ in range(at_once)))
        return (_bytes_written() - before) / (rounds * at_once) - BLOCK_BYTES

    async def _batch(self, count: int) -> int:
        life = Lifetime.of(BUILTIN["24h"], self._clock.wall())
        keys = _keys(self._kind, self._next, count)
        self._next += count
        sealed = [Sealed(key, 0, self._digest, (self._zeros,), life) for key in keys]
        results = await self._tier.write(sealed, self._clock.monotonic() + DEADLINE_S)
        assert set(results) == {Stored.STORED}, set(results)
        return len(results)


class _TimedTransactions:
    """While inside, the milliseconds of every transaction of the open store: by the clock, and of the processor; of
    these those before the commit, and those of Python's garbage collector, which may begin in any thread."""

    def __init__(self, path: Path) -> None:
        self._store = Store.visit([path])
        self.wall_ms, self.cpu_ms = list[float](), list[float]()
        self.work_cpu_ms, self.collector_cpu_ms = list[float](), list[float]()
        self._collecting = threading.local()

    def __enter__(self) -> _TimedTransactions:
        index = self._store.index
        transact = index.transact

        def timed(work: Callable[[WriteTxn], Any], **options: Any) -> Any:
            self._collecting.seconds = 0.0
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            worked_s = cpu_s

            def watched(txn: WriteTxn) -> Any:
                nonlocal worked_s
                try:
                    return work(txn)
                finally:
                    worked_s = time.thread_time()

            try:
                return transact(watched, **options)
            finally:
                self.wall_ms.append(1000 * (time.perf_counter() - wall_s))
                self.cpu_ms.append(1000 * (time.thread_time() - cpu_s))
                self.work_cpu_ms.append(1000 * (worked_s - cpu_s))
                self.collector_cpu_ms.append(1000 * self._collecting.seconds)

        index.transact = timed  # type: ignore[method-assign]
        gc.callbacks.append(self._collects)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._collects)
        del self._store.index.transact
        self._store.release(DEADLINE_S)

    def _collects(self, phase: str, _: object) -> None:
        """On the thread that collects, before and after."""
        sign = -1.0 if phase == "start" else 1.0
        self._collecting.seconds = getattr(self._collecting, "seconds", 0.0) + sign * time.thread_time()

    def slowest(self) -> dict[str, float]:
        """Of the processor's milliseconds, those of the transaction that took the most: to tell its cause."""
        number = int(np.argmax(self.cpu_ms))
        return {
            "cpu_ms": self.cpu_ms[number],
            "before_commit_cpu_ms": self.work_cpu_ms[number],
            "collector_cpu_ms": self.collector_cpu_ms[number],
            "ms": self.wall_ms[number],
        }


async def _turnover(path: Path, puts: _Puts, blocks: int) -> dict[str, Any]:
    """Put as many new blocks as the store holds."""
    rounds = -(-blocks // (BATCH_BLOCKS * IN_FLIGHT))
    with _TimedTransactions(path) as timed:
        began, before = time.perf_counter(), _bytes_written()
        for _ in range(rounds):
            await puts.round()
        seconds, written = time.perf_counter() - began, _bytes_written() - before
    stored = rounds * BATCH_BLOCKS * IN_FLIGHT
    return {
        "blocks": stored,
        "puts_per_s": stored / seconds,
        "transactions": len(timed.cpu_ms),
        "transaction_ms": _quantiles(timed.wall_ms),
        "transaction_cpu_ms": _quantiles(timed.cpu_ms),
        "slowest_transaction": timed.slowest(),
        "index_bytes_written_per_put": written / stored - BLOCK_BYTES,
    }


async def _shrink(path: Path, blocks: int, clock: SystemClock) -> dict[str, Any]:
    """Open the store with room for so many blocks, and put new ones until it has no more."""
    capacity = _capacity(blocks)
    tier = DiskTier([path], capacity, _NAMESPACE, clock=clock)
    began = time.perf_counter()
    await tier.open()
    opened = time.perf_counter()
    puts, stored, store = _Puts(tier, clock, kind=b"beside shrinking"), 0, Store.visit([path])
    try:
        with _TimedTransactions(path) as timed:
            while store.shrink.active:
                stored += await puts.round()
        seconds = time.perf_counter() - opened
        after = await puts.rate(ALONE_S / 2)
    finally:
        store.release(DEADLINE_S)
    held = tier.usage().blocks
    await tier.close(clock.monotonic() + DEADLINE_S)
    files = sum(file.stat().st_size for file in (path / "slab").iterdir())
    assert files <= capacity and held * BLOCK_BYTES <= capacity, (files, held, capacity)
    return {
        "open_s": opened - began,
        "seconds": seconds,
        "blocks": held,
        "slab_bytes_over_capacity": files / capacity,
        "puts": stored,
        "puts_per_s": stored / seconds,
        "puts_per_s_afterwards": after,
        "transactions": len(timed.cpu_ms),
        "transaction_ms": _quantiles(timed.wall_ms),
        "transaction_cpu_ms": _quantiles(timed.cpu_ms),
        "slowest_transaction": timed.slowest(),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {name: float(np.quantile(values, q)) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


def _index_bytes(path: Path) -> int:
    """Of the index of a closed store, in used pages."""
    store = Store.visit([path])
    try:
        return store.index.used_bytes()
    finally:
        store.release(DEADLINE_S)


def _bytes_written() -> int:
    """That this process has given to the kernel so far."""
    (line,) = (line for line in _IO.read_text().splitlines() if line.startswith("wchar"))
    return int(line.split()[1])


async def _beside_verify(path: Path, puts: _Puts) -> tuple[float, float, int]:
    """Puts per second while another process checks the index, and while it reads blocks; how many it had read then."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_verify, args=(path, theirs), daemon=True)
    process.start()
    theirs.close()
    verified = 0
    try:
        await asyncio.to_thread(ours.recv)
        of_index = await puts.rate(BESIDE_S)
        while not ours.poll():
            await puts.rate(1.0)
        of_blocks = await puts.rate(BESIDE_S)
        while ours.poll():
            verified = ours.recv()
    finally:
        process.kill()
        process.join()
    return of_index, of_blocks, verified


def _verify(path: Path, told: Connection) -> None:
    with looking_after([path], SystemClock()) as care:
        told.send(0)
        while True:
            care.verify(lambda done, total: told.send(done), bytes_per_s=VERIFY_BYTES_PER_S)
