"""vLLM's OffloadingConnector with the engine's whole configuration and every request made known to kvtier's tier."""

from __future__ import annotations

import logging
import time
from dataclasses import fields
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvtier.connectors.fallback import or_fallback
from kvtier.connectors.vllm import compat, weights
from kvtier.connectors.vllm.offloading.epochs import LoadGuard, OffloadingAnswer, OffloadingStep
from kvtier.connectors.vllm.offloading.metrics import LoggedStats
from kvtier.connectors.vllm.offloading.tier import KVTierSecondaryTier
from kvtier.connectors.vllm.policy import recompute_failed_loads
from kvtier.connectors.vllm.reuse import why_off

log = logging.getLogger(__name__)


class KVTierOffloadingConnector(OffloadingConnector):
    """vLLM hands a tier neither the engine's configuration (weights, quantisation, overrides) nor a request's salt,
    adapter and prompt. This connector adds them, and hands the tier's answer about a request to its sender.

    Nor does vLLM tell its offloading of weights that change in place. Here a worker fails loads of other weights, and
    the scheduler's half empties vLLM's host cache and takes the tier into the new weights' namespace.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)
        manager = self.connector_scheduler.manager if self.connector_scheduler is not None else None
        tiers = getattr(manager, "secondary_tiers", ())
        self._tiers = [tier for tier in tiers if isinstance(tier, KVTierSecondaryTier)]
        self._epoch = 0
        self._guard: LoadGuard | None = None
        self._pause_s = compat.pause_s(vllm_config)
        self._steps = 0
        self._computing = self._answered = 0  # the latest step that computes, and the latest that has run
        self._off = why_off(vllm_config, kv_cache_config)
        self._names_images = compat.names_images(vllm_config)
        if role == KVConnectorRole.WORKER:
            weights.install()
            self._guard = LoadGuard(weights.watched())
        else:
            if self._off:
                log.warning("kvtier and vLLM's offloading are off: %s", self._off)
            recompute_failed_loads(type(self).__name__, self._kv_transfer_config, vllm_config.kv_transfer_config)

    # ── scheduler ───────────────────────────────────────────────────────────────────────────────────────────

    def on_new_request(self, request: Any) -> None:
        for tier in self._tiers:
            or_fallback(tier.introduce, request, fallback=None)
        super().on_new_request(request)
        state = self.scheduler._req_status[request.request_id]
        if not all(tier.certain(request.request_id) for tier in self._tiers):
            state.max_load_tokens = 0
        if self._off or (not self._names_images and compat.holds_media(request)):
            state.max_load_tokens = state.max_offload_tokens = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        for tier in self._tiers:
            or_fallback(tier.asked, request.request_id, num_computed_tokens, fallback=None)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        for tier in self._tiers:
            or_fallback(tier.placed, request.request_id, num_external_tokens, fallback=None)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, OffloadingConnectorMetadata)
        self._pause(bool(scheduler_output.total_num_scheduled_tokens), bool(meta.load_jobs or meta.store_jobs))
        loads = {job.req_id for job in meta.load_jobs.values()}
        adapters = {name: found for name in loads for tier in self._tiers if (found := tier.adapter_of(name))}
        given = {one.name: getattr(meta, one.name) for one in fields(meta)}
        return OffloadingStep(**given, step=self._steps, epoch=self._epoch, adapters=adapters)

    def _pause(self, computes: bool, copies: bool) -> None:
        """Begin a step. Wait a moment for a lookup where it does nothing else, and no earlier one is under way: see
        `SchedulerHalf`. vLLM plans steps ahead: the output of one does not say that those after it have run."""
        self._steps += 1
        if computes:
            self._computing = self._steps
        timeout_s = 0.0 if copies or self._computing > self._answered else self._pause_s
        left_s, began = timeout_s, time.monotonic()
        for tier in self._tiers:
            or_fallback(tier.pause, left_s, fallback=None)
            left_s = max(0.0, timeout_s - (time.monotonic() - began))

    def update_connector_output(self, connector_output: Any) -> None:
        answer = connector_output.kv_connector_worker_meta
        if isinstance(answer, OffloadingAnswer):
            self._answered = max(self._answered, answer.step)
            if answer.epoch != self._epoch:  # first: what ends with this step is of the old weights
                self._begin_epoch(answer)
            for tier in self._tiers:
                or_fallback(tier.told, answer.adapters, fallback=None)
        super().update_connector_output(connector_output)
        if isinstance(answer, OffloadingAnswer):
            self._compute(answer.refused)

    def _begin_epoch(self, answer: OffloadingAnswer) -> None:
        self._epoch = answer.epoch
        for tier in self._tiers:
            or_fallback(tier.renamed, answer.weights, fallback=None)
        self.reset_cache()
        for state in self.scheduler._req_status.values():  # they run with blocks of both weights
            state.max_offload_tokens = 0

    def reset_cache(self) -> bool | None:
        """vLLM allows one reset per step; jobs that it is to wait for stay."""
        scheduler = self.scheduler
        waiting, scheduler._current_batch_jobs_to_flush = scheduler._current_batch_jobs_to_flush, set()
        reset: bool | None = super().reset_cache()
        scheduler._current_batch_jobs_to_flush |= waiting
        return reset

    def _compute(self, requests: set[str]) -> None:
        """Offer these requests nothing any more: it would be refused again."""
        for name in requests:
            if (state := self.scheduler._req_status.get(name)) is not None:
                state.max_load_tokens = 0

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        answers = [or_fallback(tier.answer_to, request, fallback=None) for tier in self._tiers]
        answer = next(filter(None, answers), None)
        delay, params = super().request_finished(request, block_ids)
        return delay, {**(params or {}), **({"kvtier": answer} if answer else {})} or None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LoggedStats:
        return LoggedStats() if data is None else LoggedStats(data=data)

    # ── worker ──────────────────────────────────────────────────────────────────────────────────────────────

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        if self._guard is not None and isinstance(meta, OffloadingStep):
            self._guard.start(meta)
        super().start_load_kv(forward_context, **kwargs)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent, received = super().get_finished(finished_req_ids)
        if self._guard is not None:
            self._guard.ended(received)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._guard is None else self._guard.bad_blocks()

    def build_connector_worker_meta(self) -> OffloadingAnswer | None:
        return None if self._guard is None else self._guard.answer(super().build_connector_worker_meta())
