"""The prompts of all simulations: a few tenants, whose chains share beginnings. The same for every seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from kvtier.identity.hashing import chain_hashes, chain_root
from kvtier.identity.keys import BlockKey, Scope, make_keys, scope_of, tenant_of
from kvtier.retention.terms import Terms
from kvtier.testing.payload import sample_namespace

NAMESPACE = sample_namespace(512)
BLOCKS = 6
CHAINS = 8

SCOPES = (
    scope_of("a"), scope_of("b"), scope_of("blink"), scope_of(None), scope_of("a", b"adapter"), scope_of("brief"),
    scope_of("fresh"),
)  # fmt: skip
SALTS: Mapping[int, tuple[str | None, Scope]] = {
    0: ("a", tenant_of(SCOPES[0])), 1: ("b", tenant_of(SCOPES[1])), 2: ("blink", tenant_of(SCOPES[2])),
    3: (None, tenant_of(SCOPES[3])), 4: ("a", tenant_of(SCOPES[4])), 5: ("brief", tenant_of(SCOPES[5])),
    6: ("fresh", tenant_of(SCOPES[6])),
}  # fmt: skip
"""By number of the scope: the salt that purges it, and its tenant."""
UNTOUCHED = 6
"""The scope that no step stores in, or purges."""

_KINDS = {2: "blink", 5: "brief"}
CLASSES: Mapping[str, Mapping[str, object]] = {
    "blink": {"ttl": "5s"},
    "brief": {"max_age": "20s"},
    "sure": {"ttl": "1h", "guarantee": True},
    "shallow": {"ttl": "1h", "ceiling": "g2"},
    "local": {"ttl": "1h", "ceiling": "g3"},
    "urgent": {"ttl": "1h", "priority": 90},
}
SHORT: Mapping[Scope, Terms] = {SCOPES[2]: Terms("blink", ttl=5.0), SCOPES[5]: Terms("brief", max_age=20.0)}
"""Scopes whose blocks are put in one class only."""


def kind_of(args: Mapping[str, Any]) -> str | None:
    """The class that this scope's blocks are put in; None: any."""
    return _KINDS.get(args["scope"])


def chain_of_step(args: Mapping[str, Any]) -> list[BlockKey]:
    """The chain that a step is about."""
    return list(_chains(args["scope"])[args["chain"]][: args["blocks"]])


def fresh_chain(scope: int, number: int, blocks: int = 4) -> list[BlockKey]:
    """A chain that nobody has put."""
    return _keys(SCOPES[scope], [1 << 20 | number] * (blocks * NAMESPACE.block_tokens))


@lru_cache(maxsize=1 << 12)
def text_of(scope: int, chain: int, given: int, made: int) -> tuple[list[int], list[BlockKey]]:
    """What an engine makes of a prompt, the first `given` tokens of a chain (below 0: one that nobody has put): these
    and at least `made` that follow, each a function of all before it, in whole blocks. And their keys."""
    made += -(given + made) % NAMESPACE.block_tokens
    tokens = ([1 << 20 | -chain] * given if chain < 0 else _prompts(scope)[chain])[:given]
    whole = hashlib.blake2b(repr(tokens).encode(), digest_size=2)
    for _ in range(made):
        tokens.append(int.from_bytes(whole.copy().digest()) % 1000)
        whole.update(tokens[-1].to_bytes(2))
    return tokens, _keys(SCOPES[scope], tokens)


@cache
def _chains(scope: int) -> list[list[BlockKey]]:
    return [_keys(SCOPES[scope], tokens) for tokens in _prompts(scope)]


@cache
def _prompts(scope: int) -> list[list[int]]:
    rng, size = random.Random(scope), NAMESPACE.block_tokens
    prompts: list[list[int]] = []
    for number in range(CHAINS):
        shared = prompts[rng.randrange(number)][: rng.randrange(1, BLOCKS) * size] if number % 3 else []
        prompts.append(shared + [rng.randrange(1000) for _ in range(BLOCKS * size - len(shared))])
    return prompts


def _keys(scope: Scope, tokens: list[int]) -> list[BlockKey]:
    return make_keys(scope, chain_hashes(chain_root(NAMESPACE.digest, scope), tokens, NAMESPACE.block_tokens))
