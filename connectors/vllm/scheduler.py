"""The half of the vLLM connector that lives in the scheduler process: finds, pins, plans copies, publishes.

    a request arrives      → `arrive`: its keys, and promotion into G2 begins
    it may be scheduled    → `match`: what lies in G2 now is pinned; None while promotion may still finish in time
    it has got blocks      → `allocated`: a load of the pinned slots
    a step is planned      → `plan`: loads and stores for the workers
    a step has run         → `completed`: loads end, blocks are confirmed, stores are published or aborted
    it ends                → `finish`

Called on the engine's one scheduler thread; nothing here waits, but `plan` where the engine has nothing to compute.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from kvtier.cache import Cache
from kvtier.clock import Clock
from kvtier.config import Offload
from kvtier.connectors.counters import Growth
from kvtier.connectors.fallback import or_fallback
from kvtier.connectors.feedback import Feedback
from kvtier.connectors.identity import engine_keys, namespace_of_weights
from kvtier.connectors.promoted import Promoted
from kvtier.connectors.purges import Purges
from kvtier.connectors.vllm import compat
from kvtier.connectors.vllm.arena_notices import ArenaNotices
from kvtier.connectors.vllm.cache import SchedulerCache
from kvtier.connectors.vllm.confirm import Chain, Confirmer, Track
from kvtier.connectors.vllm.idleness import Idleness
from kvtier.connectors.vllm.kept import KeptBlocks
from kvtier.connectors.vllm.loads import Loads
from kvtier.connectors.vllm.messages import StepMeta, WorkerMeta
from kvtier.connectors.vllm.requests import RequestReader, RequestState, promote
from kvtier.connectors.vllm.stores import ConnectorLimits, Stores
from kvtier.connectors.vllm.weighing import Launched, Weighing, ran_of
from kvtier.identity.keys import BlockKey, Scope
from kvtier.identity.namespace import Namespace
from kvtier.manager.lease import Lease
from kvtier.manager.manager import Manager

if TYPE_CHECKING:
    from kvtier.connectors.vllm.events import KVEvents

log = logging.getLogger(__name__)
_LEASE_S = 1.0
"""How long a request that cannot be scheduled yet keeps what was found for it, before it is looked up again."""
_RETURN_S = 0.5
"""How much longer than `flush_timeout_s` an idle engine steps where blocks are held that long: a step returns them."""


class SchedulerHalf:
    """See the module. Owns the state of one engine's requests and blocks; the cache itself belongs to `caches`."""

    _group = 0  # the engine's number of the group of full attention

    def __init__(
        self,
        caches: SchedulerCache,
        reader: RequestReader,
        offload: Offload,
        limits: ConnectorLimits,
        ranks: int,
        clock: Clock,
        events: KVEvents | None = None,
        epoch: int = 0,
    ) -> None:
        """`epoch` is that of the workers' weights."""
        self.epoch = epoch
        self.counters: Counter[str] = Counter()
        self._growth: Growth[str] = Growth()
        self._caches = caches
        self._events = events
        self._reader = reader
        self._limits = limits
        self._clock = clock
        self._block_tokens = caches.namespace.block_tokens
        self._requests: dict[str, RequestState] = {}
        self._feedback = Feedback(self._block_tokens, reader.controls.hint_share)
        self._step, self._job = 0, count(1).__next__
        self._arenas = ArenaNotices(clock)
        self._outbox = StepMeta(-1, epoch)  # what the workers are to be told with the next step
        self._idle = Idleness(self._requests, clock)
        in_step = limits.in_step_bytes // caches.namespace.block_bytes
        self._loads = Loads(ranks, self._block_tokens, limits.ack_timeout_s, in_step, clock, self.counters, self._job)
        self._stores = Stores(offload, limits, ranks, clock, self.counters, self._job)
        self._purges = Purges()
        self._kept = KeptBlocks(self._stores, self._loads, clock, self.counters)
        self._weighing = Weighing(limits, self._requests, self._block_tokens, clock)
        self._launched = Launched(self._weighing, limits, self._block_tokens, lambda: self._manager)
        self._awaited: Promoted | None = None  # by a request that cannot be planned in this step
        self._pool: compat.EnginePool | None = None
        self._confirmer = Confirmer(self._block_tokens, None)

    def bind(self, pool: Any) -> None:
        """The engine's block pool, before the first request."""
        self._pool = compat.EnginePool(pool, self._group)
        self._confirmer = Confirmer(self._block_tokens, self._pool if self._pool.caching else None)
        self._stores.bind(self._pool, self._confirmer)
        self._kept.bind(self._pool, self._confirmer)

    @property
    def _manager(self) -> Manager | None:
        """None where there is no cache, or a rank cannot reach its arena: nothing is found or stored then."""
        cache = self._caches.cache
        return None if cache is None or not self._arenas.reached else cache.manager

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, request: Any) -> None:
        """A request was queued."""
        state, cache = self._state_of(request), self._caches.cache
        if cache is None or self._manager is None or state.promoted.future is not None:
            return
        self._prefetch(cache, state)
        if state.scope is not None:
            prompt = state.prompt(self._block_tokens)
            state.wishes = self._feedback.begin(cache, state.scope, state.control, prompt)

    def _state_of(self, request: Any) -> RequestState:
        name = request.request_id
        if (found := self._requests.get(name)) is not None:
            return found
        control, scope = self._reader.read(request)
        track = Track(name, request, Chain((), control.chain_terms(self._block_tokens)))
        track.prompt_tokens = request.num_prompt_tokens
        track.storable = control.store and scope is not None
        if not self._limits.decode:
            track.storable_blocks = request.num_prompt_tokens // self._block_tokens
        state = RequestState(track, scope, control, self._reader.adapter_of(request), self._clock.monotonic())
        self._requests[name] = state
        self._idle.end()
        self._confirmer.start(track)
        self._grow(state)
        return state

    def _grow(self, state: RequestState) -> None:
        """Follow the engine's names of the request's blocks."""
        if state.scope is None:
            return
        request, chain = state.track.request, state.track.chain
        known = compat.agreed(request, chain)
        if known < len(chain):  # a session: the engine dropped the last token, and went on with others
            self._stores.distrust(set(self._confirmer.rename(state.track, known)))
            state.forget_found()
            chain = state.track.chain
        if hashes := compat.hashes_of(request, known):
            chain.extend(engine_keys(state.scope, hashes))
            if self._events is not None:
                isolated, lasting = bool(state.control.request.isolated), state.track.lasting
                self._events.remember(request, chain, known, lasting=lasting, isolated=isolated)

    def _readable(self, state: RequestState) -> int:
        """Blocks that may be read: the last token is always computed."""
        request = state.track.request
        if state.scope is None or not state.control.load or state.load_failed or compat.unwanted(request):
            return 0
        return int(min(len(state.track.chain), (request.num_tokens - 1) // self._block_tokens))

    def _prefetch(self, cache: Cache, state: RequestState) -> None:
        manager, usable = cache.manager, self._readable(state)
        if not manager.lower or not usable:
            return
        chain = state.track.chain[:usable]
        start = self._resident(chain)
        if manager.prefix(chain[start:]) == usable - start or not self._weighing.asks(state, usable - start):
            return
        found = promote(manager, chain, self._clock.monotonic() + self._limits.prefetch_s, start)
        state.promoted = Promoted(cache.submit(found, compat.trace_of(state.track.request)), start)

    def _resident(self, chain: Sequence[BlockKey]) -> int:
        """Leading blocks of a chain that the engine finds in its own pool."""
        return max(0, self._pool.resident(chain) - self._limits.dropped_blocks) if self._pool is not None else 0

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens after the first `computed` that can be loaded, and whether asynchronously; None: ask again."""
        state = self._state_of(request)
        track = state.track
        if track.table:
            self._confirmer.displace(track)
        self._grow(state)
        manager, now = self._manager, self._clock.monotonic()
        start = state.local = computed // self._block_tokens
        usable = self._readable(state)
        if start and self._loads.builds_upon(track.chain, start):
            return None, False
        lease, asked_before = state.lease, (state.lease_start, state.lease_usable) == (start, usable)
        if lease is not None and asked_before and now < state.lease_until_s:  # it got no blocks
            state.in_step = state.in_step and self._loads.fit_in_step(len(lease))
            return state.offered(self._block_tokens)
        state.drop_lease()
        if manager is None or start >= usable or self._loads.late or not self._reader.certain(state.adapter):
            return 0, False
        if not state.promoted.done:
            if state.wait_until_s is None:
                state.wait_until_s = now + self._limits.lookup_deadline_s
            if now < state.wait_until_s:
                self._weighing.waits(state)
                self._awaited = state.promoted
                return None, False
            self.counters["lookups_late"] += 1
        self._weighing.ready(state)
        state.asked = usable - start
        lease = self._pin(manager, state, start, usable)
        # An adapter may turn out to be another one when the forward needs it: too late for a load in step.
        state.in_step = len(lease) > 0 and state.adapter is None and self._loads.fit_in_step(len(lease))
        state.lease, state.lease_start, state.lease_usable, state.lease_until_s = lease, start, usable, now + _LEASE_S
        if len(lease) and not self._weighing.worth(state, len(lease)):
            state.decline()
            self.counters["loads_declined"] += 1
        return state.offered(self._block_tokens)

    def _pin(self, manager: Manager, state: RequestState, start: int, usable: int) -> Lease:
        """Pin what can be loaded of the request's blocks from `start` on."""
        return manager.pin(state.track.chain[:usable], start)

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The engine gave the request blocks, and expects `tokens` of them to be loaded."""
        state = self._state_of(request)
        table = compat.table_of(blocks, self._group)
        self._stores.taken(len(table))
        self._stores.forget(self._confirmer.place(state.track, table))
        patience_s = self._weighing.placed(state, tokens // self._block_tokens)
        self._loads.plan(self._manager, state, tokens // self._block_tokens, patience_s)

    def refuse(self, request: Any, blocks: Any) -> None:
        """`allocated` failed, and the request waits for its load: have the workers report all of it as failed."""
        name = request.request_id
        self._loads.refuse(name, self._requests.get(name), compat.table_of(blocks, self._group))

    def sources(self, request: Any) -> dict[str, int]:
        """Tokens of the load that was just planned for a request, by the tier they were found in."""
        return self._loads.sources(request.request_id)

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, output: Any) -> StepMeta:
        """A step was planned: cover the tokens it computes, and choose its copies.

        What the workers are to be told is put into the outbox first and only then dropped here, and the outbox goes out
        whole. So an error costs this step's part of what it hit: the rest is `undelivered`, or goes with a later step.
        """
        self._step += 1
        try:
            self._follow(output)
        except BaseException:
            self._lose()
            raise
        self._confirmer.plan(self._step)
        if (cache := self._caches.cache) is not None:
            self._purges.take_to(self._forget, cache.manager)
        out = self._outbox
        self._add_arena(out)
        self._kept.free(out.freed)
        out.cancelled += self._loads.overdue()
        out.loads += self._loads.take()
        idle = self._idle.at(output.total_num_scheduled_tokens)
        if self._stores and (manager := self._manager) is not None:
            busy = self._limits.shares_cores and (bool(out.loads) or compat.prefilled(output) > 0)
            out.stores += self._stores.plan(manager, idle=idle, busy=busy)
        self._pause(output, out)
        tokens = 0 if out.loads else compat.prefilled(output)  # on a CPU the forward waits for loads
        self._launched.add(self._step, tokens, ran_of(output, out, self._clock.monotonic()))
        out.step = self._step
        return self.undelivered()

    def _forget(self, tenants: set[Scope]) -> None:
        """These are purged: blocks of theirs that wait for a copy would come back."""
        self._stores.forget_tenants(tenants)

    def _pause(self, output: Any, out: StepMeta) -> None:
        """Wait a moment for a promotion where this step does nothing else, and no earlier one is under way: an engine
        that steps on and on holds the interpreter's lock, which the promotion needs several times, for 5 ms each."""
        awaited, self._awaited = self._awaited, None
        idle = not (output.total_num_scheduled_tokens or out.loads or out.stores or self._launched)
        if awaited is not None and idle and self._limits.pause_s:
            awaited.wait(self._limits.pause_s)

    def undelivered(self) -> StepMeta:
        """What the workers were not told yet. The caller hands it over: requests wait for some of it."""
        self._outbox.loads += self._loads.take()
        out, self._outbox = self._outbox, StepMeta(-1, self.epoch)
        return out

    def _follow(self, output: Any) -> None:
        """Follow block tables and computed tokens of the step's requests."""
        confirmer = self._confirmer
        for name in compat.preempted(output):
            if (track := confirmer.get(name)) is not None:
                confirmer.displace(track)
        for name in compat.drafted(output):
            if (track := confirmer.get(name)) is not None:
                track.drafts = True
        tokens, resumed = compat.tokens_of(output), compat.resumed(output)
        for track, blocks, begin, end in confirmer.passing(*compat.going_on(output), compat.counts(output)):
            table, whole = compat.appended(blocks, self._group), bool(resumed) and track.name in resumed
            self._cover(track, table, whole, begin, end)
        for name, table, begin in compat.starting(output, self._group):
            if (track := confirmer.get(name)) is not None:
                self._confirmer.follow_turns(track, compat.lengths_of(track.request)[0])
                self._cover(track, table, True, begin, begin + tokens.get(name, 0))

    def _lose(self) -> None:
        """The step was not followed to its end."""
        self._confirmer.lose()

    def _cover(self, track: Track, table: Sequence[int], whole: bool, begin: int, end: int) -> None:
        """The step computes tokens begin … end-1; `table` was appended to the request's, or is all of it."""
        if table:
            self._stores.taken(len(table))
            place = self._confirmer.place if whole else self._confirmer.extend
            if stale := place(track, table):
                self._stores.forget(stale)
        if end > begin:
            self._confirmer.cover(track, begin, end)

    def _add_arena(self, out: StepMeta) -> None:
        """Tell the workers of a new arena, and now and then again of one that a rank could not reach."""
        current = self._caches.current
        if current is not None and self._arenas.due(current[1]):
            out.arena = current[1]

    def completed(self, output: Any) -> None:
        """A step has run on all ranks."""
        meta = getattr(output, "kv_connector_worker_meta", None)
        answers = meta if isinstance(meta, WorkerMeta) else None
        if bad := getattr(output, "invalid_block_ids", None):  # first: copies of these may be among the answers
            self._loads.unname(self._pool, bad)
            own = set() if answers is None else self._loads.own(bad, answers.failed)
            self._confirmer.fail(bad, own)
            self._stores.distrust(bad)
        if answers is None:
            return
        self._arenas.unreached = answers.unreached
        if answers.epoch != self.epoch:
            self._begin_epoch(answers.epoch, answers.weights)
        if answers.adapters and (others := self._reader.told(answers.adapters)):
            self._give_up(others)
        for job, ranks in answers.done.items():
            or_fallback(self._answer, job, ranks, answers.failed.get(job, set()), fallback=None)
        for confirmed in self._confirmer.complete(answers.step, self._known):
            self._stores.mark(confirmed, self._manager, self._reader.default)
        now = self._clock.monotonic()
        self._launched.ended(answers.step, now)
        self._stores.abort_overdue(now)

    def _answer(self, job: int, ranks: int, failed: set[int]) -> None:
        if not self._loads.answer(self._manager, job, ranks, failed):
            self._stores.answer(job, ranks, failed)

    def _known(self, track: Track) -> int:
        state = self._requests.get(track.name)
        if state is not None and state.track is track:
            self._grow(state)
            self._confirmer.follow_turns(track, compat.lengths_of(track.request)[0])
            state.runs(self._clock)
        return compat.computed(track.request)

    # ── ends ────────────────────────────────────────────────────────────────────────────────────────────────

    def finish(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. True: keep its blocks until its name comes back from the workers."""
        name = request.request_id
        if (state := self._requests.pop(name, None)) is None:
            return False, None
        self._confirmer.finish(name)
        self._weighing.ended(name)
        state.forget_found()
        or_fallback(self._grow, state, fallback=None)
        held = self._kept.keep(state.track, self._step)
        answer = or_fallback(self._answer_to, state, fallback=dict[str, Any]())
        return held, {"kvtier": answer} if answer else None

    def _answer_to(self, state: RequestState) -> dict[str, Any]:
        """The answer to the request's sender."""
        read = self._loads.read(state)
        if state.scope is None:
            return {"tokens_read": dict(read)} if read else {}
        prompt, had = state.prompt(self._block_tokens), (state.held or 0, self._loads.reread(state))
        if (cache := self._caches.cache) is not None:
            state.tell(cache, prompt, read, self._clock)
        name = compat.public_name(state.track.request)
        return self._feedback.of(name, state.scope, state.control, prompt, read, state.wishes, *had)

    def pending(self) -> bool:
        """Whether an engine with nothing to compute should go on stepping: there is something to copy, or blocks of
        ended requests are held, and there is time for it. Held blocks keep the engine from resetting its cache."""
        if (idle := self._idle.seconds()) is None:
            return False
        if self._kept or self._loads:  # steps take the answers that give these blocks back to the engine
            return idle < self._limits.flush_timeout_s + _RETURN_S
        waits = not self._stores.stopped and self._manager is not None and bool(self._stores)
        return waits and idle < self._limits.flush_timeout_s

    def counted(self) -> dict[str, int]:
        """Counters that grew since the last call, and by how much."""
        return self._growth.since_last(self.counters)

    def take_events(self) -> list[Any]:
        """vLLM's KV events of the tiers' blocks since the last call."""
        if self._events is None:
            return []
        self.counters["events_dropped"] = self._events.events.dropped
        return list(self._events.take())

    def _begin_epoch(self, epoch: int, weights: str) -> None:
        """The workers have other weights, of this name. What they were not told yet is of the old ones, and says so."""
        self._outbox.loads += self._loads.take()
        self.epoch = epoch
        if not self._outbox.loads and not self._outbox.stores:
            self._outbox.epoch = epoch
        self._confirmer.forget()
        self.reset(namespace_of_weights(self._caches.namespace, weights))

    def _give_up(self, adapters: set[int]) -> None:
        """Requests of these adapters have run under a wrong name: nothing of them is kept."""
        log.warning("adapters %s were changed on disk: their requests are not cached", sorted(adapters))
        self._stores.void()
        for state in self._requests.values():
            if state.adapter is not None and state.adapter[0] in adapters:
                state.give_up()

    def reset(self, to: Namespace | None = None) -> bool:
        """The engine announced new weights, or has them: go on in the namespace `to`."""
        before = self._caches.namespace
        self._caches.rotate(to)
        if self._caches.namespace != before:
            self._confirmer.forget()  # the engine may have kept blocks that older weights filled
        if self._events is not None:
            self._events.clear()
        self._stores.clear()
        for state in self._requests.values():
            state.give_up()  # they run with blocks of both
        return True

    def close(self) -> None:
        """Flush within `flush_timeout_s` and release the tiers."""
        for state in self._requests.values():
            state.drop_lease()
        self._loads.close()
        self._caches.close(self._limits.flush_timeout_s)

    def check(self) -> None:
        """Assert the invariants of the parts."""
        self._confirmer.check()
        self._stores.check()
