"""What must stay: named pins and guarantees, over all tiers.

    promised or pinned ─→ held in G2 ─(durable below)→ kept by G3, let go in G2 ─(time is over)→ leaves as others do
                     └─→ named pins: noted beside G3's index, and kept by G4 for every replica

A block is held in G2 (out of its policy's hands) until a local tier below has taken the promise over; then G2 may use
its slot for others. What is promised in all is bounded by a share of the tier that keeps, what is held by the same
share of G2's slots. A purge ends pins and guarantees alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvtier.checksum import DIGEST_BYTES
from kvtier.errors import ClosedError, CorruptError, InvalidRequest, TierError
from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.retention import pins as codec
from kvtier.retention.guarantees import Guarantees
from kvtier.retention.pins import Pin, Pins
from kvtier.retention.ranges import ChainTerms
from kvtier.retention.terms import Depth
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.protocol import Notebook, Pinning, Retaining, Tier

if TYPE_CHECKING:
    from kvtier.manager.manager import Manager

log = logging.getLogger(__name__)

_NOTE = "pin/"
_UNBOUNDED_BLOCKS = 1 << 40
_PATIENCE_S = 10.0  # per call to a tier
_MARGIN = 0.125  # of a guarantee's time that it is kept longer below: not every use has to be told
_FAILURES = (TierError, ClosedError, InvalidRequest, OSError)
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class _Promise:
    """A guarantee: bytes reserved for `seconds` after each use. `made` tells it from what a purge covers."""

    seconds: float
    made: float


class Protection:
    """The promises of one manager. Sync verbs are called under the manager's lock; async ones on its loop."""

    def __init__(self, manager: Manager, time: TrustedClock, share: float) -> None:
        self._manager = manager
        self._time = time
        self._share = share
        self._tier: Retaining | None = None
        self._tier_name = ""
        self._book: Notebook | None = None
        self._shared: list[Pinning] = []
        self._budget = self._held_max = 0
        self.pins = Pins(0)
        self.guarantees = Guarantees(0, 1)
        self._promises: dict[BlockKey, _Promise] = {}
        self._below: dict[BlockKey, float] = {}  # kept by the tier below, until when
        self._to_retain: set[BlockKey] = set()  # to be kept there, if they are there
        self._to_drop: set[BlockKey] = set()
        self._unnoted: set[str] = set()  # pins whose note, or whose end, is not on its medium yet
        self._noted: dict[str, tuple[bytes, list[Pin]]] = {}  # as last read: digest, pins
        self._turn = asyncio.Lock()
        self.unheld = 0  # promised blocks that G2 had no share left for: they may have left

    async def open(self) -> None:
        """Find the tiers that keep, and what earlier processes promised. Tier errors are logged."""
        host = self._manager.host
        self._held_max = self._budget = max(1, int(self._share * host.capacity))
        for name, tier in self._manager.lower.items():
            raw: Tier = tier.inner.inner
            if self._tier is None and hasattr(raw, "retain"):
                self._tier, self._tier_name = cast(Retaining, raw), name
                capacity = raw.usage().capacity_bytes // raw.block_bytes
                self._budget = max(1, int(self._share * capacity)) if capacity else _UNBOUNDED_BLOCKS
            if self._book is None and hasattr(raw, "write_note"):
                self._book = cast(Notebook, raw)
            if hasattr(raw, "pin"):
                self._shared.append(cast(Pinning, raw))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._learn()
                kept = await self._tier.retained() if self._tier is not None else {}
        except _FAILURES as error:
            log.warning("promises of earlier processes cannot be read: %s", error)
            return
        now = self._time.read().stamp
        with self._manager.lock:
            self._below.update(kept)
            for key, until in kept.items():
                if not self.pins.held(key) and until > now:
                    self.guarantees.adopt(key, until)
                    self._promises[key] = _Promise(0.0, 0.0)  # for how long after a use is not known any more
            for key in kept:
                self._end(key)

    # ── under the lock ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def busy(self) -> bool:
        """Whether anything is promised: most of the time nothing is."""
        return bool(len(self.pins) or len(self.guarantees))

    def _wanted(self, key: BlockKey) -> bool:
        return self.pins.held(key) or self.guarantees.until(key) > _NEVER

    def _make_room(self) -> None:
        """What is not promised yet may be: pins and guarantees share one budget."""
        self.pins.limit_blocks = max(0, self._budget - len(self.guarantees))
        self.guarantees.limit_blocks = max(0, self._budget - len(self.pins))

    def guarantee(self, chain: Sequence[BlockKey], start: int, terms: ChainTerms, now: float, stop: int = -1) -> None:
        """Reserve the bytes of the guaranteed blocks among start … stop-1 (-1: the end), here or to come; all or none.

        Raises InvalidRequest when more would be promised than may be.
        """
        stop = len(chain) if stop < 0 else stop
        spans = [(chain[first:end], block) for first, end, block in terms.spans(start, stop) if block.guarantee_s]
        if not spans:
            return
        everything = [key for keys, _ in spans for key in keys]
        self._make_room()
        if not self.guarantees.fits(everything):
            self._expire(now)
            self._make_room()
        self.guarantees.reserve(everything, now)  # all, or none
        for keys, block in spans:
            hard = block.terms.max_age
            seconds = block.guarantee_s if hard is None else min(block.guarantee_s, hard)
            self.guarantees.reserve(list(keys), now + seconds)
            self._promises.update(dict.fromkeys(keys, _Promise(seconds, now)))
            if block.terms.ceiling >= Depth.G3:
                self._to_retain.update(key for key in keys if self._below.get(key, _NEVER) < now + seconds)
            self._hold(keys)

    def release_guarantees(self, keys: Iterable[BlockKey]) -> None:
        """These guaranteed blocks were not stored after all."""
        for key in keys:
            if key not in self._manager.host.index and key not in self._below:
                self._withdraw(key)

    def arrived(self, slots: Sequence[Slot]) -> None:
        """Blocks are READY in G2: those that are pinned live until their pins end, those that are promised stay."""
        wanted = [slot for slot in slots if slot.key is not None and self._wanted(slot.key)]
        if not wanted:
            return
        untils = self.pins.untils(slot.key for slot in wanted if slot.key is not None)
        now = self._time.read().serve
        for slot in wanted:
            if slot.key in untils:
                _extend(slot, untils[slot.key], now)
        self._hold(slot.key for slot in wanted if slot.key is not None)

    def _hold(self, keys: Iterable[BlockKey]) -> None:
        """Keep out of eviction what nobody below keeps, as far as G2's share goes."""
        host = self._manager.host
        alone = [key for key in keys if key not in self._below and key in host.index]
        room = max(0, self._held_max - host.retained)
        host.retain(alone[:room])
        self.unheld += len(alone[room:])

    def stored(self, tier: str, keys: Iterable[BlockKey]) -> None:
        """These blocks are durable in `tier`: if it keeps, it shall."""
        if tier == self._tier_name:
            self._to_retain.update(key for key in keys if key not in self._below and self._wanted(key))

    def used(self, keys: Iterable[BlockKey], now: float) -> None:
        """Blocks were used at `now`: their guarantees begin anew."""
        for key in keys:
            promise = self._promises.get(key)
            if promise is not None:
                self.guarantees.adopt(key, now + promise.seconds)
                if self._below.get(key, now + promise.seconds) < now + promise.seconds:
                    self._to_retain.add(key)

    def purge(self, scope: Scope, before: float) -> None:
        """A scope was purged: nothing is owed to what it had until then."""
        names = {pin.name for pin in self.pins.listed() if scope_of_key(pin.chain[0]) == scope}
        free = self.pins.purge(scope, before)
        self._unnoted |= {name for name in names if self.pins.get(name) is None}
        old = [key for key, promise in self._promises.items() if scope_of_key(key) == scope and promise.made <= before]
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
            self._hold(keys)

    def _withdraw(self, key: BlockKey) -> None:
        """End a guarantee."""
        self._promises.pop(key, None)
        self.guarantees.drop(key)
        self._end(key)

    def _end(self, key: BlockKey) -> None:
        """Let a block go unless something is owed to it still."""
        if self._wanted(key):
            return
        self._promises.pop(key, None)
        self._manager.host.release_retained([key])
        self._to_retain.discard(key)
        if self._below.pop(key, None) is not None:
            self._to_drop.add(key)

    # ── named pins, on the loop ─────────────────────────────────────────────────────────────────────────────

    async def create(self, name: str, chain: Sequence[BlockKey], ttl: float, tokens: int = 0) -> Pin:
        """Pin a chain under a new name for `ttl` seconds: what is here of it, and what will be. When this returns it is
        noted, and kept by the tiers below as far as they have it. Raises InvalidRequest, and then nothing changed."""
        async with self._turn:
            now = self._time.read().stamp
            with self._manager.lock:
                self._expire(now)
                self._make_room()
                pin = self.pins.create(name, list(chain), now, ttl, tokens)
            await self._establish(pin)
            return pin

    async def extend(self, name: str, ttl: float) -> Pin:
        """Let a pin end `ttl` seconds from now, later or sooner. Raises InvalidRequest if there is none."""
        async with self._turn:
            now = self._time.read().stamp
            with self._manager.lock:
                self._expire(now)
                pin = self.pins.extend(name, now, ttl)
            await self._establish(pin)
            return pin

    async def delete(self, name: str, *, drop: bool = False) -> bool:
        """End a pin; whether there was one. Its blocks leave as others do from now on; with `drop`, those that nothing
        else keeps leave every tier at once."""
        async with self._turn:
            now = self._time.read().stamp
            with self._manager.lock:
                self._expire(now)
                there = self.pins.get(name) is not None
                freed = self.pins.delete(name)
                for key in freed:
                    self._end(key)
                free = [key for key in freed if not self._wanted(key)]
                self._unnoted.add(name)
            there |= await self._note([name])
            await self._retain_below()
        if drop:
            await self._manager.evict_blocks(free)
        return there

    def listed(self) -> list[Pin]:
        """The pins that have not ended, by name."""
        now = self._time.wall()
        with self._manager.lock:
            return [pin for pin in self.pins.listed() if pin.until >= now]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._manager.host.block_bytes

    def resident(self, pin: Pin) -> int:
        """How many of a pin's blocks are in G2."""
        with self._manager.lock:
            return sum(key in self._manager.host.index for key in pin.chain)

    async def _establish(self, pin: Pin) -> None:
        now = self._time.wall()
        with self._manager.lock:
            index = self._manager.host.index
            self.arrived([index[key] for key in pin.chain if key in index and index[key].expires_at >= now])
            self._to_retain.update(pin.chain)
            self._unnoted.add(pin.name)
        await self._note([pin.name])
        await self._retain_below()

    # ── housekeeping, on the loop ───────────────────────────────────────────────────────────────────────────

    async def tend(self, *, learn: bool = False) -> None:
        """End what is over, and bring to the tiers below what they do not know yet; `learn`: of pins made elsewhere."""
        async with self._turn:
            now = self._time.read().delete
            with self._manager.lock:
                if now is not None:
                    self._expire(now)
                names = list(self._unnoted)
            await self._note(names)
            await self._retain_below()
            if learn:
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        await self._learn()
                except _FAILURES as error:
                    log.debug("pins cannot be read now: %s", error)

    def _expire(self, now: float) -> None:
        ended = [pin.name for pin in self.pins.listed() if pin.until < now]
        self._unnoted.update(ended)
        for key in self.guarantees.expire(now):
            self._promises.pop(key, None)  # though a pin may keep the block: its use renews no promise that is over
            self._end(key)
        for key in self.pins.expire(now):
            self._end(key)

    async def _note(self, names: Iterable[str]) -> bool:
        """Bring these pins, or their ends, to the medium; a tier that fails is tried again by `tend`. Whether a shared
        tier had one of those that ended."""
        there = False
        for name in names:
            with self._manager.lock:
                pin = self.pins.get(name)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    if self._book is not None:
                        await self._book.write_note(_NOTE + name, codec.encode([pin]) if pin is not None else None)
                    for tier in self._shared:
                        if pin is not None:
                            await tier.pin(pin)
                        else:
                            there |= await tier.unpin(name)
            except _FAILURES as error:
                log.warning("pin %s is not on every medium yet: %s", name[:40], error)
                continue
            with self._manager.lock:
                if self.pins.get(name) is pin:
                    self._unnoted.discard(name)
        return there

    async def _retain_below(self) -> None:
        """Have the tier below take promises over, and let go of those that ended."""
        if self._tier is None:
            self._to_retain.clear()
            return
        with self._manager.lock:
            keys = [key for key in self._to_retain if self._wanted(key)]
            drops = list(self._to_drop)
            self._to_retain.clear()
            self._to_drop.clear()
            groups = self._by_time(keys)
        try:
            if drops:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._tier.release_retained(drops)
                drops = []
            for times in list(groups):
                async with asyncio.timeout(_PATIENCE_S):
                    kept = await self._tier.retain(groups[times], *times)
                self._taken_over(groups.pop(times), kept, times[0])
        except _FAILURES as error:
            log.debug("%s keeps nothing now: %s", self._tier_name, error)
        finally:
            with self._manager.lock:
                self._to_drop.update(drops)
                self._to_retain.update(key for group in groups.values() for key in group)

    def _by_time(self, keys: Sequence[BlockKey]) -> dict[tuple[float, float | None], list[BlockKey]]:
        """Blocks by (until when they are to be kept, until when to be served whatever their terms)."""
        groups: dict[tuple[float, float | None], list[BlockKey]] = {}
        pinned = self.pins.untils(keys)
        for key in keys:
            promise, until = self._promises.get(key), self.guarantees.until(key)
            longer = promise.seconds * _MARGIN if promise is not None else 0.0
            served = pinned.get(key)
            groups.setdefault((max(until + longer, served or _NEVER), served), []).append(key)
        return groups

    def _taken_over(self, keys: Sequence[BlockKey], kept: Sequence[bool], until: float) -> None:
        with self._manager.lock:
            for key, is_kept in zip(keys, kept, strict=True):
                if not is_kept:
                    self._below.pop(key, None)
                    continue
                self._below[key] = until
                if self._wanted(key):
                    self._manager.host.release_retained([key])
                else:
                    self._end(key)  # it ended meanwhile

    async def _learn(self) -> None:
        """Pins that other processes and replicas made, or ended. Raises TierError or OSError."""
        if self._book is None and not self._shared:
            return
        found: dict[str, Pin] = {}
        if self._book is not None:
            self._read_notes(await self._book.read_notes(_NOTE), found)
        for tier in self._shared:
            for pin in await tier.pins():
                if pin.name not in found or found[pin.name].until < pin.until:
                    found[pin.name] = pin
        now = self._time.read().stamp
        with self._manager.lock:
            for pin in self.pins.listed():
                if pin.name not in found and pin.name not in self._unnoted:
                    for key in self.pins.delete(pin.name):
                        self._end(key)
            for pin in found.values():
                known = self.pins.get(pin.name)
                if pin.name in self._unnoted or known == pin:
                    continue
                if pin.until < now:
                    self._unnoted.add(pin.name)
                    continue
                self.pins.adopt(pin)
                self._to_retain.update(pin.chain)

    def _read_notes(self, notes: Mapping[str, bytes], found: dict[str, Pin]) -> None:
        for name, raw in notes.items():
            known = self._noted.get(name)
            if known is None or known[0] != raw[-DIGEST_BYTES:]:
                try:
                    known = (raw[-DIGEST_BYTES:], codec.decode(raw))
                except CorruptError as error:
                    log.warning("the note %s is dropped: %s", name[:40], error)
                    self._unnoted.add(name.removeprefix(_NOTE))
                    continue
            self._noted[name] = known
            found.update({pin.name: pin for pin in known[1]})
        self._noted = {name: known for name, known in self._noted.items() if name in notes}

    def stats(self) -> dict[str, int]:
        """Gauges and counters. Under the lock."""
        return {
            "pins": len(self.pins.listed()),
            "pinned": len(self.pins),
            "guaranteed": len(self.guarantees),
            "refused": self.guarantees.refused,
            "unheld": self.unheld,
        }

    def check(self) -> None:
        """Assert the invariants. Under the lock."""
        self.pins.check()
        assert all(self.guarantees.until(key) > _NEVER for key in self._promises), "a promise that nobody counts"
        assert all(map(self._wanted, self._below)), "kept below, though nothing is owed to it"
        assert self._manager.host.retained <= self._held_max, "more of G2 is held than its share"


def _extend(slot: Slot, until: float, now: float) -> None:
    ceiling = slot.life.ceiling(now)
    if ceiling is not None:
        slot.life = slot.life.keep_until(until, ceiling, now)
