"""kvtier's G3 and G4 below vLLM's own tiered offloading: a secondary tier.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierOffloadingConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm_tier", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64000000000,
          "secondary_tiers": [{"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm_tier",
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
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, NamedTuple

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

from kvtier.block import BlockKey, Scope
from kvtier.cache import Cache
from kvtier.clock import SystemClock
from kvtier.connectors.common import Control, Controls, Scopes, Settings, engine_keys, guarded, seconds
from kvtier.connectors.vllm_core import Core
from kvtier.connectors.vllm_events import OWNERSHIP
from kvtier.connectors.vllm_tier_parts import Rows, tier_namespace
from kvtier.errors import ConfigError, KVTierError
from kvtier.events import Events
from kvtier.hashing import HASH_BYTES
from kvtier.lease import Lease
from kvtier.tiers.host import Slot

log = logging.getLogger(__name__)

ARGUMENTS = ("lookup_deadline", "flush_timeout", "store_wait")
_TOKENS_READ, _EVENTS = "vllm:kvtier_tokens_read", "vllm:kvtier_events"
_GROUP_BYTES = 4  # vLLM's key is the block's hash and the number of its KV cache group
_LOCALITY = {"g3": Locality.LOCAL, "g4": Locality.REMOTE}


class KVTierOffloadingConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, which lets a tier see the engine's whole configuration while it is built: what a
    tier is told by itself does not name the weights, the quantisation or the engine's overrides."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)


class Placed(NamedTuple):
    """One chunk of a job: vLLM's key, its depth in the request's chain, and its row of vLLM's host cache."""

    key: bytes
    depth: int
    row: int


@dataclass(slots=True, eq=False)
class Search:
    """What the tiers have of one request from depth `start` on: being promoted, then held by a lease until it was
    copied out. Once per request: a copy that failed is not asked for again."""

    start: int
    asked: int
    until: float
    promotion: concurrent.futures.Future[Lease] | None = None
    lease: Lease | None = None
    last: int = -1  # the depth that vLLM asked for last
    spent: bool = False

    def end(self) -> None:
        """Let go of what it holds. The promotion's bytes stay in G2 if it was nearly done. Idempotent."""
        promotion, self.promotion = self.promotion, None
        if promotion is not None and not promotion.cancel():
            promotion.add_done_callback(_let_go)
        if self.lease is not None:
            self.lease.release()
        self.spent = True


def _let_go(promotion: concurrent.futures.Future[Lease]) -> None:
    if not promotion.cancelled() and promotion.exception() is None:
        promotion.result().release()


@dataclass(slots=True, eq=False)
class Visit:
    """One request, from its arrival until vLLM will name it no more."""

    control: Control
    scope: Scope
    chain: list[BlockKey] = field(default_factory=list)
    search: Search | None = None
    stale: bool = False  # it runs with blocks of old weights and of new ones

    def chain_of(self, context: ReqContext, block_tokens: int) -> list[BlockKey]:
        """The keys of the request's chunks as far as vLLM knows them, grown with it."""
        known = context._offload_key_positions  # in order of depth; the only place where a tier finds the chain
        if len(known) > len(self.chain):
            fresh = list(islice(known.items(), len(self.chain), None))
            if fresh[-1][1] != len(known) * block_tokens:
                raise KVTierError("the engine's keys are no chain of whole chunks")
            self.chain += engine_keys(self.scope, [bytes(key[:-_GROUP_BYTES]) for key, _ in fresh])
        return self.chain


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
        if config.security.salt == "deny":
            raise ConfigError(
                "security.salt is deny, but vLLM does not tell its tiers a request's salt (it is in the block hashes, "
                "so salts share nothing either way); use the KVTierConnector, or salt: shared"
            )
        engine = get_current_vllm_config_or_none()
        namespace = tier_namespace(offloading_spec.config, engine, settings, self.block_size_bytes)
        self._group = int(offloading_spec.config.groups[0].group_id).to_bytes(_GROUP_BYTES, "big")
        self._lookup_s = seconds(arguments, "lookup_deadline", config.deadlines.lookup)
        self._flush_s = seconds(arguments, "flush_timeout", 3.0)
        self._store_wait_s = seconds(arguments, "store_wait", 1.0)
        self._get_s = config.deadlines.get
        self._controls, self._scopes = Controls(config), Scopes(config)
        self._block_tokens = namespace.block_tokens
        self._clock = SystemClock()
        self._visits: dict[str, Visit] = {}
        self._results: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._under_way: set[concurrent.futures.Future[None]] = set()
        self._hurry = False  # somebody waits for the stores
        self._loads = concurrent.futures.ThreadPoolExecutor(1, "kvtier-load")
        self._stores = concurrent.futures.ThreadPoolExecutor(1, "kvtier-store")
        self.counters: Counter[tuple[str, str]] = Counter()  # (metric, label) → count, since the last report
        self._told: Counter[tuple[str, str]] = Counter()
        publishes = offloading_spec.kv_events_config.enable_kv_cache_events
        self._events = Events() if publishes else None
        self._core = Core(settings, namespace, events=self._events)
        self._core.open()
        self._rows = Rows(primary_kv_view)
        log.info("kvtier serves namespace %s of %s", namespace.digest.hex()[:16], namespace.model)

    @property
    def _cache(self) -> Cache | None:
        current = self._core.current
        return None if current is None else current[0]

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        guarded(self._arrive, req_context, fallback=None)
        return RequestOffloadingContext()

    def _arrive(self, context: ReqContext) -> None:
        params = context.kv_transfer_params
        control = self._controls.parse(params.get("kvtier") if isinstance(params, dict) else None)
        scope = self._scopes.of(None, b"", control.request)
        if scope is not None:
            self._visits[context.req_id] = Visit(control, scope)

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        return guarded(self._look, key, req_context, fallback=LookupResult.MISS)

    def _look(self, key: bytes, context: ReqContext) -> LookupResult:
        visit, cache = self._visits.get(context.req_id), self._cache
        if visit is None or cache is None or visit.stale or not visit.control.load:
            return LookupResult.MISS
        depth = self._depth(key, context)
        search = visit.search
        if search is None:
            search = visit.search = self._begin(cache, visit.chain_of(context, self._block_tokens), depth)
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

    def _begin(self, cache: Cache, chain: Sequence[BlockKey], start: int) -> Search:
        """Pin what lies in G2, or have it promoted."""
        manager, now = cache.manager, self._clock.monotonic()
        search = Search(start, len(chain) - start, now + self._lookup_s)
        lease = manager.pin(chain, start)
        if len(lease) == search.asked or not manager.lower:
            search.lease = lease
        else:
            lease.release()
            work = manager.promote(tuple(chain), now + self._get_s, start, referenced=True)
            search.promotion = cache.submit(work)
        return search

    def _settle(self, cache: Cache, visit: Visit, search: Search) -> bool:
        """Whether it is known by now what was found; after the deadline, that is what lies in G2."""
        promotion = search.promotion
        assert promotion is not None
        if promotion.done() and not promotion.cancelled() and promotion.exception() is None:
            search.lease, search.promotion = promotion.result(), None
        elif promotion.done() or self._clock.monotonic() >= search.until:
            if not promotion.done():
                self.counters[_EVENTS, "lookups_late"] += 1
                promotion.add_done_callback(_let_go)  # it goes on: the next request may find what it brings
            search.promotion = None
            search.lease = cache.manager.pin(visit.chain, search.start)
        else:
            return False
        if not len(search.lease):
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
                visit.search = None

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
        self._start(self._loads, job_metadata, lambda placed: self._load(search, placed))

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
    ) -> None:
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

    def _placed(self, job: TransferJob) -> list[Placed]:
        rows = [int(row) for row in job.chunk_ids]
        context = job.req_context
        return [Placed(key, self._depth(key, context), row) for key, row in zip(job.keys, rows, strict=True)]

    def _load(self, search: Search | None, placed: list[Placed]) -> list[bytes]:
        """Returns the keys whose rows hold their block now."""
        cache = self._cache
        if search is None or search.lease is None or cache is None:
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
            self.counters[_TOKENS_READ, tier] += count * self._block_tokens
        lease.tiers = tiers
        cache.manager.count(lease, search.asked)
        return good

    def _store(self, visit: Visit | None, chain: list[BlockKey], placed: list[Placed]) -> list[bytes]:
        """Returns all keys: what kvtier does not keep is no failure of the job."""
        cache = self._cache
        if visit is not None and cache is not None and chain:
            for run in _runs(placed):
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


def _runs(placed: Iterable[Placed]) -> list[list[Placed]]:
    """In order of depth, cut into runs without gaps."""
    runs: list[list[Placed]] = []
    for item in sorted(placed, key=lambda item: item.depth):
        if runs and runs[-1][-1].depth + 1 == item.depth:
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs
