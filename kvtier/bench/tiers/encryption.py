"""The cost of encryption: an encrypted store or bucket beside a plain one in the same place, by turns.

The ratio is that of the same round; `…_cpu_s_per_gb` of the ratios is what encryption adds to the CPU time of a put and
of a get. A plain bucket has a keyring, too, and so a tag per block.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from pathlib import Path
from typing import Any

from kvtier.bench.record import summary
from kvtier.bench.tiers.disk import DEADLINE_S, Bench, Pass
from kvtier.bench.tiers.objects import BLOCK_BYTES, OBJECTS, STRIDE, ServerPlace
from kvtier.clock import SystemClock
from kvtier.keyring import KEY_ID_BYTES, SECRET_BYTES, Key, Keyring
from kvtier.testing.payload import chain_of, sample_namespace, seal
from kvtier.tiers.data_keys import StoredKeys
from kvtier.tiers.key_directory import KeyDirectory
from kvtier.tiers.objects.bucket.open import BucketLimits
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Stored, Target

TARGETS = {"put_over_plain": 0.8, "get_over_plain": 0.8, "put_cpu_s_per_gb": 0.45, "get_cpu_s_per_gb": 0.45}
BUCKET_TARGETS = {"put_over_plain": 0.95, "get_over_plain": 0.95, "put_cpu_s_per_gb": 0.45, "get_cpu_s_per_gb": 0.45}
CONCURRENCY = 8


def new_keyring() -> Keyring:
    """One of random keys."""
    return Keyring([Key(secrets.token_bytes(KEY_ID_BYTES), secrets.token_bytes(SECRET_BYTES))], bytes(SECRET_BYTES))


def new_keys(folder: Path, keyring: Keyring) -> StoredKeys:
    """Data keys in a directory below `folder`."""
    return StoredKeys(KeyDirectory(folder / "data-keys"), keyring, SystemClock())


def measure(folder: Path, block_bytes: int, total_bytes: int, rounds: int) -> dict[str, Any]:
    """Figures for one block size. Writes total_bytes × 2 × (rounds + 2) below `folder`, where twice total_bytes must be
    free. Blocks for minutes."""
    (folder / "plain").mkdir()
    (folder / "encrypted").mkdir()
    plain = Bench(folder / "plain", block_bytes, total_bytes)
    encrypted = Bench(folder / "encrypted", block_bytes, total_bytes, new_keys(folder, new_keyring()))
    return asyncio.run(_rounds({"plain": plain, "encrypted": encrypted}, rounds))


async def _rounds(benches: dict[str, Bench], rounds: int) -> dict[str, Any]:
    passes: dict[str, list[Pass]] = {f"{verb}_{kind}": [] for verb in ("put", "get") for kind in benches}
    for bench in benches.values():
        await bench.tier.open()
    try:
        for bench in benches.values():
            for _ in range(2):  # the first fill allocates, the second one evicts
                await bench.put()
        for number in range(rounds):
            kinds = list(benches) if number % 2 else [*benches][::-1]
            for kind in kinds:
                passes[f"put_{kind}"].append(await benches[kind].put())
            for kind in kinds:
                passes[f"get_{kind}"].append(await benches[kind].get())
    finally:
        for bench in benches.values():
            await bench.tier.close(SystemClock().monotonic() + DEADLINE_S)
    return _figures(passes)


def _figures(passes: dict[str, list[Pass]]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        name: {
            "gb_per_s": summary([one.bytes_per_s / 1e9 for one in many]),
            "cpu_s_per_gb": summary([one.cpu_s_per_gb for one in many]),
        }
        for name, many in passes.items()
    }
    figures["ratios"] = {}
    for verb in ("put", "get"):
        pairs = list(zip(passes[f"{verb}_encrypted"], passes[f"{verb}_plain"], strict=True))
        figures["ratios"] |= {
            f"{verb}_over_plain": statistics.median(one.bytes_per_s / other.bytes_per_s for one, other in pairs),
            f"{verb}_cpu_s_per_gb": statistics.median(one.cpu_s_per_gb - other.cpu_s_per_gb for one, other in pairs),
        }
    return figures


def measure_bucket(place: ServerPlace, folder: Path, rounds: int) -> dict[str, Any]:
    """The same for G4: writes and reads of units of 32 MiB, CONCURRENCY at a time. Fills the bucket, and empties it."""
    return asyncio.run(_bucket_rounds(place, folder, rounds))


async def _bucket_rounds(place: ServerPlace, folder: Path, rounds: int) -> dict[str, Any]:
    namespace, clock, ring = sample_namespace(BLOCK_BYTES), SystemClock(), new_keyring()
    tiers = {
        kind: ObjectTier(
            f"{place.url}/{kind}", namespace, clock=clock, options=place.options, stride=STRIDE, keyring=ring,
            limits=BucketLimits(concurrency=CONCURRENCY, read_s=60),
            keys=new_keys(folder, ring) if kind == "encrypted" else None,
        )
        for kind in ("plain", "encrypted")
    }  # fmt: skip
    chains = [chain_of(namespace, STRIDE, seed) for seed in range(OBJECTS)]
    buffers = [[memoryview(bytearray(BLOCK_BYTES)) for _ in range(STRIDE)] for _ in range(CONCURRENCY)]
    blocks = [seal(chain, range(STRIDE), BLOCK_BYTES, clock.wall()) for chain in chains[:CONCURRENCY]]
    size = CONCURRENCY * STRIDE * BLOCK_BYTES

    async def put(tier: ObjectTier) -> None:
        done = await asyncio.gather(*(tier.write(some, clock.monotonic() + DEADLINE_S) for some in blocks))
        assert all(stored is Stored.STORED for some in done for stored in some), done

    async def get(tier: ObjectTier) -> None:
        targets = [[Target(place, (view,)) for place, view in enumerate(some)] for some in buffers]
        wanted = zip(chains, targets, strict=False)
        reads = (tier.read(chain, some, clock.monotonic() + DEADLINE_S) for chain, some in wanted)
        assert all(isinstance(result, Loaded) for some in await asyncio.gather(*reads) for result in some)

    passes: dict[str, list[Pass]] = {f"{verb}_{kind}": [] for verb in ("put", "get") for kind in tiers}
    for tier in tiers.values():
        await tier.open()
    try:
        for number in range(rounds + 1):
            for kind in list(tiers) if number % 2 else [*tiers][::-1]:
                for verb, work in (("put", put), ("get", get), ("get", get)):
                    began, cpu = time.perf_counter(), time.process_time()
                    await work(tiers[kind])
                    took, worked = time.perf_counter() - began, time.process_time() - cpu
                    if number:  # the first is for connections
                        passes[f"{verb}_{kind}"].append(Pass(size / took, worked / (size / 1e9)))
                await tiers[kind].evict(None)
    finally:
        for tier in tiers.values():
            await tier.close(clock.monotonic() + 5)
    return _figures(passes)
