"""Memory for a G3 tier in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtier.identity.keys import BlockKey
from kvtier.tiers.guard import Wrapper
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Tier
from tests.tiers.disk.support.store import BLOCK

SLOTS = 256


@contextmanager
def memory(block_bytes: int = BLOCK, ranks: int = 1) -> Iterator[Arena]:
    """An open arena of SLOTS blocks."""
    arena = Arena(block_bytes, ranks, SLOTS * (block_bytes + 4096) * ranks)
    arena.open()
    try:
        yield arena
    finally:
        arena.close()


class Bounced(Wrapper):
    """A tier whose callers bring memory of their own: it goes through slots of an arena that no two calls share."""

    def __init__(self, inner: Tier, arena: Arena) -> None:
        super().__init__(inner)
        self._arena = arena
        self._next = 0

    def _slot(self, lengths: Sequence[int]) -> tuple[memoryview, ...]:
        (whole,) = self._arena.pieces(self._next % self._arena.slots)
        self._next += 1
        cuts = [sum(lengths[:place]) for place in range(len(lengths))]
        return tuple(whole[cut : cut + length] for cut, length in zip(cuts, lengths, strict=True))

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: float) -> list[Loaded | Miss]:
        inside = [Target(target.index, self._slot([len(piece) for piece in target.into])) for target in targets]
        results = await self.inner.read(chain, inside, deadline)
        for target, slot in zip(targets, inside, strict=True):
            for to, piece in zip(target.into, slot.into, strict=True):
                to[:] = piece
        return results

    async def write(self, blocks: Sequence[Sealed], deadline: float) -> list[Stored]:
        inside = []
        for block in blocks:
            slot = self._slot([len(piece) for piece in block.pieces])
            for piece, given in zip(slot, block.pieces, strict=True):
                piece[:] = given
            inside.append(Sealed(block.key, block.index, block.digest, slot, block.life, block.parent, block.priority))
        return await self.inner.write(inside, deadline)
