"""Requests as the second door into vLLM sees them: whose blocks they are, and what the tiers have of them."""

from __future__ import annotations

import concurrent.futures
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

from vllm.v1.kv_offload.base import ReqContext

from kvtier.connectors.common import Control, engine_keys
from kvtier.connectors.feedback import Pinning
from kvtier.errors import KVTierError
from kvtier.identity.keys import BlockKey, Scope
from kvtier.manager.lease import Lease

GROUP_BYTES = 4
"""vLLM's key of a chunk is a block hash and the number of its KV cache group."""


@dataclass(slots=True, eq=False)
class Search:
    """What the tiers have of one request from depth `start` on: being promoted, then held by a lease until it was
    copied out."""

    start: int
    asked: int
    until: float
    first: bool = True  # of its request: what was asked for is accounted once
    promotion: concurrent.futures.Future[Lease] | None = None
    lease: Lease | None = None
    last: int = -1  # the depth that vLLM asked for last
    spent: bool = False
    load: concurrent.futures.Future[None] | None = None  # the copy
    served: bool = False  # all of it succeeded

    def leave(self) -> None:
        """Wait for the promotion no longer; it goes on, and the next request may find what it brings."""
        promotion, self.promotion = self.promotion, None
        if promotion is not None:
            promotion.add_done_callback(_let_go)

    def end(self) -> None:
        """Let go of what it holds. The promotion's bytes stay in G2 if it was nearly done. Idempotent."""
        promotion, self.promotion = self.promotion, None
        if promotion is not None and not promotion.cancel():
            promotion.add_done_callback(_let_go)
        if self.lease is not None:
            self.lease.release()
        self.spent = True


def _let_go(promotion: concurrent.futures.Future[Lease]) -> None:
    if not promotion.cancelled() and promotion.exception() is None:
        promotion.result().release()


@dataclass(slots=True, eq=False)
class TierRequest:
    """One request, from its arrival until vLLM will name it no more."""

    control: Control
    scope: Scope
    name: str = ""  # as its sender knows it
    prompt: tuple[BlockKey, ...] = ()  # keys of its whole chunks; none: vLLM does not tell
    pinning: Pinning | None = None
    read: Counter[str] = field(default_factory=Counter)  # tokens by tier
    chain: list[BlockKey] = field(default_factory=list)
    search: Search | None = None
    searches: int = 0
    stale: bool = False  # it runs with blocks of old weights and of new ones

    def chain_of(self, context: ReqContext, block_tokens: int) -> list[BlockKey]:
        """The keys of the request's chunks as far as vLLM knows them, grown with it."""
        known = context._offload_key_positions  # in order of depth; the only place where a tier finds the chain
        if len(known) > len(self.chain):
            fresh = list(islice(known.items(), len(self.chain), None))
            if fresh[-1][1] != len(known) * block_tokens:
                raise KVTierError("the engine's keys are no chain of whole chunks")
            self.chain += engine_keys(self.scope, [bytes(key[:-GROUP_BYTES]) for key, _ in fresh])
        return self.chain
