"""Which of a store's paths lie on a volume that took no more bytes, and when growth is tried there again.

Space may come back at once, so the first try is soon; each that fails doubles the wait. A try begins with one page:
where that is refused, no put pays for it. Where it is taken a segment may be made, and if that finds no space the wait
goes on from where it was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.tiers.disk.slab import Calls
from kvtier.tiers.disk.slot_health import probe

log = logging.getLogger(__name__)

PAUSE_FIRST_S, PAUSE_LAST_S = 0.5, 30.0
"""Between finding a volume full and trying it again: the first, and the longest that doubling leads to."""


@dataclass
class _Volume:
    full: bool = False
    pause_s: float = PAUSE_FIRST_S
    try_at: float = 0.0


class Volumes:
    """By part, its index. Thread-safe; only `try_again` waits for the device."""

    def __init__(
        self, parts: Sequence[Path], calls: Calls, mono_s: Callable[[], float] = lambda: time.monotonic()
    ) -> None:
        self._parts = parts
        self._calls = calls
        self._mono_s = mono_s
        self._lock = threading.Lock()
        self._volumes = [_Volume() for _ in parts]
        self.counts = {"volume_full": 0}
        """How often a volume was found full, since open."""

    def may_grow(self, part: int) -> bool:
        """Whether new segments may be made there."""
        return not self._volumes[part].full

    def why_full(self) -> str:
        """The parts that are full, and when they are tried again; empty if none is."""
        full = [(part, one.try_at) for part, one in zip(self._parts, self._volumes, strict=True) if one.full]
        if not full:
            return ""
        left_s = max(0.0, min(try_at for _part, try_at in full) - self._mono_s())
        named = ", ".join(str(part) for part, _try_at in full)
        return f"no space left on the volume of {named}: no new segments there; next try in {left_s:.1f} s"

    def found_full(self, part: int) -> None:
        """A write or a new segment there was refused for want of space."""
        with self._lock:
            volume, now = self._volumes[part], self._mono_s()
            if volume.full:
                return
            again = volume.try_at > 0.0 and now < volume.try_at + PAUSE_LAST_S
            volume.pause_s = min(2 * volume.pause_s, PAUSE_LAST_S) if again else PAUSE_FIRST_S
            volume.full, volume.try_at = True, now + volume.pause_s
            self.counts["volume_full"] += 1
        log.warning("g3: %s: no space left on the volume; blocks use the segments that are there", self._parts[part])

    def try_again(self) -> None:
        """Write a page where a try is due; growth is allowed where it is taken."""
        for part, volume in enumerate(self._volumes):
            if not volume.full or self._mono_s() < volume.try_at:
                continue
            try:
                probe([self._parts[part]], self._calls)
            except OSError as error:
                log.debug("g3: %s: still no space: %s", self._parts[part], error)
                with self._lock:
                    volume.pause_s = min(2 * volume.pause_s, PAUSE_LAST_S)
                    volume.try_at = self._mono_s() + volume.pause_s
            else:
                with self._lock:
                    volume.full, volume.try_at = False, self._mono_s()
