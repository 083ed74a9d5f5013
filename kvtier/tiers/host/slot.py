"""One place in G2: a slot's state, the terms of its block, and how its bytes are copied.

A slot's life: FREE → FILLING → READY → FREE, and from FILLING or a pinned READY to QUARANTINED while something may
still write to or read from its memory. Every hand-over names (slot, generation); a generation ends when the slot is
freed, so a late message about an earlier tenant is recognised and refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvtier.identity.keys import BlockKey
from kvtier.retention.lifetime import Lifetime, Stamp
from kvtier.retention.terms import PRIORITY, Depth, Terms
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.protocol import Pieces
from kvtier.times import Wall


class SlotState(Enum):
    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    QUARANTINED = "quarantined"


class Slot:
    """A place for one block. Mutable, owned by the HostTier; all else refer to it together with its generation."""

    __slots__ = (
        "_arena", "digest", "expires_at", "generation", "index", "key", "kind", "last_use", "number", "pins",
        "priority", "stamps", "state", "suspended",
    )  # fmt: skip

    def __init__(self, number: int, arena: Arena) -> None:
        self.number = number
        self._arena = arena
        self.generation = 0
        self.state = SlotState.FREE
        self.key: BlockKey | None = None
        self.index = 0  # depth of the block in its chain
        self.pins = 0  # changed by the HostTier alone, which counts pinned slots
        self.suspended = False  # whether the policy leaves it out while it is pinned
        self.priority = PRIORITY
        self.kind = ""  # name of the retention class it was stored under
        self.digest: bytes | None = None  # None until sealed
        self.last_use = Wall(0)
        self.stamps: tuple[Stamp, ...] = ()
        self.expires_at = Wall(0)

    @property
    def pieces(self) -> Pieces:
        """Its memory, a writable view per rank. Made anew: views that were kept would cost 260 bytes per slot."""
        return self._arena.pieces(self.number)

    @property
    def life(self) -> Lifetime:
        """Terms and last use, as they leave RAM with the block."""
        return Lifetime(self.last_use, self.stamps)

    @life.setter
    def life(self, life: Lifetime) -> None:
        self.last_use, self.stamps = life.last_use, life.stamps
        self.expires_at = life.ends(Depth.G2)

    def stamp(self, life: Lifetime, ends: Wall) -> None:
        """Set a life whose end in G2 is known: computed once for all blocks of a request."""
        self.last_use, self.stamps, self.expires_at = life.last_use, life.stamps, ends

    def extend(self, terms: Terms, wall_s: Wall) -> bool:
        """Add a request's terms and renew the idle clock. True if they allow more than the block was allowed before.
        The caller has checked that the block has not expired."""
        stamps = self.stamps
        if len(stamps) == 1 and stamps[0].max_age is None and terms.max_age is None:
            only = stamps[0]
            if only.ttl == terms.ttl and only.ceiling == terms.ceiling:
                self.use(wall_s)
                return False
        self.life = self.life.add(terms, wall_s)
        return self.stamps != stamps

    def use(self, wall_s: Wall) -> None:
        """Renew the idle clock. The caller has checked that the block has not expired."""
        stamps = self.stamps
        if len(stamps) == 1:
            stamp = stamps[0]
            if wall_s <= self.last_use:  # another thread read the clock earlier, or it was set back
                return
            self.last_use = wall_s
            if stamp.ttl is not None:
                end = wall_s + stamp.ttl
                self.expires_at = end if stamp.max_age is None else min(end, stamp.created + stamp.max_age)
        else:
            self.life = self.life.used(wall_s)


def copy_in(pieces: Sequence[memoryview], buffer: memoryview) -> None:
    """Copy `buffer` into a block's pieces, one after the other. Other threads run meanwhile: NumPy's copy releases the
    interpreter lock, a memoryview's does not. Raises ValueError unless the pieces together are as long as it."""
    for part, piece in _aligned(pieces, buffer):
        np.copyto(piece, part)


def copy_out(pieces: Sequence[memoryview], buffer: memoryview) -> None:
    """Copy a block's pieces into `buffer`, one after the other, as `copy_in` does."""
    for part, piece in _aligned(pieces, buffer):
        np.copyto(part, piece)


def _aligned(pieces: Sequence[memoryview], buffer: memoryview) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    whole, parts, stop = np.frombuffer(buffer, np.uint8), [], 0
    for piece in pieces:
        start, stop = stop, stop + piece.nbytes
        parts.append((whole[start:stop], np.frombuffer(piece, np.uint8)))
    if stop != whole.nbytes:
        raise ValueError(f"pieces of {stop} bytes and a buffer of {whole.nbytes}")
    return parts
