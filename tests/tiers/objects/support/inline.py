"""A G4 tier without a thread of its own, over a virtual bucket: a history is one thread, and the same each time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kvtier.clock import Clock
from kvtier.identity.namespace import Namespace
from kvtier.tiers.objects.tier import ObjectTier
from tests.tiers.objects.support.virtual_bucket import VirtualBucket, VirtualServer

T = TypeVar("T")


class Inline:
    """`LoopThread` on the caller's own loop."""

    usable = True

    def start(self) -> None:
        pass

    async def run(self, work: Coroutine[Any, Any, T], budget_s: float | None = None) -> T:
        async with asyncio.timeout(budget_s):
            return await work

    async def run_or_abandon(self, work: Coroutine[Any, Any, T]) -> T:
        return await work

    def stop(self, grace_s: float) -> Future[None]:
        ended: Future[None] = Future()
        ended.set_result(None)
        return ended


def inline_tier(
    namespace: Namespace, server: VirtualServer, stride: int, *, bucket: VirtualBucket | None = None,
    clock: Clock | None = None, seed: int = 0,
) -> tuple[ObjectTier, VirtualBucket]:  # fmt: skip
    """A closed tier, and its way to the server."""
    tier = ObjectTier("memory://none/x", namespace, clock=clock or server.clock, stride=stride, attempts=1, seed=seed)
    bucket = bucket or VirtualBucket(server)
    retrying = tier._store.bucket
    retrying._inner, retrying.renewable, retrying.keeps_proof = bucket, bucket.renewable, bucket.keeps_proof
    tier._loop = Inline()  # type: ignore[assignment]
    return tier, bucket
