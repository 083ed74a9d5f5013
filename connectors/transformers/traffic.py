"""Blocks between the pool that kvtier owns (G1) and the tiers below it, in both directions.

Out: what the pool is about to hand out, then what has been dirty for too long, as fast as the queue below G2 takes it.
In: blocks that G2 has pinned, into slots that can be had without a loss. A copy that the device does not finish keeps
its memory on both sides until it does; no other is started meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

from kvtier.cache import Cache
from kvtier.clock import Clock
from kvtier.connectors.runs import runs_of
from kvtier.errors import TierError
from kvtier.hit import Hit
from kvtier.identity.keys import BlockKey
from kvtier.manager.closing import Flushed
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Terms
from kvtier.tiers.device.dirty import Dirty
from kvtier.tiers.device.torch_pool import DevicePool, Place
from kvtier.tiers.host.slot import Slot
from kvtier.times import Mono, Wall

log = logging.getLogger(__name__)

_STEP_BYTES = 64 << 20


class Traffic:
    """See the module. One owner thread, the pool's. `pool` is attached to the arena of `cache`."""

    def __init__(self, pool: DevicePool, cache: Cache, clock: Clock, drop_purged: Callable[[], None]) -> None:
        """`drop_purged` drops what the pool has of tenants that were purged until now."""
        self._pool, self._cache, self._clock, self._drop_purged = pool, cache, clock, drop_purged
        self.follow_purges()
        self._lost = False  # a copy did not end; see _lose
        self._failing = False  # the device refused, or failed, one of the latest copies

    def follow_purges(self) -> None:
        """Drop what was purged until now. What is purged from now on is not offloaded until the next call drops it."""
        # What the pool has may be older than a purge of elsewhere that is learned of later.
        self._work = self._cache.manager.hierarchy.begin(Wall("-inf"))
        self._drop_purged()

    # --- in ----------------------------------------------------------------------------------------------------

    def onboard(self, chain: Sequence[BlockKey], start: int, hit: Hit) -> list[int]:
        """Slots, the caller's, with the leading blocks of `hit`, which are those from `start` on of `chain`: as many as
        G1 has space for without a loss."""
        if not self._usable():
            return []
        slots = self._pool.allocate(self.make_space(len(hit)))
        places = [(slot.number, slot.generation) for slot in hit.slots[: len(slots)]]

        def late(over: Sequence[tuple[int, Place]], last: bool) -> None:
            self._pool.free([slot for slot, _ in over])

        try:
            arrived = self._pool.copy_in(places, slots, late)
        except BaseException as error:
            # The slots are the copy's until it ends: without a name, and not handed out.
            self._lose(error)
            if isinstance(error, TierError):
                return []
            raise
        whole = _leading(arrived)
        self._pool.free(slots[whole:])
        slots = slots[:whole]
        first = 0
        try:
            for life, alike in groupby(hit.lives[:whole]):
                end = first + len(list(alike))
                self._pool.confirm(slots[first:end], chain, life, first=start + first)
                first = end
        except BaseException:
            self._pool.free(slots)
            raise
        return slots

    # --- out ---------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Copy out what G1 is about to hand out, then what has been dirty for too long, at most 64 MiB of it. Never
        waits. Returns how many blocks were copied."""
        self.follow_purges()
        limit = max(1, _STEP_BYTES // self._pool.block_bytes)
        return self._offload(min(limit, self._cache.manager.queue_space()), self._pool.horizon)

    def flush(self, timeout: float) -> Flushed:
        """Offload everything that is dirty, then wait until it is as deep as it may go, or the timeout is over."""
        deadline = Mono(self._clock.monotonic() + timeout)
        manager = self._cache.manager
        while self._pool.dirty:
            self.follow_purges()
            version = manager.space.version
            if not self._offload(manager.queue_space(), self._pool.blocks) and not self._wait(deadline, version):
                break
        return self._cache.flush(max(0.0, deadline - self._clock.monotonic()))

    def make_space(self, wanted: int, deadline: Mono | None = None) -> int:
        """How many slots, at most `wanted`, the pool's `allocate` hands out without losing a dirty block.

        Offloads what is in the way as long as the queue below G2 takes it; waits until `deadline` for that (None: not).
        """
        manager = self._cache.manager
        wanted = min(wanted, self._pool.free_blocks)
        while True:
            version = manager.space.version
            clean = self._pool.clean_ahead(wanted)
            if clean == wanted:
                return clean
            if not self._offload(min(wanted, manager.queue_space()), wanted):
                if deadline is None or not self._wait(deadline, version):
                    return clean
                self.follow_purges()

    def _wait(self, deadline: Mono, version: int) -> bool:
        """Until there may be space below that there was not at version `version` of `space`; False at the deadline, and
        where copies fail: space would be of no use."""
        if self._failing or self._clock.monotonic() >= deadline:
            return False
        return self._cache.submit(self._cache.manager.space.wait(deadline, version)).result()

    def _offload(self, limit: int, ahead: int) -> int:
        if not self._usable():
            return 0
        kept, self._failing = 0, False
        picked = self._pool.pick(limit, self._clock.monotonic(), ahead=ahead)
        runs = deque(runs_of(picked, attrgetter("chain", "depth")))
        try:
            while runs and not self._lost:
                kept += self._offload_run(runs.popleft())
        finally:
            for run in runs:
                self._pool.copies_done(run, again_since=self._clock.monotonic())
        return kept

    def _lose(self, error: BaseException) -> None:
        """A copy was left before its end: no other is given to the device until it has finished."""
        log.error("%s; blocks stay in G1 until it has", str(error) or f"{type(error).__name__} while the device copied")
        self._lost = True

    def _usable(self) -> bool:
        """Whether the device takes copies: none was lost, or all that were have ended since."""
        if self._lost and self._pool.recovered():
            log.warning("the device has finished its copies: offloading goes on")
            self._lost = False
        return not self._lost

    def _offload_run(self, run: Sequence[Dirty]) -> int:
        """Copy neighbours of one chain to G2. Returns how many of them, from the first on, are there now. Gives the run
        back to the pool, at the end of its copy if that was left before."""
        manager, chain, start = self._cache.manager, run[0].chain, run[0].depth
        there, ended = 0, True
        try:
            terms = _terms_of(self._pool.life(run[0].slot))
            slots, reached = manager.reserve(chain, start, start + len(run), terms, work=self._work)
            places = [(slot.number, slot.generation) for slot in slots]
            given = dict(zip(places, slots, strict=True))

            def late(over: Sequence[tuple[int, Place]], last: bool) -> None:
                for _, place in over:
                    manager.acknowledge(given[place], place[1])
                if last:
                    self._pool.copies_done(run, again_since=self._clock.monotonic())

            try:
                arrived = self._pool.copy_out([run[slot.index - start].slot for slot in slots], places, late)
            except BaseException as error:
                ended = False  # it may read these slots yet
                manager.abort(slots, [slot.generation for slot in slots], in_flight=True)
                self._lose(error)
                if isinstance(error, TierError):
                    return 0
                raise
            there = self._commit(run, slots, _leading(arrived), reached) - start
            return there
        finally:
            if ended:
                self._pool.copies_done(run[:there])
                self._pool.copies_done(run[there:], again_since=self._clock.monotonic())

    def _commit(self, run: Sequence[Dirty], slots: Sequence[Slot], whole: int, reached: int) -> int:
        """Publish the first `whole` of the slots that a run was copied to, give up the others, and return the depth
        behind the last block of its chain that G2 has; `reached` where all arrived."""
        manager, chain, start = self._cache.manager, run[0].chain, run[0].depth
        if whole < len(slots):
            reached, self._failing = slots[whole].index, True
            manager.abort(slots[whole:], [slot.generation for slot in slots[whole:]])
        slots = slots[:whole]
        for slot in slots:
            life = self._pool.life(run[slot.index - start].slot)
            assert life is not None
            slot.life = life  # as confirmed, not as copied: a spill is no use and no new creation
        manager.commit(chain, slots, [slot.generation for slot in slots])
        manager.finish_put(chain[:reached])
        return reached


def _leading(arrived: Sequence[bool]) -> int:
    """How many copies arrived before the first that did not."""
    return next((index for index, good in enumerate(arrived) if not good), len(arrived))


def _terms_of(life: Lifetime | None) -> Terms:
    """Terms to add to a block that G2 has already: the widest of the stamps that it carries in G1."""
    assert life is not None
    stamp = max(life.stamps, key=lambda stamp: stamp.ceiling)
    return Terms("offload", ttl=stamp.ttl, max_age=stamp.max_age, ceiling=stamp.ceiling)
