"""Slots of a G3 store that this process reserved and no write uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

from kvtier.tiers.disk.records import SlotReservation

RETURNED_PER_COMMIT_MAX = 32
_PLACE = attrgetter("segment", "slot")


class ReservedSlots:
    """For the next write, or to be freed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._apart_s = 0.0  # from the end of one write to that of the next, as of late
        self.writes = 0  # under way now,
        self._moving = 0  # blocks on their way in them,
        self._peak = 0  # and the most of late
        self._coming = 0  # slots that are being reserved for later writes
        self._held: list[SlotReservation] = []
        self._returned: list[SlotReservation] = []
        self._unused: list[SlotReservation] = []  # returned ones that nothing was written to

    @contextmanager
    def writing(self, count: int) -> Iterator[None]:
        """While inside, a write is under way, of so many blocks for which slots may be held."""
        began = time.monotonic()
        with self._lock:
            self.writes += 1
            self._moving += count
            self._peak = max(self._peak, self._moving)
        try:
            yield
        finally:
            with self._lock:
                self._apart_s = (time.monotonic() - began) / self.writes
                self.writes -= 1
                self._moving -= count

    def expected(self) -> tuple[int, float]:
        """How many writes a commit may wait for, most of those under way, and how many seconds they are apart."""
        return 3 * self.writes // 4, self._apart_s

    @contextmanager
    def reserving(self, count: int, batch: int) -> Iterator[int]:
        """While inside, so many slots are being reserved for later writes as the value says.

        None while as many are held as were on their way together, else `batch`, but `count`, those of this write, at
        least: blocks that leave together change fewer pages of the index than one by one.
        """
        with self._lock:
            enough = max(2 * count if count > 1 else 1, self._peak)
            more = max(count, batch) if len(self._held) + self._coming < enough else 0
            self._coming += more
        try:
            yield more
        finally:
            with self._lock:
                self._coming -= more

    def add(self, reservations: Sequence[SlotReservation]) -> None:
        """Hold these for the next write."""
        with self._lock:
            self._held.extend(reservations)

    def take(self, slot_cls: int, count: int, tick: int) -> list[SlotReservation]:
        """`count` slots of the class, neighbours first; none if there are fewer.

        They get one tick, the current one: blocks in them are neither colder than what was stored since they were
        reserved, nor is a head colder than its tail.
        """
        with self._lock:
            fit = sorted((one for one in self._held if one.slot_class == slot_cls), key=_PLACE)
            taken = fit[:count] if len(fit) >= count else []
            if taken:
                self._held = [one for one in self._held if one.slot_class != slot_cls] + fit[count:]
        return [one._replace(tick=tick) for one in taken]

    def give_back(self, reservations: Sequence[SlotReservation], *, unused: bool = False) -> None:
        """Have these freed by the next transaction. `unused`: nothing was written to them."""
        with self._lock:
            (self._unused if unused else self._returned).extend(reservations)

    def return_held(self) -> None:
        """Hold none for the next write any more: have them freed by the next transaction."""
        with self._lock:
            self._unused += self._held
            self._held = []
            self._peak = self._moving

    def forget(self) -> None:
        """Hold none and free none: they are not this process's any more."""
        with self._lock:
            self._held, self._returned, self._unused = [], [], []
            self._peak = self._moving

    @property
    def has_returned(self) -> bool:
        """Whether some wait to be freed."""
        return bool(self._returned or self._unused)

    def take_returned(self) -> tuple[list[SlotReservation], list[SlotReservation]]:
        """Those to free by the next transaction, and the unused ones among them apart; the caller gives them back if it
        fails."""
        most = RETURNED_PER_COMMIT_MAX
        with self._lock:
            returned, self._returned = self._returned[:most], self._returned[most:]
            most -= len(returned)
            unused, self._unused = self._unused[:most], self._unused[most:]
        return returned, unused
