"""What hints of each tenant hold: blocks that are kept or pinned for them, and names of pins.

The bound of one tenant is a share of what may be reserved at all, so one tenant's wishes do not use up what others may
reserve. Nothing is held beyond its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from kvtier.identity.keys import BlockKey, Scope
from kvtier.times import Wall

K = TypeVar("K")

PINS_MAX = 64
"""Names of pins of one tenant."""


class HintShares:
    """Blocks and pins of hints by tenant. No lock of its own."""

    def __init__(self) -> None:
        self._kept: dict[Scope, dict[BlockKey, Wall]] = {}
        self._pins: dict[Scope, dict[str, Wall]] = {}

    def take(self, tenant: Scope, keys: Sequence[BlockKey], until: Wall, limit: int) -> int:
        """Let the tenant hold the leading blocks of `keys` until then or longer, `limit` blocks in all; how many."""
        kept = self._kept.setdefault(tenant, {})
        for count, key in enumerate(keys):
            if key not in kept and len(kept) >= limit:
                return count
            kept[key] = max(until, kept.get(key, until))
        return len(keys)

    def room(self, tenant: Scope, keys: Sequence[BlockKey], limit: int) -> bool:
        """Whether `take` would take all of these."""
        kept = self._kept.get(tenant, {})
        return len(kept) + sum(key not in kept for key in keys) <= limit

    def held(self, tenant: Scope, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of `keys` that are held for the tenant."""
        kept = self._kept.get(tenant, {})
        return [key for key in keys if key in kept]

    def give(self, tenant: Scope, keys: Sequence[BlockKey]) -> None:
        """These are not held any more."""
        kept = self._kept.get(tenant, {})
        for key in keys:
            kept.pop(key, None)

    def may_pin(self, tenant: Scope, name: str) -> bool:
        """Whether the tenant may have a pin of this name, too."""
        pins = self._pins.get(tenant, {})
        return name in pins or len(pins) < PINS_MAX

    def pinned(self, tenant: Scope, name: str, until: Wall) -> None:
        """The tenant has a pin of this name."""
        self._pins.setdefault(tenant, {})[name] = until

    def has_pin(self, tenant: Scope, name: str) -> bool:
        return name in self._pins.get(tenant, {})

    def unpinned(self, tenant: Scope, name: str) -> None:
        self._pins.get(tenant, {}).pop(name, None)

    def expire(self, now: Wall) -> None:
        """Forget what is over. O(all that is held)."""
        _drop_ended(self._kept, now)
        _drop_ended(self._pins, now)

    def count(self, tenant: Scope) -> int:
        """How many blocks are held for the tenant."""
        return len(self._kept.get(tenant, ()))


def _drop_ended(of: dict[Scope, dict[K, Wall]], now: Wall) -> None:
    for tenant, held in list(of.items()):
        for name in [name for name, until in held.items() if until <= now]:
            del held[name]
        if not held:
            del of[tenant]
