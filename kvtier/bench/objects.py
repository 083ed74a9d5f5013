"""What G4 costs over the library below it: throughput, CPU, requests and lookups on one S3 server.

All subjects of one round read the same objects, one after another, so that a slow minute hits all alike:

    kvtier   ObjectTier.read of the blocks, verified, into the caller's buffers
    client   the client library's own ranged read of as many bytes, unverified
    http     http.client on presigned URLs, `readinto`, on threads: no client library at all
"""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from kvtier.bench.record import summary
from kvtier.block import BlockKey
from kvtier.clock import SystemClock
from kvtier.frame import Frame, header_bytes_of
from kvtier.namespace import Namespace
from kvtier.terms import BUILTIN, Lifetime
from kvtier.testing.faults_s3 import FaultyS3
from kvtier.testing.payload import chain_of, payload_of, sample_namespace, seal
from kvtier.tier import Loaded, Target
from kvtier.tiers.bucket_obstore import translated
from kvtier.tiers.bucket_url import Limits
from kvtier.tiers.objects import ObjectTier
from kvtier.tiers.strides import Names
from kvtier.tiers.unit_index import Unit

BLOCK_BYTES = 2 << 20
STRIDE = 16
OBJECTS = 16
READ_BLOCKS = (1, 4, 16)
CONCURRENCY = (1, 8, 32)
BATCH_BYTES = 128 << 20
_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket to measure on: its URL and the s3fs options that reach it."""

    url: str
    options: Mapping[str, Any]


def measure(place: Place, client: Literal["s3fs", "obstore"], rounds: int) -> dict[str, Any]:
    """Throughput in GB/s and CPU seconds per GB of each subject, for reads of 2, 8 and 32 MiB at concurrency 1, 8
    and 32, and of writes of 32 MiB. Fills the bucket with 512 MiB first and empties it afterwards."""
    return asyncio.run(_measure(place, client, rounds))


async def _measure(place: Place, client: Literal["s3fs", "obstore"], rounds: int) -> dict[str, Any]:
    namespace, clock = sample_namespace(BLOCK_BYTES), SystemClock()
    tiers: dict[int, ObjectTier] = {}
    for concurrency in CONCURRENCY:
        limits = Limits(concurrency=concurrency, read_s=60)
        tiers[concurrency] = ObjectTier(
            place.url, namespace, clock=clock, options=place.options, client=client, stride=STRIDE, limits=limits
        )
        await tiers[concurrency].open()
    chains = [chain_of(namespace, STRIDE, seed) for seed in range(OBJECTS)]
    bare, close_bare = await _bare(place, client)
    try:
        writes = await _fill(tiers[8], chains, namespace)
        names = [Names(_prefix(place.url), namespace.digest).unit(chain[-1]) for chain in chains]
        for tier in tiers.values():
            for chain in chains:
                await tier.lookup(chain, range(STRIDE), clock.monotonic() + _DEADLINE_S)
        urls = await _presigned(place, names)
        reads = {}
        for blocks in READ_BLOCKS:
            for concurrency in CONCURRENCY:
                subjects = {
                    "kvtier": _kvtier(tiers[concurrency], chains, blocks),
                    "client": _client(bare, names, blocks),
                    "http": _http(urls, blocks),
                }
                label = f"{blocks * BLOCK_BYTES >> 20} MiB x {concurrency}"
                reads[label] = await _interleaved(subjects, blocks, concurrency, rounds)
        return {"reads": reads, "write_32_mib_x_8": writes}
    finally:
        await close_bare()
        await tiers[8].evict(None)
        for tier in tiers.values():
            await tier.close(clock.monotonic() + 5)


Subject = Callable[[int], Awaitable[None]]
"""Reads from the n-th object."""


async def _interleaved(
    subjects: Mapping[str, Subject], blocks: int, concurrency: int, rounds: int
) -> dict[str, dict[str, Any]]:
    size = blocks * BLOCK_BYTES
    count = max(concurrency, BATCH_BYTES // size)
    speed: dict[str, list[float]] = {name: [] for name in subjects}
    cpu: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(rounds + 1):
        for name, subject in subjects.items():
            gate = asyncio.Semaphore(concurrency)

            async def one(which: int, subject: Subject = subject, gate: asyncio.Semaphore = gate) -> None:
                async with gate:
                    await subject(which % OBJECTS)

            began, used = time.perf_counter(), time.process_time()
            await asyncio.gather(*(one(which) for which in range(count)))
            took, worked = time.perf_counter() - began, time.process_time() - used
            if turn:  # the first is for connections and caches
                speed[name].append(count * size / took / 1e9)
                cpu[name].append(worked / (count * size / 1e9))
    out: dict[str, dict[str, Any]] = {
        name: {"gb_per_s": summary(speed[name]), "cpu_s_per_gb": summary(cpu[name])} for name in subjects
    }
    median = {name: out[name]["gb_per_s"]["median"] for name in subjects}
    out["ratios"] = {f"kvtier/{name}": median["kvtier"] / median[name] for name in ("client", "http")}
    return out


def _kvtier(tier: ObjectTier, chains: Sequence[Sequence[BlockKey]], blocks: int) -> Subject:
    pool: list[list[bytearray]] = []

    async def read(which: int) -> None:
        buffers = pool.pop() if pool else [bytearray(BLOCK_BYTES) for _ in range(blocks)]
        targets = [Target(index, (memoryview(buffer),)) for index, buffer in enumerate(buffers)]
        results = await tier.read(chains[which], targets, SystemClock().monotonic() + _DEADLINE_S)
        assert all(isinstance(result, Loaded) for result in results), results
        pool.append(buffers)

    return read


def _client(bare: Callable[[str, int, int], Awaitable[Any]], names: Sequence[str], blocks: int) -> Subject:
    start = header_bytes_of(STRIDE)

    async def read(which: int) -> None:
        data = await bare(names[which], start, start + blocks * BLOCK_BYTES)
        assert len(data) == blocks * BLOCK_BYTES

    return read


def _http(urls: Sequence[str], blocks: int) -> Subject:
    pool, free = ThreadPoolExecutor(32), []  # type: ignore[var-annotated]
    start, size = header_bytes_of(STRIDE), blocks * BLOCK_BYTES

    def fetch(url: str) -> None:
        parts = urlsplit(url)
        connection, buffer = free.pop() if free else (http.client.HTTPConnection(parts.netloc), bytearray(size))
        connection.request("GET", f"{parts.path}?{parts.query}", headers={"Range": f"bytes={start}-{start + size - 1}"})
        answer, view = connection.getresponse(), memoryview(buffer)
        while view:
            view = view[answer.readinto(view) :]
        answer.read()
        free.append((connection, buffer))

    async def read(which: int) -> None:
        await asyncio.get_running_loop().run_in_executor(pool, fetch, urls[which])

    return read


async def _bare(
    place: Place, client: str
) -> tuple[Callable[[str, int, int], Awaitable[Any]], Callable[[], Awaitable[None]]]:
    """The client library's own ranged read, and what closes it."""
    bucket = urlsplit(place.url).netloc
    if client == "obstore":
        from obstore.store import S3Store

        store = S3Store(bucket, client_options={"allow_http": True}, config=translated(place.options) or {})

        async def by_obstore(name: str, start: int, stop: int) -> Any:
            return await store.get_range_async(name, start=start, end=stop)

        return by_obstore, _nothing
    import s3fs

    fs = s3fs.S3FileSystem(
        asynchronous=True, skip_instance_cache=True,
        config_kwargs={"max_pool_connections": 64, "response_checksum_validation": "when_required"}, **place.options,
    )  # fmt: skip

    session = await fs.set_session()

    async def by_s3fs(name: str, start: int, stop: int) -> Any:
        return await fs._cat_file(f"{bucket}/{name}", start=start, end=stop)

    return by_s3fs, session.close


async def _nothing() -> None:
    pass


async def _presigned(place: Place, names: Sequence[str]) -> list[str]:
    import s3fs

    fs = s3fs.S3FileSystem(asynchronous=True, skip_instance_cache=True, **place.options)
    session = await fs.set_session()
    try:
        parameters = [{"Bucket": urlsplit(place.url).netloc, "Key": name} for name in names]
        return [await session.generate_presigned_url("get_object", Params=each, ExpiresIn=3600) for each in parameters]
    finally:
        await session.close()


async def _fill(tier: ObjectTier, chains: Sequence[Sequence[BlockKey]], namespace: Namespace) -> dict[str, float]:
    clock = SystemClock()
    sealed = [seal(chain, range(STRIDE), BLOCK_BYTES, clock.wall()) for chain in chains]
    began, used = time.perf_counter(), time.process_time()
    for result in await asyncio.gather(*(tier.write(each, clock.monotonic() + _DEADLINE_S) for each in sealed)):
        assert all(stored.durable for stored in result), result
    took, worked = time.perf_counter() - began, time.process_time() - used
    size = len(chains) * STRIDE * BLOCK_BYTES / 1e9
    return {"gb_per_s": size / took, "cpu_s_per_gb": worked / size}


def _prefix(url: str) -> str:
    return urlsplit(url).path.strip("/")


def lookups(place: Place, units: int, rounds: int) -> dict[str, Any]:
    """Milliseconds to look up a prompt of 512 blocks: with `units` strides in the index, and cold (its requests and
    rounds counted) on the server."""
    return asyncio.run(_lookups(place, units, rounds))


async def _lookups(place: Place, units: int, rounds: int) -> dict[str, Any]:
    namespace, clock = sample_namespace(4096), SystemClock()
    chain = chain_of(namespace, 512, seed=1)
    warm_ms, cold_ms, probes = [], [], []
    for _ in range(rounds):
        tier = ObjectTier(place.url, namespace, clock=clock, options=place.options, stride=STRIDE)
        await tier.open()
        deadline = clock.monotonic() + _DEADLINE_S
        await tier.write(seal(chain, range(512), 4096, clock.wall()), deadline)
        await tier.close(deadline)
        tier = ObjectTier(place.url, namespace, clock=clock, options=place.options, stride=STRIDE)
        await tier.open()
        counted = _count_reads(tier)
        began = time.perf_counter()
        found = await tier.lookup(chain, range(512), deadline)
        cold_ms.append(1000 * (time.perf_counter() - began))
        probes.append(counted())
        assert found == [None] * 512
        for start in range(0, 512, STRIDE):
            await tier.lookup(chain[: start + STRIDE], [start], deadline)
        _crowd(tier, namespace, units)
        began = time.perf_counter()
        assert await tier.lookup(chain, range(512), deadline) == [None] * 512
        warm_ms.append(1000 * (time.perf_counter() - began))
        await tier.evict(None)
        await tier.close(clock.monotonic() + 5)
    return {
        "units_in_index": units,
        "warm_ms": summary(warm_ms),
        "cold_ms": summary(cold_ms),
        "cold_probes": summary(probes),
        "cold_rounds_at_most": 2,
    }


def _count_reads(tier: ObjectTier) -> Callable[[], int]:
    bucket, count = tier._store.bucket, 0
    original = bucket.read

    async def read(name: str, start: int, into: Sequence[memoryview]) -> Any:
        nonlocal count
        count += 1
        return await original(name, start, into)

    bucket.read = read  # type: ignore[method-assign]
    return lambda: count


def _crowd(tier: ObjectTier, namespace: Namespace, units: int) -> None:
    """Make the index believe in `units` other strides."""
    clock = SystemClock()
    chain = chain_of(namespace, STRIDE, seed=2)
    life = Lifetime.of(BUILTIN["24h"], clock.wall())
    hashes = tuple(key[16:] for key in chain)
    frame = Frame(namespace.digest, chain[0][:16], 0, 4096, hashes, (bytes(16),) * STRIDE, life)  # type: ignore[arg-type]
    for which in range(units):
        mark = which.to_bytes(8, "little") + hashes[0][8:]
        other = replace(frame, hashes=(mark, *hashes[1:-1], bytes(reversed(mark))))
        tier._store.index.put(Unit(other, frame.total_bytes, "", life, life.last_use, clock.monotonic()))


def requests_per_100k_tokens(put_price: float, get_price: float) -> dict[str, Any]:
    """Requests and bytes to store a prompt of 100,000 tokens (blocks of 16 tokens and 2 MiB) and to load it on another
    replica, counted on a server of our own with small blocks; dollars at the given list prices per 1,000 requests."""
    return asyncio.run(_requests(put_price, get_price))


async def _requests(put_price: float, get_price: float) -> dict[str, Any]:
    tokens, small = 100_000, sample_namespace(4096)
    blocks = tokens // small.block_tokens // STRIDE * STRIDE
    chain, clock = chain_of(small, blocks), SystemClock()
    counts = []
    with FaultyS3().running() as server:
        for action in ("store", "load"):
            tier = ObjectTier(
                "s3://bucket", small, clock=clock, options=server.options, client="obstore", stride=STRIDE
            )
            await tier.open()
            before = server.requests.copy()
            deadline = clock.monotonic() + _DEADLINE_S
            if action == "store":
                await tier.write(seal(chain, range(blocks), 4096, clock.wall()), deadline)
            else:
                await tier.lookup(chain, range(blocks), deadline)
                targets = [Target(index, (memoryview(bytearray(4096)),)) for index in range(blocks)]
                for result, target in zip(await tier.read(chain, targets, deadline), targets, strict=True):
                    assert isinstance(result, Loaded) and target.into[0] == payload_of(chain[target.index], 4096)
            counts.append(dict(server.requests - before))
            await tier.close(deadline)
    size = blocks * BLOCK_BYTES + blocks // STRIDE * header_bytes_of(STRIDE)
    return {
        "tokens": blocks * small.block_tokens,
        "bytes_each_way_at_2_mib_blocks": size,
        "store": {"requests": counts[0], "dollars": _dollars(counts[0], put_price, get_price)},
        "load": {"requests": counts[1], "dollars": _dollars(counts[1], put_price, get_price)},
        "list_prices_per_1000": {"put": put_price, "get": get_price},
    }


def _dollars(counts: Mapping[str, int], put_price: float, get_price: float) -> float:
    puts = sum(counts.get(verb, 0) for verb in ("put", "copy", "list"))
    return round((puts * put_price + (sum(counts.values()) - puts) * get_price) / 1000, 6)
