"""What hints of each tenant hold: blocks that are kept, and pins.

The bound of one tenant is a share of what may be reserved at all, so one tenant's wishes do not use up what others may
reserve. Nothing is held beyond its time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtier.identity.keys import BlockKey, Scope
from kvtier.manager.slices import slices
from kvtier.retention.pins import Pin
from kvtier.times import Wall

PINS_MAX = 64
"""Pins of one tenant: there is a bound on those of all."""


_NEVER = Wall(math.inf)


@dataclass(frozen=True, slots=True)
class _Held:
    """One pin. `created` tells it from another of its name; None while it is being made."""

    chain: Sequence[BlockKey]
    until: Wall = _NEVER
    created: Wall | None = None


@dataclass(slots=True)
class _Holdings:
    kept: dict[BlockKey, Wall] = field(default_factory=dict)
    pins: dict[str, _Held] = field(default_factory=dict)
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

    def may_pin(self, tenant: Scope) -> bool:
        """Whether the tenant may have a pin more."""
        return len(self._held(tenant).pins) < PINS_MAX

    def begin_pin(self, tenant: Scope, name: str, chain: Sequence[BlockKey]) -> None:
        """A pin that the tenant has not is being made: its blocks count from now on, until `pin` or `unpin`."""
        held = self._held(tenant)
        held.pins[name] = _Held(chain)
        held.holders.update(chain)

    def pin(self, tenant: Scope, pin: Pin) -> None:
        """The tenant has this pin, or another end of it; in place of another of its name."""
        held = self._held(tenant)
        known = held.pins.get(pin.name)
        if known is None or known.chain != pin.chain:
            self.unpin(tenant, pin.name)
            held.holders.update(pin.chain)
        held.pins[pin.name] = _Held(pin.chain, pin.until, pin.created)

    def making(self, tenant: Scope, name: str) -> bool:
        """Whether a pin of this name is being made for the tenant."""
        known = self._held(tenant).pins.get(name)
        return known is not None and known.created is None

    def has_pin(self, tenant: Scope, pin: Pin | None) -> bool:
        """Whether this pin is the tenant's, and not merely of the same name as one that was."""
        known = None if pin is None else self._held(tenant).pins.get(pin.name)
        if known is None or pin is None or known.created != pin.created:
            return False
        return known.chain is pin.chain or known.chain == pin.chain

    def pins(self, tenant: Scope) -> list[str]:
        """Names of the tenant's pins, but for those that are being made."""
        return [name for name, known in self._held(tenant).pins.items() if known.created is not None]

    def unpin(self, tenant: Scope, name: str) -> None:
        """The tenant has no pin of this name any more. Idempotent."""
        held = self._held(tenant)
        known = held.pins.pop(name, None)
        held.drop(() if known is None else known.chain)

    def expire(self, now: Wall) -> Iterator[None]:
        """Forget what is over. O(all that is held): pauses after each slice, and others may change it meanwhile."""
        for tenant, held in list(self._of.items()):
            for part in slices(list(held.kept)):
                self.release(tenant, [key for key in part if held.kept.get(key, _NEVER) <= now])
                yield
            for name in [name for name, pin in held.pins.items() if pin.until <= now]:
                self.unpin(tenant, name)
            if not held.holders and self._of.get(tenant) is held:
                del self._of[tenant]
