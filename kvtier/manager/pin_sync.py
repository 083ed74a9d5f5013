"""Named pins on the media that remember them: beside G3's index, and in G4 for every replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from kvtier.checksum import DIGEST_BYTES
from kvtier.errors import ClosedError, CorruptError, InvalidRequest, TierError
from kvtier.identity.keys import KEY_BYTES, scope_of_key
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.slices import aside
from kvtier.retention.pins import Pin, Pins, decode, encode
from kvtier.tiers.protocol import Notebook, Pinning

log = logging.getLogger(__name__)

CALL_S = 15.0
"""Longer than a tier's guard waits for one call, so that the guard says which."""

FAILURES = (TierError, ClosedError, InvalidRequest, TimeoutError)
"""Errors of a tier's optional verbs, which no guard turns into answers."""

_PREFIX = "pin/"


class PinSync:
    """Writes the pins of `pins` that changed, reads those of other processes and replicas. On the manager's loop."""

    def __init__(self, hierarchy: Hierarchy, pins: Pins) -> None:
        self._lock = hierarchy.lock
        self._hierarchy = hierarchy
        self._pins = pins
        self._notebook: Notebook | None = None
        self._shared: list[Pinning] = []
        self._cached: dict[str, tuple[bytes, list[Pin]]] = {}  # as last read: digest, pins
        self.unwritten: set[str] = set()
        """Names whose pin, or whose end, is not on its medium yet. Under the lock."""
        self._ended: dict[str, Pin] = {}  # of those, pins that a time or a purge ended: another of the name stays
        self._missed: set[str] = set()  # names that a tier has missed which is left out

    def open(self) -> None:
        """Find the tiers that remember pins. They are open. Called again when another one joins."""
        with self._lock:
            self.unwritten |= self._missed
            self._missed.clear()
        self._notebook = self._hierarchy.notebook()
        self._shared = [shared for tier in self._hierarchy.lower.values() if (shared := tier.pinning()) is not None]

    def note_ended(self, pins: Iterable[Pin]) -> None:
        """These pins' time is over, or they were purged: so are they on their media, unless they were replaced there.
        Under the lock."""
        for pin in pins:
            self.unwritten.add(pin.name)
            self._ended[pin.name] = pin

    def note_deleted(self, name: str) -> None:
        """Somebody wants no pin of this name on any medium. Under the lock."""
        self.unwritten.add(name)
        self._ended.pop(name, None)

    async def write(self, names: Iterable[str]) -> bool:
        """Bring these pins, or their ends, to every medium; those of a tier that fails stay `unwritten`. Returns
        whether a shared tier had one of the pins that ended."""
        there = False
        for name in names:
            with self._lock:
                pin, ended = self._pins.get(name), self._ended.get(name)
            try:
                if self._notebook is not None and (pin is not None or await self._notes(name, ended)):
                    note = await aside(len(pin.chain), partial(encode, [pin])) if pin is not None else None
                    await self._notebook.write_note(_PREFIX + name, note)
                for tier in self._shared:
                    if pin is not None:
                        await tier.pin(pin)
                    else:
                        there |= await tier.unpin(name, ended)
            except FAILURES as error:
                log.warning("a pin is not on every medium yet: %s", error)  # its name may be a client's
                continue
            with self._lock:
                if self._pins.get(name) is pin:
                    self.unwritten.discard(name)
                    self._ended.pop(name, None)
                if self._hierarchy.lower.out:
                    self._missed.add(name)
        return there

    async def _notes(self, name: str, ended: Pin | None) -> bool:
        """Whether the note of this name is to go: it is the pin's that ended, or damaged; None: whatever it is."""
        if ended is None or self._notebook is None:
            return True
        raw = (await self._notebook.read_notes(_PREFIX + name)).get(_PREFIX + name)
        try:
            return raw is None or all(replace(pin, position=ended.position) == ended for pin in decode(raw))
        except CorruptError:
            return True

    async def merge(self) -> list[Pin]:
        """End the pins that ended elsewhere, and enter those that were made there; returns these, which do not cover
        their chains yet. Raises one of FAILURES."""
        found = await self.read()
        if found is None:
            return []
        wall_s = self._hierarchy.clock.read().stamp
        host, entered = self._hierarchy.host, list[Pin]()
        with self._lock:
            for pin in self._pins.listed():
                if pin.name not in found and pin.name not in self.unwritten:
                    self._pins.end(pin.name)
            for pin in found.values():
                if pin.name in self.unwritten or self._pins.get(pin.name) == pin:
                    continue
                if pin.until < wall_s or host.refusals.purged_until(scope_of_key(pin.chain[0])) >= pin.created:
                    self.note_ended([pin])
                    continue
                self._pins.enter(pin)
                entered.append(pin)
        return entered

    async def read(self) -> dict[str, Pin] | None:
        """The pins on all media, by name: of those with one name the one that ends last. None: no tier remembers any.
        Raises one of FAILURES."""
        if self._notebook is None and not self._shared:
            return None
        found: dict[str, Pin] = {}
        async with asyncio.timeout(CALL_S):
            if self._notebook is not None:
                notes = await self._notebook.read_notes(_PREFIX)
                found = await aside(sum(map(len, notes.values())) // KEY_BYTES, lambda: self._decode(notes))
            for tier in self._shared:
                for pin in await tier.pins():
                    if pin.name not in found or found[pin.name].until < pin.until:
                        found[pin.name] = pin
        return found

    def _decode(self, notes: Mapping[str, bytes]) -> dict[str, Pin]:
        """The pins of notes that are whole; one that is damaged is to be written anew."""
        for name, raw in notes.items():
            digest = raw[-DIGEST_BYTES:]
            if name not in self._cached or self._cached[name][0] != digest:
                try:
                    self._cached[name] = (digest, decode(raw))
                except CorruptError as error:
                    log.warning("the note %s is dropped: %s", name[:40], error)
                    self._cached.pop(name, None)
                    with self._lock:
                        self.unwritten.add(name.removeprefix(_PREFIX))
        self._cached = {name: known for name, known in self._cached.items() if name in notes}
        return {pin.name: pin for _, pins in self._cached.values() for pin in pins}
