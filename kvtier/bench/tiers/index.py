"""CPU time per block of hashing, matching and the block pool, on prompts of 8,192 tokens in blocks of 16.

All figures are taken in turn, round after round, beside a floor of the same run: a SHA-256 loop over ready-made
buffers for hashing, a loop of dict look-ups for matching. Time is the thread's CPU time: none of it waits,
and what else the machine does is not its cost.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.bench.record import interleaved, summary
from kvtier.cache import open as open_cache
from kvtier.config import Config
from kvtier.identity.hashing import chain_hashes, chain_root
from kvtier.identity.keys import SHARED, BlockKey, make_keys
from kvtier.identity.namespace import Namespace
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN
from kvtier.tiers.device.block_pool import BlockPool
from kvtier.times import Wall

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
POOL_PROMPTS = 8
TARGETS_US = {"hash": 0.6, "match": 1.0, "pool": 2.0}
"""Microseconds per block."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, the root and the keys that they give."""

    tokens: array[int]
    root: bytes
    keys: list[BlockKey]


def make_prompt(namespace: Namespace, tokens: int, seed: int) -> Prompt:
    """A prompt that shares nothing with one of another seed. Pure."""
    ids = array("I", ((seed * 7919 + i * 31) % 128_000 for i in range(tokens)))
    root = chain_root(namespace.digest, SHARED)
    return Prompt(ids, root, make_keys(SHARED, chain_hashes(root, ids, namespace.block_tokens)))


def measure(tokens: int = 8192, rounds: int = 9, repeats: int = 20) -> dict[str, dict[str, float]]:
    """Microseconds per block, by subject. Blocks for a few seconds; allocates some MiB."""
    blocks = tokens // BLOCK_TOKENS
    namespace = Namespace("bench/model", "bench:1", "bfloat16", "L2HND", BLOCK_TOKENS, BLOCK_BYTES)
    prompts = [make_prompt(namespace, tokens, seed) for seed in range(POOL_PROMPTS)]
    first = prompts[0]
    config = Config.parse({"tiers": {"g2": {"capacity": 2 * blocks * BLOCK_BYTES}}})
    with open_cache(config, namespace) as cache:
        cache.put(first.keys, [bytes(BLOCK_BYTES)] * blocks)
        assert cache.match(first.keys) == blocks
        subjects: dict[str, Callable[[], float]] = {
            "hash": _timed(lambda: chain_hashes(first.root, first.tokens, BLOCK_TOKENS), repeats, blocks),
            "hash_floor": _timed(_sha256_loop(first), repeats, blocks),
            "match": _timed(lambda: cache.match(first.keys), repeats, blocks),
            "match_floor": _timed(_dict_loop(first.keys), repeats, blocks),
            "pool": PoolCycle(prompts, repeats).seconds_per_block,
        }
        figures = interleaved(rounds, subjects)
    return {name: summary([round(s * 1e6, 4) for s in seconds]) for name, seconds in figures.items()}


def _timed(work: Callable[[], object], repeats: int, blocks: int) -> Callable[[], float]:
    def seconds_per_block() -> float:
        begin = time.thread_time()
        for _ in range(repeats):
            work()
        return (time.thread_time() - begin) / (repeats * blocks)

    return seconds_per_block


def _sha256_loop(prompt: Prompt) -> Callable[[], object]:
    raw = prompt.tokens.tobytes()
    step = 4 * BLOCK_TOKENS
    pieces = [raw[i : i + step] for i in range(0, len(raw), step)]

    def loop() -> None:
        parent = prompt.root
        for piece in pieces:
            parent = hashlib.sha256(parent + piece).digest()

    return loop


def _dict_loop(keys: Sequence[BlockKey]) -> Callable[[], object]:
    index = dict.fromkeys(keys, 1)

    def loop() -> None:
        for key in keys:
            if index.get(key) is None:
                raise AssertionError("every key is there")

    return loop


class PoolCycle:
    """A full pool that serves prompt after prompt: each allocation evicts the oldest prompt's blocks.

    Timed: allocate (with its evictions) and free; naming the new blocks in between is not.
    """

    def __init__(self, prompts: Sequence[Prompt], repeats: int) -> None:
        self._prompts = prompts
        self._repeats = repeats
        self._blocks = len(prompts[0].keys)
        self._pool = BlockPool(self._blocks * (len(prompts) - 1))
        self._life = Lifetime.of(BUILTIN["24h"], Wall(0))
        self._turn = 0
        for _ in prompts:
            self._serve()

    def _serve(self) -> float:
        keys = self._prompts[self._turn % len(self._prompts)].keys
        self._turn += 1
        begin = time.thread_time()
        slots = self._pool.allocate(self._blocks)
        allocated = time.thread_time()
        self._pool.confirm(slots, keys, self._life)
        confirmed = time.thread_time()
        self._pool.free(slots)
        return time.thread_time() - confirmed + allocated - begin

    def seconds_per_block(self) -> float:
        before = self._pool.evicted
        seconds = sum(self._serve() for _ in range(self._repeats))
        assert self._pool.evicted - before == self._repeats * self._blocks
        return seconds / (self._repeats * self._blocks)
