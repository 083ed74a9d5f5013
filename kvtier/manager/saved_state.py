"""What a manager remembers over restarts: what its policy has learned, and which time it trusted.

Written now and then and at the end beside G3's index, if there is one; read at the start. Every note carries its own
check: one that is damaged, too long or of another boot is a fresh start, never a failure.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from typing import Protocol, cast

from kvtier.errors import ClosedError, CorruptError, TierError
from kvtier.retention.trusted_clock import TrustedClock, boot_id
from kvtier.tiers.guard import Metered
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Notebook

log = logging.getLogger(__name__)

WRITE_S = 300.0
PATIENCE_S = 5.0
NOTE_BYTES_MAX = 1 << 20
_CLOCK, _POLICY = "clock", "policy"
_FAILURES = (TierError, ClosedError, OSError)


class Learned(Protocol):
    """A policy that has something to remember."""

    def encode(self) -> bytes: ...

    def restore(self, raw: bytes) -> None: ...


class SavedState:
    """The notes of one manager. On its loop; the policy is asked under the manager's lock."""

    def __init__(self, time: TrustedClock, host: HostTier, lock: threading.Lock, boot: bytes | None = None) -> None:
        """`boot` names this boot of the machine (None: ask the kernel)."""
        self._time = time
        self._policy = cast(Learned, host.policy) if hasattr(host.policy, "encode") else None
        self._lock = lock
        self._boot = boot_id() if boot is None else boot
        self._book: Notebook | None = None
        self._due = 0.0
        self._written: dict[str, bytes] = {}

    async def open(self, lower: Mapping[str, Metered]) -> None:
        """Go on from what an earlier process wrote."""
        books = [tier.inner.inner for tier in lower.values() if hasattr(tier.inner.inner, "write_note")]
        self._due = self._time.monotonic() + WRITE_S
        if not books:
            return
        self._book = cast(Notebook, books[0])
        try:
            async with asyncio.timeout(PATIENCE_S):
                found = {name: await self._read(self._book, name) for name in (_CLOCK, _POLICY)}
        except _FAILURES as error:
            log.warning("what was learned before cannot be read: %s", error)
            return
        for name, raw in found.items():
            try:
                if raw is not None:
                    self._take(name, raw)
            except CorruptError as error:
                log.warning("the note %s is not used: %s", name, error)

    async def _read(self, book: Notebook, name: str) -> bytes | None:
        raw = (await book.read_notes(name)).get(name)
        return raw if raw is not None and len(raw) <= NOTE_BYTES_MAX else None

    def _take(self, name: str, raw: bytes) -> None:
        if name == _CLOCK:
            self._time.resume(raw, self._boot)
        elif self._policy is not None:
            with self._lock:
                self._policy.restore(raw)

    async def write_when_due(self) -> None:
        """`write`, if it is long ago."""
        if self._time.monotonic() >= self._due:
            await self.write()

    async def write(self) -> None:
        """Bring what has changed to the medium. A tier that fails costs the note."""
        self._due = self._time.monotonic() + WRITE_S
        if self._book is None:
            return
        notes = {_CLOCK: self._time.anchor(self._boot)}
        if self._policy is not None:
            with self._lock:
                notes[_POLICY] = self._policy.encode()
        try:
            async with asyncio.timeout(PATIENCE_S):
                for name, raw in notes.items():
                    if self._written.get(name) != raw:
                        await self._book.write_note(name, raw)
                        self._written[name] = raw
        except _FAILURES as error:
            log.warning("what was learned is not on the medium: %s", error)
