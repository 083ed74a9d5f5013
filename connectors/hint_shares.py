"""What hints of each tenant hold: blocks that are kept, and pins.

The bound of one tenant is a share of what may be reserved at all, so one tenant's wishes do not use up what others may
reserve. Nothing is held beyond its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.identity.keys import BlockKey, Scope
from kvtier.times import Wall

PINS_MAX = 64
"""Pins of one tenant: there is a bound on those of all."""


@dataclass(slots=True)
class _Holdings:
    kept: dict[BlockKey, Wall] = field(default_factory=dict)
    pins: dict[str, tuple[Wall, Collection[BlockKey]]] = field(default_factory=dict)
    holders: Counter[BlockKey] = field(default_factory=Counter)  # keeping is one, and so is each pin

    def drop(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self.holders[key] -= 1
            if not self.holders[key]:
                del self.holders[key]


class HintShares:
    """Blocks and pins of hints by tenant. No lock of its own."""

    def __init__(self) -> None:
        self._of: dict[Scope, _Holdings] = {}

    def _held(self, tenant: Scope) -> _Holdings:
        return self._of.setdefault(tenant, _Holdings())

    def fitting(self, tenant: Scope, keys: Sequence[BlockKey], limit: int) -> int:
        """How many leading blocks of `keys` the tenant may hold, where it may hold `limit` in all."""
        holders = self._held(tenant).holders
        free = limit - len(holders)
        for count, key in enumerate(keys):
            free -= key not in holders
            if free < 0 and key not in holders:
                return count
        return len(keys)

    def keep(self, tenant: Scope, keys: Sequence[BlockKey], until: Wall) -> list[BlockKey]:
        """These are kept for the tenant until then, or longer. Returns those that were not."""
        held = self._held(tenant)
        new = [key for key in keys if key not in held.kept]
        held.holders.update(new)
        for key in keys:
            held.kept[key] = max(until, held.kept.get(key, until))
        return new

    def kept(self, tenant: Scope, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Those of `keys` that are kept for the tenant."""
        kept = self._held(tenant).kept
        return [key for key in keys if key in kept]

    def release(self, tenant: Scope, keys: Sequence[BlockKey]) -> None:
        """These are not kept any more."""
        held = self._held(tenant)
        held.drop(key for key in keys if held.kept.pop(key, None) is not None)

    def may_pin(self, tenant: Scope, name: str, chain: Collection[BlockKey]) -> bool:
        """Whether the tenant may have a pin of this name and chain, too: of another chain it has none."""
        pins = self._held(tenant).pins
        return pins[name][1] == chain if name in pins else len(pins) < PINS_MAX

    def pin(self, tenant: Scope, name: str, chain: Collection[BlockKey], until: Wall) -> None:
        """The tenant has this pin, or another end of it."""
        held = self._held(tenant)
        if name not in held.pins:
            held.holders.update(chain)
        held.pins[name] = until, chain

    def has_pin(self, tenant: Scope, name: str) -> bool:
        return name in self._held(tenant).pins

    def unpin(self, tenant: Scope, name: str) -> None:
        """The tenant has no pin of this name any more. Idempotent."""
        held = self._held(tenant)
        held.drop(held.pins.pop(name, (Wall(0.0), ()))[1])

    def expire(self, now: Wall) -> None:
        """Forget what is over. O(all that is held)."""
        for tenant, held in list(self._of.items()):
            self.release(tenant, [key for key, until in held.kept.items() if until <= now])
            for name in [name for name, (until, _) in held.pins.items() if until <= now]:
                self.unpin(tenant, name)
            if not held.holders:
                del self._of[tenant]
