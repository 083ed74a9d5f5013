"""G2 beside memory itself: put and get of a prompt's blocks against a plain copy of the same bytes.

`put` is everything up to "readable in G2": reserve (evicting an older prompt), copy, commit. `get` is look-up, lease
and a copy out of the arena. No checksum is computed in either: that is the demotion's work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from kvtier.bench.record import interleaved, summary
from kvtier.cache import Cache
from kvtier.cache import open as open_cache
from kvtier.config import Config
from kvtier.identity.namespace import Namespace

TARGET_RATIO = 0.8
"""Of a same-run copy, for blocks of 2 MiB, each way."""

_PROMPTS = 3


def measure(block_bytes: int, blocks: int = 64, rounds: int = 9) -> dict[str, dict[str, float]]:
    """Bytes per second of copy, put and get, interleaved, and ratios. Needs RAM for 5 prompts of `blocks` blocks."""
    namespace = Namespace("bench/model", "bench:1", "bfloat16", "L2HND", 16, block_bytes)
    source: list[Any] = [np.random.default_rng(i).integers(0, 255, block_bytes, np.uint8) for i in range(blocks)]
    # As much memory as the arena has, used as often as it, so that both sides find their lines equally cold.
    stand_in = cycle([[np.ones_like(block) for block in source] for _ in range(_PROMPTS - 1)])
    target = [np.ones_like(block) for block in source]
    config = Config.parse(
        {"tiers": {"g2": {"capacity": (_PROMPTS - 1) * blocks * -(-block_bytes // 4096) * 4096}}, "policy": "lru"}
    )
    with open_cache(config, namespace) as cache:
        chains = [cache.chain_hashes(range(seed, seed + blocks * 16)) for seed in range(_PROMPTS)]
        for chain in chains:
            cache.put(chain, source)
        subjects: dict[str, Callable[[], float]] = {
            "copy_put": lambda: _speed(lambda: _copy(next(stand_in), source), block_bytes * blocks),
            "put": lambda: _speed(lambda: _put(cache, chains, source), block_bytes * blocks),
            "copy_get": lambda: _speed(lambda: _copy(target, next(stand_in)), block_bytes * blocks),
            "get": lambda: _speed(lambda: _get(cache, chains, target), block_bytes * blocks),
        }
        figures = interleaved(rounds, subjects)
    for verb in ("put", "get"):  # round by round: both halves of a ratio had the same neighbours
        figures[f"{verb}_ratio"] = [a / b for a, b in zip(figures[verb], figures[f"copy_{verb}"], strict=True)]
    return {name: summary(values) for name, values in figures.items()}


def _copy(target: Sequence[Any], source: Sequence[Any]) -> None:
    for into, out in zip(target, source, strict=True):
        np.copyto(into, out)


def _put(cache: Cache, chains: Sequence[Sequence[bytes]], source: Sequence[Any]) -> None:
    chain = next(c for c in chains if cache.match(c) == 0)
    before = cache.manager.host.evictions
    assert cache.put(chain, source) == len(chain)
    assert cache.manager.host.evictions - before == len(chain), "the put found its blocks there already"


def _get(cache: Cache, chains: Sequence[Sequence[bytes]], target: Sequence[Any]) -> None:
    chain = next(c for c in chains if cache.match(c) == len(c))
    with cache.get(chain) as hit:
        assert len(hit) == len(chain)
        for into, block in zip(target, hit.blocks, strict=True):
            np.copyto(into, np.frombuffer(block, np.uint8))


def _speed(work: Callable[[], None], size: int) -> float:
    begin = time.perf_counter()
    work()
    return size / (time.perf_counter() - begin)
