"""Copies between the pages of one rank's device pool and the blocks of one cache.

On a GPU the copy engine has a thread of its own (`kvtier.kernels.pump`), which opens it, too: until it is `ready`
nothing is offered. Used from the scheduler's thread only. Nothing here waits, but `order` for the launch of a group of
layers, and `landed` and `quiesce` for copies, all of them bounded.
"""

from __future__ import annotations

import logging
import mmap
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtier.cache import Cache
from kvtier.config import cache_folder
from kvtier.connectors.sglang.pool import KVPools
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
class PageOffload:
    """Pages on their way to G2, and their outcome. Completions come in the order of submission, one per call, since all
    ranks must have equally many."""

    chain: Sequence[BlockKey]
    slots: dict[tuple[int, int], Slot] = field(default_factory=dict)  # by (number, generation), under way
    done: list[Slot] = field(default_factory=list)
    whole: bool = True  # nothing was refused or failed
    ticket: int = 0
    over: bool = False


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
        arena = self._manager.host.arena
        # A mapping of its own: it must outlive the cache's while a copy is under way.
        mapping = mmap.mmap(arena.fds()[0], 0)  # whole
        opening = partial(
            open_engine,
            pool.pages(),
            of_slots(memoryview(mapping)[: arena.slots * arena.slot_bytes], arena.slot_bytes, pool.shape),
            pool.shape,
            method=cache.config.offload.copy_by,
            calibration=cache_folder(),
            by_layer=True,
        )
        self._engine: CopyEngine | Pump = Pump(partial(opening, limits=LIMITS)) if pool.on_gpu else opening()
        self._wait_s = wait_s
        self._gate = gate
        self.events: Counter[str] = Counter()
        self._offloads: deque[PageOffload] = deque()
        self._by_ticket: dict[int, PageOffload | PageLoad] = {}

    @property
    def ready(self) -> bool:
        """Whether copies are taken: the engine is open, and works."""
        return self._engine.ready

    # ── offload ─────────────────────────────────────────────────────────────────────────────────────────────

    def offload(self, chain: Sequence[BlockKey], start: int, pages: Sequence[int], terms: Terms | ChainTerms) -> None:
        """Copy pages, which are blocks start … of `chain`, to G2 where it lacks them; its completion has the outcome.

        Blocks that are here already cost nothing. Where G2 has no space the tail is left out, and the offload fails.
        """
        if not self.ready:
            self.events["stores_without_copies"] += len(pages)
            self.fail()
            return
        offload = PageOffload(chain, whole=False, over=True)
        self._offloads.append(offload)
        manager = self._manager
        stop = start + len(pages)
        slots, reached = manager.reserve(chain, start, stop, terms)
        self.events["stores_without_room"] += stop - reached
        if slots:
            moves = Moves.of((pages[slot.index - start], slot.number, slot.generation) for slot in slots)
            try:
                offload.ticket = self._gate(lambda: self._engine.store(moves))
            except BaseException:
                manager.abort(slots, [slot.generation for slot in slots])
                self.events["copies_failed"] += len(slots)
                raise
            offload.slots = {(slot.number, slot.generation): slot for slot in slots}
            self._by_ticket[offload.ticket] = offload
            offload.over = False
        offload.whole = reached == stop

    def fail(self) -> None:
        """Add a completion that failed, in its turn."""
        self._offloads.append(PageOffload((), whole=False, over=True))

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

    # ── load ────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, wanted: Sequence[tuple[Lease, Sequence[int]]]) -> PageLoad:
        """Start copying leased blocks into pages. Owns the leases now."""
        moves = Moves.of(
            (page, slot.number, slot.generation)
            for lease, pages in wanted
            for page, slot in zip(pages, lease.slots, strict=True)
        )
        load = PageLoad([lease for lease, _ in wanted], 0, len(moves))
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
        if ack.outcome is Outcome.DONE:
            offload.done += acked
        else:
            offload.whole = False
            self.events["copies_failed"] += len(acked)
            self._manager.abort(acked, [slot.generation for slot in acked])
        if ack.last:
            offload.over = True
            done = sorted(offload.done, key=lambda slot: slot.index)
            if done:
                self._manager.commit(offload.chain, done, [slot.generation for slot in done])
                self.events["blocks_stored"] += len(done)

    def _release(self, load: PageLoad) -> None:
        for lease in load.leases:
            lease.release()

    def quiesce(self) -> None:
        """Wait, bounded, for copies under way, and forget completions: none will be asked for. The pages are handed out
        again after it: what has not ended is given up, and never stored."""
        self._engine.wait(list(self._by_ticket), self._wait_s)
        self._poll()
        for ticket in self._by_ticket:
            self._engine.cancel(ticket)
        self._offloads.clear()

    def close(self) -> None:
        """Quiesce and release the device's pages. A copy still under way keeps its memory."""
        self.quiesce()
        self._engine.close(self._wait_s)
