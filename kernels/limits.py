"""Bounds of a copy engine's queues."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.kernels.mover import Lane

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """In bytes of payload unless named otherwise."""

    chunk_bytes: int = 64 * MIB  # the unit of launching, throttling and cancelling
    load_chunk_bytes: int | None = None  # the same of loads; None: chunk_bytes
    load_window_bytes: int = 4096 * MIB  # loads in flight
    store_window_bytes: int = 1024 * MIB  # stores in flight while no load waits
    store_window_while_loading_bytes: int = 64 * MIB
    queued_moves: int = 1 << 20  # waiting or in flight, all lanes

    def chunk_of(self, lane: Lane) -> int:
        return self.chunk_bytes if lane is Lane.STORE else self.load_chunk_bytes or self.chunk_bytes
