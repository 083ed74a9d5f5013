"""What senders of requests wish and are told: pins and hints, tokens read, how far two prompts agree."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from kvtier.cache import Cache
from kvtier.connectors.control import Control
from kvtier.connectors.hints import HintExecutor
from kvtier.connectors.sessions import Branches, Sessions
from kvtier.identity.keys import BlockKey, Scope
from kvtier.manager.divergence import RecentChains
from kvtier.retention.hints import HintAnswer

log = logging.getLogger(__name__)

_NONE: Mapping[str, int] = MappingProxyType({})

Wishes = Future[dict[str, Any]]
"""A request's pin and hints on their way; ends with their part of the answer to its sender."""


class Feedback:
    """Of one engine's requests. Remembers the latest prompts and sessions. Not thread-safe; never blocks."""

    def __init__(self, block_tokens: int, share: float) -> None:
        """`share`: `retention.hints`."""
        self._block_tokens = block_tokens
        self._share = share
        self._recent = RecentChains()
        self._sessions = Sessions()
        self._executor: HintExecutor | None = None
        self._cache: Cache | None = None  # the one that has the executor

    def begin(self, cache: Cache, scope: Scope, control: Control, prompt: Sequence[BlockKey]) -> Wishes | None:
        """Begin what the request's sender wishes. None: nothing, or nothing that can be done."""
        pins = control.pin is not None and control.store and bool(prompt)
        hints, accounts = control.hints, cache.manager.accounts
        accounts.sessions = self._sessions.counts
        if not pins and not hints.actions:
            if hints.answers:
                with cache.manager.lock:
                    accounts.hints.update(answer.outcome for answer in hints.answers)
            return None
        if self._executor is None or self._cache is not cache:
            self._executor = HintExecutor(cache.manager, self._block_tokens, self._share)
            self._cache = cache
        named = (getattr(action.verb, "session", None) for action in hints.actions)
        sessions = {name: self._sessions.branches(scope, name) for name in named if name is not None}
        return cache.submit(_carry_out(self._executor, scope, control, tuple(prompt), sessions))

    @property
    def fetching(self) -> bool:
        """Whether a prefetch is under way."""
        return self._executor is not None and self._executor.fetching

    def of(
        self,
        name: str,
        scope: Scope,
        control: Control,
        prompt: Sequence[BlockKey],
        read: Mapping[str, int],
        wishes: Wishes | None,
        held: int = 0,
        reread: Mapping[str, int] = _NONE,
    ) -> dict[str, Any]:
        """The answer to the sender of the request `name`: `read` (tokens by tier) and what it asked for; `held` of the
        prompt's blocks were in the engine's own cache. `reread`: what of `read` it had lost meanwhile. Remembers the
        prompt, so that later requests can be compared with it, and go on with its session."""
        answer: dict[str, Any] = {"tokens_read": dict(read)} if read else {}
        if control.usage:
            first = {tier: tokens - reread.get(tier, 0) for tier, tokens in read.items()}
            answer["usage"] = usage_of(
                control, len(prompt), self._block_tokens, {"g1": held * self._block_tokens, **first}
            )
        answer |= outcome(control, wishes)
        if wanted := control.compared_with:
            # The OpenAI server numbers the prompts of a request.
            depths = (self._recent.divergence(f"{scope.hex()} {known}", prompt) for known in (wanted, f"{wanted}-0"))
            depth = next((depth for depth in depths if depth is not None), None)
            answer["same_tokens"] = None if depth is None else depth * self._block_tokens
        self._recent.record(f"{scope.hex()} {name}", prompt)
        ended = self._sessions.record(scope, control.session, prompt)
        if ended and self._cache is not None and not self._cache.manager.closed:
            protected = self._cache.manager.protection.wanted
            self._cache.submit(self._cache.manager.hierarchy.give_up_copies(ended, protected))
        return answer


def usage_of(control: Control, blocks: int, block_tokens: int, cached: Mapping[str, int]) -> dict[str, Any]:
    """A request's usage as APIs with prompt caches report it, in tokens: those of the prompt that were `cached`, by
    tier; and those in the rest of its `blocks`, which are to be stored, by retention class. Pure."""
    total = sum(cached.values())
    created: Counter[str] = Counter()
    if control.store:
        for start, stop, block in control.chain_terms(block_tokens).spans(total // block_tokens, blocks):
            created[block.terms.name] += (stop - start) * block_tokens
    by_tier = {tier: tokens for tier, tokens in cached.items() if tokens}
    return {"cached_tokens": total, "by_tier": by_tier, "cache_creation": dict(created)}


def outcome(control: Control, wishes: Wishes | None) -> dict[str, Any]:
    """The sender's part of the answer by now."""
    if wishes is not None and wishes.done() and not wishes.cancelled() and wishes.exception() is None:
        return wishes.result()
    answer: dict[str, Any] = {}
    pending = wishes is not None and not wishes.done()
    if control.pin is not None:
        answer["pin"] = {"name": control.pin.name, **({"pending": True} if pending else {"refused": True})}
    hints = list(control.hints.answers)
    why = "it is under way" if pending else "the cache cannot do it now"
    hints += [HintAnswer(one.id, one.kind, "deferred" if pending else "rejected", why) for one in control.hints.actions]
    return answer | _shown(hints)


async def _carry_out(
    executor: HintExecutor,
    scope: Scope,
    control: Control,
    prompt: Sequence[BlockKey],
    sessions: Mapping[str, Branches],
) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    if control.pin is not None and control.store:
        done = await executor.pin(scope, control.pin.name, control.pin.ttl_s, prompt)
        answer["pin"] = {"name": control.pin.name, **done}
    return answer | _shown(await executor.carry_out(scope, control.hints, prompt, sessions))


def _shown(answers: Sequence[HintAnswer]) -> dict[str, Any]:
    return {"hints": [asdict(answer) for answer in answers]} if answers else {}
