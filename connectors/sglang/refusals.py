"""Trees and engines of SGLang that kvtier does not serve, each with what to change."""

from __future__ import annotations

from typing import Any

from kvtier.errors import IdentityError

MISREADS_WINDOWS = ("torch_native",)
"""Attention of sglang 0.5.23 that writes the KV of a window's layers where its pool of windows has it, and reads it at
the indices of the full pool: what it computes is wrong, whatever cache there is."""

_PLAIN_ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")

_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def refuse(server: Any, params: Any) -> None:
    """Raises IdentityError for trees whose requests keep more than their pool's pages, and for engines with states that
    were not proved."""
    if params.is_eagle or params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise IdentityError(
            "the KV of a draft model is not kept; start without speculative decoding, or without kvtier"
        )
    requests, device_pool = getattr(params, "req_to_token_pool", None), params.token_to_kv_pool_allocator.get_kvcache()
    if getattr(requests, "mamba_pool", None) is not None:
        _refuse_states(params, requests, device_pool)
        _refuse_unproved(server, params)


def _refuse_unproved(server: Any, params: Any) -> None:
    """Raises IdentityError for engines with states of which no test in an engine has shown that they are right."""
    from sglang.srt.environ import envs

    core = getattr(params, "tree_core_backend", None) or envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.get()
    reasons = {
        "several ranks share the model (tensor parallelism)": int(getattr(server, "tp_size", 1) or 1) > 1,
        f"the core of its tree is {core}, not rust": core != "rust",
        "they have no extra buffer": not params.enable_mamba_extra_buffer,
        "their extra buffer is lazy": getattr(params.req_to_token_pool, "enable_mamba_extra_buffer_lazy", False),
    }
    for reason, holds in reasons.items():
        if holds:
            raise IdentityError(
                f"requests keep states beside their KV (Mamba, linear attention), and {reason}: not proved with "
                "kvtier; start this engine without that (--mamba-radix-cache-strategy extra_buffer), or without kvtier"
            )


def _refuse_states(params: Any, requests: Any, device_pool: Any) -> None:
    """Raises IdentityError for states that lie elsewhere than in slots of a pool of their own, which tree and requests
    have in common."""
    allocator, table = type(params.token_to_kv_pool_allocator).__name__, type(requests).__name__
    reasons = {
        f"the device pool is a {type(device_pool).__name__}": type(device_pool).__name__ != "HybridLinearKVPool",
        "the device pool has another pool of states": getattr(device_pool, "mamba_pool", None)
        is not requests.mamba_pool,
        f"requests are in a {table}": table != "HybridReqToTokenPool",
        f"an allocator of the kind {allocator}": allocator not in _PLAIN_ALLOCATORS,
        "the tree keeps them as int8": getattr(requests, "mamba_ckpt_pool", None) is not None,
        "a draft has some of its own": bool(getattr(params, "mtp_draft_mamba_pools", ())),
    }
    for reason, holds in reasons.items():
        if holds:
            raise IdentityError(
                f"requests keep states beside their KV (Mamba, linear attention), and {reason}: kvtier does not serve "
                "that, and a prefix without them would be wrong; start this engine without that, or without kvtier"
            )


def grid_of(params: Any) -> int:
    """Tokens that a state's place is a multiple of where the extra buffer of a tree is asked to track one; without it,
    any page's end."""
    if not params.enable_mamba_extra_buffer:
        return int(params.page_size)
    from sglang.srt.runtime_context import mamba_checkpoint_grid

    return int(mamba_checkpoint_grid(params.page_size))


def window_of(server: Any, params: Any) -> int:
    """Tokens before a token that a tree of windows keeps for it; 0 for trees without windows. Raises IdentityError for
    trees of windows that were not proved, and for attention that reads them wrong."""
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool

    allocator = params.token_to_kv_pool_allocator
    if not isinstance(allocator.get_kvcache(), BaseSWAKVPool):
        return 0
    kind, window = type(allocator).__name__, getattr(params, "swa_retain_window", None)
    attention = {getattr(server, name, None) for name in _BACKENDS}.intersection(MISREADS_WINDOWS)
    reasons = {
        f"an allocator of the kind {kind}": kind != "SWATokenToKVPoolAllocator",
        "windows that are a ring of each request's, or that its tree does not ask for": not getattr(
            params, "swa_gates_prefix_match", False
        ),
        "no size of a window": not window,
        "a draft that reads the window": getattr(params, "draft_swa_window", 0) > 0,
        f"the attention backend {', '.join(map(str, attention))}, which reads them at wrong indices": bool(attention),
    }
    for reason, holds in reasons.items():
        if holds:
            raise IdentityError(
                f"kvtier does not serve sliding windows with {reason}; start this engine without that, with "
                "--disable-hybrid-swa-memory, or without kvtier"
            )
    return int(window or 0)
