"""kvtier as vLLM's KV connector.

    KVTIER_CONFIG=kvtier.yaml vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierConnector",
        "kv_role": "kv_both"}'

The scheduler process has the cache (`scheduler`), every worker copies (`worker`). This module only passes vLLM's calls
to the two halves. No error of theirs reaches the engine's step: such a call is answered as if there were no cache.
Settings: docs/vllm.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvtier.clock import SystemClock
from kvtier.connectors import settings
from kvtier.connectors.block_events import TIERS, keeps_contents, tiers_announced
from kvtier.connectors.fallback import falls_back_to, or_fallback
from kvtier.connectors.settings import Settings
from kvtier.connectors.startup import start_line
from kvtier.connectors.tier_figures import TierGrowth
from kvtier.connectors.vllm import capabilities, compat, weights
from kvtier.connectors.vllm.cache import SchedulerCache
from kvtier.connectors.vllm.events import KVEvents, forget_predecessor
from kvtier.connectors.vllm.groups import groups_of
from kvtier.connectors.vllm.hybrid import HybridHalf
from kvtier.connectors.vllm.identity import UNREAD, block_tokens_of, cache_layout_of, namespace_of
from kvtier.connectors.vllm.log_lines import speak_as_vllm
from kvtier.connectors.vllm.messages import MIXED, Handshake, StepMeta, WorkerMeta
from kvtier.connectors.vllm.metrics import KVTierPromMetrics, KVTierStats, hit_sources
from kvtier.connectors.vllm.policy import recompute_failed_loads, recomputes_failed_loads
from kvtier.connectors.vllm.requests import RequestReader
from kvtier.connectors.vllm.reuse import why_off
from kvtier.connectors.vllm.scheduler import SchedulerHalf
from kvtier.connectors.vllm.stores import ConnectorLimits
from kvtier.connectors.vllm.worker import WorkerHalf, cpus_by_piece, host_identity, store_bounds
from kvtier.errors import ConfigError, IdentityError

if TYPE_CHECKING:
    from kvtier.connectors.vllm.tensors import CacheLayout
    from kvtier.identity.namespace import Namespace

log = logging.getLogger(__name__)

KVConnectorMetadata.register(StepMeta)
KVConnectorWorkerMetadata.register(WorkerMeta)
KVConnectorHandshakeMetadata.register(Handshake)

ARGUMENTS: Mapping[str, settings.Reader] = {
    "lookup_deadline": settings.seconds,
    "flush_timeout": settings.seconds,
    "ack_timeout": settings.seconds,
    "step_bytes": settings.size,
    "in_step_bytes": settings.size_or_none,
    "decode_blocks": settings.flag,
    "recompute": settings.recompute,
    "event_tiers": tiers_announced,
    "keep_contents": settings.flag,
}


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. vLLM makes one for the scheduler and one per worker rank."""

    _off = ""  # why nothing is cached

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError for wrong arguments and IdentityError for models that are not served: the engine does
        not start, and the message says what to change."""
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        self._settings = Settings.parse(extra, ARGUMENTS)
        self._missing = capabilities.check(KVTierConnector)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._pool: Any = None
        self._stored: StepMeta | None = None
        self._tiers: TierGrowth | None = None
        speak_as_vllm()
        self._off = why_off(vllm_config, kv_cache_config)
        if self._off:
            if role == KVConnectorRole.SCHEDULER:
                log.warning("kvtier is off: %s", self._off)
            return
        self._cache_layout: CacheLayout = cache_layout_of(vllm_config, kv_cache_config)
        stages, drafts = compat.stages_of(vllm_config), compat.drafts_max(vllm_config)
        self._groups = groups_of(kv_cache_config, stages, drafts, compat.drops_blocks(vllm_config))
        if role == KVConnectorRole.WORKER:
            unwatched = weights.install()
            self._worker = WorkerHalf(self._cache_layout, weights.watched(), unwatched)
        else:
            recompute_failed_loads(type(self).__name__, self._kv_transfer_config, vllm_config.kv_transfer_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return or_fallback(compat.block_major_layout, vllm_config, fallback=None)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return or_fallback(compat.takes_cross_layers, self._vllm_config, fallback=False)

    # A cache delivers nothing: a block that is not saved is computed again.
    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def _limits(self) -> ConnectorLimits:
        config, own = self._settings.config, self._settings.own
        tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        ahead: int | str = config.offload.spill_ahead
        blocks = -(-tokens // block_tokens_of(self._vllm_config, self._kv_cache_config))  # that one step can fill
        if ahead == "auto":
            # Blocks that four steps can consume, at most a quarter of the pool.
            ahead = min(4 * blocks, self._cache_layout.blocks // 4)
        on_gpu = compat.on_gpu(self._vllm_config)
        in_step = not on_gpu and compat.loads_in_step(self._vllm_config, self._kv_cache_config)
        step_bytes, link_bytes_s = store_bounds(self._cache_layout, blocks, on_gpu)
        return ConnectorLimits(
            lookup_deadline_s=own.get("lookup_deadline", config.deadlines.lookup),
            prefetch_s=config.deadlines.get,
            flush_timeout_s=own.get("flush_timeout", 3.0),
            ack_timeout_s=own.get("ack_timeout", 30.0),
            step_bytes=own.get("step_bytes", step_bytes),
            link_bytes_s=link_bytes_s,
            spill_ahead_blocks=int(ahead),
            decode=own.get("decode_blocks", True),
            weighs_loads=own.get("recompute", "auto") == "auto",
            gives_up=recomputes_failed_loads(self._vllm_config.kv_transfer_config),
            in_step_bytes=own.get("in_step_bytes", 16 << 20) if in_step else 0,
            shares_cores=not on_gpu,
            dropped_blocks=int(compat.drops_blocks(self._vllm_config)),
            pause_s=compat.pause_s(self._vllm_config),
        )

    # ── scheduler ───────────────────────────────────────────────────────────────────────────────────────────

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        if compat.publishes(self._vllm_config):
            or_fallback(forget_predecessor, compat.event_queue_of(gpu_block_pool), fallback=None)
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """All workers have registered their tensors: open the cache in their namespace. Raises ConfigError or
        IdentityError, and the engine does not start."""
        if self._off:
            return
        ranks = {rank: shake for rank, shake in metadata.items() if isinstance(shake, Handshake)}
        here = host_identity()
        for rank, shake in ranks.items():
            if shake.refusal:
                raise IdentityError(f"rank {rank}: {shake.refusal}")
            if shake.host != here:
                raise ConfigError(
                    f"rank {rank} runs on {shake.host}, the scheduler on {here}: workers map the scheduler's memory, "
                    "so all ranks of one engine must share its host and PID namespace"
                )
        namespace = namespace_of(self._vllm_config, self._settings, self._cache_layout, ranks)
        config = self._settings.config
        near = cpus_by_piece(self._cache_layout, [shake.cpus for _, shake in sorted(ranks.items())])
        events = (
            KVEvents(
                namespace.block_tokens,
                compat.kind_of(self._kv_cache_config),
                tiers=self._settings.own.get("event_tiers", TIERS),
            )
            if compat.publishes(self._vllm_config) and not self._groups.beside
            else None
        )
        caches = SchedulerCache(
            self._settings,
            namespace,
            near if len(near) == namespace.ranks_served else (),
            events.events if events is not None else None,
            computes=any(shake.pid == os.getpid() for shake in ranks.values()),
            announcer_of=events.announcer if events is not None and keeps_contents(self._settings) else None,
        )
        caches.open()
        self._tiers = TierGrowth(lambda: {} if caches.cache is None else caches.cache.stats(), SystemClock())
        epochs = {shake.epoch for shake in ranks.values()}
        log.info("%s", start_line(caches.cache, namespace, self._limited(namespace, ranks.values())))
        half = partial(HybridHalf, self._groups) if self._groups.beside else SchedulerHalf
        self._scheduler = half(
            caches,
            RequestReader(
                config,
                names_images=compat.names_images(self._vllm_config),
                plans_ahead=compat.plans_ahead(self._vllm_config),
                current=lambda: caches.config,
            ),
            config.offload,
            self._limits(),
            self._cache_layout.ranks,
            SystemClock(),
            events,
            epochs.pop() if len(epochs) == 1 else MIXED,
        )
        if self._pool is not None:
            self._scheduler.bind(self._pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same of workers by (pipeline stage, rank in it): the stages stand side by side."""
        width = self._vllm_config.parallel_config.tensor_parallel_size
        self.set_xfer_handshake_metadata({stage * width + rank: shake for (stage, rank), shake in metadata.items()})

    def _limited(self, namespace: Namespace, shakes: Iterable[Handshake]) -> list[str]:
        """What does not work here, and why."""
        limits = [said] if (said := capabilities.untested()) else []
        if self._missing:
            limits.append(f"this vLLM does not call {', '.join(self._missing)}")
        if not self._settings.weights and not all(shake.weights for shake in shakes):
            limits.append(
                "nothing says what weights were loaded, so blocks are of this process alone: set the argument weights"
                if namespace.weights.startswith(UNREAD)
                else "weights are named by their files, not as they were read"
            )
        if unwatched := sorted({name.rpartition(".")[2] for shake in shakes for name in shake.unwatched}):
            limits.append(f"changes by {', '.join(unwatched)} are not seen: this vLLM has no such hook")
        if len(sizes := {shake.piece_bytes for shake in shakes}) > 1:
            limits.append(
                f"every stage's part of a block takes {max(sizes)} bytes, though the smallest has {min(sizes)}"
            )
        if self._groups.beside:
            limits.append("requests with adapters are not cached: this model has several groups of KV cache")
        if self._groups.beside and compat.publishes(self._vllm_config):
            limits.append("no events of blocks: this model has several groups of KV cache")
        if not compat.names_images(self._vllm_config):
            limits.append("requests with images are not cached: vLLM does not name images by their content")
        return limits

    @falls_back_to(None)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.arrive(request)

    @falls_back_to((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (0, False) if self._scheduler is None else self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        half = self._scheduler
        if half is None:
            return
        try:
            half.allocated(request, blocks, num_external_tokens)
        except Exception:
            log.exception("kvtier: a load is refused")
            if num_external_tokens:
                half.refuse(request, blocks)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMeta(-1)
        meta = or_fallback(self._scheduler.plan, scheduler_output, fallback=None)
        return meta if meta is not None else or_fallback(self._scheduler.undelivered, fallback=StepMeta(-1))

    @falls_back_to(None)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.completed(connector_output)

    @falls_back_to((False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return (False, None) if self._scheduler is None else self._scheduler.finish(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        half = self._scheduler
        if not isinstance(half, HybridHalf):
            return self.request_finished(request, block_ids[0])
        nothing: tuple[bool, dict[str, Any] | None] = (False, None)
        return or_fallback(half.finish, request, block_ids, fallback=nothing)

    @falls_back_to(False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.pending()

    @falls_back_to(False)
    def has_pending_block_frees(self) -> bool:
        """Asked where a request that runs finds no block. True: the next step has some, and none is preempted."""
        return isinstance(self._scheduler, HybridHalf) and self._scheduler.free_blocks()

    @falls_back_to(False)
    def reset_cache(self) -> bool | None:
        return None if self._scheduler is None else self._scheduler.reset()

    @falls_back_to(None)
    def get_kv_connector_stats(self) -> KVTierStats | None:
        if self._scheduler is None or self._tiers is None:
            return None
        counts, tiers = self._scheduler.counted(), or_fallback(self._tiers.report, fallback=list[Any]())
        return KVTierStats.of(counts, tiers) if counts or tiers else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        return KVTierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTierPromMetrics:
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        if self._scheduler is None or not num_external_tokens:
            return {}
        tiers = or_fallback(self._scheduler.sources, request, fallback=dict[str, int]())
        return hit_sources(tiers) or {self._cache_hit_source: num_external_tokens}

    # ── worker ──────────────────────────────────────────────────────────────────────────────────────────────

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    # In place of it where `prefer_cross_layer_blocks`; 0.27 and 0.28.
    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        self.register_kv_caches(compat.layers_of(kv_cache, attn_backend, self._kv_cache_config))

    # Sleep mode (called from 0.33 on).

    @falls_back_to(None)
    def unregister_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.suspend()

    @falls_back_to(None)
    def restore_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.resume()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._worker is None else self._worker.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepMeta):
            copies = bool(connector_metadata.loads or connector_metadata.stores)
            or_fallback(self._worker.mark, copies, fallback=None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta, worker = self._get_connector_metadata(), self._worker
        if worker is None or not isinstance(meta, StepMeta):
            return
        worker.start(meta.step, meta.epoch)
        if meta.arena is not None:
            worker.attach(meta.arena)
        or_fallback(worker.cancel, meta.cancelled, fallback=None)
        worker.load(meta.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are copied per step, all layers at once."""

    def wait_for_save(self) -> None:
        """Stores start behind the forward that was launched, and are not waited for."""
        self._store_once(self._get_connector_metadata())

    def _store_once(self, meta: KVConnectorMetadata | None) -> None:
        """Called twice per step: up to 0.30 a step without a forward, which is all that an idle engine has, comes
        without `wait_for_save`. Any moment of the step is right, since stores are of blocks that are complete."""
        if self._worker is not None and isinstance(meta, StepMeta) and meta is not self._stored:
            self._stored = meta
            self._worker.store(meta.stores)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        worker = self._worker
        if worker is None:
            return None, None
        meta = self._connector_metadata
        self._store_once(meta)
        or_fallback(worker.poll, fallback=None)
        freed = set(meta.freed) if isinstance(meta, StepMeta) else set()
        return freed or None, worker.received() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None and self._whole():
            results.failed_recving |= self._worker.unloaded()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._worker is None:
            return set()
        bad = self._worker.bad_blocks()
        if self._whole():
            return set()
        self._worker.unloaded()  # the blocks tell
        return bad

    def _whole(self) -> bool:
        """Whether a load fails as a whole: with several groups, vLLM takes no news of single blocks."""
        return not self._off and bool(self._groups.beside)

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        return None if self._worker is None else self._worker.answer()

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                or_fallback(half.close, fallback=None)

    @falls_back_to(())
    def take_events(self) -> Iterable[Any]:
        return () if self._scheduler is None else self._scheduler.take_events()
