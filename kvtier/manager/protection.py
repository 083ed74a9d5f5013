"""Blocks that eviction must not take: named pins and guarantees, over all tiers.

    guaranteed or pinned ─→ retained in G2 ─(durable below)→ retained by G3, released in G2 ─(time is over)→ evictable
                        └─→ named pins: written beside G3's index, and in G4 for every replica

A block is retained in G2 (out of its policy's hands) until a local tier below retains it; then G2 may use its slot for
other blocks. All guarantees and pins together are bounded by a share of the tier that retains, blocks retained in G2 by
the same share of its slots. A purge ends pins and guarantees alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.pin_sync import CALL_S, FAILURES, PinSync
from kvtier.retention.guarantees import Guarantees
from kvtier.retention.pins import Pin, Pins
from kvtier.retention.ranges import ChainTerms
from kvtier.retention.terms import Depth
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.protocol import Retaining
from kvtier.times import Wall

log = logging.getLogger(__name__)

_UNBOUNDED_BLOCKS = 1 << 40
_MARGIN = 0.125  # of a guarantee's time that it is retained longer below: not every use has to reach that tier
_NEVER = Wall("-inf")
_SLICE_BLOCKS = 128
"""Blocks whose protection is taken over in one hold of the lock: half a millisecond of work."""


@dataclass(frozen=True, slots=True)
class _Guarantee:
    """Bytes reserved for `seconds` after each use. `made`: wall time that tells it from those a purge covers."""

    seconds: float
    made: Wall


class Protection:
    """The guarantees and named pins of one manager. Sync verbs are called under the lock; async ones on its loop."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._host, self._lock, self._clock = hierarchy.host, hierarchy.lock, hierarchy.clock
        self._share = hierarchy.limits.reserved
        self._tier: Retaining | None = None
        self._tier_name = ""
        self._budget = self._retained_max = 0
        self.pins = Pins(0)
        self.guarantees = Guarantees(0, 1)
        self._sync = PinSync(hierarchy, self.pins)
        self._terms: dict[BlockKey, _Guarantee] = {}
        self._below: dict[BlockKey, Wall] = {}  # retained by the tier below, until when
        self._claims: Counter[BlockKey] = Counter()  # blocks that puts under way are to store
        self._to_retain: set[BlockKey] = set()  # to be retained there, if they are there
        self._to_release: set[BlockKey] = set()
        self._turn = asyncio.Lock()
        self.unheld = 0  # protected blocks that G2 had no share left for: they may have left

    async def open(self) -> None:
        """Find the tiers that retain, and the protection that earlier processes left. Tier errors are logged."""
        self._retained_max = self._budget = max(1, int(self._share * self._host.capacity))
        tier = self._hierarchy.retaining()
        if tier is not None:
            self._tier, self._tier_name = tier.retaining(), tier.name
            capacity = tier.usage().capacity_bytes // tier.block_bytes
            self._budget = max(1, int(self._share * capacity)) if capacity else _UNBOUNDED_BLOCKS
        self._sync.open()
        try:
            async with asyncio.timeout(CALL_S):
                await self._read_pins()
                retained = await self._tier.retained() if self._tier is not None else {}
        except FAILURES as error:
            log.warning("pins and guarantees of earlier processes cannot be read: %s", error)
            return
        wall_s = self._clock.read().stamp
        with self._lock:
            self._below.update(retained)
            for key, until in retained.items():
                if not self.pins.covers(key) and until > wall_s:
                    self.guarantees.adopt(key, until)
                    self._terms[key] = _Guarantee(0.0, Wall(0))  # its time after a use is not known any more
            for key in retained:
                self._end(key)

    async def open_late(self) -> None:
        """`open` after a tier has joined: it is to retain what is protected, and to remember the pins."""
        tier = self._hierarchy.retaining()
        with self._lock:
            self._sync.unwritten.update(pin.name for pin in self.pins.listed())  # first: else they have ended elsewhere
            if tier is not None and tier.name != self._tier_name:
                self._below.clear()
        async with self._turn:
            await self.open()
        with self._lock:
            protected = {*self._terms, *(key for pin in self.pins.listed() for key in pin.chain)}
            self._to_retain.update(protected - self._below.keys())

    # ── under the lock ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def busy(self) -> bool:
        """Whether anything is protected: most of the time nothing is."""
        return bool(len(self.pins) or len(self.guarantees))

    def _wanted(self, key: BlockKey) -> bool:
        return self.pins.covers(key) or self.guarantees.until(key) > _NEVER

    def _divide_budget(self) -> None:
        """Pins and guarantees share one budget."""
        self.pins.limit_blocks = max(0, self._budget - len(self.guarantees))
        self.guarantees.limit_blocks = max(0, self._budget - len(self.pins))

    def guarantee(self, chain: Sequence[BlockKey], start: int, terms: ChainTerms, wall_s: Wall, stop: int = -1) -> None:
        """Reserve the bytes of the guaranteed blocks among start … stop-1 (-1: the end), here or to come; all or none.

        Raises InvalidRequest when that is more than may be guaranteed.
        """
        stop = len(chain) if stop < 0 else stop
        spans = [(chain[first:end], block) for first, end, block in terms.spans(start, stop) if block.guarantee_s]
        if not spans:
            return
        everything = [key for keys, _ in spans for key in keys]
        self._divide_budget()
        if not self.guarantees.fits(everything):
            self._expire(wall_s)
            self._divide_budget()
        self.guarantees.reserve(everything, wall_s)  # all, or none
        for keys, block in spans:
            hard = block.terms.max_age
            seconds = block.guarantee_s if hard is None else min(block.guarantee_s, hard)
            self.guarantees.reserve(list(keys), wall_s + seconds)
            self._terms.update(dict.fromkeys(keys, _Guarantee(seconds, wall_s)))
            if block.terms.ceiling >= Depth.G3:
                self._to_retain.update(key for key in keys if self._below.get(key, _NEVER) < wall_s + seconds)
            self._retain(keys)

    def claim(self, keys: Iterable[BlockKey]) -> None:
        """A put under way is to store these blocks: until `unclaim`, nobody else's failure ends their guarantees."""
        self._claims.update(keys)

    def unclaim(self, keys: Iterable[BlockKey]) -> None:
        """That put is over."""
        self._claims.subtract(keys)
        for key in [key for key in keys if not self._claims[key]]:
            del self._claims[key]

    def release_guarantees(self, keys: Iterable[BlockKey]) -> None:
        """These guaranteed blocks were not stored after all."""
        for key in keys:
            if key not in self._host.index and key not in self._below and key not in self._claims:
                self._withdraw(key)

    def arrived(self, slots: Sequence[Slot]) -> None:
        """Blocks are READY in G2: those that are pinned live until their pins end, guaranteed ones stay."""
        wanted = [slot for slot in slots if slot.key is not None and self._wanted(slot.key)]
        if not wanted:
            return
        untils = self.pins.untils(slot.key for slot in wanted if slot.key is not None)
        wall_s = self._clock.read().serve
        for slot in wanted:
            if slot.key in untils:
                _extend(slot, untils[slot.key], wall_s)
        self._retain(slot.key for slot in wanted if slot.key is not None)

    def _retain(self, keys: Iterable[BlockKey]) -> None:
        """Retain in G2 the blocks that no tier below retains, as far as G2's share goes."""
        host = self._host
        alone = [key for key in keys if key not in self._below and key in host.index]
        space = max(0, self._retained_max - host.retained)
        host.retain(alone[:space])
        self.unheld += len(alone[space:])

    def stored(self, tier: str, keys: Iterable[BlockKey]) -> None:
        """These blocks are durable in `tier`: protected ones are to be retained there, if it can."""
        if tier == self._tier_name:
            self._to_retain.update(key for key in keys if key not in self._below and self._wanted(key))

    def used(self, keys: Iterable[BlockKey], wall_s: Wall) -> None:
        """Blocks were used at `wall_s`: their guarantees begin anew."""
        for key in keys:
            terms = self._terms.get(key)
            if terms is not None:
                self.guarantees.adopt(key, wall_s + terms.seconds)
                if self._below.get(key, wall_s + terms.seconds) < wall_s + terms.seconds:
                    self._to_retain.add(key)

    def purge(self, scope: Scope, before: Wall) -> None:
        """A scope was purged: its pins and guarantees made until then end."""
        names = {pin.name for pin in self.pins.listed() if scope_of_key(pin.chain[0]) == scope}
        free = self.pins.purge(scope, before)
        self._sync.unwritten |= {name for name in names if self.pins.get(name) is None}
        old = [key for key, terms in self._terms.items() if scope_of_key(key) == scope and terms.made <= before]
        for key in free:
            self._end(key)
        for key in old:
            self._withdraw(key)

    def forget(self, tier: str) -> None:
        """A tier's copies were dropped by its operator."""
        if tier == self._tier_name:
            keys = list(self._below)
            self._below.clear()
            self._to_retain.update(keys)
            self._retain(keys)

    def _withdraw(self, key: BlockKey) -> None:
        """End a guarantee."""
        self._terms.pop(key, None)
        self.guarantees.drop(key)
        self._end(key)

    def _end(self, key: BlockKey) -> None:
        """Release a block that is not protected any more."""
        if self._wanted(key):
            return
        self._terms.pop(key, None)
        self._host.release_retained([key])
        self._to_retain.discard(key)
        if self._below.pop(key, None) is not None:
            self._to_release.add(key)

    # ── named pins, on the loop ─────────────────────────────────────────────────────────────────────────────

    async def create(self, name: str, chain: Sequence[BlockKey], ttl: float, tokens: int = 0) -> Pin:
        """Pin a chain under a new name for `ttl` seconds: its blocks that are here, and those to come. On return the
        pin is on its media, and the tiers below retain what they have of it. Raises InvalidRequest, and then nothing
        has changed."""
        async with self._turn:
            wall_s = self._clock.read().stamp
            with self._lock:
                self._expire(wall_s)
                self._divide_budget()
                pin = self.pins.create(name, list(chain), wall_s, ttl, tokens)
            await self._establish(pin)
            return pin

    async def extend(self, name: str, ttl: float) -> Pin:
        """Let a pin end `ttl` seconds from now, later or sooner. Raises InvalidRequest if there is none."""
        async with self._turn:
            wall_s = self._clock.read().stamp
            with self._lock:
                self._expire(wall_s)
                pin = self.pins.extend(name, wall_s, ttl)
            await self._establish(pin)
            return pin

    async def delete(self, name: str, *, drop: bool = False) -> bool:
        """End a pin; whether there was one. Its blocks leave as others do from now on; with `drop`, those that nothing
        else protects leave every tier at once."""
        async with self._turn:
            wall_s = self._clock.read().stamp
            with self._lock:
                self._expire(wall_s)
                there = self.pins.get(name) is not None
                freed = self.pins.delete(name)
                for key in freed:
                    self._end(key)
                free = [key for key in freed if not self._wanted(key)]
                self._sync.unwritten.add(name)
            there |= await self._sync.write([name])
            await self._retain_below()
        if drop:
            await self._hierarchy.drop_everywhere(free)
        return there

    def listed(self) -> list[Pin]:
        """The pins that have not ended, by name."""
        wall_s = self._clock.wall()
        with self._lock:
            return [pin for pin in self.pins.listed() if pin.until >= wall_s]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._host.block_bytes

    def resident(self, pin: Pin) -> int:
        """How many of a pin's blocks are in G2."""
        with self._lock:
            return sum(key in self._host.index for key in pin.chain)

    async def _establish(self, pin: Pin) -> None:
        wall_s = self._clock.wall()
        with self._lock:
            index = self._host.index
            self.arrived([index[key] for key in pin.chain if key in index and index[key].expires_at >= wall_s])
            self._to_retain.update(pin.chain)
            self._sync.unwritten.add(pin.name)
        await self._sync.write([pin.name])
        await self._retain_below()

    # ── housekeeping, on the loop ───────────────────────────────────────────────────────────────────────────

    async def tend(self, *, read_pins: bool = False) -> None:
        """End pins and guarantees whose time is over, and bring changes to the tiers below; with `read_pins`, take in
        those made elsewhere."""
        async with self._turn:
            wall_s = self._clock.read().delete
            with self._lock:
                if wall_s is not None:
                    self._expire(wall_s)
                names = list(self._sync.unwritten)
            await self._sync.write(names)
            await self._retain_below()
            if read_pins:
                try:
                    async with asyncio.timeout(CALL_S):
                        await self._read_pins()
                        await self._drop_stale()
                except FAILURES as error:
                    log.debug("pins cannot be read now: %s", error)

    async def _drop_stale(self) -> None:
        """End guarantees of blocks that the tier below has lost; G2 retains again those that it has."""
        if self._tier is None or not self._below:
            return
        with self._lock:
            before = list(self._below)
        retained = await self._tier.retained()
        with self._lock:
            for key in before:
                if key not in retained and self._below.pop(key, None) is not None:
                    if key in self._host.index:
                        self._retain([key])
                        self._to_retain.add(key)
                    elif not self.pins.covers(key):
                        self._withdraw(key)

    def _expire(self, wall_s: Wall) -> None:
        ended = [pin.name for pin in self.pins.listed() if pin.until < wall_s]
        self._sync.unwritten.update(ended)
        for key in self.guarantees.expire(wall_s):
            self._terms.pop(key, None)  # though a pin may keep the block: its use renews no guarantee that is over
            self._end(key)
        for key in self.pins.expire(wall_s):
            self._end(key)

    async def _retain_below(self) -> None:
        """Have the tier below retain protected blocks, and release those whose protection ended."""
        if self._tier is None:
            self._to_retain.clear()
            return
        with self._lock:
            keys = [key for key in self._to_retain if self._wanted(key)]
            drops = list(self._to_release)
            self._to_retain.clear()
            self._to_release.clear()
            groups = self._by_time(keys)
        try:
            if drops:
                async with asyncio.timeout(CALL_S):
                    await self._tier.release_retained(drops)
                drops = []
            for times in list(groups):
                async with asyncio.timeout(CALL_S):
                    done = await self._tier.retain(groups[times], *times)
                self._retained_below(groups.pop(times), done, times[0])
        except FAILURES as error:
            log.debug("%s retains nothing now: %s", self._tier_name, error)
        finally:
            with self._lock:
                self._to_release.update(drops)
                self._to_retain.update(key for group in groups.values() for key in group)

    def _by_time(self, keys: Sequence[BlockKey]) -> dict[tuple[Wall, Wall | None], list[BlockKey]]:
        """Blocks by (until when to retain them, until when to serve them whatever their terms)."""
        groups: dict[tuple[Wall, Wall | None], list[BlockKey]] = {}
        pinned = self.pins.untils(keys)
        for key in keys:
            terms, until = self._terms.get(key), self.guarantees.until(key)
            longer = terms.seconds * _MARGIN if terms is not None else 0.0
            served = pinned.get(key)
            groups.setdefault((max(until + longer, served or _NEVER), served), []).append(key)
        return groups

    def _retained_below(self, keys: Sequence[BlockKey], done: Sequence[bool], until: Wall) -> None:
        answers = zip(keys, done, strict=True)
        while part := list(islice(answers, _SLICE_BLOCKS)):
            with self._lock:
                for key, is_retained in part:
                    if not is_retained:
                        self._below.pop(key, None)
                        continue
                    self._below[key] = until
                    if self._wanted(key):
                        self._host.release_retained([key])
                    else:
                        self._end(key)  # it ended meanwhile

    async def _read_pins(self) -> None:
        """Take in the pins that other processes and replicas made, or ended. Raises TierError or OSError."""
        found = await self._sync.read()
        if found is None:
            return
        wall_s = self._clock.read().stamp
        with self._lock:
            unwritten = self._sync.unwritten
            for pin in self.pins.listed():
                if pin.name not in found and pin.name not in unwritten:
                    for key in self.pins.delete(pin.name):
                        self._end(key)
            for pin in found.values():
                if pin.name in unwritten or self.pins.get(pin.name) == pin:
                    continue
                if pin.until < wall_s:
                    unwritten.add(pin.name)
                    continue
                self.pins.adopt(pin)
                self._to_retain.update(pin.chain)

    def stats(self) -> dict[str, int]:
        """Gauges and counters. Under the lock."""
        return {
            "pins": self.pins.names,
            "pinned": len(self.pins),
            "guaranteed": len(self.guarantees),
            "refused": self.guarantees.refused,
            "unheld": self.unheld,
        }

    def check(self) -> None:
        """Assert the invariants. Under the lock."""
        self.pins.check()
        assert all(self.guarantees.until(key) > _NEVER for key in self._terms), "a guarantee that is not counted"
        assert all(map(self._wanted, self._below)), "retained below without protection"
        assert self._host.retained <= self._retained_max, "more of G2 is retained than its share"


def _extend(slot: Slot, until: Wall, wall_s: Wall) -> None:
    ceiling = slot.life.ceiling(wall_s)
    if ceiling is not None:
        slot.life = slot.life.extend_until(until, ceiling, wall_s)
