"""The books of a G3 store: which slot holds what, kept inside one LMDB write transaction.

    meta key, after the "m"     value
    "format"                    u32: FORMAT
    "uuid"                      16 bytes, the same as in every part's STORE.json
    "geometry"                  capacity u64, segment bytes u64, parts u32
    "counters"                  serial u64, tick u64, blocks u64, bytes u64, segments u32
    "namespace" ‖ digest        the namespace's fields as JSON
    "purged" ‖ digest ‖ scope   f64: blocks born until then are misses for ever
    "kept" ‖ name (80)          f64: the block is not evicted before that time
    "note" ‖ digest ‖ text      bytes that a namespace's manager wants to find again
    "shares" …                  see kvtier.tiers.disk.quota

A slot is in exactly one state: never used (past its segment's `fresh`), free, reserved, or held by an entry.
It leaves a victim and enters a reservation in the same transaction, so bytes are overwritten only after the
commit that took them from their old owner.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvtier.errors import CorruptError
from kvtier.identity.keys import NAMESPACE_BYTES, SCOPE_BYTES
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import PRIORITY, Depth
from kvtier.tiers.disk.allocator import Geometry, Segments
from kvtier.tiers.disk.eviction import EvictionOrder, SearchFloors
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.disk.quota import Shares, scope_in
from kvtier.tiers.disk.records import (
    BLOCKS,
    META,
    RESERVED,
    SLOT_ALIGN,
    Entry,
    SlotReservation,
    order_parts,
    priority_in,
    rank_of,
    rows,
    slot_class,
    tick_in,
)
from kvtier.tiers.protocol import Stored

FORMAT = 1
COUNTERS = struct.Struct("<QQQQI")
_TIME = struct.Struct("<d")
_SCOPED = NAMESPACE_BYTES + SCOPE_BYTES


UUID_KEY, FORMAT_KEY = META + b"uuid", META + b"format"
GEOMETRY_KEY, COUNTERS_KEY = META + b"geometry", META + b"counters"
NAMESPACE_KEY, PURGED_KEY = META + b"namespace", META + b"purged"
KEPT_KEY, NOTE_KEY = META + b"kept", META + b"note"
YIELDS_MAX = 64
"""Blocks that a scope gives up for one of its own: where it holds far more than its share, it shrinks step by step."""


def purged_until(txn: Any, scoped: bytes) -> float:
    """Until when the blocks of namespace ‖ scope are purged; -inf if they never were."""
    raw = txn.get(PURGED_KEY + scoped)
    return float(_TIME.unpack(raw)[0]) if raw is not None else float("-inf")


def renewed(life: Lifetime, uses: Sequence[float]) -> Lifetime:
    """`life` after uses at these times, in order; from where it is dead on they do nothing. Pure."""
    for now in uses:
        if not life.servable(Depth.G3, now):
            break
        life = life.used(now)
    return life


class WriteTxn:
    """One write transaction's view of the books. Lives between the transaction's begin and commit, on one thread.

    All changes of a transaction share one tick, so what is used or stored together ties, and leaves
    deepest first. A block never ranks above its parent, so it leaves before it. `save` must be the last call
    before the commit.
    """

    def __init__(self, txn: Any, owner: Owner, *, may_grow: bool = True, floors: SearchFloors | None = None) -> None:
        """`floors`: where earlier transactions of this process looked for what may leave."""
        self._txn = txn
        self._owner = owner
        self.geometry = Geometry.decode(txn.get(GEOMETRY_KEY))
        self._serial, tick, self._blocks, self._bytes, segments = COUNTERS.unpack(txn.get(COUNTERS_KEY))
        self.tick: int = tick + 1
        self.evicted: list[bytes] = []  # names of blocks that left for others
        self._floors = SearchFloors() if floors is None else floors
        self._segments = Segments(txn, self.geometry, segments, may_grow=may_grow)
        self._order = EvictionOrder(txn, self._floors)
        self._shares = Shares(txn)
        self._now = 0.0  # wall time of the last verb that was told it
        self._keeps = next(rows(txn, KEPT_KEY), None) is not None
        # What was found out once in this transaction: every question to LMDB gives up the interpreter lock.
        self._purged: dict[bytes, float] = {}
        self._ranks: dict[bytes, int] = {}  # of entries written here
        self._promised: set[bytes] = set()  # blocks that have a reservation from here
        self._sheltered: set[bytes] = set()  # parents of those: no victims

    def save(self) -> None:
        """Write what was kept in memory."""
        self._segments.save()
        self._shares.save()
        counters = COUNTERS.pack(self._serial, self.tick, self._blocks, self._bytes, self._segments.count)
        self._txn.put(COUNTERS_KEY, counters)

    @property
    def soon(self) -> int | None:
        """The segment that will be the next to be used, if that is not far."""
        return self._segments.soon

    # Blocks.

    def find(self, name: bytes) -> Entry | None:
        """The entry of `name`; one that fails its check is removed, as if it had never been."""
        raw = self._txn.get(BLOCKS + name)
        if raw is None:
            return None
        try:
            return Entry.decode(name, raw)
        except CorruptError:
            self._excise(name)
            return None

    def reserve(
        self,
        name: bytes,
        length: int,
        life: Lifetime,
        now: float,
        parent: bytes | None = None,
        share: int = 0,
        priority: int = PRIORITY,
    ) -> SlotReservation | Stored:
        """A slot for a block that is not here, evicting the coldest if need be; else why none is needed or given.

        A block that is here gets the join of both lifetimes, the higher priority, and counts as used. One with a
        `parent` is refused unless that is here or has a slot from this transaction. `share`: as in `publish`, so that
        nothing is written in vain. What has a higher `priority`, and lives, leaves for none of a lower.
        """
        self._now = now
        if not life.servable(Depth.G3, now) or life.born <= self.purged_until(name):
            return Stored.REFUSED
        if parent is not None and parent not in self._promised and self._rank_of(parent) is None:
            return Stored.REFUSED
        if self._join(name, length, life, now, parent, priority):
            return Stored.PRESENT
        if parent is not None:
            self._sheltered.add(parent)
        above = self._rank_of(parent) if parent is not None else None
        worth = priority if above is None else min(priority, priority_in(above))
        if share and not self._fits(name, slot_class(length), share, worth):
            return Stored.FULL
        reservation = self._claim(slot_class(length), worth)
        if reservation is None:
            return Stored.FULL
        self._promised.add(name)
        return reservation

    def reserve_ahead(self, slot_cls: int, count: int) -> list[SlotReservation]:
        """Up to `count` slots for blocks that are not known yet, evicting the coldest if need be."""
        claimed = (self._claim(slot_cls, PRIORITY) for _ in range(count))
        return [one for one in claimed if one is not None]

    def publish(
        self,
        reservation: SlotReservation,
        name: bytes,
        length: int,
        depth: int,
        digest: bytes,
        life: Lifetime,
        now: float,
        parent: bytes | None = None,
        share: int = 0,
        priority: int = PRIORITY,
    ) -> Stored:
        """Make a written block visible, its scope's coldest leaving where it would exceed `share` bytes (0: any).

        FAILED if the reservation is not ours any more; REFUSED if the parent left; FULL if nothing may leave.
        """
        self._now = now
        if not self._withdraw(reservation):
            return Stored.FAILED
        above: int | None = rank_of(priority, self.tick)
        if parent is not None:
            above = self._rank_of(parent)
        elif depth:  # unknown; if it was used since the reservation, it must stay warmer
            above = rank_of(priority, reservation.tick)
        if life.born <= self.purged_until(name) or above is None:
            self._segments.give(reservation.slot_class, reservation.segment, reservation.slot)
            return Stored.REFUSED
        if self._join(name, length, life, now, parent, priority):  # somebody else stored it meanwhile
            self._segments.give(reservation.slot_class, reservation.segment, reservation.slot)
            return Stored.PRESENT
        rank = min(rank_of(priority, self.tick), above)
        if share and not self._fits(name, reservation.slot_class, share, priority_in(rank), parent):
            self._segments.give(reservation.slot_class, reservation.segment, reservation.slot)
            return Stored.FULL
        entry = Entry(reservation.serial, reservation.segment, reservation.slot, length, depth, rank, digest, life)
        self._put(name, entry)
        self._shares.change(name, entry.slot_class * SLOT_ALIGN)
        self._blocks += 1
        self._bytes += entry.slot_class * SLOT_ALIGN
        return Stored.STORED

    def release(self, reservation: SlotReservation) -> None:
        """Give a reserved slot back unused."""
        if self._withdraw(reservation):
            self._segments.give(reservation.slot_class, reservation.segment, reservation.slot)

    def renew(self, name: bytes, uses: Sequence[float], tick: int) -> None:
        """`name` was used at these times, in order, the last before `tick`, which blocks of a chain must share.
        Unknown, dead and purged blocks stay what they are."""
        entry = self.find(name)
        if entry is not None and not self.is_purged(name, entry) and entry.life.servable(Depth.G3, uses[0]):
            self._move(name, entry, renewed(entry.life, uses), rank_of(priority_in(entry.rank), tick))

    def drop(self, name: bytes) -> bool:
        """Remove a block. Returns whether it was here."""
        entry = self.find(name)
        if entry is not None:
            self._remove(name, entry)
            self._segments.give(entry.slot_class, entry.segment, entry.slot)
        return entry is not None

    def bury_dead(self, names: Sequence[bytes], now: float) -> int:
        """Remove those of `names` that are dead and not kept. Returns how many."""
        self._now = now
        count = 0
        for name in names:
            entry = self.find(name)
            if entry is None or self._is_kept(name):
                continue
            if self.is_purged(name, entry) or not entry.life.servable(Depth.G3, now):
                count += self.drop(name)
        return count

    def condemn(self, name: bytes, raw: bytes) -> bool:
        """Remove the entry whose bytes were `raw` after its payload failed the check.

        Returns False, changing nothing, if the block is another write's by now or gone: then the bytes
        that failed were a slot's next tenant, not damage. A renewed entry is still the same write.
        """
        current = self._txn.get(BLOCKS + name)
        if current is None:
            return False
        try:
            before = Entry.decode(name, raw)
        except CorruptError:
            if current == raw:
                self._excise(name)
            return bool(current == raw)
        entry = self.find(name)
        if entry is not None and entry.serial != before.serial:
            return False
        self.drop(name)
        return True

    def drop_range(
        self, start: bytes, prefix: bytes, limit: int, doomed: Callable[[bytes, Entry], bool]
    ) -> tuple[int, bytes | None]:
        """Remove up to `limit` blocks, from the name `start` on, whose names start with `prefix` and that are `doomed`,
        or cannot be read; looks at ten times as many at most. Returns how many went and where to go on, if there
        is more.
        """
        going: list[bytes] = []
        following: bytes | None = None
        for seen, (key, raw) in enumerate(rows(self._txn, BLOCKS + prefix, BLOCKS + start)):
            name = key[len(BLOCKS) :]
            if len(going) == limit or seen == 10 * limit:
                following = name
                break
            try:
                if doomed(name, Entry.decode(name, raw)):
                    going.append(name)
            except CorruptError:
                going.append(name)
        for name in going:
            self.drop(name)
        return len(going), following

    # What must stay.

    def retain(self, name: bytes, until: float, served: float | None, now: float) -> bool:
        """Evict the block for nobody before wall time `until`; let it live until `served`. False if it is not here."""
        entry = self.find(name)
        if entry is None or self.is_purged(name, entry) or not entry.life.servable(Depth.G3, now):
            return False
        if served is not None:
            self._move(name, entry, entry.life.keep_until(served, Depth.G3, now), self._warm(entry))
        self._txn.put(KEPT_KEY + name, _TIME.pack(until))
        self._keeps = True
        return True

    def release_retained(self, name: bytes) -> None:
        """Undo `retain`."""
        if self._txn.delete(KEPT_KEY + name):
            self._floors.clear()  # it may leave now, wherever the search has got to

    def _is_kept(self, name: bytes) -> bool:
        return self._kept_until(name) > self._now

    def _kept_until(self, name: bytes) -> float:
        raw = self._txn.get(KEPT_KEY + name) if self._keeps else None
        return float("-inf") if raw is None else float(_TIME.unpack(raw)[0])

    def write_note(self, name: bytes, value: bytes | None) -> None:
        """Remember `value` under namespace ‖ text; None forgets it."""
        if value is None:
            self._txn.delete(NOTE_KEY + name)
        else:
            self._txn.put(NOTE_KEY + name, value)

    # Namespaces and scopes.

    def register(self, namespace: bytes, fields: bytes) -> None:
        """Note what a namespace digest stands for."""
        self._txn.put(NAMESPACE_KEY + namespace, fields, overwrite=False)

    def bury(self, scoped: bytes, before: float) -> None:
        """Set the tombstone of namespace ‖ scope; it only ever moves forward."""
        if before > self.purged_until(scoped):
            self._txn.put(PURGED_KEY + scoped, _TIME.pack(before))
            self._purged[scoped] = before

    def purged_until(self, name: bytes) -> float:
        """The time of the tombstone that a block's name falls under; -inf for none."""
        scoped = name[:_SCOPED]
        if scoped not in self._purged:
            self._purged[scoped] = purged_until(self._txn, scoped)
        return self._purged[scoped]

    def is_purged(self, name: bytes, entry: Entry) -> bool:
        """Whether a tombstone covers the block."""
        return entry.life.born <= self.purged_until(name)

    # Reservations and segments.

    def reclaim(self) -> int:
        """Take back the slots of owners that are dead. Returns how many."""
        dead = []
        for place, raw in rows(self._txn, RESERVED):
            reservation = SlotReservation.decode(place, raw)
            if not reservation.owner.alive(self._owner):
                dead.append(reservation)
        for reservation in dead:
            self.release(reservation)
        return len(dead)

    def resize(self, capacity: int) -> None:
        """Cut the store to another capacity, evicting what lies beyond it. The caller uses the store alone and has
        reclaimed; files are cut after the commit (`Store`). Reads the whole index."""
        geometry = replace(self.geometry, capacity=capacity)
        for key, name in list(self._order.lines()):
            slot_cls, _rank, segment, slot = order_parts(key)
            if slot >= geometry.slots_of(segment, slot_cls):
                self.drop(name)
        self._segments.resize(geometry)
        self._txn.put(GEOMETRY_KEY, geometry.encode())
        self.geometry = geometry

    # Inside.

    def _claim(self, slot_cls: int, priority: int) -> SlotReservation | None:
        place = self._segments.take(slot_cls) or self._take_victim(slot_cls, priority)
        if place is None:
            return None
        self._serial += 1
        reservation = SlotReservation(self._serial, self.tick, slot_cls, *place, self._owner)
        self._txn.put(reservation.place, reservation.encode())
        return reservation

    def _rank_of(self, name: bytes) -> int | None:
        """The rank of a block, None if it is not here."""
        if name not in self._ranks:
            entry = self.find(name)
            if entry is None:
                return None
            self._ranks[name] = entry.rank
        return self._ranks[name]

    def _warm(self, entry: Entry, priority: int = 0) -> int:
        """The rank of a block that is used now, and perhaps by somebody to whom it is worth more."""
        return rank_of(max(priority, priority_in(entry.rank)), self.tick)

    def _join(self, name: bytes, length: int, life: Lifetime, now: float, parent: bytes | None, priority: int) -> bool:
        """Join `life` to the block called `name`, if there is one that may be served once it has it."""
        entry = self.find(name)
        if entry is None:
            return False
        if entry.length != length or self.is_purged(name, entry):
            self.drop(name)
            return False
        above = self._rank_of(parent) if parent is not None else self._warm(entry, priority)
        self._move(name, entry, entry.life.join(life, now), min(above or 0, self._warm(entry, priority)))
        return True

    def _put(self, name: bytes, entry: Entry) -> None:
        self._txn.put(BLOCKS + name, entry.encode(name))
        self._order.add(name, entry)
        self._ranks[name] = entry.rank

    def _move(self, name: bytes, entry: Entry, life: Lifetime, rank: int) -> None:
        """Towards the warm end, with a new life."""
        self._order.remove(entry.order_key())
        self._put(name, replace(entry, rank=max(entry.rank, rank), life=life))

    def _remove(self, name: bytes, entry: Entry) -> None:
        """Out of `blocks` and `order`; the slot is the caller's."""
        self._txn.delete(BLOCKS + name)
        self._order.remove(entry.order_key())
        self._ranks.pop(name, None)
        if self._keeps:
            self._txn.delete(KEPT_KEY + name)
        self._shares.change(name, -entry.slot_class * SLOT_ALIGN)
        self._blocks -= 1
        self._bytes -= entry.slot_class * SLOT_ALIGN

    def _excise(self, name: bytes) -> None:
        """Remove a block whose entry cannot be read: its place is found in `order`, by a scan."""
        self._txn.delete(BLOCKS + name)
        self._ranks.pop(name, None)
        self._blocks -= 1
        doomed = [key for key, value in self._order.lines() if value == name]
        for key in doomed:
            slot_cls, _rank, segment, slot = order_parts(key)
            self._order.remove(key)
            self._shares.change(name, -slot_cls * SLOT_ALIGN)
            self._bytes -= slot_cls * SLOT_ALIGN
            self._segments.give(slot_cls, segment, slot)

    def _withdraw(self, reservation: SlotReservation) -> bool:
        raw = self._txn.get(reservation.place)
        if raw is None or SlotReservation.serial_of(raw) != reservation.serial:
            return False
        self._txn.delete(reservation.place)
        return True

    def _take_victim(self, slot_cls: int, priority: int) -> tuple[int, int] | None:
        """The slot of the class's coldest block, which goes; or one in a segment taken from another class."""
        rival = self._order.rival(slot_cls)
        if rival is not None and self._seize(rival):
            return self._segments.take(slot_cls)
        gone = self._evict(lambda: self._order.leaving(slot_cls, self._now, self._kept_until), priority)
        return None if gone is None else (gone.segment, gone.slot)

    def _fits(self, name: bytes, slot_cls: int, share: int, priority: int, parent: bytes | None = None) -> bool:
        """Whether the block's scope stays within `share` bytes with it. Its own coldest blocks leave for that."""
        self._shares.begin()
        scope, size = scope_in(name), slot_cls * SLOT_ALIGN
        for _ in range(YIELDS_MAX):
            if self._shares.of(scope) + size <= share:
                return True
            gone = self._evict(lambda: self._order.leaving_scope(scope, self._now, self._kept_until), priority, parent)
            if gone is None:
                return False
            self._segments.give(gone.slot_class, gone.segment, gone.slot)
        return self._shares.of(scope) + size <= share

    def _evict(
        self, leaving: Callable[[], tuple[bytes, bytes] | None], priority: int, spared: bytes | None = None
    ) -> Entry | None:
        """Take out the block whose line `leaving` finds; its slot is the caller's. None if it must stay.

        What this very transaction stored or renewed is no victim for what is worth no more: a chain longer than the
        store loses its tail, not its head. What has a higher `priority` is none either, as long as it lives.
        """
        while (line := leaving()) is not None:
            key, name = line
            rank = order_parts(key)[1]
            fresh = tick_in(rank) >= self.tick and priority_in(rank) >= priority
            if fresh or name in self._sheltered or name == spared:
                return None
            entry = self.find(name)
            if entry is not None and entry.order_key() == key:
                if priority_in(rank) > priority and entry.life.servable(Depth.G3, self._now):
                    return None
                self._remove(name, entry)
                self.evicted.append(name)
                return entry
            self._order.remove(key)  # a line without a block behind it
        return None

    def _seize(self, slot_cls: int) -> bool:
        """Evict the blocks of the segment of the class's coldest, unless one is kept. True if that made it spare."""
        coldest = self._order.leaving(slot_cls, self._now, self._kept_until)
        if coldest is None:
            return False
        segment = order_parts(coldest[0])[2]
        doomed = self._order.lines_in(slot_cls, segment)
        if any(self._is_kept(name) for _, name in doomed):
            return False
        for key, name in doomed:
            if self.drop(name):
                self.evicted.append(name)
            else:
                self._order.remove(key)
        return self._segments.is_spare(segment)
