"""G1: a block pool with its bytes, one row of a torch tensor per slot, on a GPU or in RAM.

`BlockPool` says which rows mean what; this class holds the rows and moves them. Bytes go to and from the host
through `copy_out` and `copy_in` alone. Torch is imported when a pool is made, not with this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.errors import CapacityError, InvalidRequest
from kvtier.pool import BlockPool
from kvtier.tier import Pieces

if TYPE_CHECKING:
    import torch


class DevicePool(BlockPool):
    """`blocks` slots of `block_bytes` bytes on `device`, uninitialised.

    Owns the memory until it is collected. Raises CapacityError when the device does not have it.
    """

    def __init__(
        self,
        blocks: int,
        block_bytes: int,
        *,
        device: str | torch.device = "cpu",
        horizon: int = 0,
        dirty_max_age_s: float = 5.0,
    ) -> None:
        import torch

        self.block_bytes = block_bytes
        try:
            self.rows: torch.Tensor = torch.empty((blocks, block_bytes), dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:  # torch has no narrower type for a failed allocation on the CPU
            raise CapacityError(f"g1: {blocks} blocks of {block_bytes} bytes do not fit on {device}: {error}") from None
        super().__init__(blocks, horizon=horizon, dirty_max_age_s=dirty_max_age_s)

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.rows.device

    def typed(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """All slots as one tensor `[blocks, *shape]` of `dtype`: a view, index it by slot.

        Raises InvalidRequest unless `shape` of `dtype` is exactly a block.
        """
        wanted = dtype.itemsize
        for size in shape:
            wanted *= size
        if wanted != self.block_bytes:
            raise InvalidRequest(f"{dtype} {tuple(shape)} has {wanted} bytes, a block {self.block_bytes}")
        return self.rows.view(dtype).view(self.blocks, *shape)

    def copy_out(self, slots: Sequence[int], into: Sequence[Pieces]) -> None:
        """Copy each block to its host pieces, which must be writable. Returns when the bytes are there.

        The caller holds the slots (a reference, or `pick`) and owns `into`. Raises InvalidRequest for pieces of
        another length.
        """
        for row, piece in self._pairs(slots, into):
            _host_array(piece)[:] = row if isinstance(row, np.ndarray) else row.cpu().numpy()

    def copy_in(self, source: Sequence[Pieces], slots: Sequence[int]) -> None:
        """Copy host pieces into freshly allocated slots. Returns when `source` may be reused.

        Raises InvalidRequest for pieces of another length.
        """
        import torch

        for row, piece in self._pairs(slots, source):
            if isinstance(row, np.ndarray):
                row[:] = _host_array(piece)
            else:
                row.copy_(torch.from_numpy(_host_array(piece).copy()))

    def pieces(self, slot: int) -> Pieces:
        """The block in `slot` as host bytes: the slot itself for a pool in RAM, else a copy. Read-only."""
        row = self.rows[slot]
        return (memoryview(row.cpu().numpy()).toreadonly(),)

    def _pairs(self, slots: Sequence[int], hosts: Sequence[Pieces]) -> list[tuple[Any, memoryview]]:
        """(part of a row, host piece) for every piece; parts as NumPy views where the pool is in RAM."""
        if len(slots) != len(hosts) or any(sum(map(len, pieces)) != self.block_bytes for pieces in hosts):
            raise InvalidRequest(
                f"{len(slots)} blocks of {self.block_bytes} bytes need as many host pieces of that size"
            )
        rows: Any = self.rows.numpy() if self.rows.device.type == "cpu" else self.rows
        pairs = []
        for slot, pieces in zip(slots, hosts, strict=True):
            start = 0
            for piece in pieces:
                pairs.append((rows[slot, start : start + len(piece)], piece))
                start += len(piece)
        return pairs


def _host_array(piece: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(piece, dtype=np.uint8)
