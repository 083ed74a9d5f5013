"""G1: a block pool with its bytes, one row of a torch tensor per slot, on a GPU or in RAM.

`BlockPool` says which row holds which block; this class holds the rows and moves them. Bytes go to and from G2 through
`copy_out` and `copy_in` alone, by the copy engine of `kvtier.kernels`: on a GPU with page-locked host memory and
streams of its own, elsewhere with memmove. Torch is imported when a pool is made, not with this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import CapacityError, InvalidRequest, KVTierError, TierError
from kvtier.identity.keys import BlockKey
from kvtier.retention.lifetime import Lifetime
from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.stream_order import HostOrder, SlotOrder, StreamOrder
from kvtier.tiers.host.arena import Arena
from kvtier.times import Mono, Wall

if TYPE_CHECKING:
    import torch

    from kvtier.kernels.copy import Ack, CopyEngine
    from kvtier.kernels.mover import Moves

Place = tuple[int, int]
"""A slot of G2: its number, and the generation in which it was reserved or pinned."""

Late = Callable[[list[tuple[int, Place]], bool], None]
"""Called with the (slot, place) pairs that a cancelled copy has released, and whether these were its last."""

_COPY_TIMEOUT_S = 30.0

_UNKNOWN = 0
"""In place of the ticket of a command that was interrupted: no acknowledgement names it, so its memory stays its."""

log = logging.getLogger(__name__)


class DevicePool(BlockPool):
    """`blocks` slots of `block_bytes` bytes on `device`, uninitialised.

    Owns the memory until it is collected. Raises CapacityError when the device does not have it.

    On a GPU several streams may use the slots. Call `confirm` and `free` while the stream is current that has the work
    on them enqueued, and `allocate` and `pin` while that one is which will use them: each stream's work on a slot then
    comes behind the others', without a wait on the host. `confirm` says that the filling step is enqueued, not over.
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
            with torch.inference_mode(False):  # whatever mode the caller is in: the rows are written to in any
                self.rows: torch.Tensor = torch.empty((blocks, block_bytes), dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:  # torch has no narrower type for a failed allocation on the CPU
            raise CapacityError(f"g1: {blocks} blocks of {block_bytes} bytes do not fit on {device}: {error}") from None
        super().__init__(blocks, horizon=horizon, dirty_max_age_s=dirty_max_age_s)
        self._order: SlotOrder = StreamOrder(torch.cuda, self.rows.device) if self.rows.is_cuda else HostOrder()
        self._engine: CopyEngine | None = None
        self._overdue: dict[int, Late] = {}  # by ticket: cancelled copies that may still be running

    def allocate(self, count: int) -> list[int]:
        slots = super().allocate(count)
        self._order.follow(slots)
        return slots

    def free(self, slots: Sequence[int]) -> None:
        super().free(slots)
        self._order.used(slots)

    def pin(self, keys: Sequence[BlockKey], wall_s: Wall, used_wall_s: Wall | None = None) -> list[int]:
        slots = super().pin(keys, wall_s, used_wall_s)
        self._order.follow(slots)
        return slots

    def confirm(
        self,
        slots: Sequence[int],
        chain: Sequence[BlockKey],
        life: Lifetime,
        *,
        first: int = 0,
        dirty_since: Mono | None = None,
    ) -> None:
        super().confirm(slots, chain, life, first=first, dirty_since=dirty_since)
        self._order.used(slots)

    def typed(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """All slots as one tensor `[blocks, *shape]` of `dtype`: a view, index it by slot.

        Raises InvalidRequest unless `shape` of `dtype` is exactly a block.
        """
        import torch

        wanted = dtype.itemsize
        for size in shape:
            wanted *= size
        if wanted != self.block_bytes:
            raise InvalidRequest(f"{dtype} {tuple(shape)} has {wanted} bytes, a block {self.block_bytes}")
        with torch.inference_mode(False):
            return self.rows.view(dtype).view(self.blocks, *shape)

    def attach(self, arena: Arena, copy_by: str = "auto", calibration: Path | None = None) -> None:
        """Copy to and from the slots of this open arena from now on, until `detach`. Page-locks it for a GPU, and
        measures how to copy there, in up to 2 s, unless `copy_by` names the method or the folder `calibration` knows.
        """
        from kvtier.kernels.engine import open_pool_engine

        self._engine = open_pool_engine(
            self.rows, arena.views(), arena.slot_bytes, method=copy_by, calibration=calibration
        )

    def detach(self) -> None:
        """Stop using the arena, before it is closed. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close(_COPY_TIMEOUT_S)
            self._deliver(engine.poll())

    def copy_out(self, slots: Sequence[int], into: Sequence[Place], late: Late) -> list[bool]:
        """Copy blocks to slots of G2, after the work queued on the current stream, and after that of others up to their
        last `confirm` or `free`. Returns which of them arrived; none where the device does not take the copy.

        Blocks until done. The caller holds the blocks (a reference, or `pick`) and has reserved the places. Raises
        InvalidRequest, with nothing begun, for a pool without an arena and for places that are not one for each block;
        TierError when the device does not finish in time, and what interrupts the wait, like KeyboardInterrupt: both
        sides belong to the copy then and must not be reused until a later `recovered` calls `late` with them, which
        never happens where the device is lost.
        """
        return self._copy(self._attached().store, slots, into, late)

    def copy_in(self, source: Sequence[Place], slots: Sequence[int], late: Late) -> list[bool]:
        """Copy pinned slots of G2 into freshly allocated blocks. Otherwise as `copy_out`."""
        return self._copy(self._attached().load, slots, source, late)

    def recovered(self) -> bool:
        """Whether copies may be started: none is overdue, and the device works. Calls `late` for overdue copies that
        have ended. Never blocks."""
        if self._engine is None:
            return False
        self._deliver(self._engine.poll())
        return not self._overdue and not self._engine.stats().broken

    def _attached(self) -> CopyEngine:
        if self._engine is None:
            raise InvalidRequest("this pool is attached to no arena")
        return self._engine

    def _copy(
        self, begin: Callable[[Moves], int], slots: Sequence[int], places: Sequence[Place], late: Late
    ) -> list[bool]:
        from kvtier.kernels.copy import Outcome

        engine, moves = self._attached(), _moves(slots, places)
        if not slots:
            return []
        self._order.follow(slots)
        ticket = _UNKNOWN
        try:
            ticket = begin(moves)
            if not engine.wait([ticket], _COPY_TIMEOUT_S):
                late_by = f"the device did not finish {len(slots)} copies in {_COPY_TIMEOUT_S:.0f} s"
                raise TierError("g1", "copy", late_by)
        except BaseException as error:
            if ticket == _UNKNOWN and isinstance(error, KVTierError):  # refused, with nothing changed
                log.warning("%d copies were not begun: %s", len(slots), error)
                return [False] * len(slots)
            self._overdue[ticket] = late
            engine.cancel(ticket)
            raise
        acks = engine.poll()
        self._deliver(acks)
        done: set[int] = set()
        for ack in acks:
            if ack.ticket == ticket and ack.outcome is Outcome.DONE:
                done.update(ack.moves.blocks.tolist())
        return [slot in done for slot in slots]

    def _deliver(self, acks: Sequence[Ack]) -> None:
        """Call `late` for cancelled copies that have ended."""
        for ack in acks:
            if (late := self._overdue.get(ack.ticket)) is not None:
                if ack.last:
                    del self._overdue[ack.ticket]
                late([(block, (slot, generation)) for block, slot, generation in ack.moves.triples()], ack.last)


def _moves(slots: Sequence[int], places: Sequence[Place]) -> Moves:
    from kvtier.kernels.mover import Moves

    if len(slots) != len(places):
        raise InvalidRequest(f"{len(slots)} blocks and {len(places)} places: one for each is needed")
    return Moves.of([(slot, number, generation) for slot, (number, generation) in zip(slots, places, strict=True)])
