"""Slots that writes have, as one transaction on the index changes them."""

from __future__ import annotations

from typing import Any

from kvtier.tiers.disk.allocator import Segments
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.disk.records import RESERVED, FreeSlot, SlotReservation, rows


class Reservations:
    """Of all processes. `serial`: the last that was given to one. Lives as long as the transaction."""

    def __init__(self, txn: Any, owner: Owner, segments: Segments, serial: int, tick: int) -> None:
        self.serial = serial
        self._txn = txn
        self._owner = owner
        self._segments = segments
        self._tick = tick

    def add(self, free: FreeSlot) -> SlotReservation:
        """A slot that was taken from the segments is this process's from now on."""
        self.serial += 1
        reservation = SlotReservation(self.serial, self._tick, *free, self._owner)
        self._txn.put(reservation.key, reservation.encode())
        return reservation

    def cancel(self, reservation: SlotReservation) -> bool:
        """Delete its record; the slot is the caller's. False if it is not ours any more."""
        key = reservation.key
        raw = self._txn.get(key)
        ours = raw is not None and SlotReservation.serial_of(raw) == reservation.serial
        if ours:
            self._txn.delete(key)
            self._segments.offer_number(reservation)
        return ours

    def all(self) -> list[SlotReservation]:
        """Those of the whole store."""
        return [SlotReservation.decode(key, raw) for key, raw in rows(self._txn, RESERVED)]

    def dead(self) -> list[SlotReservation]:
        """Those of owners that are dead."""
        found = self.all()
        alive = {owner: owner.alive(self._owner) for owner in {one.owner for one in found}}
        return [one for one in found if not alive[one.owner]]
