"""The one object that knows all tiers below G1: index, leases, promotion, write-behind, accounts.

Sync verbs (`prefix`, `pin`, `reserve`, `commit`, `abort`, `release`) are thread-safe, never wait for a tier and are
what an engine's step thread may call. Async verbs (`match`, `promote`, `flush`, `evict`, `purge`) run on the one
event loop the manager was started on. Everything that changes a slot happens under one lock, held for microseconds.

    tokens → keys → match / promote → lease          kvtier.manager.plan decides, kvtier.manager.promote moves
    reserve → (copy) → commit → write-behind         kvtier.manager.demote decides, kvtier.manager.write_behind queues
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.clock import Clock
from kvtier.errors import ClosedError, InvalidRequest, TierError
from kvtier.events import Events
from kvtier.identity.keys import BlockKey, Scope
from kvtier.manager.accounts import Account, Accounts
from kvtier.manager.demote import Demoter
from kvtier.manager.lease import Hold, Lease
from kvtier.manager.plan import Costs, Where, make_plan
from kvtier.manager.promote import Promoter
from kvtier.manager.protection import Protection
from kvtier.manager.purge import Purger
from kvtier.manager.reserve import ChainReservation
from kvtier.manager.saved_state import SavedState
from kvtier.manager.space import SpaceSignal
from kvtier.manager.stats import stats_of
from kvtier.retention.lifetime import FUTURE_S
from kvtier.retention.ranges import ChainTerms, uniform
from kvtier.retention.terms import Terms
from kvtier.retention.trusted_clock import Reading, TrustedClock
from kvtier.tiers.guard import Guarded, Metered
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Miss, Tier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """Bounds of a manager, with their units in the names."""

    lookup_s: float = 0.2
    close_s: float = 10.0
    housekeeping_s: float = 2.0
    tombstones_s: float = 20.0
    write_rate: float = 0.0  # bytes/s into G3; 0: no bound
    write_budget_per_day: float = 0.0  # bytes/day into G3; 0: no bound
    queue_fraction: float = 0.5  # of G2's slots that may wait for a lower tier
    overdue_fraction: float = 0.25  # of G2's slots that abandoned loads may hold
    touched_max: int = 100_000
    reserved: float = 0.5  # of a tier's blocks that guarantees and pins may reserve
    store_threshold: int = 1  # requests that must have wanted a block before it is written below G2
    min_prefix_blocks: int = 0  # of a prompt, before any of it is written below G2
    block_tokens: int = 1  # what accounts are multiplied with
    classes: tuple[str, ...] = ()  # names that accounts of written tokens are kept under


@dataclass(frozen=True, slots=True)
class Flushed:
    """What `flush` found. `durable[tier]`: blocks put through this handle that are on that tier's medium;
    `dropped`: accepted blocks that no lower tier took; `pending`: still under way at the deadline."""

    durable: Mapping[str, int]
    dropped: int
    pending: int


class Manager:
    """See the module. Built closed; `start` opens the tiers, `close` flushes and closes them."""

    def __init__(
        self, host: HostTier, lower: Sequence[Tier], clock: Clock, settings: ManagerLimits | None = None
    ) -> None:
        """`lower` are the raw tiers below G2, nearest first. Opens nothing."""
        self.host = host
        self.lower: dict[str, Metered] = {tier.name: Metered(Guarded(tier, clock), clock) for tier in lower}
        self.lock = threading.Lock()
        self._compute_s_per_block: float | None = None
        self.time = self._clock = TrustedClock.around(clock)
        self._settings = settings or ManagerLimits()
        self.accounts = Accounts(self._settings.block_tokens, self._settings.classes)
        host.on_lost = self.accounts.losses.record
        self._adopted = 0  # times that a jump of the clock was accepted
        self._drop_below = False
        self._touched: dict[BlockKey, float] = {}
        self._forgotten: deque[Sequence[Hold]] = deque()  # pins of leases that nobody released
        self.space = SpaceSignal(self._clock, self._coming)
        self._tasks: list[asyncio.Task[None]] = []
        self.protection = Protection(self, self.time, self._settings.reserved)
        self._purger = Purger(host, self.lower, self.protection, self.lock)
        self._saved = SavedState(self.time, host, self.lock)
        self.closed = True

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Open all tiers on the running loop. A lower tier that fails is left out, with a warning; one that must not
        be touched (FormatError) or is misconfigured (ConfigError) stops the start, with everything closed again."""
        loop = asyncio.get_running_loop()
        self.space.open(loop)
        await asyncio.to_thread(self.host.open)
        opened: list[Metered] = []
        try:
            for tier in list(self.lower.values()):
                try:
                    await tier.open()
                    opened.append(tier)
                except TierError as error:
                    log.warning("%s is left out: %s", tier.name, error)
                    del self.lower[tier.name]
        except BaseException:
            for tier in opened:
                await tier.close(self._clock.monotonic() + self._settings.close_s)
            self.host.close()
            raise
        slots = self.host.capacity
        self.promoter = Promoter(
            self.host, self._clock, self.lock, max(1, int(slots * self._settings.overdue_fraction))
        )
        await self._purger.sync()
        await self._saved.open(self.lower)
        await self.protection.open()
        self.demoter = Demoter(self, self._clock, self._settings)
        self.demoter.start(loop)
        self._tasks.append(loop.create_task(self._keep_tidy()))
        self.closed = False

    async def close(self) -> Flushed:
        """Flush within `close_s`, then let go of everything. Idempotent; leases still out keep their bytes."""
        if self.closed:
            return Flushed({}, 0, 0)
        flushed = await self.flush(self._clock.monotonic() + self._settings.close_s)
        self.closed = True
        deadline = self._clock.monotonic() + self._settings.close_s
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.demoter.close()
        await self.promoter.close(deadline)
        await self._saved.write()
        for tier in self.lower.values():
            await tier.close(deadline)
        with self.lock:
            self.host.close()
        return flushed

    def _usable(self) -> None:
        if self.closed:
            raise ClosedError("the cache is closed")

    def subscribe(self, events: Events | None) -> None:
        """Tell `events` of every tier's blocks from now on; None: nobody any more."""
        self._usable()
        with self.lock:
            self.host.notify = None if events is None else events.of(self.host.name)
        for name, tier in self.lower.items():
            tier.subscribe(None if events is None else events.of(name))

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    def prefix(self, chain: Sequence[BlockKey]) -> int:
        """Leading blocks READY in G2. Moves nothing, promises nothing."""
        self._usable()
        now = self._now().serve
        with self.lock:
            return self.host.prefix(chain, now)

    def holds(self, key: BlockKey) -> bool:
        """Whether a block is READY in G2 or on its way there. Promises nothing."""
        now = self._now().serve
        with self.lock:
            return self.host.peek(key, now) in (None, Miss.PENDING)

    def pin(self, chain: Sequence[BlockKey], start: int = 0) -> Lease:
        """Look up and pin, in one critical section, the blocks from `start` on that are READY in G2, up to the first
        that is not. Those before `start` the caller has (in G1); they count as used."""
        self._usable()
        time = self._now()
        now, used = time.serve, time.stamp
        holds: list[Hold] = []
        miss: Miss | None = None
        with self.lock:
            for key in chain[start:]:
                slot = self.host.pin(key, now, used)
                if slot is None:
                    miss = self._why(key, self.host.peek(key, now) or Miss.EVICTED)
                    break
                holds.append((slot, slot.generation))
            self.host.reference(chain, start + len(holds), self._clock.monotonic())
            self._note_use(chain[: start + len(holds)], used)
        self._admit(chain, range(start + len(holds)))
        return Lease(holds, [self.host.name] * len(holds), miss, self.release, self._forgotten.append)

    def _admit(self, chain: Sequence[BlockKey], found: Sequence[int]) -> None:
        """A request found the blocks at these depths, in G1 too: that may make them worth a write."""
        if self.demoter.admission.active:
            with self.lock:
                self.demoter.admission.want(chain[index] for index in found)
            self.demoter.demote(chain, sorted(self.demoter.lacking(chain, found)))

    def _why(self, key: BlockKey, miss: Miss) -> Miss:
        """What is not here may have left for a reason that is remembered. Under the lock."""
        return self.accounts.losses.why(key) if miss is Miss.ABSENT else miss

    async def match(self, chain: Sequence[BlockKey], deadline: float | None = None) -> int:
        """Longest resident prefix over all tiers. Moves nothing; waits for lower tiers at most `lookup_s`."""
        return make_plan(await self._locate(chain, deadline), len(chain)).hit

    async def _locate(self, chain: Sequence[BlockKey], deadline: float | None, start: int = 0) -> list[Where]:
        """Where each block of `chain` is, up to the first that is nowhere; later ones may be unknown. Those before
        `start` need no looking for and are given as G2's."""
        self._usable()
        now = self._now().serve
        with self.lock:
            where: list[Where] = [self.host.name] * start
            where += [self.host.peek(key, now) or self.host.name for key in chain[start:]]
        if deadline is None:
            deadline = self._clock.monotonic() + self._settings.lookup_s
        for tier in self.lower.values():
            wanted = [index for index, place in enumerate(where) if isinstance(place, Miss)]
            if not wanted:
                break
            answers = await tier.lookup(chain, wanted, deadline)
            for index, miss in zip(wanted, answers, strict=True):
                if miss is None:
                    where[index] = tier.name
                elif where[index] is Miss.ABSENT:
                    where[index] = miss  # the more telling reason
        return where

    async def promote(
        self, chain: Sequence[BlockKey], deadline: float, start: int = 0, *, referenced: bool = False
    ) -> Lease:
        """Bring the longest prefix that pays off into G2 and pin it, by `deadline`; what is late is a miss.

        Blocks before `start` the caller has (in G1): they are not in the lease, but count as used. `referenced`:
        `pin` was called for the same request and has told the policy of it.
        """
        self._usable()
        lookup_by = min(deadline, self._clock.monotonic() + self._settings.lookup_s)
        where = await self._locate(chain, lookup_by, start)
        plan = make_plan(where, start + self.host.capacity, self.host.name, self._costs())
        time = self._now()
        pinned: dict[int, Slot] = {}
        with self.lock:
            for index in range(start, plan.hit):
                if (
                    where[index] == self.host.name
                    and (slot := self.host.pin(chain[index], time.serve, time.stamp)) is not None
                ):
                    pinned[index] = slot
            if not referenced:  # before the loads, so that the policy knows for whom it makes room
                self.host.reference(chain, start + len(pinned), self._clock.monotonic())
        try:
            loaded = await self.promoter.load(self.lower, chain, plan.loads, deadline)
        except BaseException:
            self.release([(slot, slot.generation) for slot in pinned.values()])
            raise
        pinned.update({index: out for index, out in loaded.items() if isinstance(out, Slot)})
        hit = next((index for index in range(start, plan.hit) if index not in pinned), max(start, plan.hit))
        holds = [(pinned[index], pinned[index].generation) for index in range(start, hit)]
        self.release([(slot, slot.generation) for index, slot in pinned.items() if index >= hit])
        miss = plan.miss
        if hit < plan.hit:
            outcome = loaded.get(hit, Miss.EVICTED)
            miss = outcome if isinstance(outcome, Miss) else Miss.EVICTED
        with self.lock:
            if miss is Miss.CORRUPT:
                self.accounts.losses.record(chain[hit], miss)
            elif miss is not None:
                miss = self._why(chain[hit], miss)
            for index, out in loaded.items():
                if index < hit and isinstance(out, Slot):
                    out.use(time.stamp)
            self._note_use(chain[:hit], time.stamp)
        # What `pin` found before has been counted then.
        self._admit(chain, [index for index in range(hit) if index in loaded or not referenced])
        self._demote_promoted(chain, where, loaded)
        return Lease(holds, [str(place) for place in where[start:hit]], miss, self.release, self._forgotten.append)

    async def prewarm(self, chain: Sequence[BlockKey], deadline: float) -> int:
        """Bring what is anywhere of `chain` into G2 by `deadline`, for a request to come; returns how many leading
        blocks are there now. Asks for nothing in the accounts."""
        with await self.promote(chain, deadline) as lease:
            return len(lease)

    def computed(self, blocks: float, seconds: float) -> None:
        """The engine computed this many blocks in this time: the estimate that loading is weighed against."""
        sample = seconds / max(blocks, 1e-9)
        old = self._compute_s_per_block
        self._compute_s_per_block = sample if old is None else old + 0.2 * (sample - old)

    def _costs(self) -> Costs | None:
        if self._compute_s_per_block is None:
            return None
        known = {name: tier.estimate() for name, tier in self.lower.items()}
        return Costs(self._compute_s_per_block, {name: s for name, s in known.items() if s is not None})

    def _demote_promoted(
        self, chain: Sequence[BlockKey], where: Sequence[Where], loaded: Mapping[int, Slot | Miss]
    ) -> None:
        """Give what came from a deep tier to the tiers above it that lack it (G4 → G3)."""
        nearest = next(iter(self.lower), None)
        indices = [i for i, out in loaded.items() if isinstance(out, Slot) and where[i] != nearest]
        if nearest is not None and indices:
            self.demoter.demote(chain, sorted(indices))

    def count(
        self, lease: Lease, asked: int, request_id: str = "", compared_with: str = "", chain: Sequence[BlockKey] = ()
    ) -> Account:
        """Book a request for `asked` blocks that was served by `lease`; see `Accounts.read`."""
        with self.lock:
            return self.accounts.record_read(lease, asked, request_id, compared_with, chain)

    def lost(self, keys: Sequence[BlockKey], why: Miss) -> None:
        """These blocks will be missed, and that is why: for accounts of later requests."""
        with self.lock:
            for key in keys:
                self.accounts.losses.record(key, why)

    def account(self, request_id: str) -> Account | None:
        """What a request has asked for, read and written so far; a copy. None: it is not among the latest."""
        with self.lock:
            account = self.accounts.known(request_id)
            return copy.deepcopy(account)

    def release(self, holds: Sequence[Hold]) -> None:
        """Undo pins. Does not block."""
        if not holds:
            return
        with self.lock:
            for slot, generation in reversed(holds):
                self.host.unpin(slot, generation)
        self.space.notify()

    def _release_forgotten(self) -> None:
        while self._forgotten:
            self.release(self._forgotten.popleft())

    def _note_use(self, keys: Sequence[BlockKey], now: float) -> None:
        """Remember uses for the lower tiers and for what was promised. Under the lock."""
        if (self.lower or self.protection.busy) and len(self._touched) < self._settings.touched_max:
            self._touched.update(dict.fromkeys(keys, now))

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
    ) -> tuple[list[Slot], int]:
        """FILLING slots for blocks start … stop-1 of `chain` that G2 lacks, as far as there is room.

        `terms` are the request's, for all its blocks or by depth. `keep` claims blocks that must not be evicted for
        these; with `insist` the policy may not refuse them: they are on their way to a lower tier (None: if there is
        one that is well). Returns the slots and the index reached: blocks before it are reserved, or are here already
        (then `terms` are added to them, and what the nearest lower tier lacks is queued for it), or are being filled
        by somebody else. The caller copies, then commits or aborts each slot.
        """
        self._usable()
        self._release_forgotten()
        time = self._now()
        asked = uniform(terms) if isinstance(terms, Terms) else terms
        if insist is None:
            insist = self.demoter.healthy()
        out = ChainReservation(chain, time, keep, insist)
        with self.lock:
            if self.demoter.admission.active:
                self.demoter.admission.want(chain[start:stop])
            if asked.guarantees:
                self._promise(chain, start, stop, asked, time.stamp)
            reached = out.take(self.host, self.accounts.losses, start, stop, asked)
            if self.protection.busy:
                met = (self.host.index.get(chain[index]) for index in out.present)
                self.protection.arrived([slot for slot in met if slot is not None])
        if out.present:
            self.demoter.demote(chain, sorted({*out.widened, *self.demoter.lacking(chain, out.present)}))
        return out.slots, reached

    def guarantee(self, chain: Sequence[BlockKey], start: int, terms: ChainTerms) -> None:
        """Reserve bytes for the guaranteed blocks of a chain from `start` on before they are stored. Raises
        InvalidRequest, and then nothing is promised, when that would be more than may be reserved."""
        now = self._now().stamp
        with self.lock:
            self.protection.guarantee(chain, start, terms, now)

    def _promise(self, chain: Sequence[BlockKey], start: int, stop: int, terms: ChainTerms, now: float) -> None:
        """The same for who must not fail: what is refused (and counted) lives on without a guarantee."""
        with contextlib.suppress(InvalidRequest):
            self.protection.guarantee(chain, start, terms, now, stop)

    def release_guarantees(self, keys: Sequence[BlockKey]) -> None:
        """These blocks were promised room and were not stored: nothing is owed to them."""
        with self.lock:
            self.protection.release_guarantees(keys)

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
        unless the caller will see to them `again`. `request_id`: whose account they are booked to, too.
        """
        self._usable()
        published: list[Slot] = []
        with self.lock:
            for slot, generation in zip(slots, generations, strict=True):
                if self.host.commit(slot, generation):
                    slot.pins += 1  # at once: nobody may evict it before it is queued
                    published.append(slot)
            if self.protection.busy:
                self.protection.arrived(published)
            self.accounts.record_written([slot.kind for slot in published], request_id)
        refused = self.demoter.demote_pinned(chain, published)
        if self.lower and not again:
            self.demoter.dropped += len(refused)
        return refused

    def abort(self, slots: Sequence[Slot], generations: Sequence[int], *, in_flight: bool = False) -> None:
        """Give up FILLING slots; with `in_flight`, until `acknowledge` their memory is left alone."""
        with self.lock:
            for slot, generation in zip(slots, generations, strict=True):
                self.host.abort(slot, generation, in_flight=in_flight)
        self.space.notify()

    def acknowledge(self, slot: Slot, generation: int) -> None:
        """The last writer of an aborted in-flight slot is done with its memory."""
        with self.lock:
            self.host.acknowledge(slot, generation)
        self.space.notify()

    def finish_put(self, chain: Sequence[BlockKey], dropped: int = 0) -> None:
        """A put of `chain` is over, and `dropped` of its blocks found no queue: give the others their order of
        eviction, tail coldest."""
        now = self._now().serve
        with self.lock:
            self.demoter.dropped += dropped
            resident = self.host.prefix(chain, now)
            self.host.chain_stored(chain, resident, self._clock.monotonic())

    def queue_room(self) -> int:
        """Blocks that the lower tiers' queues would accept now; all of G2 where there is no lower tier."""
        return self.demoter.space()

    def _coming(self) -> bool:
        with self.lock:
            return self.host.busy()

    # ── whole tiers ─────────────────────────────────────────────────────────────────────────────────────────

    async def flush(self, deadline: float) -> Flushed:
        """Wait until what was put is as deep as it may go, tails of strides included, and on its medium."""
        self._usable()
        await self.demoter.drain(deadline)
        self._flush_touches()
        await self.protection.tend()
        for tier in self.lower.values():
            await tier.flush(deadline)
        with self.lock:
            durable = {name: self.demoter.durable[name] for name in self.lower}
            return Flushed(durable, self.demoter.dropped, self.demoter.pending())

    async def evict(self, name: str) -> int:
        """Drop one tier's copies of this namespace; returns how many. Blocks under a lease stay until it ends."""
        self._usable()
        if name == self.host.name:
            with self.lock:
                return sum(self.host.drop(key) for key in list(self.host.index))
        count = await self.lower[name].evict(None)
        with self.lock:
            self.protection.forget(name)
        return count

    async def evict_blocks(self, keys: Sequence[BlockKey]) -> None:
        """Drop these blocks from every tier. Those under a lease stay until it ends."""
        with self.lock:
            for key in keys:
                self.host.drop(key)
        for tier in self.lower.values():
            await tier.evict(keys)

    async def purge(self, scope: Scope) -> int:
        """Drop a scope from every tier, for good: what was stored until now is a miss everywhere from now on."""
        self._usable()
        return await self._purger.purge(scope, self._now().serve)

    async def _keep_tidy(self) -> None:
        """Hand touches down and learn of purges by other processes, now and then."""
        waited_s = 0.0
        while True:
            await asyncio.sleep(self._settings.housekeeping_s)
            self._release_forgotten()
            self._flush_touches()
            with self.lock:
                self.host.train()
            await self.accept_time()
            waited_s += self._settings.housekeeping_s
            learn = waited_s >= self._settings.tombstones_s
            if learn:
                waited_s = 0.0
                await self._purger.sync()
            await self.protection.tend(learn=learn)
            await self._saved.write_when_due()

    def _now(self) -> Reading:
        """The time. If the wall clock was set and that is accepted now, what was stamped by the time before and lies in
        the future now is dropped: it would come back to life when that time is reached. Without the lock."""
        time = self.time.read()
        if self.time.adopted != self._adopted:
            with self.lock:
                self._adopted = self.time.adopted
                self._drop_below = True
                self.host.drop_made_after(time.serve + FUTURE_S)
        return time

    async def accept_time(self) -> None:
        """The same for the lower tiers; until then they serve nothing of the future."""
        future = self._now().serve + FUTURE_S
        if self._drop_below:
            self._drop_below = False
            for tier in self.lower.values():
                await tier.drop_made_after(future)

    def _flush_touches(self) -> None:
        with self.lock:
            touched, self._touched = self._touched, {}
            if self.protection.busy:
                for key, now in touched.items():
                    self.protection.used([key], now)
        by_time: dict[float, list[BlockKey]] = {}
        for key, now in touched.items():
            by_time.setdefault(now, []).append(key)
        for tier in self.lower.values():
            for now, keys in by_time.items():
                tier.touch(keys, now)

    def stats(self) -> dict[str, Any]:
        """Counters since start and gauges of now; see docs/operations.md for each."""
        self._release_forgotten()
        return stats_of(self)

    def check(self) -> None:
        """Assert the invariants of every part that has some."""
        with self.lock:
            self.host.check()
            self.protection.check()
        for tier in self.lower.values():
            tier.check()
