"""The namespace of the rows of vLLM's host cache, for the second door into vLLM."""

from __future__ import annotations

from typing import Any

from kvtier.connectors.common import Settings, model_name
from kvtier.connectors.vllm.compat import hash_problem
from kvtier.connectors.vllm.identity import HASH_VERSION, algorithm_of, engine_weights, rope_of, short
from kvtier.errors import IdentityError
from kvtier.identity.namespace import Namespace


def tier_namespace(offloading: Any, vllm_config: Any | None, settings: Settings, row_bytes: int) -> Namespace:
    """The identity of the rows of vLLM's host cache.

    `offloading` is what vLLM tells a tier, `vllm_config` the engine's whole configuration where it is known. Without
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
    fields: dict[str, Any] = _vouched(settings) if vllm_config is None else _engine(vllm_config, settings)
    return Namespace(
        **fields,
        model=model_name(offloading.model.name, settings.model),
        dtype=offloading.model.dtype,
        layout=f"vllm-host:{offloading.kv_cache_layout}:{form}:{shape}:{cache.blocks_per_chunk}x{group.tokens_per_block}:"
        f"{offloading.worker_kv_bytes_per_block}:{short(list(group.layer_names))}",
        block_tokens=group.tokens_per_block * cache.blocks_per_chunk,
        block_bytes=row_bytes,
        layers=f"0:{len(group.layer_names)}",
        tp=parallel.tp_size,
        pp=parallel.pp_size,
        cp=parallel.pcp_size * parallel.dcp_size,
        hash_version=HASH_VERSION,
    )


def _vouched(settings: Settings) -> dict[str, str]:
    if not settings.weights:
        raise IdentityError(
            "vLLM's OffloadingConnector does not tell a tier what the engine runs: use kv_connector "
            "KVTierOffloadingConnector from kvtier.connectors.vllm.offloading, or set the tier's argument weights to "
            "an id that you change with the checkpoint, its quantisation, its adapters and every override"
        )
    return {"weights": f"id:{settings.weights}", "hash_algorithm": "vllm"}


def _engine(vllm_config: Any, settings: Settings) -> dict[str, str]:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    # Where hashes are seeded at random, this interface is older than what is served here.
    if problem := hash_problem(cache.prefix_caching_hash_algo, randomised=False):
        raise IdentityError(problem)
    kind = str(cache.cache_dtype)
    if getattr(cache, "calculate_kv_scales", False) or "per_token" in kind:
        raise IdentityError(f"KV scales computed at run time ({kind}) are not stored; use static ones")
    return {
        "weights": engine_weights(vllm_config, settings),
        "group": "mla" if getattr(model, "use_mla", False) else "full",
        "quantization": "" if kind == "auto" else kind,
        "scales": "checkpoint" if kind.startswith("fp8") else "",
        "rope": rope_of(model),
        "hash_algorithm": algorithm_of(cache.prefix_caching_hash_algo),
    }
