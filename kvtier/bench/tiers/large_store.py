"""A G3 store of many small blocks: how long it takes to open, and its puts beside `kvtier g3 verify`.

All blocks are zeros, and so are the slab files: the entries are made without puts, which would take minutes.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
ALONE_S, BESIDE_S = 8.0, 16.0
VERIFY_BYTES_PER_S = 100 << 20
TARGETS = {"open_s": 0.05, "beside_verify_over_alone": 0.8}
_ENTRIES_PER_COMMIT = 20_000


def measure(folder: Path, blocks: int) -> dict[str, Any]:
    """Seconds from a closed store of `blocks` blocks to an open one, and on to the first block from it; puts per second
    alone, and while another process verifies the store: its index first, then its blocks at VERIFY_BYTES_PER_S. Leaves
    a store in `folder`, for the caller to delete. Blocks for minutes."""
    return asyncio.run(_measure(folder / "large", blocks))


async def _measure(path: Path, blocks: int) -> dict[str, Any]:
    clock = SystemClock()
    namespace = Namespace("bench/large", "bench:1", "bfloat16", "L2HND", 16, BLOCK_BYTES)
    keys = make_keys(SHARED, [number.to_bytes(32, "big") for number in range(blocks)])
    await asyncio.to_thread(_fill, path, namespace, keys)
    tier = DiskTier([path], _capacity(blocks), namespace, clock=clock)
    began = time.perf_counter()
    await tier.open()
    opened = time.perf_counter()
    into = memoryview(bytearray(BLOCK_BYTES))
    (result,) = await tier.read(keys[:1], [Target(0, (into,))], clock.monotonic() + DEADLINE_S)
    first = time.perf_counter()
    assert isinstance(result, Loaded), result
    puts = _Puts(tier, clock)
    count = tier.usage().blocks
    await puts.rate(ALONE_S / 2)  # the first fill of what is held for later writes
    before = await puts.rate(ALONE_S)
    beside, verified = await _beside_verify(path, puts)
    after = await puts.rate(ALONE_S)
    await tier.close(clock.monotonic() + DEADLINE_S)
    return {
        "blocks": count,
        "open_s": opened - began,
        "first_hit_after_open_s": first - opened,
        "puts_per_s": {"alone": (before + after) / 2, "beside_verify": beside},
        "beside_verify_over_alone": 2 * beside / (before + after),
        "blocks_verified": verified,
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

    def __init__(self, tier: DiskTier, clock: SystemClock) -> None:
        self._tier = tier
        self._clock = clock
        self._next = 0
        self._zeros = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        self._digest = digest_of([self._zeros])

    async def rate(self, seconds: float) -> float:
        """Blocks per second, of so many seconds."""
        began, stored = time.perf_counter(), 0
        while time.perf_counter() < began + seconds:
            stored += sum(await asyncio.gather(*(self._batch() for _ in range(IN_FLIGHT))))
        return stored / (time.perf_counter() - began)

    async def _batch(self) -> int:
        life = Lifetime.of(BUILTIN["24h"], self._clock.wall())
        self._next += BATCH_BLOCKS
        names = [bytes([1]) + number.to_bytes(31, "big") for number in range(self._next, self._next + BATCH_BLOCKS)]
        sealed = [Sealed(key, 0, self._digest, (self._zeros,), life) for key in make_keys(SHARED, names)]
        results = await self._tier.write(sealed, self._clock.monotonic() + DEADLINE_S)
        assert set(results) == {Stored.STORED}, set(results)
        return len(results)


async def _beside_verify(path: Path, puts: _Puts) -> tuple[float, int]:
    """Puts per second while another process verifies, and how many blocks that had verified."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_verify, args=(path, theirs), daemon=True)
    process.start()
    try:
        await asyncio.to_thread(ours.recv)
        rate = await puts.rate(BESIDE_S)
    finally:
        process.kill()
        process.join()
    verified = 0
    try:
        while ours.poll():
            verified = ours.recv()
    except EOFError:
        pass
    return rate, verified


def _verify(path: Path, told: Connection) -> None:
    with looking_after([path], SystemClock()) as care:
        told.send(0)
        while True:
            care.verify(lambda done, total: told.send(done), bytes_per_s=VERIFY_BYTES_PER_S)
