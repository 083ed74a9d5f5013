"""The tiers below G2: those in use, nearest first, and those that did not open, which are tried again until they do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.errors import ClosedError, KVTierError, TierError
from kvtier.events import Events
from kvtier.tiers.guard import Guarded
from kvtier.tiers.meter import Metered
from kvtier.tiers.protocol import Tier
from kvtier.times import Mono

log = logging.getLogger(__name__)

TRY_FIRST_S, TRY_LAST_S = 1.0, 60.0
"""Before the second try to open a tier, and the longest that doubling leads to."""


@dataclass
class LeftOut:
    """A tier that is not in use, since it did not open for this `reason`. `opened`: it is open meanwhile, and learns
    what it missed."""

    tier: Metered
    reason: str
    next_try: Mono
    pause_s: float = TRY_FIRST_S
    opened: bool = False


class LowerTiers(Mapping[str, Metered]):
    """The tiers in use, by name. Changed on the manager's loop only; read on any thread, at any time: a tier that has
    joined stays until the end."""

    def __init__(self, tiers: Sequence[Tier], clock: Clock) -> None:
        """`tiers` are raw, nearest first. Opens nothing."""
        self._clock = clock
        self._all = {tier.name: Metered(Guarded(tier, clock), clock) for tier in tiers}
        self._used = dict(self._all)  # never changed, but replaced
        self._events: Events | None = None
        self.out: dict[str, LeftOut] = {}
        """Tiers that are left out, by name. Replaced as a whole, too."""

    def __getitem__(self, name: str) -> Metered:
        return self._used[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._used)

    def __len__(self) -> int:
        return len(self._used)

    def values(self) -> ValuesView[Metered]:
        return self._used.values()

    def items(self) -> ItemsView[str, Metered]:
        return self._used.items()

    def every(self) -> list[Metered]:
        """The tiers in use and those that are left out, nearest first."""
        return list(self._all.values())

    def subscribe(self, events: Events | None) -> None:
        """Notify `events` of these tiers' blocks from now on, those that join included; None: nobody any more."""
        self._events = events
        for tier in self._used.values():
            self._subscribe(tier)

    @contextmanager
    def losing(self, tiers: Iterable[Metered]) -> Iterator[None]:
        """Around what takes blocks out of these tiers: who listens hears of it where a tier does not say which. Even if
        it fails: some may have gone."""
        try:
            yield
        finally:
            for tier in tiers:
                if self._events is not None and not tier.names_removals():
                    self._events.lose(tier.name)

    async def evict(self, name: str) -> int:
        """Drop all of the namespace's blocks from one tier; returns how many."""
        with self.losing([tier := self._used[name]]):
            return await tier.evict(None)

    def _subscribe(self, tier: Metered) -> None:
        tier.subscribe(None if self._events is None else self._events.of(tier.name))

    async def open(self) -> None:
        """Open all tiers. One that fails is left out; one that must not be touched (FormatError) or is misconfigured
        (ConfigError) raises."""
        for name, tier in self._all.items():
            try:
                await tier.open()
            except (TierError, ClosedError) as error:
                log.warning("%s is left out: %s", name, error)
                self.out = {**self.out, name: LeftOut(tier, str(error), self._next_try(TRY_FIRST_S))}
                self._used = {other: used for other, used in self._used.items() if other != name}

    def _next_try(self, pause_s: float) -> Mono:
        return Mono(self._clock.monotonic() + pause_s)

    async def open_again(self, name: str, look_s: float) -> Metered:
        """Wait for the next try of a tier that was left out, and open it if it is not open; where that fails, again
        after twice the pause. The injected clock cannot wake anybody: it is read every `look_s`."""
        left = self.out[name]
        while True:
            if self._clock.monotonic() < left.next_try:
                await asyncio.sleep(look_s)
                continue
            try:
                if not left.opened:
                    await left.tier.open()
                    left.opened = True
                return left.tier
            except KVTierError as error:  # a mistake in the configuration, too: the cache is up, and stays up
                self.defer(name, error)

    def defer(self, name: str, error: Exception) -> None:
        """Try a tier again later: it failed once more."""
        left = self.out[name]
        if str(error) != left.reason:
            log.warning("%s is left out still: %s", name, error)
        left.reason, left.pause_s = str(error), min(TRY_LAST_S, 2 * left.pause_s)
        left.next_try = self._next_try(left.pause_s)

    def join(self, name: str) -> None:
        """Take a tier into use that is open and up to date."""
        tier = self.out[name].tier
        self._subscribe(tier)
        self._used = {other: self._all[other] for other in self._all if other == name or other in self._used}
        self.out = {other: left for other, left in self.out.items() if other != name}
        log.warning("%s is in use now", name)

    def why_out(self) -> dict[str, str]:
        """For each tier that is left out: its reason, and when it is tried next."""
        now = self._clock.monotonic()
        return {
            name: f"not open: {left.reason}; next try in {max(0.0, left.next_try - now):.0f} s"
            for name, left in self.out.items()
        }

    async def close(self, deadline: Mono) -> None:
        """Close all that are open, at once, whatever they do."""
        opened = [left.tier for left in self.out.values() if left.opened]
        tiers = [*self._used.values(), *opened]
        await asyncio.gather(*(tier.close(deadline) for tier in tiers), return_exceptions=True)
