"""What requests ask for beside being cached, and what their senders learn of it: pins and comparisons."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.cache import Cache
from kvtier.connectors.common import Control, keep_prompt
from kvtier.identity.keys import BlockKey, Scope
from kvtier.manager.divergence import RecentChains

Pinning = concurrent.futures.Future[dict[str, Any]]


class Feedback:
    """Of one engine's requests. Remembers the latest prompts; not thread-safe; never blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._recent = RecentChains()

    def pin(self, cache: Cache, scope: Scope, control: Control, prompt: Sequence[BlockKey]) -> Pinning | None:
        """Begin to keep the prompt, if its sender asked for that."""
        if control.pin is None or not control.store or not prompt:
            return None
        return cache.submit(keep_prompt(cache.manager.protection, scope, control.pin, prompt, self._block_tokens))

    def told(
        self,
        name: str,
        scope: Scope,
        control: Control,
        prompt: Sequence[BlockKey],
        read: Mapping[str, int],
        pinning: Pinning | None,
    ) -> dict[str, Any]:
        """What the sender of the request `name` learns: tokens read by tier, and what became of its wishes. Later
        requests may be compared with this one."""
        told: dict[str, Any] = {"tokens_read": dict(read)} if read else {}
        if control.pin is not None:
            told["pin"] = {"name": control.pin.name, **pin_outcome(pinning)}
        if wanted := control.compared_with:
            # The OpenAI server numbers the prompts of a request.
            depths = (self._recent.divergence(f"{scope.hex()} {known}", prompt) for known in (wanted, f"{wanted}-0"))
            depth = next((depth for depth in depths if depth is not None), None)
            told["same_tokens"] = None if depth is None else depth * self._block_tokens
        self._recent.record(f"{scope.hex()} {name}", prompt)
        return told


def pin_outcome(pinning: Pinning | None) -> dict[str, Any]:
    """What became of a wish to pin, so far."""
    if pinning is not None and not pinning.done():
        return {"pending": True}
    failed = pinning is None or pinning.cancelled() or pinning.exception() is not None
    return {"refused": True} if pinning is None or failed else pinning.result()
