"""Entries of a G3 store and their rows in `order`, counted, in an LMDB write transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier.errors import CorruptError
from kvtier.identity.keys import NAMESPACE_BYTES
from kvtier.retention.lifetime import Lifetime
from kvtier.tiers.disk.allocator import Segments
from kvtier.tiers.disk.eviction import EvictionOrder
from kvtier.tiers.disk.layout import Layout
from kvtier.tiers.disk.purged import Purged
from kvtier.tiers.disk.quota import Shares
from kvtier.tiers.disk.records import (
    BLOCKS,
    ENCRYPTED_FORMAT,
    FIRST_FORMAT,
    FORMAT_KEY,
    ORDER,
    SLOT_ALIGN,
    Counters,
    Entry,
    FreeSlot,
    SlotReservation,
    order_key_in,
    order_parts,
    rows,
)
from kvtier.tiers.disk.retained import Retained

_FIRST, _ENCRYPTED = FIRST_FORMAT.to_bytes(4, "little"), ENCRYPTED_FORMAT.to_bytes(4, "little")


class Entries:
    """Blocks by name. `blocks` and `slot_bytes` count them as this transaction leaves them; the caller saves those."""

    def __init__(
        self, txn: Any, layout: Layout, counters: Counters, order: EvictionOrder, segments: Segments,
        shares: Shares, retained: Retained, purged: Purged,
    ) -> None:  # fmt: skip
        self.blocks, self.slot_bytes = counters.blocks, counters.slot_bytes
        self._txn = txn
        self._layout = layout
        self._order = order
        self._segments = segments
        self._shares = shares
        self._retained = retained
        self._purged = purged
        self._admitted: dict[bytes, bool] = {}  # the last namespace: it may give way to the next
        self.removed: dict[bytes, None] = {}  # names of blocks that were here before and are not after
        self._ranks: dict[bytes, int] = {}  # of entries written here: every call of LMDB gives up the interpreter lock

    def find(self, name: bytes) -> Entry | None:
        """The entry of `name`; one that fails its check is removed, as if it had never been."""
        try:
            return self.read(name)
        except CorruptError:
            self._drop_unreadable(name)
            return None

    def read(self, name: bytes) -> Entry | None:
        """The entry of `name`. Raises CorruptError for one that fails its check, unless it is another namespace's."""
        raw = self._txn.get(self._layout.key(name))
        if raw is None:
            return None
        try:
            return Entry.decode(name, raw)
        except CorruptError:
            if self._layout.is_anothers(self._txn, name, raw):
                return None
            raise

    def has_row(self, name: bytes, row: bytes) -> bool:
        """Whether this is the key of the block's row in `order`, by what its entry says. Raises CorruptError for one
        that says another and fails its check, unless it is another namespace's."""
        raw = self._txn.get(self._layout.key(name))
        if raw is None or order_key_in(raw) == row:
            return raw is not None
        self.read(name)
        return False

    def select(
        self, start: bytes, prefix: bytes, limit: int, matching: Callable[[bytes, Entry], bool]
    ) -> tuple[list[bytes], bytes | None]:
        """Up to `limit` names, from `start` on, that start with `prefix` and whose entries are `matching` or cannot be
        read, of ten times as many at most; and the name to go on from, None at the end."""
        found: list[bytes] = []
        for seen, (name, raw) in enumerate(self._layout.entries(self._txn, prefix, start)):
            if len(found) == limit or seen == 10 * limit:
                return found, name
            try:
                if matching(name, Entry.decode(name, raw)):
                    found.append(name)
            except CorruptError:
                found.append(name)
        return found, None

    def rank_of(self, name: bytes) -> int | None:
        """The rank of a block. None if it is not here, or is purged and not removed yet: a block below it could not be
        read."""
        if name not in self._ranks:
            entry = self.find(name)
            if entry is not None and not self._purged.covers(name, entry.mark):
                self._ranks[name] = entry.rank
        return self._ranks.get(name)

    def admit(self, name: bytes) -> bool:
        """Whether a block of this name can be added (`Layout.admit`)."""
        namespace = name[:NAMESPACE_BYTES]
        if namespace not in self._admitted:
            self._admitted = {namespace: self._layout.admit(self._txn, namespace)}
        return self._admitted[namespace]

    def add(self, name: bytes, entry: Entry) -> None:
        """A block that was not here, and was admitted."""
        if entry.encryption is not None and self._txn.get(FORMAT_KEY) == _FIRST:
            self._txn.put(FORMAT_KEY, _ENCRYPTED)  # readers of the first format would take the entry for damage
        self._put(name, entry)
        self.removed.pop(name, None)
        self.blocks += 1
        self.slot_bytes += entry.slot_bytes

    def update(self, name: bytes, entry: Entry, life: Lifetime, rank: int) -> None:
        """A new life, and `rank` if that is higher."""
        key = entry.order_key()
        self._order.use(key)
        self._shares.removed(name, key)
        self._put(name, entry._replace(rank=max(entry.rank, rank), life=life))

    def relocate(self, name: bytes, entry: Entry, to: SlotReservation) -> None:
        """The block lies in another slot from now on; the one that it had is the caller's."""
        moved = entry._replace(serial=to.serial, segment=to.segment, slot=to.slot)
        self._txn.put(self._layout.key(name), self._layout.encode(name, moved))
        self._shares.removed(name, entry.order_key())
        self._shares.placed(name, self._order.replace(entry.order_key(), name, moved))

    def remove(self, name: bytes, row: bytes) -> FreeSlot:
        """Delete the records of a block whose row in `order` has this key, whether or not its entry can be read; the
        slot is the caller's."""
        self._delete(name)
        return self._remove_row(name, row)

    def drop(self, name: bytes) -> bool:
        """Remove a block and free its slot. Returns whether it was here."""
        entry = self.find(name)
        if entry is not None:
            self._segments.give(self.remove(name, entry.order_key()))
        return entry is not None

    def _put(self, name: bytes, entry: Entry) -> None:
        self._txn.put(self._layout.key(name), self._layout.encode(name, entry))
        self._shares.placed(name, self._order.add(name, entry))
        self._ranks[name] = entry.rank

    def _drop_unreadable(self, name: bytes) -> None:
        """Remove a block whose entry cannot be read. Its row in `order` is the one that the entry says, if that is of
        this block, or of a name without a block: then the entry's own name is damaged. Else it is found by a scan."""
        written = self._layout.written(name)
        said = order_key_in(self._txn.get(self._layout.key(name)))
        whose = None if said is None else self._txn.get(said)
        if said is not None and whose is not None and (whose == written or not self._txn.get(BLOCKS + whose)):
            keys = [said]
        else:
            keys = [key for key, value in rows(self._txn, ORDER) if value == written]
        self._delete(name)
        for key in keys:
            self._segments.give(self._remove_row(name, key))

    def _remove_row(self, name: bytes, row: bytes) -> FreeSlot:
        slot_cls, _rank, segment, slot = order_parts(row)
        self._order.remove(row)
        self.slot_bytes -= slot_cls * SLOT_ALIGN
        self._shares.removed(name, row)
        return FreeSlot(slot_cls, segment, slot)

    def _delete(self, name: bytes) -> None:
        self._txn.delete(self._layout.key(name))
        self._retained.forget(name)
        self._ranks.pop(name, None)
        self.removed[name] = None
        self.blocks -= 1
