"""G4 against the library below it: throughput and CPU time of reads on one S3 server.

All subjects of one round read the same objects, one after another, so that a slow minute hits all alike:

    kvtier   ObjectTier.read of the blocks, verified, into the caller's buffers
    client   the client library's own ranged read of as many bytes, unverified
    http     http.client on presigned URLs, `readinto`, on threads: no client library at all
"""

from __future__ import annotations

import asyncio
import http.client
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from kvtier.bench.record import summary
from kvtier.clock import SystemClock
from kvtier.identity.keys import BlockKey
from kvtier.identity.namespace import Namespace
from kvtier.keyring import Keyring
from kvtier.testing.payload import chain_of, sample_namespace, seal
from kvtier.testing.servers import SeaweedFS
from kvtier.tiers.objects.bucket.obstore import translated
from kvtier.tiers.objects.bucket.open import BucketLimits, open_bucket
from kvtier.tiers.objects.frame import header_bytes_of
from kvtier.tiers.objects.names import ObjectNames
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Target

BLOCK_BYTES = 2 << 20
STRIDE = 16
OBJECTS = 16
READ_BLOCKS = (1, 4, 16)
CONCURRENCY = (1, 8, 32)
BATCH_BYTES = 128 << 20
_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """A bucket to measure on: its URL and the s3fs options that reach it."""

    url: str
    options: Mapping[str, Any]


@contextmanager
def emptied(place: ServerPlace) -> Iterator[ServerPlace]:
    """`place`, whose objects are all deleted at the end."""

    async def empty() -> None:
        bucket, prefix = open_bucket(place.url, place.options, "auto", SystemClock(), BucketLimits())
        await bucket.start()
        try:
            async for page in bucket.list(f"{prefix}/"):
                await bucket.delete_many([stat.name for stat in page])
        finally:
            await bucket.close()

    try:
        yield place
    finally:
        asyncio.run(empty())


@contextmanager
def on_loopback(folder: Path | None = None) -> Iterator[ServerPlace]:
    """A new bucket of a SeaweedFS that runs meanwhile, with its data in a temporary directory of `folder`."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=folder) as data:
        server = SeaweedFS(Path(data))
        server.start()
        try:
            yield ServerPlace(server.new_bucket(), server.options)
        finally:
            server.stop()


def measure(place: ServerPlace, client: Literal["s3fs", "obstore"], rounds: int) -> dict[str, Any]:
    """Throughput in GB/s and CPU seconds per GB of each subject, for reads of 2, 8 and 32 MiB at concurrency 1, 8
    and 32, and of writes of 32 MiB. Fills the bucket with 512 MiB first and empties it afterwards."""
    return asyncio.run(_measure(place, client, rounds))


async def _measure(place: ServerPlace, client: Literal["s3fs", "obstore"], rounds: int) -> dict[str, Any]:
    namespace, clock = sample_namespace(BLOCK_BYTES), SystemClock()
    tiers: dict[int, ObjectTier] = {}
    for concurrency in CONCURRENCY:
        limits = BucketLimits(concurrency=concurrency, read_s=60)
        tiers[concurrency] = ObjectTier(
            place.url, namespace, clock=clock, options=place.options, client=client, stride=STRIDE, limits=limits
        )
        await tiers[concurrency].open()
    chains = [chain_of(namespace, STRIDE, seed) for seed in range(OBJECTS)]
    bare, close_bare = await _bare(place, client)
    try:
        writes = await _fill(tiers[8], chains, namespace)
        objects = ObjectNames(_prefix(place.url), namespace.digest, Keyring.public())
        names = [objects.unit(chain[-1]) for chain in chains]
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
        names = list(subjects)
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            subject = subjects[name]
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
    for name in subjects:
        if name != "kvtier":
            # Round by round: what slows one subject of a round down slows its neighbours, too.
            pairs = zip(speed["kvtier"], speed[name], strict=True)
            out.setdefault("ratios", {})[f"kvtier/{name}"] = summary([ours / theirs for ours, theirs in pairs])
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
    place: ServerPlace, client: str
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


async def _presigned(place: ServerPlace, names: Sequence[str]) -> list[str]:
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
