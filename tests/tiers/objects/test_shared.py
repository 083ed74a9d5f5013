"""One bucket, several processes: what one stored the other serves; a crash on either side leaves nothing partial."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.identity.keys import BlockKey, scope_of
from kvtier.retention.terms import Terms
from kvtier.testing import chain_of, payload_of, sample_namespace, seal
from kvtier.testing.servers import S3Server, SeaweedFS
from kvtier.tiers.objects.bucket.open import BucketLimits
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Target

BLOCK = 1 << 20
NS = sample_namespace(BLOCK)
S = 4

WRITER = """
import asyncio, json, sys
from kvtier.identity.keys import scope_of
from kvtier.clock import SystemClock
from kvtier.retention.terms import Terms
from kvtier.testing import chain_of, sample_namespace, seal
from kvtier.tiers.objects.tier import ObjectTier

async def main(url, options, client, blocks, salt, ttl):
    ns, clock = sample_namespace(1 << 20), SystemClock()
    tier = ObjectTier(url, ns, clock=clock, options=options, client=client, stride=4)
    await tier.open()
    chain = chain_of(ns, blocks, 7, scope_of(salt))
    print("ready", flush=True)
    results = await tier.write(
        seal(chain, range(blocks), 1 << 20, clock.wall(), Terms("t", ttl=ttl)), clock.monotonic() + 60
    )
    print(json.dumps([str(r) for r in results]), flush=True)
    await tier.close(clock.monotonic() + 5)

asyncio.run(main(*json.loads(sys.argv[1])))
"""


def start_writer(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, json.dumps(args)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )  # fmt: skip


async def open_tier(server: S3Server, url: str, **more: object) -> ObjectTier:
    more = {"clock": SystemClock(), "options": server.options, "stride": S} | more
    tier = ObjectTier(url, NS, **more)  # type: ignore[arg-type]
    await tier.open()
    return tier


async def read(tier: ObjectTier, chain: Sequence[BlockKey], seconds: float = 30) -> list[Loaded | Miss]:
    buffers = [bytearray(BLOCK) for _ in chain]
    targets = [Target(i, (memoryview(b),)) for i, b in enumerate(buffers)]
    results = await tier.read(chain, targets, SystemClock().monotonic() + seconds)
    for key, buffer, result in zip(chain, buffers, results, strict=True):
        assert not isinstance(result, Loaded) or buffer == payload_of(key, BLOCK), "wrong bytes"
    return results


def loaded(results: Sequence[object]) -> int:
    return sum(isinstance(result, Loaded) for result in results)


async def test_what_one_process_stored_another_serves(seaweedfs: S3Server) -> None:
    url = seaweedfs.new_bucket()
    writer = start_writer(url, seaweedfs.options, "s3fs", 10, "tenant", 3600)
    out, _ = writer.communicate(timeout=60)
    assert json.loads(out.splitlines()[1]) == ["stored"] * 10
    tier = await open_tier(seaweedfs, url)
    chain = chain_of(NS, 10, 7, scope_of("tenant"))
    deadline = SystemClock().monotonic() + 30
    assert await tier.lookup(chain, range(10), deadline) == [None] * 10
    assert loaded(await read(tier, chain)) == 10
    assert loaded(await read(tier, chain_of(NS, 10, 7, scope_of("another")))) == 0
    await tier.close(deadline)


async def test_a_writer_killed_in_mid_upload_leaves_nothing_partial(seaweedfs: S3Server) -> None:
    url = seaweedfs.new_bucket()
    chain = chain_of(NS, 64, 7, scope_of("tenant"))
    tier = await open_tier(seaweedfs, url)
    served = 0
    for delay in (0.02, 0.1):
        writer = start_writer(url, seaweedfs.options, "obstore", 64, "tenant", 3600)
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        await asyncio.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        results = await read(tier, chain)
        assert Miss.CORRUPT not in results, "a partial object was visible"
        served = max(served, loaded(results))
        await asyncio.sleep(0.1)
    writer = start_writer(url, seaweedfs.options, "obstore", 64, "tenant", 3600)
    out, _ = writer.communicate(timeout=60)
    assert set(json.loads(out.splitlines()[1])) <= {"stored", "present"}
    fresh = await open_tier(seaweedfs, url)  # one that does not remember what was not there a moment ago
    assert loaded(await read(fresh, chain)) == 64
    for each in (tier, fresh):
        await each.close(SystemClock().monotonic() + 5)


class Ahead(SystemClock):
    """The same clock, `seconds` later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wall(self) -> float:
        return super().wall() + self._seconds


async def test_a_longer_term_of_another_process_outlives_the_first(seaweedfs: S3Server) -> None:
    url = seaweedfs.new_bucket()
    tier = await open_tier(seaweedfs, url)
    chain = chain_of(NS, S, 7, scope_of("tenant"))
    clock = SystemClock()
    await tier.write(seal(chain, range(S), BLOCK, clock.wall(), Terms("short", ttl=600)), clock.monotonic() + 30)
    other = chain_of(NS, S, 8, scope_of("tenant"))
    await tier.write(seal(other, range(S), BLOCK, clock.wall(), Terms("short", ttl=600)), clock.monotonic() + 30)
    out, _ = start_writer(url, seaweedfs.options, "s3fs", S, "tenant", 3600).communicate(timeout=60)
    assert json.loads(out.splitlines()[1]) == ["present"] * S
    fresh = await open_tier(seaweedfs, url, clock=Ahead(700))
    assert loaded(await read(fresh, chain)) == S
    assert loaded(await read(fresh, other)) == 0, "the control: what nobody extended is gone"
    await tier.close(clock.monotonic() + 5)
    await fresh.close(clock.monotonic() + 5)


@pytest.mark.parametrize("client", ["obstore", pytest.param("s3fs", marks=pytest.mark.long)])
async def test_the_server_is_killed_in_mid_transfer_and_comes_back(tmp_path: Path, client: str) -> None:
    server = SeaweedFS(tmp_path / "weed")
    try:
        server.start()
    except (OSError, RuntimeError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no SeaweedFS: {error}")
    clock = SystemClock()
    try:
        url = server.new_bucket()
        tier = await open_tier(server, url, client=client, limits=BucketLimits(connect_s=1, read_s=2), attempts=2)
        chains = [chain_of(NS, 16, seed) for seed in range(8)]
        first = seal(chains[0], range(16), BLOCK, clock.wall())
        assert all(r.durable for r in await tier.write(first, clock.monotonic() + 30))
        writes = [
            asyncio.create_task(tier.write(seal(c, range(16), BLOCK, clock.wall()), clock.monotonic() + 8))
            for c in chains[1:]
        ]
        await asyncio.sleep(0.15)
        began = time.monotonic()
        server.kill()
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert time.monotonic() - began < 40, "a write outlived its deadline"
        assert all(isinstance(r, (list, Exception)) for r in results)
        # With the server gone: misses, at once.
        began = time.monotonic()
        assert loaded(await read(tier, chains[0], seconds=3)) == 0
        assert time.monotonic() - began < 30
        server.start()
        give_up = time.monotonic() + 60
        while loaded(await read(tier, chains[0])) < 16:
            assert time.monotonic() < give_up, "not served within a minute of the server's return"
            await asyncio.sleep(0.5)
        for chain, result in zip(chains[1:], results, strict=True):
            got = await read(tier, chain)
            assert Miss.CORRUPT not in got
            if isinstance(result, list):
                for stored, there in zip(result, got, strict=True):
                    assert not stored.durable or isinstance(there, Loaded), "an acknowledged block is gone"
            while not all(
                r.durable for r in await tier.write(seal(chain, range(16), BLOCK, clock.wall()), clock.monotonic() + 10)
            ):
                assert time.monotonic() < give_up + 30, "writes do not work again"
                await asyncio.sleep(0.5)
        await tier.close(clock.monotonic() + 5)
    finally:
        server.stop()


async def test_a_cancelled_read_writes_nothing_afterwards(seaweedfs: S3Server) -> None:
    url = seaweedfs.new_bucket()
    tier = await open_tier(seaweedfs, url)
    chain, clock = chain_of(NS, 32), SystemClock()
    await tier.write(seal(chain, range(32), BLOCK, clock.wall()), clock.monotonic() + 30)
    for delay in (0.0, 0.005, 0.02, 0.05):
        buffers = [bytearray(BLOCK) for _ in chain]
        targets = [Target(i, (memoryview(b),)) for i, b in enumerate(buffers)]
        task = asyncio.create_task(tier.read(chain, targets, clock.monotonic() + 30))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
            raise asyncio.CancelledError  # it was faster
        for buffer in buffers:
            buffer[:] = b"\xaa" * BLOCK
        await asyncio.sleep(0.1)
        assert all(buffer == b"\xaa" * BLOCK for buffer in buffers), "written to after the call was over"
    assert loaded(await read(tier, chain)) == 32
    tier.check()
    await tier.close(clock.monotonic() + 5)
