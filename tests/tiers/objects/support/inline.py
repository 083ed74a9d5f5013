"""A G4 tier without a thread of its own, over a virtual bucket: a history is one thread, and the same each time."""

from __future__ import annotations

from kvtier.clock import Clock
from kvtier.identity.namespace import Namespace
from kvtier.tiers.objects.tier import ObjectTier
from tests.tiers.objects.support.virtual_bucket import VirtualBucket, VirtualServer


def inline_tier(
    namespace: Namespace, server: VirtualServer, stride: int, *, bucket: VirtualBucket | None = None,
    clock: Clock | None = None, seed: int = 0,
) -> tuple[ObjectTier, VirtualBucket]:  # fmt: skip
    """A closed tier, and its way to the server."""
    bucket = bucket or VirtualBucket(server)
    tier = ObjectTier("x", namespace, clock=clock or server.clock, bucket=bucket, stride=stride, attempts=1, seed=seed)
    return tier, bucket
