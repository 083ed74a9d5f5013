"""kvtier's G3 and G4 below vLLM's own tiered offloading: a secondary tier.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierOffloadingConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm.offloading", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64000000000,
          "secondary_tiers": [{"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm.offloading",
                               "kvtier_config": "kvtier.yaml"}]}}'

vLLM copies between the GPU and its host cache, and asks this tier for blocks that the host cache lacks. `tiers.g2` is
the memory between the host cache and the lower tiers: a store is a copy into it, after which vLLM has its row back
however slow the disk is; a load is a copy out of blocks that were verified and are pinned there, so nothing that hangs
below ever touches vLLM's memory. Settings: docs/vllm.md.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtier.cache import Cache
from kvtier.clock import SystemClock
from kvtier.connectors.block_events import TIERS, tiers_announced
from kvtier.connectors.counters import EVENTS, TOKENS_READ, Growth, tokens_by_tier
from kvtier.connectors.fallback import falls_back_to, or_fallback
from kvtier.connectors.feedback import Feedback
from kvtier.connectors.identity import engine_keys, namespace_of_weights
from kvtier.connectors.promoted import Promoted
from kvtier.connectors.purges import Purges
from kvtier.connectors.runs import runs_of
from kvtier.connectors.settings import Reader, Settings, seconds
from kvtier.connectors.startup import start_line
from kvtier.connectors.tier_figures import TierGrowth
from kvtier.connectors.vllm import compat
from kvtier.connectors.vllm.cache import SchedulerCache
from kvtier.connectors.vllm.offloading.identity import tier_namespace
from kvtier.connectors.vllm.offloading.jobs import Jobs
from kvtier.connectors.vllm.offloading.metrics import add_figures, definitions
from kvtier.connectors.vllm.offloading.requests import GROUP_BYTES, Search, TierRequest
from kvtier.connectors.vllm.offloading.rows import Placed, Rows
from kvtier.connectors.vllm.requests import RequestReader
from kvtier.errors import ConfigError, KVTierError
from kvtier.events import Change, Events
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import BlockKey, Scope, tenant_of
from kvtier.identity.namespace import Namespace
from kvtier.manager.work import Work
from kvtier.tiers.host.slot import Slot
from kvtier.times import Wall

log = logging.getLogger(__name__)

ARGUMENTS: Mapping[str, Reader] = {
    "lookup_deadline": seconds,
    "flush_timeout": seconds,
    "store_wait": seconds,
    "event_tiers": tiers_announced,
}
_TOKENS_READ, _EVENTS = f"vllm:{TOKENS_READ.name}", f"vllm:{EVENTS.name}"
_SEARCHES_MAX = 4  # per request; more would mean that its blocks push each other out of vLLM's host cache
_LOCALITY = {"g3": Locality.LOCAL, "g4": Locality.REMOTE}


class KVTierSecondaryTier(SecondaryTierManager):
    """See the module. All calls come from vLLM's scheduler thread and wait for nothing; two threads copy."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **arguments: Any,
    ) -> None:
        """Opens the tiers. Raises ConfigError and IdentityError: the engine does not start, the message says why."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if "_offload_key_positions" not in ReqContext.__dataclass_fields__:
            raise ConfigError("this vLLM does not say where in a request a block lies; 0.31 and later do")
        settings = Settings.parse(arguments, ARGUMENTS)
        config = settings.config
        engine = get_current_vllm_config_or_none()
        self._introduces = engine is not None  # KVTierOffloadingConnector introduces every request
        self._introduced = False
        if config.security.salt == "deny" and not self._introduces:
            raise ConfigError(
                "security.salt is deny, but vLLM's OffloadingConnector does not name a request's salt (it is in "
                "the block hashes, so salts share nothing either way); use kv_connector KVTierOffloadingConnector from "
                "kvtier.connectors.vllm.offloading, or salt: shared"
            )
        namespace = tier_namespace(offloading_spec.config, engine, settings, self.block_size_bytes)
        self._group = int(offloading_spec.config.groups[0].group_id).to_bytes(GROUP_BYTES, "big")
        self._lookup_s = settings.own.get("lookup_deadline", config.deadlines.lookup)
        self._flush_s = settings.own.get("flush_timeout", 3.0)
        self._store_wait_s = settings.own.get("store_wait", 1.0)
        self._get_s = config.deadlines.get
        plans_ahead = engine is not None and compat.plans_ahead(engine)
        self._reader = RequestReader(config, plans_ahead=plans_ahead, current=lambda: self._caches.config)
        self._block_tokens = namespace.block_tokens
        self._hashes_per_chunk = max(1, namespace.block_tokens // int(offloading_spec.config.cache.tokens_per_hash))
        self._feedback = Feedback(namespace.block_tokens, config.retention.hints)
        self._clock = SystemClock()
        self._requests: dict[str, TierRequest] = {}
        self._awaited: Promoted | None = None  # that a request waits for, as it was told in this step
        self._purges = Purges()
        self._hurry = False  # the engine waits for the stores
        self.counters: Counter[tuple[str, str]] = Counter()  # (metric, label) → count
        self._growth: Growth[tuple[str, str]] = Growth()
        self._figures = TierGrowth(lambda: {} if self._cache is None else self._cache.stats(), self._clock)
        publishes = offloading_spec.kv_events_config.enable_kv_cache_events
        self._events = Events() if publishes else None
        self._announced = _LOCALITY.keys() & settings.own.get("event_tiers", TIERS)
        alone = offloading_spec.config.parallel.world_size == 1  # then this is the worker's process, too
        self._caches = SchedulerCache(settings, namespace, events=self._events, computes=alone)
        self._caches.open()
        self._next: Namespace | None = None  # of weights that the workers have already
        self._rows = Rows(primary_kv_view)
        self._jobs = Jobs(self._rows.row_bytes)
        log.info("%s", start_line(self._cache, namespace))

    @property
    def _cache(self) -> Cache | None:
        return self._caches.cache

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    def introduce(self, request: Any) -> None:
        """Called by KVTierOffloadingConnector before `on_new_request`, which names neither the request's salt nor its
        adapter nor its prompt."""
        self._introduced = True
        control, scope = self._reader.read(request)
        if scope is None:
            return
        whole = request.num_prompt_tokens // self._block_tokens * self._hashes_per_chunk
        hashes = compat.hashes_of(request)[:whole]
        prompt = tuple(engine_keys(scope, hashes[self._hashes_per_chunk - 1 :: self._hashes_per_chunk]))
        adapter = self._reader.adapter_of(request)
        state = TierRequest(control, scope, compat.public_name(request), prompt, adapter)
        self._requests[request.request_id] = state
        if (cache := self._cache) is not None:
            state.wishes = self._feedback.begin(cache, scope, control, prompt)

    def adapter_of(self, name: str) -> tuple[int, str] | None:
        """A request's adapter, by id and name; None without one."""
        state = self._requests.get(name)
        return None if state is None else state.adapter

    def certain(self, name: str) -> bool:
        """Whether blocks of the request's adapter may be loaded, by vLLM from wherever: see `RequestReader`."""
        return self._reader.certain(self.adapter_of(name))

    def told(self, adapters: Mapping[int, str]) -> None:
        """The workers have loaded these adapters, by id. Nothing is kept of requests of those taken for others."""
        others = self._reader.told(adapters)
        for state in self._requests.values() if others else ():
            if state.adapter is not None and state.adapter[0] in others:
                self._give_up(state)

    def renamed(self, weights: str) -> None:
        """The workers have other weights, of this name: the next reset goes on in their namespace."""
        self._next = namespace_of_weights(self._caches.namespace, weights)

    def answer_to(self, request: Any) -> dict[str, Any]:
        """The answer to the sender of a request that has ended."""
        state = self._requests.get(request.request_id)
        if state is None:
            return {}
        state.over = True
        held, reread = state.held // self._block_tokens, state.read - state.first
        return self._feedback.of(
            state.name, state.scope, state.control, state.prompt, state.read, state.wishes, held, reread
        )

    def asked(self, name: str, computed: int) -> None:
        """The engine asks for what it lacks of a request: it has so many tokens itself."""
        if (state := self._requests.get(name)) is not None:
            state.asked = computed

    def placed(self, name: str, loaded: int) -> None:
        """A request has its blocks, anew where it was preempted, and takes no more: so many tokens are loaded."""
        if (state := self._requests.get(name)) is not None:
            state.placed(loaded)
            self._end_unspent(state)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        or_fallback(self._arrive, req_context, fallback=None)
        return RequestOffloadingContext()

    def _arrive(self, context: ReqContext) -> None:
        if self._introduces:
            if not self._introduced:
                self._introduced = True
                log.warning("requests come without their salts, so none is cached: use KVTierOffloadingConnector")
            return
        control, scope = self._reader.read(context)  # which has no salt and no adapter
        if control.pin is not None or control.compared_with:
            log.warning("a pin or comparison is refused under vLLM's own connector: use KVTierOffloadingConnector")
        if scope is not None:
            self._requests[context.req_id] = TierRequest(control, scope)

    @falls_back_to(LookupResult.MISS)
    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        context = req_context
        state, cache = self._requests.get(context.req_id), self._cache
        if state is None or cache is None or state.stale or not state.control.load:
            return LookupResult.MISS
        depth = self._depth(key, context)
        search = state.search
        if search is not None and search.load is not None:
            if not search.load.done():
                return LookupResult.RETRY
            if search.served and state.searches < _SEARCHES_MAX:
                search = None  # vLLM made space for its blocks by dropping others of this very request
        if search is None:
            search = self._search(cache, state, state.chain_of(context, self._block_tokens), depth)
        again, search.last = depth <= search.last, depth
        if search.spent or depth < search.start:
            return LookupResult.MISS
        # One answer for all blocks of a pass over the chain: vLLM would load what came during it, and miss the head.
        if search.lease is None and not (again and self._settled(cache, state, search)):
            self._awaited = search.promoted
            return LookupResult.RETRY
        assert search.lease is not None
        return LookupResult.HIT if depth < search.start + len(search.lease) else LookupResult.MISS

    def pause(self, timeout_s: float) -> None:
        """Called after the lookups of a step: wait at most so long for a promotion that one of them waits for, or for
        a copy into vLLM's rows."""
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            awaited.wait(timeout_s)
        else:
            self._jobs.wait_for_load(timeout_s)

    def _depth(self, key: bytes, context: ReqContext) -> int:
        position = context.get_offload_key_position(key)
        if position is None or position % self._block_tokens:
            raise KVTierError("the engine does not say where in its request a block lies")
        return int(position) // self._block_tokens - 1

    def _search(self, cache: Cache, state: TierRequest, chain: Sequence[BlockKey], start: int) -> Search:
        now = self._clock.monotonic()
        search = Search(start, len(chain) - start, now + self._lookup_s, first=not state.searches)
        state.search, state.searches = search, state.searches + 1
        search.begin(cache, chain, now + self._get_s)
        return search

    def _settled(self, cache: Cache, state: TierRequest, search: Search) -> bool:
        """Whether it is known by now what was found."""
        if not search.poll(cache.manager, state.chain, self._clock.monotonic()):
            return False
        assert search.lease is not None
        self.counters[_EVENTS, "lookups_late"] += search.late
        if not len(search.lease) and search.first:
            cache.manager.count(search.lease, search.asked)
        return True

    @falls_back_to(None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if (cache := self._cache) is not None:
            self._purges.take_to(self._forget, cache.manager)
        for name in context.new_req_ids:  # it has its blocks, and takes no more
            self._end_unspent(self._requests.get(name))
        for name in context.preempted_req_ids:  # it starts anew
            state = self._requests.get(name)
            if state is not None and state.search is not None:
                state.search.end()
                state.search, state.searches = None, 0

    @falls_back_to(None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._end_unspent(self._requests.pop(req_context.req_id, None))

    def _end_unspent(self, state: TierRequest | None) -> None:
        if state is not None and state.search is not None and not state.search.spent:
            state.search.end()

    @falls_back_to(None)
    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """The request used these chunks where vLLM has them."""
        state, cache = self._requests.get(req_context.req_id), self._cache
        if state is None or cache is None or not keys:
            return
        chain = state.chain_of(req_context, self._block_tokens)
        count = 1 + max(self._depth(key, req_context) for key in keys)
        cache.manager.pin(chain[:count], count).release()

    # ── moving ──────────────────────────────────────────────────────────────────────────────────────────────

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Copy into vLLM's rows, on a thread, from the blocks that `lookup` found and pinned."""
        state = self._requests.get(job_metadata.req_context.req_id)
        search = state.search if state is not None and state.search is not None and not state.search.spent else None
        if search is not None:  # else nothing pins the blocks any more
            search.spent = True
        load = self._jobs.load(job_metadata, lambda: self._load(state, search, job_metadata))
        if search is not None:
            search.load = load

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Copy out of vLLM's rows into G2, on a thread; what lies deeper is written behind."""
        state = self._requests.get(job_metadata.req_context.req_id)
        chain: list[BlockKey] = []
        work = or_fallback(self._begin, fallback=None)  # a purge from now on holds for it, however long it waits
        if state is not None and state.control.store and not state.stale:
            known = or_fallback(state.chain_of, job_metadata.req_context, self._block_tokens, fallback=chain)
            chain = list(known)
        self._jobs.store(job_metadata, lambda: self._store(state, chain, self._placed(job_metadata), work))

    def _begin(self) -> Work | None:
        """The work of a job that begins now, on blocks that are older; None without a cache. Follows the purges before
        it."""
        if (cache := self._cache) is None:
            return None
        work = cache.manager.hierarchy.begin(Wall("-inf"))
        self._purges.take_to(self._forget, cache.manager)
        return work

    def _forget(self, tenants: set[Scope]) -> None:
        """These are purged: blocks of requests that are over, which vLLM hands on later, would come back."""
        for state in self._requests.values():
            if state.over and tenant_of(state.scope) in tenants:
                self._give_up(state)

    def _placed(self, job: TransferJob) -> list[Placed]:
        places = zip(job.keys, job.chunk_ids, strict=True)
        return [Placed(key, self._depth(key, job.req_context), int(row)) for key, row in places]

    def _load(self, state: TierRequest | None, search: Search | None, job: TransferJob) -> list[bytes]:
        """Returns the keys whose rows hold their block now."""
        if state is None or search is None or search.lease is None:
            return []
        lease, good, tiers = search.lease, [], []
        try:
            placed = self._placed(job)
            for key, depth, row in placed:
                index = depth - search.start
                slot: Slot | None = lease.slots[index] if 0 <= index < len(lease) else None
                if slot is None or slot.key is None or slot.key[-HASH_BYTES:] + self._group != key:
                    continue
                self._rows.write(row, slot.pieces)
                good.append(key)
                tiers.append(lease.tiers[index])
        finally:
            lease.release()
        tokens = tokens_by_tier(tiers, self._block_tokens)
        state.read += tokens
        self.counters.update({(_TOKENS_READ, tier): count for tier, count in tokens.items()})
        lease.tiers = tiers
        if search.first and (cache := self._cache) is not None:
            cache.manager.count(lease, search.asked)
        search.served = len(good) == len(placed)
        return good

    def _store(
        self, state: TierRequest | None, chain: list[BlockKey], placed: list[Placed], work: Work | None
    ) -> list[bytes]:
        """Returns all keys: a block that finds no space is no failure of the job."""
        cache = self._cache
        if state is not None and cache is not None and work is not None and chain:
            for run in runs_of(sorted(placed, key=lambda item: item.depth), lambda item: (chain, item.depth)):
                stop = run[-1].depth + 1
                timeout = 0.0 if self._hurry else self._store_wait_s
                with self._rows.read([item.row for item in run]) as buffers:
                    terms, start = state.control.request, run[0].depth
                    taken = cache.put(chain[:stop], buffers, terms, start=start, timeout=timeout, work=work)
                self.counters[_EVENTS, "blocks_stored"] += taken
                self.counters[_EVENTS, "stores_without_room"] += len(run) - taken
        return [item.key for item in placed]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return self._jobs.finished()

    def drain_jobs(self) -> None:
        """Wait for the copies; the one that waits for space goes on for `store_wait` at most. vLLM calls this when it
        resets its caches, which may mean new weights: nothing stored until now may be found again (unless
        `keep_on_reset`)."""
        self._hurry = True
        self._jobs.wait()
        self._hurry = False
        for state in self._requests.values():
            self._give_up(state)
        to, self._next = self._next, None
        self._caches.rotate(to)

    def _give_up(self, state: TierRequest) -> None:
        """Neither read nor keep anything more of it."""
        state.stale = True
        if state.search is not None:
            or_fallback(state.search.end, fallback=None)

    # ── reports ─────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        for (metric, label), count in self._growth.since_last(self.counters).items():
            stats.increase_counter(metric, count, (label,))
        if self._introduces:  # else vLLM's log line would have all of them
            add_figures(or_fallback(self._figures.report, fallback=list[Any]()), stats)
        return stats if not stats.is_empty() else None

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that came to the disk or the object store, or left it. vLLM adds the tokens it knows."""
        for change in self._events.take() if self._events is not None else ():
            if isinstance(change, Change) and change.tier in self._announced:
                yield OffloadingEvent(
                    keys=[key[-HASH_BYTES:] + self._group for key in change.keys],
                    medium=Medium.STORAGE,
                    removed=not change.stored,
                    locality=_LOCALITY[change.tier],
                )

    def shutdown(self) -> None:
        """Finish the copies, flush within `flush_timeout`, and allow vLLM to unmap its memory."""
        self._hurry = True
        self._jobs.close()
        for state in self._requests.values():
            if state.search is not None:
                or_fallback(state.search.end, fallback=None)
        self._requests.clear()
        self._rows.release()
        self._caches.close(self._flush_s)
