"""kvtier's G3 and G4 below vLLM's own tiered offloading: a secondary tier.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierOffloadingConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm.offloading", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64000000000,
          "secondary_tiers": [{"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm.offloading",
                               "kvtier_config": "kvtier.yaml"}]}}'

vLLM copies between the GPU and its host cache, and asks this tier for what the host cache lacks. `tiers.g2` is the
memory between the host cache and the lower tiers: a store is a copy into it, after which vLLM has its row back however
slow the disk is; a load is a copy out of blocks that were verified and are pinned there, so nothing that hangs below
ever touches vLLM's memory. Settings: docs/vllm.md.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar

from vllm.config import set_current_vllm_config
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtier.cache import Cache
from kvtier.clock import SystemClock
from kvtier.connectors.common import Controls, Scopes, Settings, engine_keys, guarded, seconds
from kvtier.connectors.feedback import Feedback
from kvtier.connectors.vllm import compat
from kvtier.connectors.vllm.cache import SchedulerCache
from kvtier.connectors.vllm.events import OWNERSHIP
from kvtier.connectors.vllm.identity import Adapters
from kvtier.connectors.vllm.offloading.identity import tier_namespace
from kvtier.connectors.vllm.offloading.requests import GROUP_BYTES, Search, TierRequest
from kvtier.connectors.vllm.offloading.rows import Placed, Rows, runs_of
from kvtier.errors import ConfigError, KVTierError
from kvtier.events import Events
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import BlockKey
from kvtier.tiers.host.slot import Slot

log = logging.getLogger(__name__)

ARGUMENTS = ("lookup_deadline", "flush_timeout", "store_wait")
_TOKENS_READ, _EVENTS = "vllm:kvtier_tokens_read", "vllm:kvtier_events"
_SEARCHES_MAX = 4  # per request; more would mean that its blocks push each other out of vLLM's host cache
_LOCALITY = {"g3": Locality.LOCAL, "g4": Locality.REMOTE}


class KVTierOffloadingConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, which lets a tier see what it is not told by itself: the engine's whole configuration
    while it is built (weights, quantisation, overrides), and of every request its salt, its adapter and its prompt. And
    it hands what the tier has to say of a request to its sender."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)
        manager = self.connector_scheduler.manager if self.connector_scheduler is not None else None
        tiers = getattr(manager, "secondary_tiers", ())
        self._tiers = [tier for tier in tiers if isinstance(tier, KVTierSecondaryTier)]

    def on_new_request(self, request: Any) -> None:
        for tier in self._tiers:
            guarded(tier.meet, request, fallback=None)
        super().on_new_request(request)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        told = self._told(request)
        keep, params = super().request_finished(request, block_ids)
        return keep, {**(params or {}), **told} or None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def _told(self, request: Any) -> dict[str, Any]:
        nothing: dict[str, Any] = {}
        told = [told for tier in self._tiers if (told := guarded(tier.told, request, fallback=nothing))]
        return {"kvtier": told[0]} if told else {}


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
            raise ConfigError("this vLLM does not tell its tiers where in a request a block lies; 0.31 and later do")
        settings = Settings.parse(arguments, ARGUMENTS)
        config = settings.config
        engine = get_current_vllm_config_or_none()
        self._meets = engine is not None  # every request is introduced
        self._met = False
        if config.security.salt == "deny" and not self._meets:
            raise ConfigError(
                "security.salt is deny, but vLLM's OffloadingConnector does not tell a tier a request's salt (it is in "
                "the block hashes, so salts share nothing either way); use kv_connector KVTierOffloadingConnector from "
                "kvtier.connectors.vllm.offloading, or salt: shared"
            )
        namespace = tier_namespace(offloading_spec.config, engine, settings, self.block_size_bytes)
        self._group = int(offloading_spec.config.groups[0].group_id).to_bytes(GROUP_BYTES, "big")
        self._lookup_s = seconds(arguments, "lookup_deadline", config.deadlines.lookup)
        self._flush_s = seconds(arguments, "flush_timeout", 3.0)
        self._store_wait_s = seconds(arguments, "store_wait", 1.0)
        self._get_s = config.deadlines.get
        self._controls, self._scopes = Controls(config), Scopes(config)
        self._block_tokens = namespace.block_tokens
        self._hashes_per_chunk = max(1, namespace.block_tokens // int(offloading_spec.config.cache.tokens_per_hash))
        self._adapters, self._wishes = Adapters(), Feedback(namespace.block_tokens)
        self._clock = SystemClock()
        self._visits: dict[str, TierRequest] = {}
        self._results: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._under_way: set[concurrent.futures.Future[None]] = set()
        self._hurry = False  # somebody waits for the stores
        self._loads = concurrent.futures.ThreadPoolExecutor(1, "kvtier-load")
        self._stores = concurrent.futures.ThreadPoolExecutor(1, "kvtier-store")
        self.counters: Counter[tuple[str, str]] = Counter()  # (metric, label) → count, since the last report
        self._told: Counter[tuple[str, str]] = Counter()
        publishes = offloading_spec.kv_events_config.enable_kv_cache_events
        self._events = Events() if publishes else None
        alone = offloading_spec.config.parallel.world_size == 1  # then this is the worker's process, too
        self._core = SchedulerCache(settings, namespace, events=self._events, computes=alone)
        self._core.open()
        self._rows = Rows(primary_kv_view)
        log.info("kvtier serves namespace %s of %s", namespace.digest.hex()[:16], namespace.model)

    @property
    def _cache(self) -> Cache | None:
        current = self._core.current
        return None if current is None else current[0]

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    def meet(self, request: Any) -> None:
        """Who asks: called by KVTierOffloadingConnector before vLLM's own call, which does not say it."""
        self._met = True
        control = self._controls.parse(compat.control_of(request))
        adapter = self._adapters.of(compat.adapter_of(request))
        if adapter is None or compat.holds_foreign_state(request):
            return
        scope = self._scopes.of(compat.salt_of(request), adapter, control.request)
        if scope is None:
            return
        whole = request.num_prompt_tokens // self._block_tokens * self._hashes_per_chunk
        hashes = compat.hashes_of(request)[:whole]
        prompt = tuple(engine_keys(scope, hashes[self._hashes_per_chunk - 1 :: self._hashes_per_chunk]))
        visit = self._visits[request.request_id] = TierRequest(control, scope, compat.public_name(request), prompt)
        if (cache := self._cache) is not None:
            visit.pinning = self._wishes.pin(cache, scope, control, prompt)

    def told(self, request: Any) -> dict[str, Any]:
        """What the sender of a request that has ended learns of it."""
        visit = self._visits.get(request.request_id)
        if visit is None:
            return {}
        return self._wishes.told(visit.name, visit.scope, visit.control, visit.prompt, visit.read, visit.pinning)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        guarded(self._arrive, req_context, fallback=None)
        return RequestOffloadingContext()

    def _arrive(self, context: ReqContext) -> None:
        if self._meets:
            if not self._met:
                self._met = True
                log.warning("nobody says whose requests these are, so none is cached: use KVTierOffloadingConnector")
            return
        params = context.kv_transfer_params
        control = self._controls.parse(params.get("kvtier") if isinstance(params, dict) else None)
        if control.pin is not None or control.compared_with:
            log.warning("a pin or comparison is not heard under vLLM's own connector: use KVTierOffloadingConnector")
        scope = self._scopes.of(None, b"", control.request)
        if scope is not None:
            self._visits[context.req_id] = TierRequest(control, scope)

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        return guarded(self._look, key, req_context, fallback=LookupResult.MISS)

    def _look(self, key: bytes, context: ReqContext) -> LookupResult:
        visit, cache = self._visits.get(context.req_id), self._cache
        if visit is None or cache is None or visit.stale or not visit.control.load:
            return LookupResult.MISS
        depth = self._depth(key, context)
        search = visit.search
        if search is not None and search.load is not None:
            if not search.load.done():
                return LookupResult.RETRY
            if search.served and visit.searches < _SEARCHES_MAX:
                search = None  # vLLM made room for what came by dropping other blocks of this very request
        if search is None:
            search = visit.search = self._begin(cache, visit, visit.chain_of(context, self._block_tokens), depth)
        again, search.last = depth <= search.last, depth
        if search.spent or depth < search.start:
            return LookupResult.MISS
        # One answer for all blocks of a pass over the chain: vLLM would load what came during it, and miss the head.
        if search.lease is None and not (again and self._settle(cache, visit, search)):
            return LookupResult.RETRY
        assert search.lease is not None
        return LookupResult.HIT if depth < search.start + len(search.lease) else LookupResult.MISS

    def _depth(self, key: bytes, context: ReqContext) -> int:
        position = context.get_offload_key_position(key)
        if position is None or position % self._block_tokens:
            raise KVTierError("the engine does not say where in its request a block lies")
        return int(position) // self._block_tokens - 1

    def _begin(self, cache: Cache, visit: TierRequest, chain: Sequence[BlockKey], start: int) -> Search:
        """Pin what lies in G2, or have it promoted."""
        manager, now = cache.manager, self._clock.monotonic()
        search = Search(start, len(chain) - start, now + self._lookup_s, first=not visit.searches)
        visit.searches += 1
        lease = manager.pin(chain, start)
        if len(lease) == search.asked or not manager.lower:
            search.lease = lease
        else:
            lease.release()
            work = manager.promote(tuple(chain), now + self._get_s, start, referenced=True)
            search.promotion = cache.submit(work)
        return search

    def _settle(self, cache: Cache, visit: TierRequest, search: Search) -> bool:
        """Whether it is known by now what was found; after the deadline, that is what lies in G2."""
        promotion = search.promotion
        assert promotion is not None
        if promotion.done() and not promotion.cancelled() and promotion.exception() is None:
            search.lease, search.promotion = promotion.result(), None
        elif promotion.done() or self._clock.monotonic() >= search.until:
            if not promotion.done():
                self.counters[_EVENTS, "lookups_late"] += 1
            search.leave()
            search.lease = cache.manager.pin(visit.chain, search.start)
        else:
            return False
        if not len(search.lease) and search.first:
            cache.manager.count(search.lease, search.asked)
        return True

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        guarded(self._scheduled, context, fallback=None)

    def _scheduled(self, context: ScheduleEndContext) -> None:
        for name in context.new_req_ids:  # it has got its blocks: what it did not take, it will not take any more
            visit = self._visits.get(name)
            if visit is not None and visit.search is not None and not visit.search.spent:
                visit.search.end()
        for name in context.preempted_req_ids:  # it starts anew
            visit = self._visits.get(name)
            if visit is not None and visit.search is not None:
                visit.search.end()
                visit.search, visit.searches = None, 0

    def on_request_finished(self, req_context: ReqContext) -> None:
        visit = self._visits.pop(req_context.req_id, None)
        if visit is not None and visit.search is not None and not visit.search.spent:
            guarded(visit.search.end, fallback=None)

    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """The request used these chunks where vLLM has them."""
        guarded(self._touch, keys, req_context, fallback=None)

    def _touch(self, keys: Collection[bytes], context: ReqContext) -> None:
        visit, cache = self._visits.get(context.req_id), self._cache
        if visit is None or cache is None or not keys:
            return
        chain = visit.chain_of(context, self._block_tokens)
        count = 1 + max(self._depth(key, context) for key in keys)
        cache.manager.pin(chain[:count], count).release()

    # ── moving ──────────────────────────────────────────────────────────────────────────────────────────────

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Copy into vLLM's rows, on a thread, from the blocks that `lookup` found and pinned."""
        visit = self._visits.get(job_metadata.req_context.req_id)
        search = visit.search if visit is not None else None
        if search is not None:
            search.spent = True
        load = self._start(self._loads, job_metadata, lambda placed: self._load(visit, search, placed))
        if search is not None:
            search.load = load

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Copy out of vLLM's rows into G2, on a thread; what lies deeper is written behind."""
        visit = self._visits.get(job_metadata.req_context.req_id)
        chain: list[BlockKey] = []
        if visit is not None and visit.control.store and not visit.stale:
            context = job_metadata.req_context
            nothing: list[BlockKey] = []
            chain = list(guarded(visit.chain_of, context, self._block_tokens, fallback=nothing))
        self._start(self._stores, job_metadata, lambda placed: self._store(visit, chain, placed))

    def _start(
        self,
        thread: concurrent.futures.ThreadPoolExecutor,
        job: TransferJob,
        move: Callable[[list[Placed]], list[bytes]],
    ) -> concurrent.futures.Future[None]:
        """Run a job's move, and report it in any case: until then vLLM's rows are pinned."""

        def run() -> None:
            began = time.monotonic()
            nothing: list[bytes] = []
            good = guarded(lambda: move(self._placed(job)), fallback=nothing)
            self._results.put(
                JobResult(
                    job.job_id,
                    len(good) == len(job.keys),
                    tuple(good) if good and job.is_promotion else None,
                    time.monotonic() - began,
                    len(good) * self._rows.row_bytes,
                )
            )

        future = thread.submit(run)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def _placed(self, job: TransferJob) -> list[Placed]:
        rows = [int(row) for row in job.chunk_ids]
        context = job.req_context
        return [Placed(key, self._depth(key, context), row) for key, row in zip(job.keys, rows, strict=True)]

    def _load(self, visit: TierRequest | None, search: Search | None, placed: list[Placed]) -> list[bytes]:
        """Returns the keys whose rows hold their block now."""
        cache = self._cache
        if visit is None or search is None or search.lease is None or cache is None:
            return []
        lease, good, tiers = search.lease, [], []
        try:
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
        for tier, count in Counter(tiers).items():
            visit.read[tier] += count * self._block_tokens
            self.counters[_TOKENS_READ, tier] += count * self._block_tokens
        lease.tiers = tiers
        if search.first:
            cache.manager.count(lease, search.asked)
        search.served = len(good) == len(placed)
        return good

    def _store(self, visit: TierRequest | None, chain: list[BlockKey], placed: list[Placed]) -> list[bytes]:
        """Returns all keys: what kvtier does not keep is no failure of the job."""
        cache = self._cache
        if visit is not None and cache is not None and chain:
            for run in runs_of(placed):
                stop = run[-1].depth + 1
                timeout = 0.0 if self._hurry else self._store_wait_s
                with self._rows.read([item.row for item in run]) as buffers:
                    taken = cache.put(chain[:stop], buffers, visit.control.request, start=run[0].depth, timeout=timeout)
                self.counters[_EVENTS, "blocks_stored"] += taken
                self.counters[_EVENTS, "stores_without_room"] += len(run) - taken
        return [item.key for item in placed]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        while True:
            try:
                yield self._results.get_nowait()
            except queue.Empty:
                return

    def drain_jobs(self) -> None:
        """Wait for the copies; the one that waits for room goes on for `store_wait` at most. vLLM calls this when it
        resets its caches, which may mean new weights: nothing stored until now may be found again (unless
        `keep_on_reset`)."""
        self._hurry = True
        concurrent.futures.wait(list(self._under_way))
        self._hurry = False
        for visit in self._visits.values():
            visit.stale = True
            if visit.search is not None:
                guarded(visit.search.end, fallback=None)
        self._core.rotate()

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            _TOKENS_READ: OffloadingCounterMetadata("Prompt tokens read by kvtier, by tier.", ("tier",)),
            _EVENTS: OffloadingCounterMetadata("What happened to kvtier's blocks and lookups.", ("event",)),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        moved = {name: count - self._told[name] for name, count in list(self.counters.items())}
        self._told.update({name: count for name, count in moved.items() if count > 0})
        stats = OffloadingConnectorStats()
        for (metric, label), count in moved.items():
            if count > 0:
                stats.increase_counter(metric, count, (label,))
        return stats if not stats.is_empty() else None

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What came to lie on the disk or in the object store, and what left it. vLLM adds the tokens it knows."""
        for change in self._events.take() if self._events is not None else ():
            if change.tier in _LOCALITY:
                yield OffloadingEvent(
                    keys=[key[-HASH_BYTES:] + self._group for key in change.keys],
                    medium=Medium.STORAGE,
                    removed=not change.stored,
                    locality=_LOCALITY[change.tier],
                    ownership=OWNERSHIP,
                )

    def shutdown(self) -> None:
        """Finish the copies, flush within `flush_timeout`, and give vLLM's memory back."""
        self._hurry = True
        for thread in (self._loads, self._stores):
            thread.shutdown(wait=True)
        for visit in self._visits.values():
            if visit.search is not None:
                guarded(visit.search.end, fallback=None)
        self._visits.clear()
        self._rows.release()
        self._core.close(self._flush_s)
