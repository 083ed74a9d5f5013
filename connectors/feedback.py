"""Answers to the senders of requests: tokens read, the fate of a pin, and how far two prompts agree."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from kvtier.cache import Cache
from kvtier.connectors.control import Control, PinRequest
from kvtier.errors import InvalidRequest
from kvtier.identity.keys import SHARED, BlockKey, Scope
from kvtier.manager.divergence import RecentChains
from kvtier.manager.protection import Protection

log = logging.getLogger(__name__)

PinFuture = Future[dict[str, Any]]


class Feedback:
    """Of one engine's requests. Remembers the latest prompts. Not thread-safe; never blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._recent = RecentChains()

    def pin(self, cache: Cache, scope: Scope, control: Control, prompt: Sequence[BlockKey]) -> PinFuture | None:
        """Begin to pin the prompt, if its sender asked for that."""
        if control.pin is None or not control.store or not prompt:
            return None
        return cache.submit(pin_prompt(cache.manager.protection, scope, control.pin, prompt, self._block_tokens))

    def of(
        self,
        name: str,
        scope: Scope,
        control: Control,
        prompt: Sequence[BlockKey],
        read: Mapping[str, int],
        pinning: PinFuture | None,
    ) -> dict[str, Any]:
        """The answer to the sender of the request `name`: `read` (tokens by tier) and what it asked for. Remembers the
        prompt, so that later requests can be compared with it."""
        answer: dict[str, Any] = {"tokens_read": dict(read)} if read else {}
        if control.pin is not None:
            answer["pin"] = {"name": control.pin.name, **pin_outcome(pinning)}
        if wanted := control.compared_with:
            # The OpenAI server numbers the prompts of a request.
            depths = (self._recent.divergence(f"{scope.hex()} {known}", prompt) for known in (wanted, f"{wanted}-0"))
            depth = next((depth for depth in depths if depth is not None), None)
            answer["same_tokens"] = None if depth is None else depth * self._block_tokens
        self._recent.record(f"{scope.hex()} {name}", prompt)
        return answer


def pin_outcome(pinning: PinFuture | None) -> dict[str, Any]:
    """The state of a pin by now."""
    if pinning is not None and not pinning.done():
        return {"pending": True}
    failed = pinning is None or pinning.cancelled() or pinning.exception() is not None
    return {"refused": True} if pinning is None or failed else pinning.result()


async def pin_prompt(
    protection: Protection, scope: Scope, asked: PinRequest, prompt: Sequence[BlockKey], block_tokens: int
) -> dict[str, Any]:
    """Pin a prompt as its sender asked, or move the end of its pin of this name. Returns the answer to the sender; a
    refusal is one. Runs on the cache's loop. Names of requests with a scope are that scope's own."""
    name = asked.name if scope == SHARED else f"{scope.hex()[:16]}/{asked.name}"
    known = protection.pins.get(name)
    try:
        if known is not None and known.chain == tuple(prompt):
            pin = await protection.extend(name, asked.ttl_s)
        else:
            pin = await protection.create(name, prompt, asked.ttl_s, len(prompt) * block_tokens)
    except InvalidRequest as refused:
        log.warning("a pin is refused: %s", refused)
        return {"refused": True}
    return {"until": pin.until}
