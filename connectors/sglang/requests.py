"""Requests of one rank between their first look-up and their admission: what they ask for, what is on its way up, and
what their senders learn.

Used from the scheduler's thread only; nothing here waits.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvtier.cache import Cache
from kvtier.connectors.common import Control, Controls, Scopes, Settings, engine_keys
from kvtier.connectors.feedback import Feedback, Pinning, pin_outcome
from kvtier.identity.keys import BlockKey, Scope
from kvtier.manager.lease import Lease
from kvtier.tiers.protocol import Miss

_VISITS_MAX = 4096
_NAME = "kvtier"


@dataclass(slots=True)
class QueuedRequest:
    """One request. `chain` is its prompt's whole pages, from the first; empty until they are known, and where they may
    not be cached."""

    until: float  # it is passed over, for its blocks, at most until then
    chain: list[BlockKey] = field(default_factory=list)
    start: int = 0  # pages that are on the device
    control: Control | None = None  # what it asked for, and who may share its blocks: both are known with the chain
    scope: Scope | None = None
    promotion: Future[Lease] | None = None
    promoted_from: int = 0  # depth of the first block of `promotion`
    pinning: Pinning | None = None  # its prompt is being pinned
    waits: bool = False  # as of the last look-up
    decided: bool = False  # on every rank: waits no longer
    lease: Lease | None = None  # of its load

    @property
    def reads(self) -> bool:
        """Whether it may and wants to have blocks from below."""
        return bool(self.chain) and self.control is not None and self.control.load

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


class QueuedRequests:
    """The requests that are being looked up, and the accounts of those that were admitted."""

    def __init__(self, settings: Settings, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._wait_s = settings.config.deadlines.get
        self._controls, self._scopes = Controls(settings.config), Scopes(settings.config)
        self._of: OrderedDict[str, QueuedRequest] = OrderedDict()
        self.events: Counter[str] = Counter()
        self.tokens_read: Counter[str] = Counter()  # by tier
        self._wishes = Feedback(block_tokens)

    def __len__(self) -> int:
        return len(self._of)

    def of(self, rid: str) -> QueuedRequest | None:
        return self._of.get(rid)

    def arrive(self, rid: str) -> QueuedRequest:
        """The request's visit, a new one if it has none. Cannot fail: all ranks have the same visits, since they vote
        on them."""
        visit = self._of.get(rid)
        if visit is None:
            visit = self._of[rid] = QueuedRequest(time.monotonic() + self._wait_s)
            while len(self._of) > _VISITS_MAX:
                self.forget(next(iter(self._of)))
        return visit

    def place(
        self, visit: QueuedRequest, req: Any, head: Callable[[], list[str]], tail: Sequence[str], cache: Cache
    ) -> None:
        """Bring the visit's chain up to date: `tail` are the pages that the device lacks now, after `head()`. The first
        time its prompt is pinned, if that is wished."""
        known = visit.chain[visit.start :]
        if tail and len(known) == len(tail) and known[-1].endswith(bytes.fromhex(tail[-1])):
            return
        if visit.control is None:
            visit.control, visit.scope = self.control_of(req)
        control, scope = visit.control, visit.scope
        if scope is None:
            return
        hashes = [*head(), *tail]
        visit.chain = engine_keys(scope, [bytes.fromhex(page) for page in hashes])
        visit.start = len(hashes) - len(tail)
        if visit.pinning is None:
            visit.pinning = self._wishes.pin(cache, scope, control, visit.chain)

    def control_of(self, req: Any) -> tuple[Control, Scope | None]:
        """What the request asked for, and who may share its blocks (None: it may not be cached)."""
        custom = getattr(getattr(req, "sampling_params", None), "custom_params", None)
        control = self._controls.parse(custom.get(_NAME) if isinstance(custom, dict) else None)
        # SGLang folds an adapter's id into the extra key, which seeds the page hashes; both also name the scope.
        adapter = (req.extra_key or "").encode()
        return control, self._scopes.of(req.cache_salt, adapter, control.request)

    def resident(self, visit: QueuedRequest, cache: Cache) -> int:
        """Blocks from `visit.start` on that G2 has now. The first time it starts bringing up what it lacks, and notes
        whether that is worth waiting for."""
        if not visit.reads:
            return 0
        tail, promotion = visit.chain[visit.start :], visit.promotion
        # Asked before G2 is: what is said to be up can be found then. And nothing is taken before it is said to be up,
        # though it may be there already: only then is it known where it came from.
        up = promotion is None or promotion.done()
        found = cache.manager.prefix(tail)
        if visit.decided or not cache.manager.lower or (up and found == len(tail)):
            visit.waits = False
            return found
        if promotion is None:
            visit.promoted_from, up = visit.start, False
            visit.promotion = cache.submit(cache.manager.promote(visit.chain, visit.until, visit.start))
        visit.waits = not up and time.monotonic() < visit.until
        if not up and not visit.waits:
            self.events["lookups_late"] += 1
        return found

    def admit(self, req: Any, head: Callable[[], list[str]] | None, cache: Cache) -> None:
        """The request is in the next batch: count what it was given and what not, put what its sender learns into its
        answer, and let go of it. `head()` is its prompt where nothing was looked up, since the device has all of it."""
        visit = self.of(req.rid) or QueuedRequest(0.0)
        if head is not None:
            self.place(visit, req, head, (), cache)
        read, told = self._book(visit, cache), {}
        if visit.control is not None and visit.scope is not None:
            told = self._wishes.told(req.rid, visit.scope, visit.control, visit.chain, read, visit.pinning)
        tell(req, {"tokens_read": read, **told}, visit.pinning)
        self.forget(req.rid)

    def _book(self, visit: QueuedRequest, cache: Cache) -> dict[str, int]:
        """Account for what was asked for below; tokens by the tier they came from."""
        asked = len(visit.chain) - visit.start
        if not (asked and visit.reads):
            return {}
        if visit.lease is None:
            with cache.manager.pin(()) as nothing:
                nothing.miss = visit.miss()
                cache.manager.count(nothing, asked)
            return {}
        cache.manager.count(visit.lease, asked)
        read = {tier: blocks * self._block_tokens for tier, blocks in Counter(visit.lease.tiers).items()}
        self.tokens_read.update(read)
        return read

    def forget(self, rid: str) -> None:
        """Let go of a request: what was promoted for it may be evicted again."""
        visit = self._of.pop(rid, None)
        if visit is not None and visit.promotion is not None:
            visit.promotion.cancel()
            visit.promotion.add_done_callback(_release_result)

    def clear(self) -> None:
        for rid in list(self._of):
            self.forget(rid)


def tell(req: Any, told: dict[str, Any], pinning: Pinning | None = None) -> None:
    """Have the request's answer say it, as `meta_info["kvtier"][0]`; what a pin became is said when it is known. A
    request that was sent back to the queue and is admitted again has read twice."""
    info = getattr(req, "customized_info", None) or {}
    if earlier := info.get(_NAME):
        told = {**told, "tokens_read": dict(Counter(earlier[0]["tokens_read"]) + Counter(told["tokens_read"]))}
    # SGLang takes values by the number of the output token: this one comes with the first.
    answer = [told]
    req.customized_info = {**info, _NAME: answer}
    if pinning is not None:

        def kept(done: Pinning) -> None:
            answer[0] = {**told, "pin": {"name": told["pin"]["name"], **pin_outcome(done)}}

        # Whoever sends the answer meanwhile has one dictionary or the other, and neither changes.
        pinning.add_done_callback(kept)


def _release_result(promotion: Future[Lease]) -> None:
    if not promotion.cancelled() and promotion.exception() is None:
        promotion.result().release()
