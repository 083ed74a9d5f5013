"""Stores of boundaries: the blocks of a boundary on their way from vLLM's pool into G2.

All blocks of a boundary are copied by one job. It is published whole, and only if the engine has handed out none of
them before every rank had answered: a part of a boundary is of no use.

Called on the engine's one scheduler thread; nothing here waits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.clock import Clock
from kvtier.connectors.fallback import or_fallback
from kvtier.connectors.vllm.boundary import Boundary
from kvtier.connectors.vllm.boundary_blocks import BoundaryBlocks
from kvtier.connectors.vllm.messages import StepMoves
from kvtier.connectors.vllm.patience import Patience
from kvtier.connectors.vllm.stores import ConnectorLimits
from kvtier.manager.manager import Manager
from kvtier.tiers.host.slot import Slot
from kvtier.times import Mono

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Copy:
    manager: Manager
    boundary: Boundary
    slots: list[Slot]
    generations: list[int]
    since_s: Mono
    ranks: int = 0
    failed: set[int] = field(default_factory=set)
    abandoned: bool = False


class BoundaryStores:
    """See the module. `counters` are the half's."""

    def __init__(
        self,
        limits: ConnectorLimits,
        ranks: int,
        clock: Clock,
        counters: Counter[str],
        job: Callable[[], int],
    ) -> None:
        """`job` returns a new number of a job at each call."""
        self.stopped = False  # a rank has stopped answering: nothing more is copied out
        self._limits = limits
        self._ranks = ranks
        self._clock = clock
        self._counters = counters
        self._job = job
        self._copying: dict[int, _Copy] = {}
        self._patience = Patience()

    def __len__(self) -> int:
        """Copies under way."""
        return len(self._copying)

    def plan(self, manager: Manager | None, held: BoundaryBlocks) -> list[StepMoves]:
        """This step's copies: boundaries that are ready, at least one, at most as many as `step_bytes` allows. Without
        a cache (`manager` is None) they are given up. An error costs the boundary that it hit."""
        moves: list[StepMoves] = []
        left = 0 if manager is None else max(1, self._limits.step_bytes // manager.host.block_bytes)
        while held.ready and (not moves or len(held.ready[0].blocks) <= left):
            boundary = held.ready.pop(0)
            copy: _Copy | None = None
            if not held.lasting(boundary):
                self._counters["spill_lost"] += len(boundary.blocks)
            elif manager is not None and not self.stopped:
                left -= len(boundary.blocks)
                copy = or_fallback(self._reserve, manager, boundary, fallback=None)
            if copy is None:
                held.give_back(boundary)
                continue
            job = self._job()
            self._copying[job] = copy
            blocks = tuple(boundary.blocks[slot.index] for slot in copy.slots)
            slots = tuple(slot.number for slot in copy.slots)
            groups = tuple(boundary.groups[slot.index] for slot in copy.slots)
            moves.append(StepMoves(job, blocks, slots, tuple(copy.generations), groups))
        return moves

    def _reserve(self, manager: Manager, boundary: Boundary) -> _Copy | None:
        """Slots for the blocks that G2 lacks; None if there are none to copy, or not room for all."""
        count = len(boundary.blocks)
        slots, reached = manager.reserve(boundary.chain, 0, count, boundary.chain.terms)
        generations = [slot.generation for slot in slots]
        if reached < count:
            self._counters["stores_without_room"] += count
            manager.abort(slots, generations)
            return None
        return _Copy(manager, boundary, slots, generations, self._clock.monotonic()) if slots else None

    def answer(self, held: BoundaryBlocks, job: int, ranks: int, failed: set[int]) -> bool:
        """So many more ranks are done with a job, whose moves at these positions went wrong. False: it is none of
        these."""
        copy = self._copying.get(job)
        if copy is None:
            return False
        copy.ranks += ranks
        copy.failed |= failed
        if copy.ranks >= self._ranks:
            del self._copying[job]
            try:
                self._copied(copy, held.lasting(copy.boundary))
            finally:
                held.give_back(copy.boundary)
        return True

    def _copied(self, copy: _Copy, lasting: bool) -> None:
        if copy.abandoned:
            for slot, generation in zip(copy.slots, copy.generations, strict=True):
                copy.manager.acknowledge(slot, generation)
        elif copy.failed or not lasting:
            self._counters["copies_failed" if copy.failed else "spill_lost"] += len(copy.slots)
            copy.manager.abort(copy.slots, copy.generations)
        else:
            copy.manager.commit(copy.boundary.chain, copy.slots, copy.generations)
            self._counters["blocks_stored"] += len(copy.slots)

    def abort_overdue(self, held: BoundaryBlocks, mono_s: Mono) -> None:
        """A step has run. Abort copies that a rank leaves unanswered: their slots go to quarantine, and nothing more is
        copied out."""
        oldest = next(iter(self._copying.values()), None)
        if oldest is None or oldest.abandoned:
            return
        if not self._patience.over(oldest, mono_s - oldest.since_s, self._limits.ack_timeout_s):
            return
        log.error("a rank has not answered a copy for %.0f s: no boundary is stored", self._limits.ack_timeout_s)
        self.stopped = True
        for copy in self._copying.values():
            if not copy.abandoned:
                copy.abandoned = True
                self._counters["copies_abandoned"] += len(copy.slots)
                copy.manager.abort(copy.slots, copy.generations, in_flight=True)
                held.give_back(copy.boundary)

    def clear(self, held: BoundaryBlocks | None) -> None:
        """Nothing that was filled until now is kept."""
        for copy in self._copying.values():
            if held is not None:
                held.give_back(copy.boundary)
        self._copying.clear()
