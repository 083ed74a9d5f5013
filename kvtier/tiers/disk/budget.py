"""What a G3 store may still write today: one token bucket per directory, in its index, for all processes and restarts.

    key                         value
    "budget"                    level f64, CLOCK_BOOTTIME f64 and boot id (16) when that was so, then u64s: bytes leased
                                and written, bytes of stored blocks

Space is leased in the transaction that reserves a slot, so a crash counts it as written. A transaction pays for its own
commit in advance, as much as the last one wrote, between COMMIT_BYTES and IN_ADVANCE_MAX; what the kernel counts beyond
that, and zeros of preallocated segments, are charged with the next, and what it counts less is paid back. Whoever asks
what may be written counts all of that, as the next transaction will. What must be written, a purge first of all, may
overdraw the bucket; blocks, uses and removals wait then. What stays unpaid is the difference where a process is killed
right after a commit that wrote more than its last one: a few MB at most, for each such kill.

A day's budget B gives a bucket of B / 24 that fills at 22 / 24 B a day: whatever a day begins with, it writes at most
23 / 24 B and what is overdrawn. An unknown balance is none, and time while the machine was off adds nothing. Processes
without a bound are charged, too; at most a day's budget of debt counts.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    seconds, and bytes to be charged. `in_advance`: those that this transaction will write, and others since the last.
    `owed`: what its last commit wrote beyond what it had paid in advance; negative if it wrote less."""

    per_day: float
    boot: bytes
    now_s: float
    in_advance: int
    owed: int = 0

    def covers(self, level: float, size: int) -> bool:
        """Whether `size` bytes may be written at a level from which all that was taken. A bucket that was full before
        allows any size, so that no block is too large. Pure."""
        return not self.per_day or level >= min(size, self.per_day / 24 - self.in_advance)


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
        """Bytes that a transaction with that allowance may write now, once it has paid. Pure."""
        level = self.level - allowance.owed  # it has been missing, or there, since that commit, as the bucket filled
        if allowance.per_day:  # else nobody knows here how fast it fills
            level = max(level, -allowance.per_day)  # processes without a bound may have written for months
            passed_s = max(0.0, allowance.now_s - self.at_s) if self.boot == allowance.boot else 0.0
            level = min(allowance.per_day / 24, level + passed_s * 22 / 24 * allowance.per_day / DAY_S)
        return level - allowance.in_advance

    def allows(self, allowance: Allowance, size: int) -> bool:
        """Whether a transaction with that allowance may write `size` bytes. Pure."""
        return allowance.covers(self.level_at(allowance), size)


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
        self._at = (allowance.now_s, allowance.boot) if allowance.per_day else (before.at_s, before.boot)
        self._level = before.level_at(allowance)
        self._written, self._stored = before.written + allowance.owed + allowance.in_advance, before.stored

    def allows(self, size: int) -> bool:
        """Whether `size` more bytes may be written."""
        return self._allowance.covers(self._level, size)

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


class Debt:
    """What a process has written to a store and not paid for yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._advance = COMMIT_BYTES
        self._since = 0  # beside commits
        self._owed = 0

    def allowance(self, per_day: float, boot: bytes, now_s: float) -> Allowance:
        """For a transaction now, which pays for its commit as much as the last one wrote."""
        with self._lock:
            return Allowance(per_day, boot, now_s, self._advance + self._since, self._owed)

    def owe(self, size: int) -> None:
        """So many bytes were written to the store's files."""
        with self._lock:
            self._since += size

    @contextmanager
    def paying(self, allowance: Allowance) -> Iterator[None]:
        """While inside, a transaction pays what the allowance says, in vain if the body raises."""
        before = thread_written()
        with self._lock:  # now: nobody must find it taken from the level, and owed, too
            advance, since = self._advance, allowance.in_advance - self._advance
            self._since -= since
            self._owed -= allowance.owed
        try:
            yield
        except BaseException:
            with self._lock:
                self._since += since + _written_since(before)
                self._owed += allowance.owed
            raise
        with self._lock:
            written = _written_since(before)
            self._owed += written - advance
            self._advance = min(max(COMMIT_BYTES, written), IN_ADVANCE_MAX)


def _written_since(before: int | None) -> int:
    now = thread_written()
    return COMMIT_BYTES if before is None or now is None else now - before


def thread_written() -> int | None:
    """Bytes that this thread has given to the kernel to write so far; None where that is not told.

    Not `write_bytes`: where the page cache has large folios, that counts a folio for a page.
    """
    try:
        fd = os.open(_IO, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.read(fd, 4096)
        finally:
            os.close(fd)
        return int(found.partition(b"wchar: ")[2].partition(b"\n")[0])
    except (OSError, ValueError):
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
        """Set a user's bound, and the clock; 0: it has none any more."""
        if bytes_per_day:
            self._of[user], self.boot_s = bytes_per_day, boot_s
        else:
            self._of.pop(user, None)
        self.bytes = min(self._of.values(), default=0.0)
