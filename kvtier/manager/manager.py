"""The one object that knows all tiers below G1: index, leases, promotion, write-behind, accounts.

Sync verbs (`prefix`, `pin`, `reserve`, `commit`, `abort`, `release`) are thread-safe, never wait for a tier and are
for an engine's step thread. Async verbs (`match`, `promote`, `flush`, `evict`, `purge`) run on the one event loop the
manager was started on. Everything that changes a slot happens under one lock, held for microseconds.

    tokens → keys → match / promote → lease          plan.py decides, promote.py moves
    reserve → (copy) → commit → write-behind         demote.py decides, write_behind.py queues
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvtier.clock import Clock
from kvtier.errors import ClosedError, InvalidRequest
from kvtier.events import Events
from kvtier.identity.keys import BlockKey, Scope
from kvtier.manager.accounts import Account, Accounts
from kvtier.manager.closing import Closing, Flushed, Step, within
from kvtier.manager.demote import Demoter
from kvtier.manager.divergence import tails_of
from kvtier.manager.hierarchy import Hierarchy, ManagerLimits
from kvtier.manager.housekeeping import Housekeeping
from kvtier.manager.joining import Joining
from kvtier.manager.lease import Lease
from kvtier.manager.promote import Promoter
from kvtier.manager.protection import Protection
from kvtier.manager.purge import Purger
from kvtier.manager.reserve import ChainReservation
from kvtier.manager.saved_state import SavedState
from kvtier.manager.slices import MOVED_BLOCKS, aside, slices
from kvtier.manager.stats import stats_of
from kvtier.manager.work import Work
from kvtier.retention.ranges import ChainTerms, uniform
from kvtier.retention.terms import Terms
from kvtier.tiers.host.pins import Hold, Holds
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Miss, Tier
from kvtier.times import Mono


class Manager:
    """See the module. Built closed. `host`, `lower`, `lock` and `space` are its `Hierarchy`'s, for the connectors."""

    def __init__(
        self,
        host: HostTier,
        lower: Sequence[Tier],
        clock: Clock,
        limits: ManagerLimits | None = None,
        lock: threading.Lock | None = None,
    ) -> None:
        """`lower` are the raw tiers below G2, nearest first. Opens nothing. `lock`: one that measures itself."""
        self.hierarchy = hierarchy = Hierarchy(host, lower, clock, limits, lock)
        self.host, self.lower, self.lock, self.space = host, hierarchy.lower, hierarchy.lock, hierarchy.space
        self._clock, self._limits = hierarchy.clock, hierarchy.limits
        self.accounts = Accounts(self._limits.block_tokens, self._limits.classes)
        host.on_lost = self.accounts.losses.record
        self.promoter = Promoter(hierarchy)
        self.protection = Protection(hierarchy)
        self._saved = SavedState(hierarchy)
        self._purger = Purger(hierarchy, self.protection)
        self._housekeeping = Housekeeping(hierarchy, self.protection, self._purger, self._saved)
        self.demoter = Demoter(hierarchy, self.promoter, self.protection, self._housekeeping.flush_uses)
        self._closing: Closing | None = None
        self.closed = True

    async def start(self) -> None:
        """Open all tiers on the running loop; see `Hierarchy.open` for those that fail."""
        hierarchy = self.hierarchy
        await hierarchy.open()
        try:
            await self._saved.open()  # first: how far the purge log was read
            await self._purger.sync()
            await self.protection.open()
            self.demoter.open()
        except BaseException:
            deadline = self._clock.monotonic() + self._limits.close_s
            async with contextlib.AsyncExitStack() as ending:
                ending.push_async_callback(hierarchy.close, deadline)
                ending.push_async_callback(hierarchy.supervisor.close, deadline)
            raise
        hierarchy.supervisor.start(
            "housekeeping", self._housekeeping.run, hierarchy.service, self._limits.housekeeping_s
        )
        Joining(hierarchy, self._purger, self._saved, self.protection, self.demoter).start()
        self._closing, self.closed = None, False

    def apply(self, limits: ManagerLimits) -> None:
        """Bounds of a changed configuration, in force from the next call on. No block moves."""
        with self.lock:
            self._limits = self.hierarchy.apply(limits)
            self.accounts.name_classes(limits.classes)
            self.demoter.apply(limits)

    async def close(self) -> Flushed:
        """Take in nothing more, flush, then close everything, all within `close_s`, whatever a tier does. Leases still
        out keep their bytes. Idempotent: a second call waits for the first. Cancelling the first skips the flush and
        leaves CANCELLED_S for the rest, which is done all the same. Where the loop has ended, nothing is flushed."""
        if self._closing is not None:
            await self._closing.ended()
        if self.closed:
            return Flushed({}, 0, 0)
        self.closed = True
        self.space.notify()  # whoever waits to store finds the cache closed
        steps: list[Step] = [
            (0.75, self.promoter.close),
            (0.8, self.hierarchy.supervisor.close),
            (0.8, lambda _: self.demoter.close()),
            (0.85, lambda deadline: within(self._saved.write(), deadline, self._clock)),
            (0.95, self.hierarchy.close),
        ]
        steps = steps[-1:] if self.hierarchy.stranded else steps  # all else ended with its loop
        self._closing = Closing((0.7, self._flush), steps, self._limits.close_s, self._clock)
        return await self._closing.result()

    def _usable(self) -> None:
        if self.closed:
            raise ClosedError("the cache is closed")

    def _unusable(self) -> bool:
        """Whether everything is a miss now. Raises ClosedError."""
        self._usable()
        return self.hierarchy.out

    def _nothing(self) -> Lease:
        return Lease([], [], Miss.UNPROVEN if self.hierarchy.unproven else Miss.BREAKER, self.release)

    def subscribe(self, events: Events | None) -> None:
        """Notify `events` of every tier's blocks from now on; None: nobody any more."""
        self._usable()
        with self.lock:
            self.host.notify = None if events is None else events.of(self.host.name)
        self.lower.subscribe(events)

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    def prefix(self, chain: Sequence[BlockKey]) -> int:
        """Leading blocks READY in G2. Moves nothing and pins nothing."""
        if self._unusable():
            return 0
        return self.hierarchy.prefix(chain)

    def holds(self, key: BlockKey) -> bool:
        """Whether a block is READY in G2 or on its way there, and not stuck. Pins nothing."""
        now = self.hierarchy.now().serve
        with self.lock:
            return self.host.peek(key, now) in (None, Miss.PENDING) and not self.promoter.is_stuck(key)

    def pin(self, chain: Sequence[BlockKey], start: int = 0) -> Lease:
        """Pin the blocks from `start` on that are READY in G2, up to the first that is not; each is looked up and
        pinned in one critical section. Those before `start` the caller has (in G1); they count as used."""
        if self._unusable():
            return self._nothing()
        time = self.hierarchy.now()
        pins, miss = list[Holds](), None
        for part in slices(chain[start:]):
            with self.lock:
                pins.append(pinned := self.host.pin_leading(part, time.serve, time.stamp))
                if len(pinned) < len(part):
                    key = part[len(pinned)]
                    miss = self._why(key, self.host.peek(key, time.serve) or Miss.EVICTED)
                    break
        holds = Holds.joined(pins)
        self.hierarchy.reference(chain, start + len(holds))
        self._housekeeping.record_use(chain[: start + len(holds)], time.stamp)
        self.demoter.found(chain, range(start + len(holds)))
        return Lease(holds, [self.host.name] * len(holds), miss, self.release, self._housekeeping.forget)

    def _why(self, key: BlockKey, miss: Miss) -> Miss:
        """The reason that is remembered for a block that is not here. Under the lock."""
        return self.accounts.losses.why(key) if miss is Miss.ABSENT else miss

    async def match(self, chain: Sequence[BlockKey], deadline: Mono | None = None, start: int = 0) -> int:
        """Longest resident prefix over all tiers; see `pin` for `start`. Moves nothing; waits at most `lookup_s`."""
        if self._unusable():
            return start
        return (await self.promoter.plan(await self.promoter.locate(chain, deadline, start), len(chain))).hit

    async def promote(
        self, chain: Sequence[BlockKey], deadline: Mono, start: int = 0, *, referenced: bool = False
    ) -> Lease:
        """Bring the longest prefix that pays off into G2 and pin it, by `deadline`; what is late is a miss. Blocks
        before `start`: see `pin`. `referenced`: that was called for this request, so the policy knows of it."""
        if self._unusable():
            return self._nothing()
        time = self.hierarchy.now()
        promoted = await self.promoter.promote(chain, start, deadline, time, referenced=referenced)
        hit, miss = start + len(promoted.holds), promoted.miss
        with self.lock:
            if miss is Miss.CORRUPT:
                self.accounts.losses.record(chain[hit], miss)
            miss = self._why(chain[hit], miss) if miss is Miss.ABSENT else miss
        lease = Lease(promoted.holds, promoted.found, miss, self.release, self._housekeeping.forget)
        try:
            await aside(hit, lambda: self._housekeeping.record_use(chain[:hit], time.stamp))
            await aside(hit, lambda: self.demoter.promoted(chain, start, promoted.found, counted=referenced))
        except BaseException:
            lease.release()
            raise
        return lease

    async def prewarm(self, chain: Sequence[BlockKey], deadline: Mono) -> int:
        """`promote` for a request to come; returns how many leading blocks are in G2 now. Is no request in accounts."""
        with await self.promote(chain, deadline) as lease:
            return len(lease)

    def computed(self, blocks: float, seconds: float) -> None:
        """The engine computed this many blocks in this time; see `Promoter.computed`."""
        self.promoter.computed(blocks, seconds)

    def count(
        self, lease: Lease, asked: int, request_id: str = "", compared_with: str = "", chain: Sequence[BlockKey] = ()
    ) -> Account:
        """Record that `lease` served a request for `asked` blocks; see `Accounts.record_read`."""
        found, tails = Counter(lease.tiers), tails_of(chain) if request_id else b""
        with self.lock:
            return self.accounts.record_read(lease, asked, request_id, compared_with, chain, found, tails)

    def lost(self, keys: Sequence[BlockKey], why: Miss) -> None:
        """These blocks are gone, for this reason: later requests that miss them are given it."""
        for part in slices(keys):
            with self.lock:
                for key in part:
                    self.accounts.losses.record(key, why)

    def account(self, request_id: str) -> Account | None:
        """A copy of what a request has asked for, read and written. None: it is not among the latest."""
        with self.lock:
            return copy.deepcopy(self.accounts.known(request_id))

    def release(self, holds: Sequence[Hold]) -> None:
        """Undo pins; see `Hierarchy.release`. Does not wait."""
        self.hierarchy.release(holds[::-1])

    # ── storing ─────────────────────────────────────────────────────────────────────────────────────────────

    def reserve(
        self,
        chain: Sequence[BlockKey],
        start: int,
        stop: int,
        terms: Terms | ChainTerms,
        keep: Callable[[BlockKey], bool] | None = None,
        *,
        insist: bool | None = None,
        work: Work | None = None,
        passed: set[int] | None = None,
    ) -> tuple[list[Slot], int]:
        """FILLING slots for blocks start … stop-1 of `chain` that G2 lacks, as far as there is space.

        `terms` are the request's, for all its blocks or by depth. `keep` claims blocks that must not be evicted for
        these; with `insist` the policy may not refuse them: they are on their way to a lower tier (None: if one is
        healthy). Returns the slots and the index reached: blocks before it are reserved, or here already (then `terms`
        are added, and those that the nearest lower tier lacks are queued for it), or `passed`: another caller fills
        them. None of a scope that was purged since `work` began (None: now). The caller commits or aborts each slot.
        """
        self._usable()
        self._housekeeping.unpin_forgotten()
        time, work = self.hierarchy.now(), work or self.hierarchy.begin()
        asked = uniform(terms) if isinstance(terms, Terms) else terms
        if insist is None:
            insist = self.hierarchy.healthy()
        promised, reached = chain[start:stop] if asked.guarantees else (), start
        out = ChainReservation(chain, time, work, keep, insist, self.promoter.take_over, passed)
        self.protection.claims.add(promised)
        try:
            if promised:
                with contextlib.suppress(InvalidRequest):  # refused, and counted: the blocks live on without it
                    self.protection.guarantee(chain, start, asked, work, stop)
            reached = out.take_slices(self.lock, self.host, self.accounts.losses, start, stop, asked, self._met)
        finally:
            self.protection.claims.remove(promised)
            self.protection.release_guarantees(promised[reached - start :])
        if out.present:
            self._housekeeping.record_use([chain[index] for index in out.present], time.stamp)
            self.demoter.stored_again(chain, out.present, out.widened)
        return out.slots, reached

    def _met(self, keys: Sequence[BlockKey], present: Sequence[BlockKey]) -> None:
        """Blocks are to be stored; some are here already. Under the lock."""
        if self.demoter.admission.active:
            self.demoter.admission.want(keys)
        if self.protection.busy:
            self.protection.arrived([slot for key in present if (slot := self.host.index.get(key)) is not None])

    def commit(
        self,
        chain: Sequence[BlockKey],
        slots: Sequence[Slot],
        generations: Sequence[int],
        *,
        again: bool = False,
        request_id: str = "",
    ) -> list[int]:
        """Publish filled slots, ascending in depth, and queue them for the lower tiers.

        Returns the depths that no queue accepted: they are readable in G2 and nowhere else, and count as dropped,
        unless the caller will see to them `again`. `request_id`: the request whose account counts them.
        """
        self._usable()
        published, latest = list[Slot](), self.hierarchy.latest()
        for filled in slices(list(zip(slots, generations, strict=True)), MOVED_BLOCKS):
            with self.lock:
                published += (part := self.host.commit_all(filled, latest))
                self.host.tell(part)
                self.host.pins.pin_all([slot.number for slot in part])  # nobody may evict it before it is queued
                if self.protection.busy:
                    self.protection.arrived(part)
                self.accounts.record_written([slot.kind for slot in part], request_id)
        refused = self.demoter.demote_pinned(chain, published)
        if self.lower and not again:
            self.demoter.dropped += len(refused)
        return refused

    def abort(self, slots: Sequence[Slot], generations: Sequence[int], *, in_flight: bool = False) -> None:
        """Give up FILLING slots; with `in_flight`, until `acknowledge` their memory is left alone."""
        for filled in slices(list(zip(slots, generations, strict=True)), MOVED_BLOCKS):
            with self.lock:
                keys = [slot.key for slot, _ in filled if slot.key is not None]
                for slot, generation in filled:
                    self.host.abort(slot, generation, in_flight=in_flight)
            if self.protection.busy:
                self.protection.release_guarantees(keys)
        self.space.notify()

    def acknowledge(self, slot: Slot, generation: int) -> None:
        """The last writer of an aborted in-flight slot is done with its memory."""
        with self.lock:
            self.host.unpin(slot, generation)
        self.space.notify()

    def finish_put(self, chain: Sequence[BlockKey], dropped: int = 0) -> None:
        """A put of `chain` is over, and `dropped` of its blocks found no queue: order the rest, tail coldest."""
        resident = self.hierarchy.prefix(chain)
        with self.lock:
            self.demoter.dropped += dropped
        self.hierarchy.reference(chain, resident, stored=True)

    def queue_space(self) -> int:
        """Blocks that the lower tiers' queues would accept now; all of G2 where there is no lower tier."""
        return self.demoter.space()

    # ── whole tiers ─────────────────────────────────────────────────────────────────────────────────────────

    async def flush(self, deadline: Mono) -> Flushed:
        """Wait until all blocks put are durable as deep as they may go; at most until the deadline."""
        self._usable()
        return await self._flush(deadline)

    async def _flush(self, deadline: Mono) -> Flushed:
        if self.hierarchy.stranded:
            return self.flushed()
        await self.demoter.drain(deadline)
        await self._housekeeping.flush_uses()
        await within(self.protection.tend(), deadline, self._clock)
        await asyncio.gather(*(tier.flush(deadline) for tier in self.lower.values()), return_exceptions=True)
        return self.flushed()

    def flushed(self) -> Flushed:
        """The state that a flush would return now."""
        with self.lock:
            durable = {name: self.demoter.durable[name] for name in self.lower}
            return Flushed(durable, self.demoter.dropped, self.demoter.pending())

    async def evict(self, name: str) -> int:
        """Drop one tier's copies of this namespace; returns how many. Blocks under a lease stay until it ends."""
        self._usable()
        if name == self.host.name:
            count = await self.hierarchy.drop_slices(self.host.drop_where(lambda number: True))
        else:
            count = await self.lower.evict(name)
        await self.protection.evicted(name, self.demoter.on_its_way)
        return count

    async def purge(self, scopes: Collection[Scope]) -> int:
        """Drop scopes from every tier, for good: their blocks stored until now are misses everywhere from now on."""
        self._usable()
        return await self._purger.purge(scopes)

    def stats(self) -> dict[str, Any]:
        """Counters since start and gauges of now; see docs/operations.md for each."""
        self._housekeeping.unpin_forgotten()
        return stats_of(self.hierarchy, self.accounts, self.demoter, self.promoter, self.protection)

    def check(self) -> None:
        """Assert the invariants of every part that has some."""
        with self.lock:
            self.host.check()
            self.protection.check()
        for tier in self.lower.values():
            tier.check()
