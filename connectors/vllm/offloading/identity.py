"""The namespace of the rows of vLLM's host cache."""

from __future__ import annotations

from typing import Any

from kvtier.connectors.configuration import digest16
from kvtier.connectors.identity import model_name
from kvtier.connectors.settings import Settings
from kvtier.connectors.vllm.identity import HASH_VERSION, engine_fields
from kvtier.errors import IdentityError
from kvtier.identity.namespace import Namespace


def tier_namespace(offloading: Any, vllm_config: Any | None, settings: Settings, row_bytes: int) -> Namespace:
    """The identity of the rows of vLLM's host cache.

    `offloading` is the configuration that vLLM hands to a tier, `vllm_config` the engine's, where it is known. Without
    it nothing says which weights, quantisation and overrides the engine runs: then the operator must. Reads the
    checkpoint. Raises IdentityError.
    """
    if len(offloading.groups) != 1:
        raise IdentityError(
            f"this model keeps {len(offloading.groups)} groups of KV cache; kvtier serves models with one group"
        )
    (group,), parallel, cache = offloading.groups, offloading.parallel, offloading.cache
    shape = f"tp{parallel.tp_size}pp{parallel.pp_size}pcp{parallel.pcp_size}dcp{parallel.dcp_size}"
    form = "canonical" if offloading.canonical_layout else f"ranks{parallel.world_size}"
    if offloading.replicated_layout:
        form += "-one-copy"
    if vllm_config is None:
        fields = _operator_fields(settings)
    else:  # where hashes are seeded at random, this interface is older than the releases that are served
        fields = engine_fields(vllm_config, settings, randomised=False)
    return Namespace(
        **fields,
        model=model_name(offloading.model.name, settings.model),
        dtype=offloading.model.dtype,
        layout=f"vllm-host:{offloading.kv_cache_layout}:{form}:{shape}:{cache.blocks_per_chunk}x{group.tokens_per_block}:"
        f"{offloading.worker_kv_bytes_per_block}:{digest16(list(group.layer_names))}",
        block_tokens=group.tokens_per_block * cache.blocks_per_chunk,
        block_bytes=row_bytes,
        layers=f"0:{len(group.layer_names)}",
        tp=parallel.tp_size,
        pp=parallel.pp_size,
        cp=parallel.pcp_size * parallel.dcp_size,
    )


def _operator_fields(settings: Settings) -> dict[str, Any]:
    if not settings.weights:
        raise IdentityError(
            "vLLM's OffloadingConnector does not say to a tier what the engine runs: use kv_connector "
            "KVTierOffloadingConnector from kvtier.connectors.vllm.offloading, or set the tier's argument weights to "
            "an id that you change with the checkpoint, its quantisation, its adapters and every override"
        )
    return {"weights": f"id:{settings.weights}", "hash_algorithm": "vllm", "hash_version": HASH_VERSION}
