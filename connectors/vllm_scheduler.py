"""The half of the vLLM connector that lives in the scheduler process: finds, pins, plans copies, publishes.

    a request arrives      → `arrive`: its keys, and promotion into G2 begins
    it may be scheduled    → `match`: what lies in G2 now is pinned; None while promotion may still finish in time
    it has got blocks      → `allocated`: a load of the pinned slots
    a step is planned      → `plan`: loads and stores for the workers
    a step has run         → `completed`: loads end, blocks are confirmed, stores are published or given up
    it ends                → `finish`

Called on the engine's one scheduler thread; nothing here waits.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvtier.block import Scope
from kvtier.cache import Cache
from kvtier.clock import Clock
from kvtier.config import Offload
from kvtier.connectors import vllm_compat as compat
from kvtier.connectors.common import Control, Controls, Scopes, engine_keys
from kvtier.connectors.vllm_confirm import Chain, Confirmed, Confirmer, Span, Token, Track
from kvtier.connectors.vllm_core import Core
from kvtier.connectors.vllm_events import KVEvents
from kvtier.connectors.vllm_identity import Adapters
from kvtier.connectors.vllm_messages import ArenaHandle, Load, Moves, StepMeta, WorkerMeta
from kvtier.dirty import Dirty, DirtyList
from kvtier.lease import Lease
from kvtier.manager import Manager
from kvtier.tiers.host import Slot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the connector. Times in seconds."""

    lookup_deadline: float  # a request is kept waiting for promotion at most so long
    prefetch_s: float  # a promotion that nobody waits for goes on at most so long
    flush_timeout: float = 3.0  # an idle or stopping engine copies out at most so long
    ack_timeout: float = 30.0  # a rank that leaves a copy unanswered longer has stopped answering
    step_bytes: int = 64 << 20  # copied out per step
    spill_ahead: int = 64  # blocks at the head of the free queue that are kept copied
    decode: bool = True  # blocks that were filled by decoding are kept, too


@dataclass(slots=True, eq=False)
class Visit:
    """One request between arrival and end."""

    track: Track
    scope: Scope | None
    control: Control
    prefetch: concurrent.futures.Future[Lease] | None = None
    ask_until: float | None = None
    sources: dict[int, str] = field(default_factory=dict)  # depth → tier it was promoted from
    lease: Lease | None = None
    lease_start: int = 0
    asked: int = 0  # blocks beyond the engine's own hit, until they are booked
    read: Counter[str] = field(default_factory=Counter)  # tokens by tier


@dataclass(slots=True, eq=False)
class _Loading:
    visit: Visit
    lease: Lease
    start: int
    count: int
    ranks: int = 0
    failed: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Copy:
    chain: Chain
    slot: Slot
    generation: int
    block: int
    token: Token


@dataclass(slots=True, eq=False)
class _Storing:
    manager: Manager
    copies: list[_Copy]
    since: float
    ranks: int = 0
    failed: set[int] = field(default_factory=set)
    abandoned: bool = False


class SchedulerHalf:
    """See the module. Owns the bookkeeping of one engine; the cache itself belongs to `core`."""

    def __init__(
        self,
        core: Core,
        scopes: Scopes,
        controls: Controls,
        offload: Offload,
        limits: Limits,
        ranks: int,
        clock: Clock,
        events: KVEvents | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._core = core
        self._events = events
        self._scopes = scopes
        self._controls = controls
        self._default = controls.parse(None).terms
        self._offload = offload
        self._limits = limits
        self._ranks = ranks
        self._clock = clock
        self._block_tokens = core.namespace.block_tokens
        self._adapters = Adapters()
        self._visits: dict[str, Visit] = {}
        self._dirty = DirtyList()
        self._tokens: dict[int, Token] = {}  # of dirty blocks
        self._loads: list[Load] = []
        self._loading: dict[int, _Loading] = {}
        self._storing: dict[int, _Storing] = {}
        self._delayed: dict[str, tuple[Track, int, float]] = {}  # finished, blocks kept: track, last step, deadline
        self._jobs = self._step = 0
        self._arena = 0  # number of the arena that workers know
        self._idle_since: float | None = None
        self._offloads = True
        self._pool: compat.Pool | None = None
        self._confirmer = Confirmer(self._block_tokens, None, compat.Pool.names)

    def bind(self, pool: Any) -> None:
        """The engine's block pool, before the first request."""
        self._pool = compat.Pool(pool)
        token_of: Callable[[int], Token | None] | None = self._pool.token_of if self._pool.caching else None
        self._confirmer = Confirmer(self._block_tokens, token_of, compat.Pool.names)

    @property
    def _manager(self) -> Manager | None:
        current = self._core.current
        return None if current is None else current[0].manager

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, request: Any) -> None:
        """A request was queued."""
        visit = self._visit(request)
        current = self._core.current
        if current is not None and visit.prefetch is None:
            self._prefetch(current[0], visit, request)

    def _visit(self, request: Any) -> Visit:
        name = request.request_id
        visit = self._visits.get(name)
        if visit is not None:
            return visit
        control = self._controls.parse(compat.control_of(request))
        adapter = self._adapters.of(compat.adapter_of(request))
        scope = None
        if adapter is not None and not compat.holds_foreign_state(request):
            scope = self._scopes.of(compat.salt_of(request), adapter, control.terms)
        track = Track(name, request, Chain((), control.terms))
        track.keep = control.store and scope is not None
        if not self._limits.decode:
            track.keep_blocks = request.num_prompt_tokens // self._block_tokens
        visit = Visit(track, scope, control)
        self._visits[name] = visit
        self._confirmer.start(track)
        self._grow(visit)
        return visit

    def _grow(self, visit: Visit) -> None:
        if visit.scope is not None:
            chain = visit.track.chain
            known = len(chain)
            chain.extend(engine_keys(visit.scope, compat.hashes_of(visit.track.request, known)))
            if self._events is not None:
                self._events.learn(visit.track.request, chain, known)

    def _readable(self, visit: Visit) -> int:
        """Blocks that may be read: the last token is always computed."""
        request = visit.track.request
        if visit.scope is None or not visit.control.load or compat.unwanted(request):
            return 0
        return int(min(len(visit.track.chain), (request.num_tokens - 1) // self._block_tokens))

    def _prefetch(self, cache: Cache, visit: Visit, request: Any) -> None:
        manager, usable = cache.manager, self._readable(visit)
        if not manager.lower or not usable:
            return
        chain = visit.track.chain[:usable]
        start = self._pool.resident(chain) if self._pool is not None else 0
        if manager.prefix(chain[start:]) == usable - start:
            return
        deadline = self._clock.monotonic() + self._limits.prefetch_s
        visit.prefetch = cache.submit(manager.promote(chain, deadline, start))
        visit.prefetch.add_done_callback(lambda done: self._promoted(visit, start, done))

    @staticmethod
    def _promoted(visit: Visit, start: int, done: concurrent.futures.Future[Lease]) -> None:
        """On the cache's loop: remember where blocks came from; `match` pins them when the request may run."""
        if done.cancelled() or done.exception() is not None:
            return
        lease = done.result()
        visit.sources = {start + index: tier for index, tier in enumerate(lease.tiers) if tier != "g2"}
        lease.release()

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens after the first `computed` that can be loaded, and whether asynchronously; None: ask again."""
        visit = self._visit(request)
        track = visit.track
        if track.table:
            self._confirmer.displace(track)
        self._drop_lease(visit)
        self._grow(visit)
        manager = self._manager
        start, usable = computed // self._block_tokens, self._readable(visit)
        if manager is None or start >= usable:
            return 0, False
        now = self._clock.monotonic()
        if visit.prefetch is not None and not visit.prefetch.done():
            if visit.ask_until is None:
                visit.ask_until = now + self._limits.lookup_deadline
            if now < visit.ask_until:
                return None, False
            self.counters["lookups_late"] += 1
        visit.asked = usable - start
        lease = manager.pin(track.chain[:usable], start)
        visit.lease, visit.lease_start = lease, start
        return len(lease) * self._block_tokens, len(lease) > 0

    def _drop_lease(self, visit: Visit) -> None:
        if visit.lease is not None:
            visit.lease.release()
            visit.lease = None

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The engine gave the request blocks, and expects `tokens` of them to be loaded."""
        visit = self._visit(request)
        self._forget(self._confirmer.place(visit.track, compat.table_of(blocks)))
        lease, visit.lease = visit.lease, None
        if tokens == 0:
            self._book(visit, lease, visit.lease_start, 0)
            if lease is not None:
                lease.release()
            return
        count, start = tokens // self._block_tokens, visit.lease_start
        if lease is None or len(lease) < count:
            raise AssertionError(f"{count} blocks are to be loaded, {0 if lease is None else len(lease)} are pinned")
        self._jobs += 1
        self._loading[self._jobs] = _Loading(visit, lease, start, count)
        slots = lease.slots[:count]
        moves = Moves(
            self._jobs,
            tuple(visit.track.table[start : start + count]),
            tuple(slot.number for slot in slots),
            tuple(slot.generation for slot in slots),
        )
        self._loads.append(Load(request.request_id, moves))

    def refuse(self, request: Any, blocks: Any, tokens: int) -> None:
        """Something went wrong after a load was promised: have the workers report it as failed, all of it."""
        table = compat.table_of(blocks)
        self._jobs += 1
        bad = tuple(table[-(tokens // self._block_tokens) :]) if tokens else ()
        self._loads.append(Load(request.request_id, Moves(self._jobs, tuple(table) or bad, (), ())))

    def _book(self, visit: Visit, lease: Lease | None, start: int, good: int) -> None:
        """Account for what a request asked for, once per question: `good` blocks from `start` on were truly read."""
        manager, asked, visit.asked = self._manager, visit.asked, 0
        if manager is None or lease is None or not asked:
            return
        lease.tiers = [visit.sources.get(start + index, "g2") for index in range(good)]
        for tier, count in Counter(lease.tiers).items():
            visit.read[tier] += count * self._block_tokens
            self.counters[f"tokens_read_{tier}"] += count * self._block_tokens
        manager.count(lease, asked)

    def sources(self, request: Any) -> dict[str, int]:
        """Tokens of the load that was just planned for a request, by the tier they were found in."""
        for work in self._loading.values():
            if work.visit.track.name == request.request_id:
                tiers = [work.visit.sources.get(work.start + index, "g2") for index in range(work.count)]
                return {tier: n * self._block_tokens for tier, n in Counter(tiers).items()}
        return {}

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, output: Any) -> StepMeta:
        """A step was planned: note what it will fill, and choose this step's copies."""
        self._step += 1
        for name in compat.preempted(output):
            if (track := self._confirmer.get(name)) is not None:
                self._confirmer.displace(track)
        spans = []
        for item in compat.scheduled(output):
            visit = self._visits.get(item.name)
            if visit is None:
                continue
            track = visit.track
            place = self._confirmer.place if item.whole else self._confirmer.extend
            self._forget(place(track, item.table))
            if item.end > item.begin:
                spans.append(Span(track, track.life, item.begin, item.end))
        self._confirmer.plan(self._step, spans)
        meta = StepMeta(self._step, self._new_arena())
        meta.stores = self._plan_stores(idle=not spans and not self._visits)
        meta.freed = self._release_delayed()
        meta.loads = self.take_loads()
        return meta

    def take_loads(self) -> list[Load]:
        """Loads that were promised and not handed out yet: their requests wait for an answer, whatever happens."""
        loads, self._loads = self._loads, []
        return loads

    def _new_arena(self) -> ArenaHandle | None:
        current = self._core.current
        if current is None or current[1].number == self._arena:
            return None
        self._arena = current[1].number
        return current[1]

    def _forget(self, blocks: list[int]) -> None:
        if blocks:
            self.counters["spill_lost"] += self._dirty.discard(blocks)
            for block in blocks:
                self._tokens.pop(block, None)

    def _plan_stores(self, idle: bool) -> list[Moves]:
        manager, pool = self._manager, self._pool
        if manager is None or pool is None or not self._dirty or not self._offloads:
            return []
        now = self._clock.monotonic()
        eager = idle or self._offload.mode == "eager" or not pool.caching
        aged = now if eager else now - self._offload.dirty_max_age
        limit = max(1, self._limits.step_bytes // manager.host.block_bytes)
        picked = self._dirty.pick(pool.head(self._limits.spill_ahead) if pool.caching else (), limit, aged)
        copies: list[_Copy] = []
        for run in _runs(picked):
            copies += self._reserve(manager, run)
        if not copies:
            return []
        self._jobs += 1
        self._storing[self._jobs] = _Storing(manager, copies, now)
        return [
            Moves(
                self._jobs,
                tuple(copy.block for copy in copies),
                tuple(copy.slot.number for copy in copies),
                tuple(copy.generation for copy in copies),
            )
        ]

    def _reserve(self, manager: Manager, run: list[Dirty]) -> list[_Copy]:
        """Slots for those of a run that still are what they were and that G2 lacks."""
        living: dict[int, tuple[int, Token]] = {}
        for dirty in run:
            token = self._tokens.pop(dirty.slot, None)
            if token is None or not self._confirmer.holds(dirty.slot, token):
                break  # later blocks would lie behind a gap
            living[dirty.depth] = (dirty.slot, token)
        self.counters["spill_lost"] += len(run) - len(living)
        for dirty in run[len(living) :]:
            self._tokens.pop(dirty.slot, None)
        if not living:
            return []
        chain = run[0].chain
        assert isinstance(chain, Chain)
        start = run[0].depth
        slots, reached = manager.reserve(chain, start, start + len(living), chain.terms)
        self.counters["stores_without_room"] += start + len(living) - reached
        return [_Copy(chain, slot, slot.generation, *living[slot.index]) for slot in slots]

    def completed(self, output: Any) -> None:
        """A step has run on all ranks."""
        meta = getattr(output, "kv_connector_worker_meta", None)
        answers = meta if isinstance(meta, WorkerMeta) else None
        if answers is not None:
            for job, ranks in answers.done.items():
                self._answer(job, ranks, answers.failed.get(job, set()))
        self._confirmer.fail(getattr(output, "invalid_block_ids", None) or ())
        if answers is None:
            return
        now = self._clock.monotonic()
        for confirmed in self._confirmer.complete(answers.step, self._known):
            self._mark(confirmed, now)
        self._give_up_on_silence(now)

    def _known(self, track: Track) -> int:
        visit = self._visits.get(track.name)
        if visit is not None and visit.track is track:
            self._grow(visit)
        return int(track.request.num_tokens) - 1

    def _mark(self, confirmed: Confirmed, now: float) -> None:
        track, depth, block, token, found = confirmed
        if not track.keep or depth >= track.keep_blocks:
            return
        key, manager = track.chain[depth], self._manager
        if found and track.chain.terms == self._default and manager is not None and manager.holds(key):
            return  # it was confirmed for another request and has been stored since
        known = self._dirty.get(key)
        if known is not None:
            if self._confirmer.holds(known.slot, self._tokens[known.slot]):
                return
            self._forget([known.slot])
        self._forget([block])
        self._dirty.add(block, track.chain, depth, now)
        self._tokens[block] = token

    # ── answers ─────────────────────────────────────────────────────────────────────────────────────────────

    def _answer(self, job: int, ranks: int, failed: set[int]) -> None:
        work: _Loading | _Storing | None = self._loading.get(job) or self._storing.get(job)
        if work is None:
            return
        work.ranks += ranks
        work.failed |= failed
        if work.ranks < self._ranks:
            return
        if isinstance(work, _Loading):
            del self._loading[job]
            self._loaded(work)
        else:
            del self._storing[job]
            self._stored(work)

    def _loaded(self, work: _Loading) -> None:
        good = min(work.failed, default=work.count)
        track = work.visit.track
        track.load_begin = work.start * self._block_tokens
        track.loaded = (work.start + good) * self._block_tokens
        self.counters["load_failures"] += len(work.failed)
        self._book(work.visit, work.lease, work.start, good)
        work.lease.release()

    def _stored(self, work: _Storing) -> None:
        manager = work.manager
        if work.abandoned:
            for copy in work.copies:
                manager.acknowledge(copy.slot, copy.generation)
            return
        good: dict[int, list[_Copy]] = {}
        for position, copy in enumerate(work.copies):
            if position in work.failed or not self._confirmer.holds(copy.block, copy.token):
                self.counters["copies_failed" if position in work.failed else "spill_lost"] += 1
                manager.abort([copy.slot], [copy.generation])
            else:
                good.setdefault(id(copy.chain), []).append(copy)
        for copies in good.values():
            manager.commit(copies[0].chain, [c.slot for c in copies], [c.generation for c in copies])
            self.counters["blocks_stored"] += len(copies)

    def _give_up_on_silence(self, now: float) -> None:
        """Copies that a rank leaves unanswered: their slots go to quarantine, and nothing more is copied out."""
        overdue = next(iter(self._storing.values()), None)
        if overdue is None or overdue.abandoned or now - overdue.since < self._limits.ack_timeout:
            return
        log.error("a rank has not answered a copy for %.0f s: nothing more is offloaded", self._limits.ack_timeout)
        self._offloads = False
        for work in self._storing.values():
            if not work.abandoned:
                work.abandoned = True
                self.counters["copies_abandoned"] += len(work.copies)
                slots, generations = [c.slot for c in work.copies], [c.generation for c in work.copies]
                work.manager.abort(slots, generations, in_flight=True)

    # ── ends ────────────────────────────────────────────────────────────────────────────────────────────────

    def finish(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. True: keep its blocks until its name comes back from the workers."""
        visit = self._visits.pop(request.request_id, None)
        if visit is None:
            return False, None
        self._grow(visit)
        self._drop_lease(visit)
        if visit.prefetch is not None:
            visit.prefetch.cancel()
        self._confirmer.finish(request.request_id)
        told = {"kvtier": {"tokens_read": dict(visit.read)}} if visit.read else None
        return self._delay(visit), told

    def _delay(self, visit: Visit) -> bool:
        """Without names in the pool, blocks are only known as long as the request holds them: keep them until they
        are copied, at most a quarter of the pool and not long."""
        pool, track = self._pool, visit.track
        if pool is None or pool.caching or not self._offloads or not track.keep or not track.table:
            return False
        held = sum(len(track.table) for track, _, _ in self._delayed.values())
        if 4 * (held + len(track.table)) > pool.blocks:
            self.counters["spill_lost"] += len(track.table)
            self._confirmer.displace(track)
            return False
        self._delayed[track.name] = (track, self._step, self._clock.monotonic() + self._limits.flush_timeout)
        return True

    def _release_delayed(self) -> list[str]:
        freed = []
        now = self._clock.monotonic()
        busy = {id(c.chain) for work in self._storing.values() for c in work.copies} if self._delayed else set()
        busy |= {id(dirty.chain) for dirty in self._dirty} if self._delayed else set()
        for name, (track, last, deadline) in list(self._delayed.items()):
            done = not self._confirmer.under_way(last) and id(track.chain) not in busy
            if done or now >= deadline:
                del self._delayed[name]
                self._confirmer.displace(track)
                freed.append(name)
        return freed

    def pending(self) -> bool:
        """Whether an engine without requests should go on stepping: there is something to copy, and time for it."""
        if self._visits:
            self._idle_since = None
            return False
        now = self._clock.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since >= self._limits.flush_timeout:
            return False
        return self._offloads and self._manager is not None and bool(self._dirty or self._storing)

    def news(self) -> dict[str, int]:
        """Counters that moved since the last call, and by how much."""
        moved = {name: count - self._told[name] for name, count in self.counters.items()}
        self._told = Counter(self.counters)
        return {name: count for name, count in moved.items() if count > 0}

    def take_events(self) -> list[Any]:
        """vLLM's KV events of the tiers' blocks since the last call."""
        return [] if self._events is None else list(self._events.take())

    def reset(self) -> bool:
        """The engine announced new weights."""
        self._core.rotate()
        if self._events is not None:
            self._events.clear()
        self._dirty, self._tokens = DirtyList(), {}
        self._storing.clear()
        for visit in self._visits.values():
            self._drop_lease(visit)
            visit.scope, visit.track.keep = None, False  # they run with blocks of both: nothing of them is kept
        return True

    def close(self) -> None:
        """Flush within `flush_timeout` and let go of the tiers."""
        for visit in self._visits.values():
            self._drop_lease(visit)
        self._core.close(self._limits.flush_timeout)

    def check(self) -> None:
        """Assert the invariants of the parts."""
        self._confirmer.check()
        self._dirty.check()


def _runs(picked: list[Dirty]) -> list[list[Dirty]]:
    """Cut into runs of consecutive depths of one chain."""
    runs: list[list[Dirty]] = []
    for dirty in picked:
        if runs and runs[-1][-1].chain is dirty.chain and runs[-1][-1].depth + 1 == dirty.depth:
            runs[-1].append(dirty)
        else:
            runs.append([dirty])
    return runs
