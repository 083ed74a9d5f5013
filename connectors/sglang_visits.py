"""Requests of one rank between their first look-up and their admission: what they ask for, and what is on its way up.

Used from the scheduler's thread only; nothing here waits.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvtier.block import BlockKey, Scope
from kvtier.cache import Cache
from kvtier.connectors.common import Control, Controls, PinWish, Scopes, Settings, engine_keys, keep_prompt
from kvtier.lease import Lease
from kvtier.tier import Miss

_VISITS_MAX = 4096


@dataclass(slots=True)
class Visit:
    """One request. `chain` is its prompt's whole pages, from the first; empty where it may not be read."""

    until: float  # it is passed over, for its blocks, at most until then
    chain: list[BlockKey] = field(default_factory=list)
    start: int = 0  # pages that are on the device
    promotion: Future[Lease] | None = None
    promoted_from: int = 0  # depth of the first block of `promotion`
    waits: bool = False  # as of the last look-up
    decided: bool = False  # on every rank: waits no longer
    lease: Lease | None = None  # of its load
    wish: tuple[Scope, PinWish] | None = None  # its prompt is to be pinned

    def tiers(self, count: int) -> list[str]:
        """Where `count` blocks from `start` on were found: in G2, unless they were promoted for this request."""
        done = self._promoted()
        known = {} if done is None else dict(enumerate(done.tiers, self.promoted_from))
        return [known.get(depth, "g2") for depth in range(self.start, self.start + count)]

    def miss(self) -> Miss:
        """Why the blocks behind what was found are not there."""
        if self.promotion is not None and not self.promotion.done():
            return Miss.LATE
        done = self._promoted()
        return (done.miss if done is not None else None) or Miss.ABSENT

    def _promoted(self) -> Lease | None:
        done = self.promotion
        return None if done is None or not done.done() or done.cancelled() or done.exception() else done.result()


class Visits:
    """The requests that are being looked up, and the accounts of those that were admitted."""

    def __init__(self, settings: Settings, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._wait_s = settings.config.deadlines.get
        self._controls, self._scopes = Controls(settings.config), Scopes(settings.config)
        self._of: OrderedDict[str, Visit] = OrderedDict()
        self.events: Counter[str] = Counter()
        self.tokens_read: Counter[str] = Counter()  # by tier

    def __len__(self) -> int:
        return len(self._of)

    def of(self, rid: str) -> Visit | None:
        return self._of.get(rid)

    def arrive(self, rid: str) -> Visit:
        """The request's visit, a new one if it has none. Cannot fail: all ranks have the same visits, since they vote
        on them."""
        visit = self._of.get(rid)
        if visit is None:
            visit = self._of[rid] = Visit(time.monotonic() + self._wait_s)
            while len(self._of) > _VISITS_MAX:
                self.forget(next(iter(self._of)))
        return visit

    def place(self, visit: Visit, req: Any, head: Callable[[], list[str]], tail: Sequence[str]) -> None:
        """Bring the visit's chain up to date: `tail` are the pages that the device lacks now, after `head()`."""
        last = bytes.fromhex(tail[-1])
        if visit.chain and visit.chain[-1].endswith(last) and len(visit.chain) - visit.start == len(tail):
            return
        control, scope = self.wishes(req)
        if scope is None or not control.load:
            visit.chain = []
            return
        hashes = [*head(), *tail]
        visit.chain = engine_keys(scope, [bytes.fromhex(page) for page in hashes])
        visit.start = len(hashes) - len(tail)
        if control.pin is not None and control.store:
            visit.wish = (scope, control.pin)

    def wishes(self, req: Any) -> tuple[Control, Scope | None]:
        """What the request asked for, and who may share its blocks (None: it may not be cached)."""
        custom = getattr(getattr(req, "sampling_params", None), "custom_params", None)
        control = self._controls.parse(custom.get("kvtier") if isinstance(custom, dict) else None)
        # SGLang folds an adapter's id into the extra key, which seeds the page hashes; both also name the scope.
        adapter = (req.extra_key or "").encode()
        return control, self._scopes.of(req.cache_salt, adapter, control.request)

    def resident(self, visit: Visit, cache: Cache) -> int:
        """Blocks from `visit.start` on that G2 has now. The first time it starts bringing up what it lacks, and notes
        whether that is worth waiting for."""
        if visit.wish is not None:
            self._pin(cache, *visit.wish, visit.chain)
            visit.wish = None
        tail = visit.chain[visit.start :]
        found = cache.manager.prefix(tail)
        if visit.decided or found == len(tail) or not cache.manager.lower:
            visit.waits = False
            return found
        if visit.promotion is None:
            visit.promoted_from = visit.start
            visit.promotion = cache.submit(cache.manager.promote(visit.chain, visit.until, visit.start))
        done = visit.promotion.done()
        visit.waits = not done and time.monotonic() < visit.until
        if not done and not visit.waits:
            self.events["lookups_late"] += 1
        return found

    def pin_known(self, req: Any, head: Callable[[], list[str]], cache: Cache) -> None:
        """Of a request that is not looked up, since the device has all of its prompt: pin that, if it is wished."""
        control, scope = self.wishes(req)
        if control.pin is not None and control.store and scope is not None and (hashes := head()):
            self._pin(cache, scope, control.pin, engine_keys(scope, [bytes.fromhex(page) for page in hashes]))

    def _pin(self, cache: Cache, scope: Scope, wish: PinWish, prompt: Sequence[BlockKey]) -> None:
        """What is here of it stays, and what will be; nobody waits for it."""
        cache.submit(keep_prompt(cache.manager.keeper, scope, wish, list(prompt), self._block_tokens))

    def book(self, rid: str, cache: Cache | None) -> None:
        """The request is admitted: count what it was given and what not, and let go of it."""
        visit = self._of.get(rid)
        if visit is not None and visit.chain and cache is not None:
            asked = len(visit.chain) - visit.start
            if visit.lease is not None:
                for tier, blocks in Counter(visit.lease.tiers).items():
                    self.tokens_read[tier] += blocks * self._block_tokens
                cache.manager.count(visit.lease, asked)
            else:
                with cache.manager.pin(()) as nothing:
                    nothing.miss = visit.miss()
                    cache.manager.count(nothing, asked)
        self.forget(rid)

    def forget(self, rid: str) -> None:
        """Let go of a request: what was promoted for it may be evicted again."""
        visit = self._of.pop(rid, None)
        if visit is not None and visit.promotion is not None:
            visit.promotion.cancel()
            visit.promotion.add_done_callback(_release_result)

    def clear(self) -> None:
        for rid in list(self._of):
            self.forget(rid)


def _release_result(promotion: Future[Lease]) -> None:
    if not promotion.cancelled() and promotion.exception() is None:
        promotion.result().release()
