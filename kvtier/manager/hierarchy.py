"""G2 under its lock, and the tiers below it: the ground that the manager's parts stand on."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvtier.clock import Clock
from kvtier.errors import ClosedError, KVTierError
from kvtier.identity.keys import BlockKey, scope_of_key
from kvtier.manager.lower import LowerTiers
from kvtier.manager.slices import SLICE_BLOCKS, slices
from kvtier.manager.space import SpaceSignal
from kvtier.manager.turns import TURN_NS, Turns
from kvtier.manager.work import Work, WorkUnderWay
from kvtier.retention.lifetime import FUTURE_S
from kvtier.retention.trusted_clock import Reading, TrustedClock
from kvtier.supervisor import Supervisor
from kvtier.tiers.breaker import Breaker, Health
from kvtier.tiers.host.pins import Hold, Holds
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.meter import Metered
from kvtier.tiers.protocol import Describing, Miss, Notebook, PurgeLogging, Tier
from kvtier.times import Mono, Wall

_END = object()


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """Bounds of a manager, with their units in the names."""

    lookup_s: float = 0.2
    close_s: float = 10.0
    housekeeping_s: float = 2.0
    tombstones_s: float = 20.0
    purge_bound_s: float = math.inf  # since the purge log was read that is in force; beyond, nothing is served
    write_rate: float = 0.0  # bytes/s into G3; 0: no bound
    g2_bytes: int = 0  # capacity of G2, at most its arena's; 0: that
    g3_bytes: int = 0  # capacity of G3; 0: as it was opened
    g3_write_budget: float = 0.0  # bytes that may be written to G3 per day; 0: any
    queue_fraction: float = 0.5  # of G2's slots that may wait for a lower tier
    overdue_fraction: float = 0.25  # of G2's slots that abandoned loads may hold, each tier's the same share of it
    touched_max: int = 100_000
    reserved: float = 0.5  # of a tier's blocks that guarantees and pins may reserve
    store_threshold: int = 1  # requests that must have wanted a block before it is written below G2
    min_prefix_blocks: int = 0  # of a prompt, before any of it is written below G2
    block_tokens: int = 1  # tokens per block, for accounts
    classes: tuple[str, ...] = ()  # retention classes that accounts of written tokens name


class Hierarchy:
    """G2 and the tiers below it, nearest first. Built closed; owns no policy.

    `lock` guards `host` and every part of the manager whose docstring says "under the lock"; it is held for
    microseconds.
    """

    def __init__(
        self,
        host: HostTier,
        lower: Sequence[Tier],
        clock: Clock,
        limits: ManagerLimits | None = None,
        lock: threading.Lock | None = None,
    ) -> None:
        """`lower` are the raw tiers below G2, nearest first. Opens nothing. `lock`: one that measures itself."""
        self.host = host
        self.lower = LowerTiers(lower, clock)
        self.clock = TrustedClock.around(clock)
        self.limits = limits or ManagerLimits()
        self.lock = lock or threading.Lock()
        self.work = WorkUnderWay()
        self.space = SpaceSignal(self.clock, self._may_free)
        self.supervisor = Supervisor(self.clock)
        self.turns = Turns()
        self.service = Breaker(self.clock)  # of the whole cache: while it is open, every block is a miss
        self.proven_at = Mono("-inf")
        """When the listing of the purge log began whose entries are in force in G2."""
        self.position = 0
        """Number of the last entry of the purge log that is in force in G2; 0: there is none. Under the lock."""
        self.log_memory = b""
        """For the next process: how far the purge log was read when every tier last had its purges; b"": not at all."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._later: list[Iterator[int]] = []  # slices that drop what an earlier time stamped
        self._adopted = 0  # jumps of the wall clock that were accepted
        self._drop_below: set[str] = set()  # tiers that have not yet dropped what the earlier time stamped

    def apply(self, limits: ManagerLimits) -> ManagerLimits:
        """Other limits, from now on; G2's blocks follow its capacity in the background. Under the lock."""
        arena, self.limits = self.host.arena, limits
        if limits.g2_bytes and self.host.capacity:
            self.host.resize(min(arena.slots, arena.slots_in(limits.g2_bytes)))
        return limits

    async def open(self) -> None:
        """Open all tiers on the running loop. A lower tier that fails is left out for now, with a warning; one that
        must not be touched (FormatError) or is misconfigured (ConfigError) raises, with everything closed again."""
        self._loop = asyncio.get_running_loop()
        self.space.open(self._loop)
        allocating = asyncio.ensure_future(asyncio.to_thread(self.host.open))
        try:
            await asyncio.shield(allocating)
            await self.lower.open()
        except BaseException:
            try:
                await asyncio.wait({allocating})  # a thread has the arena until then
            finally:
                await self.close(self.clock.monotonic() + self.limits.close_s)
            raise

    async def close(self, deadline: Mono) -> None:
        """Close all tiers at once, then G2, whatever they do."""
        try:
            await self.lower.close(deadline)
        finally:
            with self.lock:
                tables = self.host.vacate()
            del tables
            self.host.arena.close()

    @property
    def stranded(self) -> bool:
        """Whether the loop that this was opened on has ended, and all that ran there with it."""
        return self._loop is not None and self._loop.is_closed()

    def require_loop(self) -> None:
        """While this is open, raises ClosedError on another event loop than the one that it was opened on: its tasks,
        locks and waits are there."""
        mine, here = self._loop, asyncio.get_running_loop()
        if self.host.capacity and mine is not None and mine is not here:
            ended = ", which has ended" if mine.is_closed() else ""
            raise ClosedError(
                f"this cache was opened on the event loop {mine!r}{ended}, and is called on {here!r}; call it there "
                "(asyncio.run_coroutine_threadsafe), or open one here"
            )

    @property
    def out(self) -> bool:
        """Whether nothing is to be served: a task that the whole cache needs keeps failing, or a purge may have been
        missed (`ManagerLimits.purge_bound_s`)."""
        return self.service.health is not Health.WELL or self.unproven

    @property
    def unproven(self) -> bool:
        """Whether the purges in force are older than the bound."""
        bound_s = self.limits.purge_bound_s
        return bound_s < math.inf and self.clock.monotonic() - self.proven_at > bound_s

    # ── the tiers below G2 ──────────────────────────────────────────────────────────────────────────────────

    @property
    def nearest(self) -> Metered | None:
        """The tier right below G2, if there is one."""
        return next(iter(self.lower.values()), None)

    def healthy(self) -> bool:
        """Whether there is a tier right below G2 that is worth waiting for."""
        return self.nearest is not None and self.nearest.healthy()

    def retaining(self) -> Metered | None:
        """The nearest tier that can exempt blocks from eviction."""
        return next((tier for tier in self.lower.values() if tier.retaining() is not None), None)

    def notebook(self) -> Notebook | None:
        """Where small values of the manager's survive a restart: the nearest tier that can remember some."""
        return next((found for tier in self.lower.values() if (found := tier.notebook()) is not None), None)

    def describing(self) -> tuple[Metered, Describing] | None:
        """The nearest tier that keeps what its blocks hold, with its verbs for that."""
        found = ((tier, tier.describing()) for tier in self.lower.values())
        return next(((tier, verbs) for tier, verbs in found if verbs is not None), None)

    def purge_log(self) -> PurgeLogging | None:
        """The tier whose purges are a log, if there is one."""
        return next((found for tier in self.lower.values() if (found := tier.purge_log()) is not None), None)

    def position_of(self, chain: Sequence[BlockKey], holds: Iterable[Hold]) -> int | None:
        """The position of the purge log at which pinned blocks of a chain are taken for writing; None if one of them
        was purged since. Under the lock."""
        until = self.host.refusals.purged_until(scope_of_key(chain[0]))
        return None if any(slot.life.born <= until for slot, _ in holds) else self.position

    def is_clogged(self, tier: Metered) -> bool:
        """Whether reads of a tier that do not end hold its share of G2: it is given no more, and is not looked into."""
        share = self.host.capacity * self.limits.overdue_fraction / len(self.lower)
        return tier.overdue >= max(1, int(share))

    # ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────

    def unpin(self, holds: Sequence[Hold]) -> None:
        """Undo pins, the deepest block's first, before this returns. Wakes who waits for space."""
        self._unpin_some(_sliced(holds[::-1]))

    def release(self, deepest_first: Iterable[Hold]) -> None:
        """`unpin` for any number. On the loop those beyond TURN_NS are unpinned in later turns: nobody has a claim
        on them, so that may happen at any time, even when the loop's tasks are cancelled."""
        parts = _sliced(deepest_first)
        if self._loop is None or asyncio._get_running_loop() is not self._loop:
            self._unpin_some(parts)
        elif self._unpin_some(parts, TURN_NS):
            rest = self.supervisor.spawn(self._release(parts))
            rest.add_done_callback(lambda _: self._unpin_some(parts))  # also of one that was cancelled before it began

    async def _release(self, parts: Iterator[Sequence[Hold]]) -> None:
        await self.turns.next()
        while self._unpin_some(parts, TURN_NS):
            await self.turns.next()

    def _unpin_some(self, parts: Iterator[Sequence[Hold]], most_ns: float = math.inf) -> bool:
        """Undo the pins of the next parts, for so much of this thread's CPU time or a little more. Whether there may be
        more."""
        began, done, more = time.thread_time_ns(), 0, False
        for part in parts:
            with self.lock:
                self.host.unpin_all(part)
            done += len(part)
            if more := time.thread_time_ns() - began >= most_ns:
                break
        if done:
            self.space.notify()
        return more

    def begin(self, made: Wall | None = None) -> Work:
        """The work of a verb that begins now, with blocks that were made then or later (None: now). A purge of before
        then that is learned of meanwhile is none of them. Takes the lock."""
        made = self.now().stamp if made is None else made
        with self.lock:
            return self.work.begin(made)

    def prefix(self, chain: Sequence[BlockKey]) -> int:
        """Leading blocks READY in G2."""
        now, count = self.now().serve, 0
        for part in slices(chain):
            with self.lock:
                found = self.host.prefix(part, now)
            count += found
            if found < len(part):
                break
        return count

    def reference(self, chain: Sequence[BlockKey], resident: int, *, stored: bool = False) -> None:
        """Tell the policy of a request. Takes the lock for a step at a time."""
        for _ in self.reference_steps(chain, resident, stored=stored):
            pass

    def reference_steps(self, chain: Sequence[BlockKey], resident: int, *, stored: bool = False) -> Iterator[None]:
        """`reference`; the caller may let others have their turn between two steps."""
        return self._locked(self.host.policy.reference_steps(chain, resident, self.clock.monotonic(), stored=stored))

    def trained(self) -> Iterator[None]:
        """Have the policy do what no request has to wait for, as `reference_steps` does."""
        return self._locked(self.host.policy.train_steps())

    def _locked(self, steps: Iterator[None]) -> Iterator[None]:
        more = True
        while more:
            with self.lock:
                more = next(steps, _END) is not _END
            if more:
                yield

    async def drop_everywhere(self, keys: Sequence[BlockKey], spared: Callable[[BlockKey], bool]) -> None:
        """Drop these blocks from every tier. Those under a lease stay until it ends, and `spared` ones, which is asked
        under the lock when their turn comes: somebody may want them by then."""
        for part in slices(keys):
            with self.lock:
                for key in part:
                    if not spared(key):
                        self.host.drop(key)
            await asyncio.sleep(0)
        for part in slices(keys):
            with self.lock:
                free = [key for key in part if not spared(key)]
            await asyncio.gather(*(tier.evict(free) for tier in self.lower.values()))

    async def give_up_copies(self, keys: Sequence[BlockKey], spared: Callable[[BlockKey], bool]) -> int:
        """Drop the copies in G2 of those of a chain's last blocks that the nearest lower tier is known to have. Leased
        ones and `spared` ones, which is asked under the lock, stay. Returns how many went."""
        tier, count, index = next(iter(self.lower.values()), None), 0, self.host.index
        below = list[Miss | None]()
        for places in slices(range(len(keys) if tier is not None else 0)):
            below += tier.peek(keys, places) if tier is not None else ()
            await asyncio.sleep(0)
        first = 1 + next((at for at in reversed(range(len(below))) if below[at] is not None), -1)
        for part in slices(keys[first : len(below)]):
            with self.lock:
                free = [key for key in part if (slot := index.get(key)) is not None and not slot.pins]
                count += sum(self.host.drop(key) for key in free if not spared(key))
            await asyncio.sleep(0)
        self.space.notify()
        return count

    def drop_slices(self, slices: Iterator[int]) -> Coroutine[Any, Any, int]:
        """Drop blocks of G2 slice by slice, and release the lock in between; gives how many. Has begun when this
        returns, and goes on to the end, though who awaits it is cancelled. Raises ClosedError where the end of the
        cache cuts it off."""
        return self._dropped(self.supervisor.spawn(self._drop_slices(slices)))

    async def _dropped(self, dropping: asyncio.Task[int]) -> int:
        await asyncio.wait({dropping})  # not `shield`: then the caller would look cancelled where this was
        if dropping.cancelled():
            raise ClosedError("the cache is closed")
        return dropping.result()

    async def _drop_slices(self, slices: Iterator[int]) -> int:
        count, more = 0, True
        while more:
            with self.lock:
                dropped = next(slices, None)
            more = dropped is not None
            count += dropped or 0
            await asyncio.sleep(0)
        self.space.notify()
        return count

    def _may_free(self) -> bool:
        with self.lock:
            return self.host.busy()

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────────

    def now(self) -> Reading:
        """The time. If the wall clock was set and that is accepted now, blocks of G2 that the earlier time stamped and
        that lie in the future are misses: they would come back to life when that time is reached. Takes the lock."""
        time = self.clock.read()
        if self.clock.adopted != self._adopted:
            with self.lock:
                self._adopted = self.clock.adopted
                self._drop_below = {*self.lower, *self.lower.out}
                self._later.append(self.host.refuse_made_after(time.serve + FUTURE_S))
        return time

    def made_by(self) -> Wall:
        """The time by which all that may be served was made. Later than now where an earlier time was accepted: what
        was stamped just before that lies in the future, as far as it is served at all. Under the lock, or a thread
        stamps and takes in more before the time is used."""
        serve = self.clock.read().serve
        return max(serve, min(self.clock.stamped, serve + FUTURE_S))

    def latest(self) -> Wall:
        """No block carries a later time, unless a clock stamped it that was given up while the block was on its way:
        it is not published then. Takes the lock."""
        return self.now().serve + FUTURE_S if self.clock.adopted else Wall("inf")

    async def accept_time(self) -> None:
        """`now` for the lower tiers; until then they serve nothing from the future. One that fails is asked again at
        the next call. G2 drops what `now` has refused."""
        future = self.now().serve + FUTURE_S
        while self._later:
            await self.drop_slices(self._later.pop())
        for name in [name for name in self._drop_below if name in self.lower and not self.lower[name].resting]:
            with contextlib.suppress(KVTierError):
                await self.lower[name].drop_made_after(future)
                self._drop_below.discard(name)


def _sliced(holds: Iterable[Hold]) -> Iterator[Sequence[Hold]]:
    """The same, a slice at a time. Columns are not taken apart."""
    if isinstance(holds, Holds):
        yield from (holds,) if len(holds) <= SLICE_BLOCKS else slices(holds)
        return
    rest = iter(holds)
    while part := list(islice(rest, SLICE_BLOCKS)):
        yield part
