"""One LMDB write transaction on a G3 store: which slot holds which block.

A slot is in exactly one state: never used (past its segment's `fresh`), free, reserved, or held by an entry.
It leaves a victim and enters a reservation in the same transaction, so bytes are overwritten only after the
commit that took them from their old owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvtier.errors import CorruptError
from kvtier.retention.terms import PRIORITY, Depth
from kvtier.tiers.disk.allocator import Segments
from kvtier.tiers.disk.budget import Allowance, WriteBudget
from kvtier.tiers.disk.class_worth import ClassWorths
from kvtier.tiers.disk.entries import Entries
from kvtier.tiers.disk.eviction import EvictionOrder
from kvtier.tiers.disk.geometry import geometry_in, put_capacity, put_reach
from kvtier.tiers.disk.layout import Layout
from kvtier.tiers.disk.memory import TxnMemory
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.disk.purged import Purged
from kvtier.tiers.disk.quota import Shares, scope_in
from kvtier.tiers.disk.records import (
    NAMESPACE_KEY,
    NOTE_KEY,
    SLOT_ALIGN,
    Counters,
    Entry,
    FreeSlot,
    NewBlock,
    SlotReservation,
    order_parts,
    priority_in,
    rank_of,
    same_write,
    slot_class,
    tick_in,
)
from kvtier.tiers.disk.reservations import Reservations
from kvtier.tiers.disk.retained import Retained
from kvtier.tiers.disk.touches import life_after
from kvtier.tiers.protocol import Stored
from kvtier.times import Wall

GUESTS_MAX = 8  # blocks evicted for one slot: guests seldom leave one for their class
EXTRA_EVICTIONS_MAX = 64
"""Of a transaction, beyond one for each slot or stored block: guests, small blocks of a scope for a large one. A scope
that holds far more than its share shrinks step by step."""


class WriteTxn:
    """One write transaction's view of the store. Lives between the transaction's begin and commit, on one thread.

    All changes of a transaction share one tick, so what is used or stored together ties, and leaves deepest first. A
    block never ranks above its parent, so it leaves before it. `save` must be the last call before the commit.
    Times are seconds since the epoch.
    """

    def __init__(
        self, txn: Any, owner: Owner, layout: Layout, memory: TxnMemory, purges: Mapping[bytes, Wall],
        allowance: Allowance, *, may_grow: Callable[[int], bool],
    ) -> None:  # fmt: skip
        """`memory`: of earlier transactions of this process. `purges`: what the index may not have yet,
        namespace ‖ scope → time. `may_grow`: as in `Segments`."""
        self._txn = txn
        self._layout = layout
        self.geometry = geometry_in(txn)
        counters = Counters.decode(txn.get(layout.counters_key))
        self.tick: int = counters.tick + 1
        self.evicted: list[bytes] = []  # names of evicted blocks
        self._memory = memory
        self._retained = Retained(txn)
        self.purged = Purged(txn, purges)
        self.budget = WriteBudget(txn, layout.budget_key, allowance)
        self.segments = Segments(txn, self.geometry, counters.segments, memory.demand, may_grow=may_grow)
        self.reservations = Reservations(txn, owner, self.segments, counters.serial, self.tick)
        self.worths = ClassWorths(txn, self.geometry, memory.ghosts, begin=memory.demand.waits)
        order = (memory.floors, self.worths, self.segments.draining, self._retained.until)
        self.order = EvictionOrder(txn, layout, self.geometry, *order)
        shares = self._shares = Shares(txn)
        self._entries = Entries(txn, layout, counters, self.order, self.segments, shares, self._retained, self.purged)
        self.removed = self._entries.removed  # those that were evicted among them
        self._wall_s = self._expired_by = Wall(0)  # of the last verb that was given them
        self._since = self.tick  # when what is done now began
        self._reserved: set[bytes] = set()  # blocks that have a reservation from here,
        self._coming = Counter[bytes]()  # and the bytes of their slots, by scope
        self._extra_evictions = EXTRA_EVICTIONS_MAX
        self._sheltered: set[bytes] = set()  # parents of those, and blocks that were published here: no victims

    def save(self) -> None:
        """Write what is cached."""
        self.segments.save()
        self.worths.save()
        self._shares.save()
        self.budget.save()
        counts = self._entries.blocks, self._entries.slot_bytes, self.segments.count
        self._txn.put(self._layout.counters_key, Counters(self.reservations.serial, self.tick, *counts).encode())

    def find(self, name: bytes) -> Entry | None:
        """The entry of `name`; one that fails its check is removed, as if it had never been."""
        return self._entries.find(name)

    @contextmanager
    def going_on(self, since: int, reserved: Iterable[NewBlock]) -> Iterator[None]:
        """While inside, go on with what a transaction of the tick `since` began: these blocks have slots from there,
        and what is used now ranks as if it had been used then."""
        self._since = since
        self._expect(reserved)
        try:
            yield
        finally:
            self._since = self.tick

    def reserve(
        self, block: NewBlock, wall_s: Wall, share_bytes: int = 0, *, expired_by: Wall | None = None
    ) -> SlotReservation | Stored:
        """A slot for a block that is not here, evicting the coldest if need be; else why none is needed or given.

        A block that is here gets the join of both lifetimes, the higher priority, and counts as used; `_gives_way`
        says what becomes of one that is encrypted otherwise. One with a `parent` is refused unless that is here, not
        purged, or has a slot from this transaction. `share_bytes`: as in `publish`, so that nothing is written in vain.
        A live block of a higher priority leaves for none of a lower, nor does a retained one. They count as such until
        `expired_by` (None: `wall_s`): a clock that is in doubt does not end them.
        """
        self._begin(wall_s, expired_by)
        if not self.is_servable(block.name, block, wall_s):
            return Stored.REFUSED
        above = None if block.parent is None else self._entries.rank_of(block.parent)
        if block.parent is not None and above is None and block.parent not in self._reserved:
            return Stored.REFUSED
        if (met := self._meet(block, self.find(block.name))) is not None:
            return met
        if not self.budget.allows(slot_class(block.length) * SLOT_ALIGN):
            return Stored.BUDGET
        if block.parent is not None:
            self._sheltered.add(block.parent)
        worth = block.priority if above is None else min(block.priority, priority_in(above))
        self.order.cut_short |= share_bytes > 0 and not self._shares.count_on()
        if share_bytes and not (self._shares.counted and self._make_room(block, share_bytes, worth, ahead=True)):
            return Stored.FULL
        if (reservation := self._reserve_slot(slot_class(block.length), worth)) is None:
            return Stored.FULL
        self._expect([block])
        return reservation

    def reserve_slots(self, slot_cls: int, count: int) -> list[SlotReservation]:
        """Up to `count` slots for blocks that are not known yet, evicting the coldest if need be."""
        found: list[SlotReservation] = []
        while len(found) < count and self.budget.allows(slot_cls * SLOT_ALIGN):
            if (reservation := self._reserve_slot(slot_cls, PRIORITY)) is None:
                break
            found.append(reservation)
        return found

    def reserve_other(self, name: bytes, entry: Entry, wall_s: Wall) -> SlotReservation | None:
        """Another slot for a block that is here, free or of a block of its class that may leave for it; None if there
        is none, or the budget is spent. It wants no space of other classes, nor what no class has: either can have
        that."""
        self._begin(wall_s)
        if not self.budget.allows(entry.slot_bytes):
            return None
        self._sheltered.add(name)
        place, slot_cls = self.segments.take(entry.slot_class, grows=False), entry.slot_class
        if place is None:
            victim = self._evict(lambda: self.order.victim(slot_cls, wall_s), priority_in(entry.rank))
            place = None if victim is None else self.segments.take_from(victim, grows=False)
        return None if place is None else self._reserve_place(slot_cls, place)

    def relocate(self, name: bytes, serial: int, to: SlotReservation) -> bool:
        """The bytes of the block, as the write `serial` stored it, are durable in `to`: there it lies from now on. If
        it is gone, purged, or of another write by now, `to` is free instead. Whether it was done."""
        if not self.reservations.cancel(to):
            return False
        entry = self.find(name)
        if entry is None or entry.serial != serial or self.purged.covers(name, entry.mark):
            self.segments.give(to)
            return False
        self._entries.relocate(name, entry, to)
        self.segments.give(entry)
        return True

    def publish(
        self, reservation: SlotReservation, block: NewBlock, wall_s: Wall, share_bytes: int = 0,
        *, expired_by: Wall | None = None,
    ) -> Stored:  # fmt: skip
        """Make a written block visible, its scope's coldest leaving where it would exceed `share_bytes` (0: any).
        `expired_by`: as in `reserve`.

        FAILED if the reservation is not ours any more; REFUSED if the parent left or is purged; FULL if none may leave.
        """
        self._begin(wall_s, expired_by)
        if not self.reservations.cancel(reservation):
            return Stored.FAILED
        outcome = self._publish(reservation, block, share_bytes)
        if outcome is not Stored.STORED:
            self.segments.give(reservation)
        return outcome

    def _begin(self, wall_s: Wall, expired_by: Wall | None = None) -> None:
        self._wall_s, self._expired_by = wall_s, wall_s if expired_by is None else expired_by

    def _publish(self, reservation: SlotReservation, block: NewBlock, share_bytes: int) -> Stored:
        # Below the top the parent may be unknown; if it was used since the reservation, it must stay warmer.
        oldest = rank_of(block.priority, reservation.tick if block.depth else self.tick)
        above = oldest if block.parent is None else self._entries.rank_of(block.parent)
        if above is None or self.purged.covers(block.name, block.mark) or not self._entries.admit(block.name):
            return Stored.REFUSED
        old, kept = self.find(block.name), self._retained.until(block.name)
        if (met := self._meet(block, old)) is not None:  # another process stored it meanwhile
            return met
        rank = min(rank_of(block.priority, self.tick), above)
        if share_bytes and not self._make_room(block, share_bytes, priority_in(rank)):
            return Stored.FULL
        if old is not None and kept > self._expired_by:
            block = block._replace(life=old.life.join(block.life, self._wall_s))
            self._retained.set(block.name, kept)
        self._entries.add(block.name, block.entry(reservation, rank))
        self._sheltered.add(block.name)  # its rank may be as old as its parent's
        self.worths.stored(block.name, reservation.slot_class)
        self.budget.stored(block.length)
        return Stored.STORED

    def left(self, name: bytes, slot_cls: int) -> None:
        """A block was evicted."""
        self.evicted.append(name)
        self.worths.evicted(name, slot_cls)

    def release(self, reservation: SlotReservation, *, refund: bool = False) -> None:
        """Give a reserved slot back. `refund`: nothing was written to it."""
        if self.reservations.cancel(reservation):
            self.segments.give(reservation)
            self.budget.charge(-reservation.slot_class * SLOT_ALIGN if refund else 0)

    def renew(self, name: bytes, uses: Sequence[Wall], tick: int) -> None:
        """`name` was used at these times, in order, the last before `tick`, which blocks of a chain must share.
        Unknown, dead and purged blocks are left alone."""
        entry = self.find(name)
        if entry is not None and self.is_servable(name, entry, uses[0]):
            self._entries.update(name, entry, life_after(entry.life, uses), rank_of(priority_in(entry.rank), tick))

    def drop(self, name: bytes) -> bool:
        """Remove a block. Returns whether it was here."""
        return self._entries.drop(name)

    def drop_all(self, names: Sequence[bytes]) -> int:
        """Remove blocks. Returns how many were here."""
        return sum(map(self.drop, names))

    def drop_range(
        self, start: bytes, prefix: bytes, limit: int, matching: Callable[[bytes, Entry], bool]
    ) -> tuple[int, bytes | None]:
        """Remove up to `limit` blocks, from the name `start` on, whose names start with `prefix` and that are
        `matching` or cannot be read; looks at ten times as many at most. Returns how many were removed and the name to
        go on from, None at the end."""
        found, following = self._entries.select(start, prefix, limit, matching)
        self.drop_all(found)
        return len(found), following

    def is_same(self, name: bytes, raw: bytes) -> bool:
        """Whether the block is still of the write whose entry was `raw`, renewed or not. If it is not, what was read
        by that entry was a slot's next tenant, not damage."""
        found = self._txn.get(self._layout.key(name))
        return found is not None and same_write(name, raw, found) and not self._layout.is_anothers(self._txn, name, raw)

    def delete_corrupt(self, name: bytes, raw: bytes) -> bool:
        """Remove the block after its payload failed the check. False, changing nothing, if it is not the same."""
        if same := self.is_same(name, raw):
            self.drop(name)
        return same

    def retain(self, names: Sequence[bytes], until: Wall, served: Wall | None, wall_s: Wall) -> list[bool]:
        """Exempt blocks from eviction before `until`; let them live until `served`. Per name, whether it is here."""
        return [self._retain(name, until, served, wall_s) for name in names]

    def _retain(self, name: bytes, until: Wall, served: Wall | None, wall_s: Wall) -> bool:
        if (entry := self.find(name)) is None or not self.is_servable(name, entry, wall_s):
            return False
        if served is not None:
            life = entry.life.extend_until(served, Depth.G3, wall_s)
            self._entries.update(name, entry, life, rank_of(priority_in(entry.rank), self.tick))
        if until < self._retained.until(name):
            self._memory.floors.clear()  # a search may have passed over it for longer than that
        self._retained.set(name, until)
        return True

    def release_retained(self, names: Sequence[bytes], untils: Sequence[Wall] | None = None) -> None:
        """Undo `retain`, of blocks that are retained no longer than these times say (None: however long)."""
        if untils is not None:
            names = [name for name, until in zip(names, untils, strict=True) if self._retained.until(name) <= until]
        if sum(map(self._retained.forget, names)):
            self._memory.floors.clear()  # they may leave now, however far a search has got
            self._memory.demand.retry()

    def must_stay(self, name: bytes, wall_s: Wall) -> bool:
        """Whether the block is exempt from eviction at that time."""
        return self._retained.until(name) > wall_s

    def write_note(self, name: bytes, value: bytes | None) -> None:
        """Save `value` under namespace ‖ text; None deletes it."""
        if value is None:
            self._txn.delete(NOTE_KEY + name)
        else:
            self._txn.put(NOTE_KEY + name, value)

    def register(self, namespace: bytes, fields: bytes) -> None:
        """Record the fields of a namespace digest, unless it has a record or cannot be told from another."""
        if self._layout.admit(self._txn, namespace) and not self._txn.get(NAMESPACE_KEY + namespace):
            self._txn.put(NAMESPACE_KEY + namespace, fields)

    def is_servable(self, name: bytes, block: NewBlock | Entry, wall_s: Wall) -> bool:
        """Whether the block may be served: it is not expired and no tombstone covers it."""
        return block.life.servable(Depth.G3, wall_s) and not self.purged.covers(name, block.mark)

    def reclaim(self, limit: int | None = None) -> int:
        """Free the slots of owners that are dead, up to `limit`. Returns how many."""
        for reservation in (dead := self.reservations.dead()[:limit]):
            self.release(reservation)
        return len(dead)

    def resize(self, capacity_bytes: int) -> None:
        """Another capacity, for a store that the caller uses alone. What lies beyond a smaller one leaves later
        (`kvtier.tiers.disk.shrink`)."""
        self.geometry = put_capacity(self._txn, capacity_bytes)
        self.segments.resize(self.geometry)

    def end_shrink(self) -> bool:
        """The segments reach no further than the capacity from now on, unless something lies there. Whether that is so.
        The caller has cut the files."""
        if ended := self.segments.trim():
            put_reach(self._txn, self.geometry)
        return ended

    def _reserve_slot(self, slot_cls: int, priority: int) -> SlotReservation | None:
        place = self.segments.take(slot_cls) or self._take_from_victim(slot_cls, priority)
        if slot_cls in self.segments.short:
            self._want(slot_cls, priority, must=False)
        return None if place is None else self._reserve_place(slot_cls, place)

    def _reserve_place(self, slot_cls: int, place: tuple[int, int]) -> SlotReservation:
        self.budget.charge(slot_cls * SLOT_ALIGN)
        return self.reservations.add(FreeSlot(slot_cls, *place))

    def _meet(self, block: NewBlock, old: Entry | None) -> Stored | None:
        """Why a block is not stored whose name `old` has; None where that is nothing, or is removed."""
        if old is not None and not self._gives_way(block):
            return Stored.REFUSED
        return Stored.PRESENT if old is not None and self._join(block) else None

    def _gives_way(self, block: NewBlock) -> bool:
        """Whether the block of this name, if there is one, is encrypted as `block` is; one that is not, and that this
        writer may replace, is removed.

        It replaces plain bytes, and what an earlier key of the tenant encrypted, which is destroyed: a tenant has one
        key at a time. Other keys may be another process's. A retained block stays until the one for it is written.
        """
        entry = self.find(block.name)
        if entry is None or entry.key_id == block.key_id:
            return True
        if block.key is None or (entry.encryption is not None and entry.life.born >= block.key.created):
            return False
        return (block.encryption is None and self.must_stay(block.name, self._expired_by)) or self.drop(block.name)

    def _join(self, block: NewBlock) -> bool:
        """Join the block's life to the entry of its name, if there is one that may be served once it has it."""
        entry = self.find(block.name)
        if entry is None or entry.key_id != block.key_id:
            return False
        if entry.length != block.length or self.purged.covers(block.name, entry.mark):
            self.drop(block.name)
            return False
        warm = rank_of(max(block.priority, priority_in(entry.rank)), self._since)
        above = warm if block.parent is None else self._entries.rank_of(block.parent)
        self._entries.update(block.name, entry, entry.life.join(block.life, self._wall_s), min(above or 0, warm))
        return True

    def _take_from_victim(self, slot_cls: int, priority: int) -> tuple[int, int] | None:
        """The slot of the class's coldest block, which is evicted, and so are a few guests that are colder."""
        place, number = None, 0
        while place is None and number < GUESTS_MAX and self._may_evict(number):
            if (victim := self._evict(lambda: self.order.victim(slot_cls, self._expired_by), priority)) is None:
                break
            place, number = self.segments.take_from(victim), number + 1
        self.order.cut_short |= self._extra_evictions < 0 or self.segments.cut_short
        self._want(slot_cls, priority, must=place is None)
        return place

    def _may_evict(self, number: int) -> bool:
        """Whether a block, after so many that were evicted for it, may have one more evicted by this transaction."""
        self._extra_evictions -= number > 0
        return number == 0 or self._extra_evictions >= 0

    def _expect(self, blocks: Iterable[NewBlock]) -> None:
        for block in blocks:
            self._reserved.add(block.name)
            self._coming[scope_in(block.name)] += slot_class(block.length) * SLOT_ALIGN

    def _want(self, slot_cls: int, priority: int, *, must: bool) -> None:
        """The class could use a segment of another, if there is one."""
        if self.order.has_other(slot_cls):
            self._memory.demand.want(slot_cls, priority, self.tick, must=must)

    def _make_room(self, block: NewBlock, share_bytes: int, priority: int, *, ahead: bool = False) -> bool:
        """Whether the block's scope stays within `share_bytes` with it (`ahead`: and with those that have
        slots from here). Its own coldest are evicted for that."""
        scope, number = scope_in(block.name), 0
        wanted = slot_class(block.length) * SLOT_ALIGN + self._coming[scope] * ahead
        while (held := self._shares.of(scope)) + wanted > share_bytes:
            if not self._may_evict(number):
                self.order.cut_short |= held <= share_bytes  # else it holds too much: it shrinks, but nobody waits
                return False
            victim = self._evict(lambda: self.order.victim_in_scope(scope, self._expired_by), priority, block.parent)
            if victim is None:
                return False
            self.segments.give(victim)
            number += 1
        return True

    def _evict(
        self, next_victim: Callable[[], tuple[bytes, bytes] | None], priority: int, spared: bytes | None = None
    ) -> FreeSlot | None:
        """Take out the block that `next_victim` finds in the order; its slot is the caller's. None if it must stay.

        A block that this very transaction, or one that it goes on with, stored or renewed is no victim for one of no
        higher priority: a chain longer than the store loses its tail, not its head. Nor is a live block of a higher
        `priority`. Without an entry that can be read a block is a victim like any other.
        """
        while (row := next_victim()) is not None:
            key, name = row
            rank = order_parts(key)[1]
            fresh = tick_in(rank) >= self._since and priority_in(rank) >= priority
            if fresh or name in self._sheltered or name == spared:
                return None
            try:
                if not self._entries.has_row(name, key):
                    self.order.remove(key)  # a row without a block behind it
                    continue
                entry = self._entries.read(name) if priority_in(rank) > priority else None
                if entry is not None and entry.life.ends(Depth.G3) >= self._expired_by:  # as in `expired.is_over`
                    return None
            except CorruptError:
                pass
            slot = self._entries.remove(name, key)
            self.left(name, slot.slot_class)
            return slot
        return None
