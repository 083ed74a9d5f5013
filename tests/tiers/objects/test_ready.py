"""Getting ready: one listing for all callers, and none of them decides for the others."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.errors import TierError
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.objects.tier import FRESH_S
from tests.tiers.objects.support.inline import inline_tier
from tests.tiers.objects.support.virtual_bucket import VirtualBucket, VirtualServer

NS = sample_namespace(64)


class Gated(VirtualBucket):
    """Listings wait for `gate`; `down`: they fail."""

    def __init__(self, server: VirtualServer) -> None:
        super().__init__(server)
        self.gate = asyncio.Event()
        self.gate.set()
        self.down = False

    async def list(self, prefix: str, after: str = ""):  # type: ignore[no-untyped-def]
        await self.gate.wait()
        if self.down:
            self.requests["list"] += 1
            raise TierError("g4", "list", "down")
        async for page in super().list(prefix, after):
            yield page


async def test_a_caller_that_gives_up_leaves_the_listing_to_the_others() -> None:
    server = VirtualServer()
    bucket = Gated(server)
    tier, _ = inline_tier(NS, server, 4, bucket=bucket)
    await tier.open()
    server.clock.advance(FRESH_S + 1)
    bucket.requests.clear()
    bucket.gate.clear()
    calls = [asyncio.create_task(tier.pins()) for _ in range(5)]
    await asyncio.sleep(0.01)
    for call in calls[:4]:
        call.cancel()
    await asyncio.sleep(0.01)
    bucket.gate.set()
    assert await calls[4] == [] and bucket.requests["list"] == 1
    bucket.gate.clear()
    server.clock.advance(FRESH_S + 1)
    for _ in range(3):
        lone = asyncio.create_task(tier.pins())
        await asyncio.sleep(0.01)
        lone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lone
    bucket.gate.set()
    assert await tier.lookup(chain_of(NS, 4), range(4), server.clock.monotonic() + 5)
    assert tier.problem == "" and bucket.requests["list"] == 2
    await tier.close(server.clock.monotonic() + 5)


async def test_after_a_failure_calls_fail_at_once_for_a_while() -> None:
    server = VirtualServer()
    bucket = Gated(server)
    tier, _ = inline_tier(NS, server, 4, bucket=bucket)
    await tier.open()
    server.clock.advance(FRESH_S + 1)
    bucket.requests.clear()
    bucket.down = True
    for _ in range(3):
        with pytest.raises(TierError, match="down"):
            await tier.pins()
    assert bucket.requests["list"] == 1
    bucket.down = False
    server.clock.advance(4)
    assert await tier.pins() == []
    await tier.close(server.clock.monotonic() + 5)
