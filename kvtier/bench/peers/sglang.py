"""Prompt tokens of a replayed conversation trace that an SGLang engine with a small device pool computes, by cache
below it.

    nothing         SGLang's own radix tree alone
    kvtier          KVTierLinker over G2 and G3
    hicache         HiCache: its host pool and its file storage
    hicache+kvtier  HiCache: its host pool, and kvtier as its storage

As vllm.py beside it does for vLLM: all have as much host memory and the same disk, a restart, and tokens compared
with an engine without any cache. On a CPU kvtier's stand-ins let SGLang run, HiCache too (see
`kvtier.testing.sglang_cpu`): its copies are torch's there and not those of its kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.bench.peers.contest import OUTPUT_TOKENS, Contest, Replay
from kvtier.bench.peers.prompts import BLOCK_BYTES, BLOCK_TOKENS, PROMPT_BLOCKS_MAX
from kvtier.errors import InvalidRequest

NAMES = ("nothing", "kvtier", "hicache", "hicache+kvtier")
_ENGINE = Path(__file__).with_name("sglang_engine.py")
_DISK = "4GiB"


def compare(contest: Contest, python: Path, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Figures per contender. `python` is an interpreter that has SGLang and kvtier. Blocks for minutes."""

    def replay(
        contest: Contest, name: str, more: Mapping[str, Any], prompts: Sequence[Sequence[int]], margins: bool = False
    ) -> Replay:
        engine = {
            "model_path": str(contest.model), "page_size": BLOCK_TOKENS, "random_seed": 0,
            "max_total_tokens": contest.gpu_blocks * BLOCK_TOKENS,
            "context_length": BLOCK_TOKENS * (PROMPT_BLOCKS_MAX + 4), "chunked_prefill_size": 512, **more,
        }  # fmt: skip
        job = {"engine": engine, "prompts": [*map(list, prompts)], "tokens": OUTPUT_TOKENS, "margins": margins,
               "settle_s": 3.0}  # fmt: skip
        return contest.run_engine(name, ["CUDA_VISIBLE_DEVICES=", str(python), "-P", str(_ENGINE)], job)

    truth = replay(contest, "oracle", {"disable_radix_cache": True}, contest.prompts, margins=True)
    return contest.compare(names, truth, _arguments, replay)


@contextmanager
def _arguments(contest: Contest, name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Arguments of the engine that switch a contender on."""
    host, disk = contest.host_blocks, folder / "disk"
    if name == "nothing":
        yield {}
    elif name == "kvtier":
        yield {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "KVTierLinker",
                "linker_module_path": "kvtier.connectors.sglang",
                "linker_extra_config": _kvtier(host, disk),
            },
        }
    elif name == "hicache":
        yield _hicache(contest, host, "file", {"file_storage_path": str(disk)})
    elif name == "hicache+kvtier":
        where = {
            "backend_name": "kvtier", "module_path": "kvtier.connectors.sglang.hicache", "class_name": "KVTierStorage",
            "interface_v1": 1, "hicache_storage_pass_prefix_keys": True,
        }  # fmt: skip
        yield _hicache(contest, host - host // 2, "dynamic", {**where, **_kvtier(host // 2, disk)})
    else:
        raise InvalidRequest(f"{name!r} is not a contender; known: {', '.join(NAMES)}")


def _kvtier(blocks: int, disk: Path) -> dict[str, Any]:
    tiers = {"g2": {"capacity": blocks * BLOCK_BYTES}, "g3": {"path": str(disk), "capacity": _DISK}}
    config = {"version": 1, "tiers": tiers, "deadlines": {"get": "5s", "lookup": "1s"}}
    return {"kvtier_config": config}


def _hicache(contest: Contest, blocks: int, backend: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": blocks / contest.gpu_blocks,
        "hicache_write_policy": "write_through",
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
        "hicache_storage_backend": backend,
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps({**extra, "prefetch_threshold": BLOCK_TOKENS}),
    }
