"""What a G3 store may still write today: one token bucket per directory, in its index, for all processes and restarts.

    key                         value
    "budget"                    level f64, CLOCK_BOOTTIME f64 and boot id (16) when that was so, then u64s: bytes leased
                                and written, bytes of stored blocks

Space is leased in the transaction that reserves a slot, so a crash counts it as written. A transaction pays for its own
commit in advance, as much as the last one wrote, between COMMIT_BYTES
and IN_ADVANCE_MAX; what the kernel counts beyond that, and
zeros of preallocated segments, are charged with the next. What must be written, a purge first of all, may overdraw the
bucket; blocks, uses and removals wait then.

A day's budget B gives a bucket of B / 24 that fills at 22 / 24 B a day: whatever a day begins with, it writes at most
23 / 24 B and what is overdrawn. An unknown balance is none, and time while the machine was off adds nothing. Processes
without a bound are charged, too; at most a day's budget of debt counts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.clock import SystemClock

DAY_S = 86_400.0
COMMIT_BYTES = 128 << 10
"""Of a transaction whose writes nobody has counted yet, or where the kernel does not tell."""
IN_ADVANCE_MAX = 32 * COMMIT_BYTES
"""Of the commit of a transaction: what was too much comes back with the next one, also into a full bucket."""
_BALANCE = struct.Struct("<dd16sQQ")
_IO = Path("/proc/thread-self/io")


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a process brings into a transaction: its bound in bytes per day (0: none), its boot and the time since, in
    seconds, and bytes to be charged: those written since its last one, and those that this one will write."""

    per_day: float
    boot: bytes
    now_s: float
    unpaid: int


@dataclass(frozen=True, slots=True)
class Balance:
    """The record. Bytes are counted since the store was made."""

    level: float = 0.0
    at_s: float = 0.0
    boot: bytes = bytes(16)
    written: int = 0
    stored: int = 0

    @property
    def amplification(self) -> float:
        """Bytes written per byte of stored blocks; 0 where none was stored."""
        return self.written / self.stored if self.stored else 0.0

    def level_at(self, allowance: Allowance) -> float:
        """Bytes that may be written now. Pure."""
        burst = allowance.per_day / 24
        passed_s = max(0.0, allowance.now_s - self.at_s) if self.boot == allowance.boot else 0.0
        level = max(self.level, -allowance.per_day)  # processes without a bound may have written for months
        return min(burst, level + passed_s * 22 / 24 * allowance.per_day / DAY_S)

    def allows(self, allowance: Allowance, size: int) -> bool:
        """Whether `size` bytes may be written now. A full bucket allows any size, so that no block is too large."""
        return not allowance.per_day or self.level_at(allowance) >= min(size, allowance.per_day / 24)


def read_balance(txn: Any, key: bytes) -> Balance:
    """The balance of a store, under `key` (`Layout.budget_key`); none where the record is missing or foreign."""
    raw = txn.get(key)
    return Balance(*_BALANCE.unpack(raw)) if raw is not None and len(raw) == _BALANCE.size else Balance()


class WriteBudget:
    """The balance in an LMDB write transaction. `save` must be called before the commit."""

    def __init__(self, txn: Any, key: bytes, allowance: Allowance) -> None:
        self._txn = txn
        self._key = key
        self._allowance = allowance
        before = read_balance(txn, key)
        # A process without a bound does not know how fast the bucket fills.
        self._at = (allowance.now_s, allowance.boot) if allowance.per_day else (before.at_s, before.boot)
        self._level = before.level_at(allowance) if allowance.per_day else before.level
        self._written, self._stored = before.written, before.stored
        self.charge(allowance.unpaid)

    def allows(self, size: int) -> bool:
        """Whether `size` more bytes may be written."""
        per_day = self._allowance.per_day
        return not per_day or self._level >= min(size, per_day / 24)

    def charge(self, size: int) -> None:
        """So many bytes are written, or leased; if negative, leased and not used."""
        self._level -= size
        self._written += size

    def stored(self, size: int) -> None:
        """A block of so many bytes was stored."""
        self._stored += size

    def save(self) -> None:
        """Write the balance."""
        now_s, boot = self._at
        self._txn.put(self._key, _BALANCE.pack(self._level, now_s, boot, max(0, self._written), self._stored))


def thread_written() -> int | None:
    """Bytes that this thread has given to the kernel to write so far; None where that is not told.

    Not `write_bytes`: where the page cache has large folios, that counts a folio for a page.
    """
    try:
        for line in _IO.read_text().splitlines():
            name, _, value = line.partition(": ")
            if name == "wchar":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


class DailyBound:
    """What the users of a store in this process may write to it per day: the least bound that one of them has."""

    def __init__(self) -> None:
        self.bytes = 0.0
        """Per day; 0: no bound."""
        self.boot_s: Callable[[], float] = SystemClock().monotonic
        """A clock that counts since boot."""
        self._of: dict[object, float] = {}

    def limit(self, user: object, bytes_per_day: float, boot_s: Callable[[], float]) -> None:
        """Set a user's bound, and the clock; 0: it has none."""
        if bytes_per_day:
            self._of[user], self.boot_s = bytes_per_day, boot_s
            self.bytes = min(self._of.values())
