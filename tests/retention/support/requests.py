"""A cache over given tiers, and requests to it as an engine makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import kvtier
from kvtier.testing import VirtualClock, payload_of, payloads_of, sample_namespace
from kvtier.tiers.protocol import Tier

BLOCK = 4096
NS = sample_namespace(BLOCK)


@contextmanager
def opened(
    clock: VirtualClock | None = None, tiers: Sequence[Tier] = (), blocks: int = 16, **more: object
) -> Iterator[kvtier.Cache]:
    """A cache with `blocks` slots in G2 above `tiers`; `more` are sections of its configuration."""
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": blocks * BLOCK}}, **more})
    with kvtier.open(config, NS, clock=clock or VirtualClock(), tiers=tiers) as cache:
        yield cache
        cache.check()


def put(cache: kvtier.Cache, keys: list[bytes], **options: object) -> int:
    """As a request does it: looked up, then stored."""
    cache.get(keys).release()
    return cache.put(keys, payloads_of(keys, BLOCK), **options)  # type: ignore[arg-type]


def served(cache: kvtier.Cache, keys: list[bytes]) -> int:
    """Leading blocks that the cache serves, each with its right bytes."""
    with cache.get(keys) as hit:
        assert [bytes(block) for block in hit.blocks] == [payload_of(key, BLOCK) for key in keys[: len(hit)]]
        return len(hit)
