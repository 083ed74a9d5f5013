"""vLLM's OffloadingConnector with the engine's whole configuration and every request made known to kvtier's tier."""

from __future__ import annotations

from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvtier.connectors.fallback import or_fallback
from kvtier.connectors.vllm.offloading.tier import KVTierSecondaryTier


class KVTierOffloadingConnector(OffloadingConnector):
    """vLLM hands a tier neither the engine's configuration (weights, quantisation, overrides) nor a request's salt,
    adapter and prompt. This connector adds them, and hands the tier's answer about a request to its sender."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)
        manager = self.connector_scheduler.manager if self.connector_scheduler is not None else None
        tiers = getattr(manager, "secondary_tiers", ())
        self._tiers = [tier for tier in tiers if isinstance(tier, KVTierSecondaryTier)]

    def on_new_request(self, request: Any) -> None:
        for tier in self._tiers:
            or_fallback(tier.introduce, request, fallback=None)
        super().on_new_request(request)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        answers = [or_fallback(tier.answer_to, request, fallback=None) for tier in self._tiers]
        answer = next(filter(None, answers), None)
        delay, params = super().request_finished(request, block_ids)
        return delay, {**(params or {}), **({"kvtier": answer} if answer else {})} or None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])
