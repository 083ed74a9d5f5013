"""Slots reserved for writes to come, so that a stream of writes commits once per write, not twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from kvtier.tiers.disk.records import SlotReservation


class ReservedSlots:
    """Reservations of this process that no write has taken yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[SlotReservation] = []

    def wants(self, count: int) -> bool:
        """Whether so many more may be held, without holding much of the store."""
        return len(self._held) < 2 * count

    def add(self, reservations: Sequence[SlotReservation]) -> None:
        """Hold these; given back when no write comes for a while."""
        with self._lock:
            self._held.extend(reservations)

    def take(self, slot_cls: int, count: int, tick: int) -> list[SlotReservation]:
        """`count` slots of the class, neighbours first; none if there are fewer.

        They get one tick, that of now: blocks in them are neither colder than what was stored since they were
        reserved, nor is a head colder than its tail.
        """
        with self._lock:
            fit = sorted((r for r in self._held if r.slot_class == slot_cls), key=lambda r: (r.segment, r.slot))
            taken = fit[:count] if len(fit) >= count else []
            gone = {one.serial for one in taken}
            self._held = [one for one in self._held if one.serial not in gone]
        return [replace(one, tick=tick) for one in taken]

    def clear(self) -> list[SlotReservation]:
        """Hold none any more; returns what was held."""
        with self._lock:
            held, self._held = self._held, []
        return held
