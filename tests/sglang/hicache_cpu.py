"""Lets SGLang's HiCache run on a CPU: stands in for page-locking, and for the one copy that `direct` needs.

SGLang looks these up where CUDA would have put them. With `hicache_io_backend="direct"` and
`hicache_mem_layout="layer_first"` nothing else of CUDA's is called.
"""

from __future__ import annotations

import builtins
from types import SimpleNamespace
from typing import Any

import torch


def transfer_kv_direct(
    src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.to(target.device)] = source[src_indices.to(source.device)]


def install() -> None:
    builtins.transfer_kv_direct = transfer_kv_direct  # type: ignore[attr-defined]
    done = SimpleNamespace(
        cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0, cudaGetErrorString=lambda _: ""
    )
    torch.cuda.cudart = lambda: done  # type: ignore[assignment]
