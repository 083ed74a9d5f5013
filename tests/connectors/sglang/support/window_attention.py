"""SGLang's attention for tests (torch_native) writes the KV of a window's layers where its pool of windows has it, but
reads it at the indices of the full pool: its own prefix hits are wrong, without any kvtier, which refuses it. Its
attention for CPUs with AMX (IntelAMXAttnBackend._swa_kv_indices) translates them; here torch_native does the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvtier.connectors.sglang import refusals


def translated(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run(
        backend: Any, query: Any, output: Any, keys: Any, values: Any, table: Any, rows: Any, *rest: Any, **named: Any
    ) -> Any:
        pool = backend.token_to_kv_pool
        windows = pool.swa_kv_pool.k_buffer if isinstance(pool, SWAKVPool) else ()
        if any(keys.data_ptr() == window.data_ptr() for window in windows):
            table = pool.translate_loc_from_full_to_swa(table[rows].long())
            rows = torch.arange(len(table))
        return original(backend, query, output, keys, values, table, rows, *rest, **named)

    return run


def mend() -> None:
    """Have torch_native read windows where they are, and kvtier serve it. Idempotent."""
    refusals.MISREADS_WINDOWS = ()  # type: ignore[assignment]
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        original = getattr(TorchNativeAttnBackend, name)
        if not hasattr(original, "__wrapped__"):
            setattr(TorchNativeAttnBackend, name, translated(original))
