"""Test data: block bytes that are a pure function of their key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvtier.checksum import digest_of
from kvtier.identity.hashing import chain_hashes, chain_root
from kvtier.identity.keys import SHARED, BlockKey, Scope, make_keys
from kvtier.identity.namespace import Namespace
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN, Terms
from kvtier.tiers.protocol import Sealed
from kvtier.times import Wall


def payload_of(key: bytes, length: int) -> bytes:
    """`length` bytes that only `key` has (SHAKE-128 of it). Pure."""
    return hashlib.shake_128(key).digest(length)


def payloads_of(keys: Sequence[bytes], length: int) -> list[bytes]:
    """One payload per key."""
    return [payload_of(key, length) for key in keys]


def sample_namespace(block_bytes: int = 4096, **fields: object) -> Namespace:
    """A namespace for tests; `fields` override."""
    base: dict[str, object] = {
        "model": "test/model", "weights": "test:1", "dtype": "bfloat16", "layout": "L2HND",
        "block_tokens": 16, "block_bytes": block_bytes,
    }  # fmt: skip
    return Namespace.parse({**base, **fields})


def chain_of(namespace: Namespace, blocks: int, seed: int = 0, scope: Scope = SHARED) -> list[BlockKey]:
    """Keys of a prompt of `blocks` full blocks; prompts with different seeds share nothing. Pure."""
    size = namespace.block_tokens
    tokens = [seed] * size + list(range(size, blocks * size))
    return make_keys(scope, chain_hashes(chain_root(namespace.digest, scope), tokens[: blocks * size], size))


def seal(
    chain: Sequence[BlockKey],
    indices: Sequence[int],
    block_bytes: int,
    now: Wall,
    terms: Terms = BUILTIN["24h"],
    ranks: int = 1,
    *,
    parents: bool = False,
    position: int = 0,
) -> list[Sealed]:
    """Sealed blocks of a chain with their `payload_of` bytes, cut into `ranks` pieces; with `parents`, tiers that care
    take each only under its parent. `position`: of the purge log."""
    out = []
    for index in indices:
        payload = memoryview(payload_of(chain[index], block_bytes))
        step = block_bytes // ranks
        pieces = tuple(payload[r * step : (r + 1) * step] for r in range(ranks))
        parent = chain[index - 1] if parents and index else None
        life = Lifetime.of(terms, now)
        out.append(Sealed(chain[index], index, digest_of(pieces), pieces, life, parent, terms.priority, position))
    return out
