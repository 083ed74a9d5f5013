"""A bucket of many strides: look-up time, time to read other replicas' deltas, requests and their price."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvtier.bench.record import summary
from kvtier.bench.tiers.objects import STRIDE, ServerPlace
from kvtier.clock import SystemClock
from kvtier.config import G4
from kvtier.identity.namespace import Namespace
from kvtier.testing.faults_s3 import FaultyS3
from kvtier.testing.payload import chain_of, payload_of, sample_namespace, seal
from kvtier.tiers.objects.bucket.open import BucketLimits
from kvtier.tiers.objects.frame import header_bytes_of
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Target

PROMPT_BLOCKS = 512
TINY_BYTES = 64
"""Bytes per block where only names and headers matter."""

LIKE_BYTES = 2 << 20
"""Bytes per block that requests and prices are stated for (16 tokens of an 8B model)."""

WARM_TURNS = 200
COLD_TURNS = 5
DELAY_S = 0.25
"""Added to every request to count round trips: long against the server's own time."""

_DEADLINE_S = 600.0


def lookups(place: ServerPlace, strides: int) -> dict[str, Any]:
    """Fill a bucket with `strides` real objects of tiny blocks and look a prompt of 512 blocks up in it.

    `learn`: a second replica reads the first one's deltas. `warm`: by its index alone. `cold`: by a replica with an
    empty index, requests and round trips counted. Leaves the objects in the bucket.
    """
    return asyncio.run(_lookups(place, strides))


async def _lookups(place: ServerPlace, strides: int) -> dict[str, Any]:
    namespace, clock = sample_namespace(TINY_BYTES), SystemClock()
    deadline = clock.monotonic() + _DEADLINE_S
    per_chain = PROMPT_BLOCKS // STRIDE
    began = time.perf_counter()
    writer = await _opened(place, namespace)
    gate = asyncio.Semaphore(4)

    async def store(seed: int) -> None:
        async with gate:
            blocks = seal(chain_of(namespace, PROMPT_BLOCKS, seed), range(PROMPT_BLOCKS), TINY_BYTES, clock.wall())
            results = await writer.write(blocks, deadline)
            assert all(stored.durable for stored in results), results

    chains = -(-strides // per_chain)
    await asyncio.gather(*(store(seed) for seed in range(chains)))
    await writer.close(deadline)
    filled_s = time.perf_counter() - began
    prompt = chain_of(namespace, PROMPT_BLOCKS, seed=chains // 2)
    cold = [await _cold(place, namespace, prompt) for _ in range(COLD_TURNS)]
    return {
        "strides": chains * per_chain,
        "objects_per_s_stored": chains * per_chain / filled_s,
        "cold": {
            "ms": summary([turn["ms"] for turn in cold]),
            "requests": summary([turn["requests"] for turn in cold]),
            "round_trips": await _round_trips(place, namespace, prompt),
        },
        **await _by_index(place, namespace, prompt, chains * per_chain),
    }


async def _opened(place: ServerPlace, namespace: Namespace) -> ObjectTier:
    limits = BucketLimits(concurrency=32, read_s=60)
    tier = ObjectTier(place.url, namespace, clock=SystemClock(), options=place.options, stride=STRIDE, limits=limits)
    await tier.open()
    return tier


async def _cold(place: ServerPlace, namespace: Namespace, prompt: Any) -> dict[str, float]:
    tier = await _opened(place, namespace)
    deadline = SystemClock().monotonic() + _DEADLINE_S
    count = _counting(tier)
    began = time.perf_counter()
    found = await tier.lookup(prompt, range(len(prompt)), deadline)
    took = {"ms": 1000 * (time.perf_counter() - began), "requests": count()}
    assert found == [None] * len(prompt), found
    await tier.close(SystemClock().monotonic())
    return took


async def _round_trips(place: ServerPlace, namespace: Namespace, prompt: Any) -> float:
    """Time of a cold look-up in units of DELAY_S, which is added to every request."""
    tier = await _opened(place, namespace)
    _delayed(tier, DELAY_S)
    began = time.perf_counter()
    found = await tier.lookup(prompt, range(len(prompt)), SystemClock().monotonic() + _DEADLINE_S)
    took = time.perf_counter() - began
    assert found == [None] * len(prompt), found
    await tier.close(SystemClock().monotonic())
    return round(took / DELAY_S, 2)


async def _by_index(place: ServerPlace, namespace: Namespace, prompt: Any, strides: int) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tier = await _opened(place, namespace)
    clock = SystemClock()
    deadline = clock.monotonic() + _DEADLINE_S
    began = time.perf_counter()
    unknown = chain_of(namespace, STRIDE, seed=strides)
    late_ms = []
    while tier.counters()["learnt_units"] < strides and clock.monotonic() < deadline:
        started = time.perf_counter()
        await tier.lookup(unknown, [0], clock.monotonic() + 0.2)
        late_ms.append(1000 * (time.perf_counter() - started))
        await asyncio.sleep(0.1)
    learnt_s = time.perf_counter() - began
    warm_ms = []
    for _ in range(WARM_TURNS):
        started = time.perf_counter()
        found = await tier.lookup(prompt, range(len(prompt)), clock.monotonic() + 1)
        warm_ms.append(1000 * (time.perf_counter() - started))
        assert found == [None] * len(prompt)
    out = {
        "learn": {
            "strides": tier.counters()["learnt_units"],
            "seconds": learnt_s,
            "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
            "slowest_lookup_meanwhile_ms": max(late_ms, default=0.0),
        },
        "warm_ms": summary(warm_ms) | {"p99": sorted(warm_ms)[int(0.99 * len(warm_ms))]},
    }
    await tier.close(clock.monotonic() + 5)
    return out


def _counting(tier: ObjectTier) -> Callable[[], int]:
    """Counts the header reads of a tier from now on."""
    bucket: Any = tier._store.bucket
    original, count = bucket.read, 0

    async def read(*args: Any) -> Any:
        nonlocal count
        count += 1
        return await original(*args)

    bucket.read = read
    return lambda: count


def _delayed(tier: ObjectTier, seconds: float) -> None:
    bucket: Any = tier._store.bucket

    def slow(verb: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def later(*args: Any) -> Any:
            await asyncio.sleep(seconds)
            return await verb(*args)

        return later

    for verb in ("head", "read"):
        setattr(bucket, verb, slow(getattr(bucket, verb)))


def per_100k_tokens(g4: G4) -> dict[str, Any]:
    """Requests and bytes to store a prompt of 100,000 tokens (blocks of 16 tokens and 2 MiB) and to load it on another
    replica, counted on a server of our own with small blocks; dollars at `g4.prices`."""
    return asyncio.run(_requests(g4.prices))


async def _requests(prices: Mapping[str, float]) -> dict[str, Any]:
    tokens, small = 100_000, sample_namespace(4096)
    blocks = tokens // small.block_tokens // STRIDE * STRIDE
    chain, clock = chain_of(small, blocks), SystemClock()
    counts = []
    with FaultyS3().running() as server:
        for action in ("store", "load"):
            tier = ObjectTier(
                "s3://bucket", small, clock=clock, options=server.options, client="obstore", stride=STRIDE
            )
            before = server.requests.copy()
            await tier.open()
            deadline = clock.monotonic() + _DEADLINE_S
            if action == "store":
                await tier.write(seal(chain, range(blocks), 4096, clock.wall()), deadline)
                await tier.flush(deadline)
            else:
                await tier.lookup(chain, range(blocks), deadline)
                targets = [Target(index, (memoryview(bytearray(4096)),)) for index in range(blocks)]
                for result, target in zip(await tier.read(chain, targets, deadline), targets, strict=True):
                    assert isinstance(result, Loaded) and target.into[0] == payload_of(chain[target.index], 4096)
            counts.append(dict(server.requests - before))
            await tier.close(deadline)
    size = blocks * LIKE_BYTES + blocks // STRIDE * header_bytes_of(STRIDE)
    return {
        "tokens": blocks * small.block_tokens,
        "bytes_each_way": size,
        "store": {"requests": counts[0], "dollars": _dollars(counts[0], prices)},
        "load": {"requests": counts[1], "dollars": _dollars(counts[1], prices)},
        "dollars_per_day_kept": round(size / 1e9 * prices["gb_month"] / 30, 6),
        "prices": dict(prices),
    }


def _dollars(counts: Mapping[str, int], prices: Mapping[str, float]) -> float:
    puts = sum(counts.get(verb, 0) for verb in ("put", "copy", "list"))
    free = counts.get("delete", 0)
    return round((puts * prices["put"] + (sum(counts.values()) - puts - free) * prices["get"]) / 1000, 6)
