"""Copies between the pages of one rank's device pool and the blocks of one cache.

On a GPU the copy engine has a thread of its own (`kvtier.kernels.pump`), which opens it, too: until it is `ready`
nothing is offered. Used from the scheduler's thread only, until it is `left`: then another thread closes it, while the
scheduler's waits for the loads that it has begun. Nothing here waits, but `order` for the launch of a group of layers,
and `landed` and `quiesce` for copies, all of them bounded.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtier.cache import Cache
from kvtier.config import cache_folder
from kvtier.connectors.sglang.beside import BoundaryStore
from kvtier.connectors.sglang.part_engines import PartEngines
from kvtier.connectors.sglang.pool import KVPools, PoolPart, place_of
from kvtier.connectors.sglang.state_pool import StatePart
from kvtier.errors import KVTierError
from kvtier.identity.keys import BlockKey
from kvtier.kernels.copy import Ack, CopyEngine, Moves, Outcome
from kvtier.kernels.engine import open_engine
from kvtier.kernels.layout import of_slots
from kvtier.kernels.pump import LIMITS, Pump
from kvtier.manager.lease import Lease
from kvtier.retention.ranges import ChainTerms
from kvtier.retention.terms import Terms
from kvtier.tiers.host.slot import Slot

log = logging.getLogger(__name__)

_LAST_S = 30.0
"""For a load that was given up but has begun, behind the time that it had: a device that takes longer does not work."""


@dataclass(slots=True)
class _Blocks:
    """Blocks of one chain on their way to G2. `together`: they are those of a boundary, at these places on the device,
    and published all or not at all."""

    chain: Sequence[BlockKey]
    together: Sequence[int] | None = None
    done: list[Slot] = field(default_factory=list)
    failed: bool = False


_Slots = dict[tuple[int, int], tuple[_Blocks, Slot]]  # by (number, generation)


@dataclass(slots=True)
class PageOffload:
    """Pages on their way to G2, and their outcome: blocks of a request's chain, and those of a boundary at its end.
    Completions come in the order of submission, one per call, since all ranks must have equally many."""

    blocks: list[_Blocks] = field(default_factory=list)
    slots: _Slots = field(default_factory=dict)  # under way
    whole: bool = True  # nothing was refused or failed
    ticket: int = 0
    over: bool = False
    void: bool = False  # its pages may hold something else before it is copied


@dataclass(slots=True)
class PageLoad:
    """Leased blocks on their way to pages of a batch."""

    leases: list[Lease]
    ticket: int
    wanted: int
    done: int = 0
    over: bool = False
    unordered: bool = False  # a forward may have read its pages before they were there


class PageCopies:
    """The copies between `pool` and `cache`'s G2. Owns the copy engine; `close` it before the cache."""

    def __init__(self, cache: Cache, pool: KVPools, wait_s: float, gate: Callable[[Callable[[], int]], int]) -> None:
        """`gate(submit)` calls submit() where the device orders it behind all forwards that are launched: they write
        pages that are offloaded, and may use pages that were freed since, into which is loaded."""
        self.cache = cache
        self._manager = cache.manager
        parts = pool.parts
        self._part_bytes = [part.shape.block_bytes for part in parts]
        engines = [self._open(part, pool.on_gpu) for part in parts]
        self._engine: CopyEngine | Pump | PartEngines
        self._engine = engines[0] if len(engines) == 1 else PartEngines(engines, pool.place)
        self._wait_s = wait_s
        self._gate = gate
        self.events: Counter[str] = Counter()
        self._offloads: deque[PageOffload] = deque()
        self._by_ticket: dict[int, PageOffload | PageLoad] = {}
        self._turn = threading.RLock()  # of acknowledgements: taken and followed as one

    def _open(self, part: PoolPart | StatePart, on_gpu: bool) -> CopyEngine | Pump:
        arena = self._manager.host.arena
        # A mapping of its own: it must outlive the cache's while a copy is under way, and is page-locked once.
        mapping = mmap.mmap(arena.fds()[0], 0)  # whole
        opening = partial(
            open_engine,
            part.pages(),
            of_slots(memoryview(mapping)[: arena.slots * arena.slot_bytes], arena.slot_bytes, part.shape),
            part.shape,
            method=self.cache.config.offload.copy_by,
            calibration=cache_folder(),
            by_layer=True,
        )
        return Pump(partial(opening, limits=LIMITS)) if on_gpu else opening()

    @property
    def ready(self) -> bool:
        """Whether copies are taken: the engine is open, and works."""
        return self._engine.ready

    # ── offload ─────────────────────────────────────────────────────────────────────────────────────────────

    def offload(
        self,
        chain: Sequence[BlockKey],
        start: int,
        pages: Sequence[int],
        terms: Terms | ChainTerms,
        boundary: BoundaryStore | None = None,
    ) -> None:
        """Copy pages, which are blocks start … of `chain`, to G2 where it lacks them, and a boundary at their end; its
        completion has the outcome.

        Blocks that are here already cost nothing. Where G2 has no space the tail is left out, and the offload fails.
        """
        if not self.ready:
            self.events["stores_without_copies"] += len(pages)
            self.fail()
            return
        offload = PageOffload(whole=False, over=True)
        self._offloads.append(offload)
        moves, whole = self._reserve(offload, _Blocks(chain), start, pages, terms)
        if whole and boundary is not None:
            beside = _Blocks(boundary.keys, together=boundary.blocks)
            more, whole = self._reserve(offload, beside, 0, boundary.blocks, boundary.terms)
            moves += more
        if moves:
            try:
                offload.ticket = self._gate(lambda: self._engine.store(Moves.of(moves)))
            except BaseException:
                self._abort([slot for _, slot in offload.slots.values()])
                offload.slots.clear()
                raise
            self._by_ticket[offload.ticket] = offload
            offload.over = False
        offload.whole = whole

    def _reserve(
        self, offload: PageOffload, blocks: _Blocks, start: int, places: Sequence[int], terms: Terms | ChainTerms
    ) -> tuple[list[tuple[int, int, int]], bool]:
        """Slots for what G2 lacks of a chain from `start` on, as moves from its `places` on the device; and whether
        there was room for all."""
        stop = start + len(places)
        slots, reached = self._manager.reserve(blocks.chain, start, stop, terms)
        self.events["stores_without_room"] += stop - reached
        if blocks.together is not None and reached < stop:
            self._manager.abort(slots, [slot.generation for slot in slots])
            return [], False
        if slots:
            offload.blocks.append(blocks)
            offload.slots.update({(slot.number, slot.generation): (blocks, slot) for slot in slots})
        return [(places[slot.index - start], slot.number, slot.generation) for slot in slots], reached == stop

    def _abort(self, slots: Sequence[Slot]) -> None:
        self._manager.abort(slots, [slot.generation for slot in slots])
        self.events["copies_failed"] += len(slots)

    def fail(self) -> None:
        """Add a completion that failed, in its turn."""
        self._offloads.append(PageOffload(whole=False, over=True))

    def completed(self) -> int:
        """How many of the oldest offloads are over."""
        self._poll()
        count = 0
        for offload in self._offloads:
            if not offload.over:
                break
            count += 1
        return count

    def pop(self) -> bool:
        """Take the oldest completion; whether all its pages are in G2."""
        return self._offloads.popleft().whole

    def outstanding(self) -> int:
        """Offloads whose completion was not taken."""
        return len(self._offloads)

    def leave(self) -> int:
        """Nobody takes completions any more, and another thread closes this: pages that are not copied by now are
        handed out again, and never stored. Returns how many offloads have no completion."""
        self._poll()
        self._void()
        return self.outstanding()

    def _void(self) -> None:
        with self._turn:
            for offload in self._offloads:
                offload.void = True

    # ── load ────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, leases: Sequence[Lease], copies: Iterable[tuple[int, Slot]]) -> PageLoad:
        """Start copying leased blocks into pages. Owns the leases now."""
        moves = Moves.of((page, slot.number, slot.generation) for page, slot in copies)
        load = PageLoad(list(leases), 0, len(moves))
        try:
            load.ticket = self._gate(lambda: self._engine.load(moves))
        except BaseException:
            self._release(load)
            raise
        self._by_ticket[load.ticket] = load
        return load

    def order(self, load: PageLoad, layer: int) -> None:
        """Order the caller's stream behind `layer` of a load, and the layers before it. Where that fails, the load
        does."""
        if load.unordered:
            return
        try:
            self._engine.fence(load.ticket, layer)
        except Exception:
            log.exception("a forward was not ordered behind the load of its pages")
            load.unordered = True

    def landed(self, load: PageLoad) -> bool:
        """Wait until nothing of `load` writes any more; whether every page held its block when it was read.

        One that takes too long is given up. Raises KVTierError, which must end the engine, where the device has begun
        it and does not end it: the pages are handed out again, and the copy may write into them still.
        """
        try:
            if not self._engine.wait([load.ticket], self._wait_s):
                self._engine.cancel(load.ticket)
                self._engine.wait([load.ticket], _LAST_S)
            self._poll()
        except Exception:
            log.exception("the end of a load is unknown")
        if not load.over:
            raise KVTierError("a copy into the engine's pages was begun and does not end; restart the engine")
        return load.done == load.wanted and not load.unordered

    # ── common ──────────────────────────────────────────────────────────────────────────────────────────────

    def _poll(self) -> None:
        with self._turn:
            for ack in self._engine.poll():
                job = self._by_ticket.get(ack.ticket)
                if isinstance(job, PageOffload):
                    self._stored(job, ack)
                elif isinstance(job, PageLoad):
                    job.done += len(ack.moves) if ack.outcome is Outcome.DONE else 0
                    if ack.last:
                        job.over = True
                        self._release(job)
                if ack.last:
                    self._by_ticket.pop(ack.ticket, None)

    def _stored(self, offload: PageOffload, ack: Ack) -> None:
        acked = [offload.slots.pop((number, generation)) for _, number, generation in ack.moves.triples()]
        if ack.outcome is Outcome.DONE and not offload.void:
            for blocks, slot in acked:
                blocks.done.append(slot)
        else:
            offload.whole = False
            for blocks, _ in acked:
                blocks.failed = True
            self._abort([slot for _, slot in acked])
        if ack.last:
            offload.over = True
            for blocks in offload.blocks:
                self._publish(blocks)

    def _publish(self, blocks: _Blocks) -> None:
        done = sorted(blocks.done, key=lambda slot: slot.index)
        if blocks.together is not None and blocks.failed:
            self._abort(done)
        elif done:
            if blocks.together is not None:
                self._blank(blocks.together, done)
            self._manager.commit(blocks.chain, done, [slot.generation for slot in done])
            self.events["blocks_stored"] += len(done)

    def _blank(self, places: Sequence[int], slots: Sequence[Slot]) -> None:
        """Clear what lies behind the bytes of a block that has fewer than others: another block's."""
        for slot in slots:
            part, _ = place_of(places[slot.index])
            used = self._part_bytes[part]
            rest = slot.pieces[0][used : self._part_bytes[0]]
            rest[:] = bytes(len(rest))

    def _release(self, load: PageLoad) -> None:
        for lease in load.leases:
            lease.release()

    def settle(self) -> None:
        """Wait, bounded, for copies under way, and give up those that have not ended: they are never stored.
        Completions stay, to be taken."""
        try:
            self._engine.wait(list(self._by_ticket), self._wait_s)
            self._poll()
        finally:
            self._void()
        for ticket in list(self._by_ticket):
            self._engine.cancel(ticket)

    def free_pages(self) -> None:
        """Settle, and wait for the device to let go of the pages: their memory goes. Bounded."""
        self.settle()
        if not self._engine.wait(list(self._by_ticket), _LAST_S):
            log.error("a copy of pages whose memory goes was begun and does not end")

    def quiesce(self) -> None:
        """Settle, and forget completions, whatever fails: none will be asked for. The pages are handed out again after
        it."""
        try:
            self.settle()
        finally:
            self._offloads.clear()

    def close(self) -> None:
        """Quiesce and release the device's pages. A copy still under way keeps its memory."""
        self.quiesce()
        self._engine.close(self._wait_s)
