"""State of the manager that survives a restart: the policy's statistics, the time that was trusted, the latest that
was stamped where that lies ahead of it, and how far the replicas' purge log was read when all tiers had its purges.

Written beside G3's index, if there is one, every WRITE_S, after a new time was accepted, and at the end. Read at the
start. Each value carries its own check: one that is damaged, too long or of another boot is a fresh start, never a
failure.
"""

from __future__ import annotations

import logging
from typing import Protocol, cast

from kvtier.errors import ClosedError, CorruptError, TierError
from kvtier.manager.hierarchy import Hierarchy
from kvtier.retention.trusted_clock import boot_id
from kvtier.tiers.protocol import Notebook

log = logging.getLogger(__name__)

WRITE_S = 300.0
NOTE_BYTES_MAX = 1 << 20
_CLOCK, _POLICY, _STAMPED, _PURGE_LOG = "clock", "policy", "stamped", "purge-log"
_FAILURES = (TierError, ClosedError)


class Saveable(Protocol):
    """A policy whose statistics can be written down."""

    def encode(self) -> bytes: ...

    def restore(self, raw: bytes) -> None: ...


class SavedState:
    """The saved state of one manager. On its loop; the policy is asked under the hierarchy's lock."""

    def __init__(self, hierarchy: Hierarchy, boot: bytes | None = None) -> None:
        """`boot` names this boot of the machine (None: ask the kernel)."""
        self._hierarchy = hierarchy
        self._clock, self._lock = hierarchy.clock, hierarchy.lock
        policy = hierarchy.host.policy
        self._policy = cast(Saveable, policy) if hasattr(policy, "encode") else None
        self._boot = boot_id() if boot is None else boot
        self._notebook: Notebook | None = None
        self._due = 0.0
        self._adopted = 0  # times that were accepted by the last write
        self._written: dict[str, bytes] = {}

    async def open(self) -> None:
        """Go on from the state that an earlier process wrote."""
        self._due = self._clock.monotonic() + WRITE_S
        self._notebook = self._hierarchy.notebook()
        if self._notebook is None:
            return
        try:
            names = (_CLOCK, _POLICY, _STAMPED, _PURGE_LOG)
            found = {name: await self._read(self._notebook, name) for name in names}
        except _FAILURES as error:
            log.warning("saved state cannot be read: %s", error)
            return
        for name, raw in found.items():
            try:
                if raw is not None:
                    self._take(name, raw)
            except CorruptError as error:
                log.warning("saved state %s is not used: %s", name, error)

    async def open_late(self) -> None:
        """`open`, where a tier has joined that remembers, and none did before."""
        if self._notebook is None:
            await self.open()

    async def _read(self, notebook: Notebook, name: str) -> bytes | None:
        raw = (await notebook.read_notes(name)).get(name)
        return raw if raw is not None and len(raw) <= NOTE_BYTES_MAX else None

    def _take(self, name: str, raw: bytes) -> None:
        if name == _CLOCK:
            self._clock.resume(raw, self._boot)
        elif name == _STAMPED:
            self._clock.resume_stamped(raw)
        elif name == _PURGE_LOG:
            self._take_purge_log(raw)
        elif self._policy is not None:
            with self._lock:
                self._policy.restore(raw)

    def _take_purge_log(self, raw: bytes) -> None:
        """The log must go on from where an earlier process read it; until it can be read, that is the position."""
        purges = self._hierarchy.purge_log()
        position = purges.remember(raw) if purges is not None else 0
        with self._lock:
            self._hierarchy.position = max(position, self._hierarchy.position)

    async def write_when_due(self) -> None:
        """`write`, if it is long ago, a new time was accepted, or a purge was read since."""
        read = self._hierarchy.log_memory != self._written.get(_PURGE_LOG, b"")
        accepted = self._clock.adopted != self._adopted
        if self._clock.monotonic() >= self._due or accepted or (read and self._notebook is not None):
            await self.write()

    async def write(self) -> None:
        """Bring the values that changed to the medium. A tier that fails costs the value."""
        self._due, self._adopted = self._clock.monotonic() + WRITE_S, self._clock.adopted
        if self._notebook is None:
            return
        values = {_CLOCK: self._clock.anchor(self._boot)}
        if (stamped := self._clock.stamped_ahead()) is not None:
            values[_STAMPED] = stamped
        if self._policy is not None:
            with self._lock:
                values[_POLICY] = self._policy.encode()
        if self._hierarchy.log_memory:
            values[_PURGE_LOG] = self._hierarchy.log_memory
        try:
            for name, raw in values.items():
                if self._written.get(name) != raw:
                    await self._notebook.write_note(name, raw)
                    self._written[name] = raw
        except _FAILURES as error:
            log.warning("saved state is not on the medium: %s", error)
