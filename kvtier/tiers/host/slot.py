"""One place in G2: a slot's state, the terms of its block, and how its bytes are copied.

A slot's life: FREE → FILLING → READY → FREE, and from FILLING or a pinned READY to QUARANTINED while something may
still write to or read from its memory. Every hand-over names (slot, generation); a generation ends when the slot is
freed, so a late message about an earlier tenant is recognised and refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.checksum import DIGEST_BYTES
from kvtier.identity.keys import BlockKey
from kvtier.retention.lifetime import Lifetime, Stamp
from kvtier.retention.terms import Depth, Terms
from kvtier.tiers.host.slot_table import SlotState as SlotState
from kvtier.tiers.host.slot_table import SlotTable
from kvtier.tiers.protocol import Pieces
from kvtier.times import Wall

_STATES = tuple(SlotState)


class Slot:
    """A place for one block: a view of one row of the HostTier's table. All refer to it together with its generation.
    Two views of one row are equal."""

    __slots__ = ("number", "table")

    def __init__(self, number: int, table: SlotTable) -> None:
        self.number = number
        self.table = table

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and self.number == other.number and self.table is other.table

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        return f"<slot {self.number}, generation {self.generation}, {self.state.name}>"

    @property
    def generation(self) -> int:
        return self.table.generations[self.number]

    @property
    def state(self) -> SlotState:
        return _STATES[self.table.states[self.number]]

    @property
    def key(self) -> BlockKey | None:
        """Of the block, None while it is FREE."""
        key: BlockKey | None = self.table.keys[self.number]
        return key

    @property
    def index(self) -> int:
        """Depth of the block in its chain."""
        return self.table.depths[self.number]

    @property
    def pins(self) -> int:
        return self.table.pins[self.number]

    @property
    def suspended(self) -> bool:
        """Whether the policy leaves the block out while it is pinned."""
        return bool(self.table.waiting[self.number]) and self.state is SlotState.READY

    @property
    def priority(self) -> int:
        return self.table.priorities[self.number]

    @property
    def kind(self) -> str:
        """Name of the retention class that the block was stored under."""
        return self.table.names[self.table.kinds[self.number]]

    @kind.setter
    def kind(self, name: str) -> None:
        self.table.kinds[self.number] = self.table.kind_of(name)

    @property
    def digest(self) -> bytes | None:
        """Of the bytes; None until sealed."""
        if not self.table.sealed[self.number]:
            return None
        start = DIGEST_BYTES * self.number
        return bytes(self.table.digests[start : start + DIGEST_BYTES])

    @digest.setter
    def digest(self, digest: bytes | None) -> None:
        self.table.seal(self.number, digest)

    @property
    def pieces(self) -> Pieces:
        """Its memory, a writable view per rank. Made anew: views that were kept would cost 260 bytes per slot."""
        return self.table.arena.pieces(self.number)

    @property
    def last_use(self) -> Wall:
        return Wall(self.table.last_uses[self.number])

    @property
    def stamps(self) -> tuple[Stamp, ...]:
        return self.table.stamps[self.number] or ()

    @property
    def expires_at(self) -> Wall:
        return self.table.ends(self.number)

    @property
    def life(self) -> Lifetime:
        """Terms and last use, as they leave RAM with the block."""
        return self.table.life(self.number)

    @life.setter
    def life(self, life: Lifetime) -> None:
        self.table.stamp(self.number, life, life.ends(Depth.G2))

    def stamp(self, life: Lifetime, ends: Wall) -> None:
        """Set a life whose end in G2 is known: computed once for all blocks of a request."""
        self.table.stamp(self.number, life, ends)

    def extend(self, terms: Terms, wall_s: Wall) -> bool:
        """Add a request's terms and renew the idle clock. True if they allow more than the block was allowed before.
        The caller has checked that the block has not expired."""
        return self.table.extend(self.number, terms, wall_s)

    def describe(self, generation: int, life: Lifetime | None, digest: bytes | None, priority: int | None) -> None:
        """Set the facts that a FILLING slot is published with. `life` None: the one it was stamped with; `priority`
        None: that of its reservation. Ignored if the generation is stale."""
        self.table.describe(self.number, generation, life, digest, priority)

    def use(self, wall_s: Wall) -> None:
        """Renew the idle clock. The caller has checked that the block has not expired."""
        self.table.use(self.number, wall_s)


_BRIEF_BYTES = 16 * 1024
"""Copied under the interpreter lock: that takes less than giving it up."""


def copy_in(pieces: Sequence[memoryview], buffer: memoryview) -> None:
    """Copy `buffer` into a block's pieces, one after the other. Other threads run meanwhile: NumPy's copy releases the
    interpreter lock, a memoryview's does not. Raises ValueError unless the pieces together are as long as it."""
    for part, piece in _aligned(pieces, buffer):
        _copy(piece, part)


def copy_out(pieces: Sequence[memoryview], buffer: memoryview) -> None:
    """Copy a block's pieces into `buffer`, one after the other, as `copy_in` does."""
    for part, piece in _aligned(pieces, buffer):
        _copy(part, piece)


def _copy(into: memoryview, source: memoryview) -> None:
    if source.nbytes <= _BRIEF_BYTES:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def _aligned(pieces: Sequence[memoryview], buffer: memoryview) -> list[tuple[memoryview, memoryview]]:
    whole, parts, stop = _flat(buffer), [], 0
    for piece in pieces:
        start, stop = stop, stop + piece.nbytes
        parts.append((whole[start:stop], _flat(piece)))
    if stop != buffer.nbytes:
        raise ValueError(f"pieces of {stop} bytes and a buffer of {buffer.nbytes}")
    return parts


def _flat(view: memoryview) -> memoryview:
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")
