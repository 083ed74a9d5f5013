"""Requests as vLLM's tiered offloading shows them: their scope and chain, and the search for their blocks."""

from __future__ import annotations

import concurrent.futures
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from vllm.v1.kv_offload.base import ReqContext

from kvtier.cache import Cache
from kvtier.connectors.control import Control
from kvtier.connectors.feedback import Wishes
from kvtier.connectors.identity import engine_keys
from kvtier.connectors.promoted import Promoted
from kvtier.errors import KVTierError
from kvtier.identity.keys import BlockKey, Scope
from kvtier.manager.lease import Lease
from kvtier.manager.manager import Manager
from kvtier.times import Mono

GROUP_BYTES = 4
"""vLLM's key of a chunk is a block hash and the number of its KV cache group."""


@dataclass(slots=True, eq=False)
class Search:
    """The tiers' blocks of one request from depth `start` on: being promoted, then pinned by `lease` until they were
    copied out. `asked` blocks were looked for."""

    start: int
    asked: int
    until_s: Mono  # for the promotion
    first: bool  # of its request: what was asked for is recorded once
    promoted: Promoted = field(default_factory=Promoted)
    lease: Lease | None = None
    last: int = -1  # the depth that vLLM asked for last
    late: bool = False  # the promotion was not over in time
    spent: bool = False  # nothing more is answered from it
    load: concurrent.futures.Future[None] | None = None  # the copy
    served: bool = False  # all of it succeeded

    def begin(self, cache: Cache, chain: Sequence[BlockKey], deadline_s: Mono) -> None:
        """Pin the blocks if all are in G2, else begin to promote them, until `deadline_s` at most."""
        manager = cache.manager
        lease = manager.pin(chain, self.start)
        if len(lease) == self.asked or not manager.lower:
            self.lease = lease
        else:
            lease.release()
            work = manager.promote(tuple(chain), deadline_s, self.start, referenced=True)
            self.promoted = Promoted(cache.submit(work), self.start)

    def poll(self, manager: Manager, chain: Sequence[BlockKey], now_s: Mono) -> bool:
        """Set `lease` if the promotion is over, or its time is up: then to the blocks that are in G2, and the promotion
        goes on for the next request. False: neither yet."""
        self.lease = self.promoted.lease()
        if self.lease is None:
            if not self.promoted.done and now_s < self.until_s:
                return False
            self.late = not self.promoted.done
            self.promoted.abandon(cancel=False)
            self.promoted, self.lease = Promoted(), manager.pin(chain, self.start)
        return True

    def end(self) -> None:
        """Release its blocks, but for those that are being copied: the copy does that at its end. The promotion's bytes
        stay in G2 if it was nearly done. Idempotent."""
        if self.spent:
            return
        self.spent = True
        self.promoted.abandon()  # which releases its lease
        if self.lease is not None:
            self.lease.release()


@dataclass(slots=True, eq=False)
class TierRequest:
    """One request, from its arrival until vLLM will name it no more."""

    control: Control
    scope: Scope
    name: str = ""  # as its sender knows it
    prompt: tuple[BlockKey, ...] = ()  # keys of its whole chunks; none: unknown
    adapter: tuple[int, str] | None = None  # id and name
    wishes: Wishes | None = None
    read: Counter[str] = field(default_factory=Counter)  # tokens by tier
    asked: int = 0  # tokens that the engine had itself when it asked last
    cached: int | None = None  # tokens that it did not compute when it first ran, from wherever
    first: Counter[str] = field(default_factory=Counter)  # what was `read` by then
    chain: list[BlockKey] = field(default_factory=list)
    search: Search | None = None
    searches: int = 0
    over: bool = False  # vLLM has ended it, and may still hand on what it computed
    stale: bool = False  # nothing more is read or kept of it: it runs with blocks of old weights and of new ones

    def placed(self, loaded: int) -> None:
        """It runs, and so many tokens are loaded for it."""
        if self.cached is None:
            self.cached, self.first = self.asked + loaded, Counter(self.read)

    @property
    def held(self) -> int:
        """Tokens that vLLM's own caches had when it first ran."""
        return max(0, (self.cached or 0) - self.first.total())

    def chain_of(self, context: ReqContext, block_tokens: int) -> list[BlockKey]:
        """The keys of the request's chunks as far as vLLM knows them, grown with it."""
        known = context._offload_key_positions  # in order of depth; the only place where a tier finds the chain
        if len(known) > len(self.chain):
            fresh = list(islice(known.items(), len(self.chain), None))
            if fresh[-1][1] != len(known) * block_tokens:
                raise KVTierError("the engine's keys are no chain of whole chunks")
            self.chain += engine_keys(self.scope, [bytes(key[:-GROUP_BYTES]) for key, _ in fresh])
        return self.chain
