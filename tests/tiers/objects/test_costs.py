"""Requests of a long prompt, counted: 32,768 tokens of an 8B model are 2,048 blocks of 2 MiB in 128 units."""

from __future__ import annotations

import pytest

from kvtier.identity.keys import BlockKey
from kvtier.testing import VirtualClock, chain_of, payload_of, sample_namespace, seal
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Target
from tests.tiers.objects.support.inline import inline_tier
from tests.tiers.objects.support.virtual_bucket import VirtualBucket, VirtualServer

NS = sample_namespace(64)  # the number of requests does not depend on it
STRIDE, BLOCKS = 16, 2048
CHAIN = chain_of(NS, BLOCKS)


@pytest.fixture
def server() -> VirtualServer:
    return VirtualServer()


async def replica(server: VirtualServer) -> tuple[ObjectTier, VirtualBucket]:
    tier, bucket = inline_tier(NS, server, STRIDE)
    await tier.open()
    bucket.requests.clear()
    return tier, bucket


async def write(tier: ObjectTier, chain: list[BlockKey], clock: VirtualClock) -> None:
    """As write-behind does: some strides at a time."""
    for first in range(0, len(chain), 4 * STRIDE):
        part = seal(chain, range(first, first + 4 * STRIDE), NS.block_bytes, clock.wall())
        assert all(result.durable for result in await tier.write(part, clock.monotonic() + 30))
    await tier.flush(clock.monotonic() + 30)


async def read(tier: ObjectTier, chain: list[BlockKey], clock: VirtualClock) -> None:
    into = [memoryview(bytearray(NS.block_bytes)) for _ in chain]
    found = await tier.lookup(chain, range(len(chain)), clock.monotonic() + 30)
    assert found == [None] * len(chain)
    for first in range(0, len(chain), 64):
        targets = [Target(at, (into[at],)) for at in range(first, first + 64)]
        results = await tier.read(chain, targets, clock.monotonic() + 30)
        assert all(isinstance(result, Loaded) for result in results)
    assert [bytes(view) for view in into] == [payload_of(key, NS.block_bytes) for key in chain]


async def test_a_long_prefix_takes_one_request_a_unit(server: VirtualServer) -> None:
    one, writing = await replica(server)
    await write(one, CHAIN, server.clock)
    assert writing.requests["put"] <= 130 and writing.requests.total() <= 132
    two, reading = await replica(server)
    server.clock.advance(15)
    await two._store.deltas.poll()  # as a heartbeat does
    reading.requests.clear()
    await read(two, CHAIN, server.clock)
    assert reading.requests["get"] <= 130 and reading.requests.total() <= 131
    reading.requests.clear()
    assert await two.lookup(CHAIN, range(BLOCKS), server.clock.monotonic() + 30) == [None] * BLOCKS
    assert not reading.requests
    three, cold = await replica(server)
    cold.requests.clear()
    await read(three, CHAIN, server.clock)
    assert cold.requests["get"] <= 128 + 28
    for tier in (one, two, three):
        await tier.close(server.clock.monotonic() + 5)


@pytest.mark.parametrize("blocks", [1, 15, 16, 17, 64, 512, BLOCKS, BLOCKS + 5])
async def test_an_unknown_prompt_takes_few_requests(server: VirtualServer, blocks: int) -> None:
    one, _ = await replica(server)
    await write(one, CHAIN, server.clock)
    two, bucket = await replica(server)
    for learned in (False, True):
        if learned:
            server.clock.advance(15)
            await two._store.deltas.poll()
        bucket.requests.clear()
        chain = chain_of(NS, blocks, seed=9 + learned)
        found = await two.lookup(chain, range(blocks), server.clock.monotonic() + 30)
        assert found == [Miss.ABSENT] * blocks
        assert bucket.requests.total() <= 8, bucket.requests
    for tier in (one, two):
        await tier.close(server.clock.monotonic() + 5)
