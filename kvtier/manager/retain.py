"""Keeps wanted blocks out of eviction's reach: in G2, until a local tier below retains them.

Who wants a block, and until when, is the owner's business. The tier below is told in the background; what it could not
be told stays on a list.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from kvtier.identity.key_map import KeyMap
from kvtier.identity.keys import BlockKey
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.pin_sync import CALL_S, FAILURES
from kvtier.manager.slices import MOVED_BLOCKS, slices
from kvtier.tiers.meter import Metered
from kvtier.tiers.protocol import Retaining
from kvtier.times import Wall

log = logging.getLogger(__name__)

UNBOUNDED_BLOCKS = 1 << 40

V = TypeVar("V")

Times = tuple[Wall, Wall | None]
"""Until when to retain a block, and until when to serve it whatever its terms."""

_NEVER, _FOREVER = Wall("-inf"), Wall("inf")
_ASKED_BLOCKS = 1024  # that the tier below is to retain in one call


class Retainer:
    """The retained blocks of one manager. Sync verbs are called under the lock; async ones on its loop, in slices.
    At each yield a block is retained only if it was wanted when its slice was done; whoever stops to want it calls
    `release`."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        wanted: Callable[[BlockKey], bool],
        by_time: Callable[[Sequence[BlockKey]], Mapping[Times, list[BlockKey]]],
    ) -> None:
        """`wanted` says whether a block is to be retained; `by_time` sorts those that are. Both under the lock."""
        self._hierarchy = hierarchy
        self._host, self._lock = hierarchy.host, hierarchy.lock
        self._wanted, self._by_time = wanted, by_time
        self._tier: Retaining | None = None
        self._metered: Metered | None = None  # the same
        self._tier_name = ""
        self._most = 0
        self._below = KeyMap[Wall]()  # retained by the tier below, until when
        self._to_retain = KeyMap[None]()  # to be retained there, if they are there
        self._to_release = KeyMap[Wall]()  # unless it retains them longer: another process wants them
        self.unheld = 0
        """Wanted blocks that G2 had no share left for: they may have left."""

    def open(self, share: float) -> int:
        """Find the tier that retains. Returns how many blocks may be wanted: see `size`."""
        self._metered = tier = self._hierarchy.retaining()
        if tier is not None:
            with self._lock:
                below = self._below
                if tier.name != self._tier_name:  # another one than before
                    self._below = KeyMap()
                self._tier, self._tier_name = tier.retaining(), tier.name
            del below  # without the lock: that of a million blocks takes a tenth of a second
        return self.size(share)

    def size(self, share: float) -> int:
        """The capacities of now count. Returns how many blocks may be wanted: this share of the tier's that retains, or
        of G2's. G2 retains that share of its own at most, and what it retains already until that ends."""
        with self._lock:
            budget = max(1, int(share * self._host.capacity))
            self._most = max(budget, len(self._host.retained))
        if self._metered is None:
            return budget
        capacity = self._metered.usage().capacity_bytes // self._metered.block_bytes
        return max(1, int(share * capacity)) if capacity else UNBOUNDED_BLOCKS

    async def known_below(self) -> Mapping[BlockKey, Wall]:
        """What the tier below retains, whoever asked it to. Raises its errors."""
        async with asyncio.timeout(CALL_S):
            return await self._tier.retained() if self._tier is not None else {}

    # ── under the lock ──────────────────────────────────────────────────────────────────────────────────────

    def found(self, key: BlockKey, until: Wall) -> None:
        """The tier below was found to retain this block."""
        self._below[key] = until

    def has_below(self, key: BlockKey) -> bool:
        """Whether the tier below retains this block."""
        return key in self._below

    def is_asked(self, key: BlockKey) -> bool:
        """Whether the tier below is still to say if it has this block, to retain it."""
        return key in self._to_retain

    def retain(self, keys: Iterable[BlockKey]) -> None:
        """Retain in G2 the blocks that no tier below retains, as far as G2's share goes."""
        host = self._host
        held = host.retained
        alone = [key for key in keys if key not in self._below and key not in held and key in host.index]
        space = max(0, self._most - len(held))
        host.retain(alone[:space])
        self.unheld += len(alone[space:])

    def ask(self, keys: Iterable[BlockKey], until: Wall | None = None) -> None:
        """Have the tier below retain these blocks, unless it does `until` then or longer (None: anyway)."""
        if until is None:
            self._to_retain.set_all(keys, None)
        else:
            self._to_retain.set_all((key for key in keys if self._below.get(key, _NEVER) < until), None)

    def stored(self, tier: str, keys: Iterable[BlockKey]) -> None:
        """These blocks are durable in `tier`."""
        if tier == self._tier_name:
            wanted = (key for key in keys if key not in self._below and self._wanted(key))
            self._to_retain.set_all(wanted, None)

    def release(self, key: BlockKey) -> None:
        """Nobody wants this block any more."""
        self._host.release_retained([key])
        self._to_retain.pop(key, None)
        if (until := self._below.pop(key, None)) is not None:
            self._to_release[key] = until

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────────────────

    async def forget(self, tier: str) -> None:
        """A tier's copies were dropped by its operator. What it stores again meanwhile is retained once more."""
        if tier == self._tier_name:
            await self._lost(list(self._below), {})

    async def drop_stale(self) -> list[BlockKey]:
        """Find the blocks that the tier below has lost, or retains for less, as another process asked; it is to retain
        them again, and G2 those lost ones that it has. Returns those that are nowhere. Raises the tier's errors."""
        if self._tier is None or not self._below:
            return []
        before = list(self._below)  # at once, in C: no lock
        return await self._lost(before, await self.known_below())

    async def _lost(self, keys: Sequence[BlockKey], retained: Mapping[BlockKey, Wall]) -> list[BlockKey]:
        nowhere: list[BlockKey] = []
        for part in slices(keys, MOVED_BLOCKS):
            with self._lock:
                gone = [key for key in part if key not in retained and self._below.pop(key, None) is not None]
                shorter = [key for key in part if retained.get(key, _FOREVER) < self._below.get(key, _NEVER)]
                self.retain(gone)
                self._to_retain.set_all(gone + shorter, None)
                nowhere += [key for key in gone if key not in self._host.index]
            await asyncio.sleep(0)
        return nowhere

    async def tell_below(self) -> None:
        """Have the tier below retain what is wanted, and release what is not. What fails is tried the next time."""
        tier = self._tier
        if tier is None:
            with self._lock:
                if dropped := (self._to_retain, self._to_release) if self._to_retain or self._to_release else ():
                    self._to_retain, self._to_release = KeyMap(), KeyMap()
            del dropped  # without the lock
            return
        try:
            await self._pass_on(self._to_release, partial(self._release_below, tier))
            await self._pass_on(self._to_retain, partial(self._ask_below, tier))
        except FAILURES as error:
            log.debug("%s retains nothing now: %s", self._tier_name, error)

    async def _pass_on(self, waiting: KeyMap[V], tell: Callable[[Mapping[BlockKey, V]], Awaitable[None]]) -> None:
        """Tell the tier of the blocks that wait now. Those that it was not told of wait again."""
        left = len(waiting)
        while left > 0:
            with self._lock:
                part = waiting.take(min(left, _ASKED_BLOCKS))
            if not part:  # nobody wants the rest any more
                return
            left -= len(part)
            try:
                await tell(part)
            except BaseException:
                for again in slices(list(part)):
                    with self._lock:
                        for key in again:
                            waiting[key] = part[key]
                raise

    async def _release_below(self, tier: Retaining, untils: Mapping[BlockKey, Wall]) -> None:
        async with asyncio.timeout(CALL_S):
            await tier.release_retained(list(untils), list(untils.values()))

    async def _ask_below(self, tier: Retaining, keys: Iterable[BlockKey]) -> None:
        groups: dict[Times, list[BlockKey]] = {}
        for part in slices(list(keys), MOVED_BLOCKS):
            with self._lock:
                for times, wanted in self._by_time(part).items():
                    groups.setdefault(times, []).extend(wanted)
            await asyncio.sleep(0)
        for times, wanted in groups.items():
            async with asyncio.timeout(CALL_S):
                done = await tier.retain(wanted, *times)
            await self._retained_below(wanted, done, times[0])

    async def _retained_below(self, keys: Sequence[BlockKey], done: Sequence[bool], until: Wall) -> None:
        for part in slices(list(zip(keys, done, strict=True)), MOVED_BLOCKS):
            with self._lock:
                for key, is_retained in part:
                    if not is_retained:
                        self._below.pop(key, None)
                        continue
                    self._below[key] = until
                    if self._wanted(key):
                        self._host.release_retained([key])
                    else:
                        self.release(key)  # it ended meanwhile
            await asyncio.sleep(0)

    def check(self) -> None:
        """Assert the invariants. Under the lock."""
        assert all(map(self._wanted, self._below)), "retained below without protection"
        assert len(self._host.retained) <= self._most, "more of G2 is retained than its share"
