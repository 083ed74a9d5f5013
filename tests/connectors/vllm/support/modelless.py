"""vLLM's own scheduler and kvtier's own connector, both halves, over memory that no model computes.

A "forward" checks what attention would read, by group and by the block tables that the workers were told of, and
writes what it would leave: the name of the tokens up to each place. So a wrong byte is seen in the step that reads it,
whatever a model's tokens would have made of it, and a step takes a millisecond.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtier.connectors.vllm.connector import KVTierConnector

_MODEL = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 1024, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 4096, "sliding_window": 64, "torch_dtype": "float32",
}  # fmt: skip


def sampled(prefix: Sequence[int]) -> int:
    """The token that follows: of all of the prefix."""
    return int.from_bytes(hashlib.blake2b(repr(prefix).encode(), digest_size=2).digest()) % 1000 + 3


class Wrong(AssertionError):
    """Attention would have read something else than it should."""


class Modelless:
    """See the module. `windows`: (tokens of the window, layers) of each group beside the full one of `layers`."""

    def __init__(
        self,
        folder: Path,
        windows: Sequence[tuple[int, int]],
        *,
        layers: int = 2,
        size: int = 8,
        blocks: int = 64,
        full_at: int = 0,
        config: dict[str, Any] | None = None,
        arguments: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(_MODEL))
        transfer = {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "kvtier_config": config or {"tiers": {"g2": {"capacity": "2MiB"}}},
                "model": "paper",
                "weights": "paper",
                "lookup_deadline": "30s",
                "recompute": "never",
                **(arguments or {}),
            },
        }
        given = {
            "model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512,
            "block_size": size, "max_num_batched_tokens": 64, "max_num_seqs": 6, "async_scheduling": False,
            "enforce_eager": True, "kv_transfer_config": transfer, "gpu_memory_utilization": 0.1,
            **engine,
        }  # fmt: skip
        self.vllm_config = EngineArgs(**given).create_engine_config()
        self.asynchronous = bool(given["async_scheduling"])
        self.vllm_config.scheduler_config.async_scheduling = self.asynchronous
        cache = self.vllm_config.cache_config
        cache.num_gpu_blocks, cache.block_size = blocks, size
        self.size, self.blocks = size, blocks
        self.windows: list[int] = [0] * (1 + len(windows))  # by group; 0: full attention
        groups: list[KVCacheGroupSpec] = []
        shape = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        todo = iter(windows)
        self.names: list[list[str]] = []
        for number in range(1 + len(windows)):
            if number == full_at:
                names = [f"model.layers.{layer}.full" for layer in range(layers)]
                groups.append(KVCacheGroupSpec(names, FullAttentionSpec(**shape)))
            else:
                window, count = next(todo)
                self.windows[number] = window
                names = [f"model.layers.{layer}.window{number}" for layer in range(count)]
                groups.append(KVCacheGroupSpec(names, SlidingWindowSpec(**shape, sliding_window=window)))
            self.names.append(names)
        page = groups[0].kv_cache_spec.page_size_bytes
        tensors = [
            KVCacheTensor(page * blocks, [names[layer] for names in self.names if layer < len(names)], 0, page)
            for layer in range(layers)
        ]
        self.kv_config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups,
            prefix_cache_retention_interval=cache.prefix_cache_retention_interval,
            hash_block_size=size, cache_hit_alignment_tokens=size,
        )  # fmt: skip
        # A page is one number per token: vLLM's page of 2 · size · 4 bytes.
        self.memory = [torch.full((blocks, size), -1, dtype=torch.int64) for _ in range(layers)]
        kind = AsyncScheduler if self.asynchronous else Scheduler
        self.scheduler = kind(
            vllm_config=self.vllm_config, kv_cache_config=self.kv_config, block_size=size, hash_block_size=size,
            structured_output_manager=StructuredOutputManager(self.vllm_config), log_stats=True,
        )  # fmt: skip
        connector: Any = self.scheduler.connector
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        self.worker_side = KVTierConnector(self.vllm_config, KVConnectorRole.WORKER, self.kv_config)
        self.worker_side.register_kv_caches(
            {name: self.memory[layer] for names in self.names for layer, name in enumerate(names)}
        )
        connector.set_xfer_handshake_metadata({0: self.worker_side.get_handshake_metadata()})
        hashing = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self.hasher = get_request_block_hasher(size, hashing)
        self.tables: dict[str, list[list[int]]] = {}  # as the workers know them
        self.tokens: dict[str, list[int]] = {}  # of a request, as sampled by the workers
        self.queue: deque[tuple[Any, Any]] = deque()  # steps that have run, and were not told to the scheduler
        self.answers: dict[str, list[int]] = {}
        self.reads: dict[str, int] = {}  # tokens of the longest prefix that a request did not compute
        self._numbers = itertools.count()
        self.checked = 0

    @property
    def half(self) -> Any:
        return self.scheduler.connector._scheduler

    @property
    def worker(self) -> Any:
        return self.worker_side._worker

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def cache(self) -> Any:
        return self.half._caches.cache

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, prompt: list[int], tokens: int = 4, name: str = "", priority: int = 0, control: Any = None) -> str:
        name = name or f"r{next(self._numbers)}"
        extra = None if control is None else {"kv_transfer_params": {"kvtier": control}}
        request = Request(
            request_id=name, prompt_token_ids=list(prompt), pooling_params=None, block_hasher=self.hasher,
            sampling_params=SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra),
            priority=priority,
        )  # fmt: skip
        self.tokens[name] = list(prompt)
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def right(self, prompt: list[int], tokens: int) -> list[int]:
        whole = list(prompt)
        for _ in range(tokens):
            whole.append(sampled(whole))
        return whole[len(prompt) :]

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """Plan a step, run it, and tell the scheduler of it: with asynchronous scheduling of the one before."""
        if self.busy:
            output = self.scheduler.schedule()
            self.queue.append((output, self._run(output)))
        if len(self.queue) > self.asynchronous or (self.queue and not self.busy):
            self.scheduler.update_from_output(*self.queue.popleft())

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self.scheduler.connector.has_pending_push_work())

    def run(self, limit_s: float = 20.0) -> None:
        """Until nothing is left to do."""
        until = time.monotonic() + limit_s
        while self.busy or self.queue:
            assert time.monotonic() < until, f"not idle after {limit_s} s: {list(self.scheduler.requests)}"
            self.step()

    def _run(self, output: Any) -> Any:
        side, given = self.worker_side, KVConnectorOutput()
        side.bind_connector_metadata(output.kv_connector_metadata)
        self._follow(output)
        sampled_ids: list[list[int]] = []
        names = list(output.num_scheduled_tokens)
        for name in names:
            begin = self._begin[name]
            sampled_ids.append(self._forward(name, begin, begin + output.num_scheduled_tokens[name]))
        side.start_load_kv(None)
        side.wait_for_save()
        results = side.get_transfer_results(output.finished_req_ids)
        given.finished_sending, given.finished_recving = results.finished_sending, results.finished_recving
        given.failed_recving = results.failed_recving
        given.invalid_block_ids = side.get_block_ids_with_load_errors()
        given.kv_connector_worker_meta = side.build_connector_worker_meta()
        side.clear_connector_metadata()
        for name in output.finished_req_ids:
            self.tables.pop(name, None)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=sampled_ids,
            kv_connector_output=given,
        )

    def _follow(self, output: Any) -> None:
        self._begin: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(table) for table in new.block_ids]
            self._begin[new.req_id] = new.num_computed_tokens
            self.reads.setdefault(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, blocks, begin in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            self._begin[name] = begin
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(table) for table in blocks]
            elif blocks is not None:
                for table, more in zip(self.tables[name], blocks, strict=True):
                    table += more

    def _content(self, name: str, place: int) -> int:
        prefix = self.tokens[name][: place + 1]
        return int.from_bytes(hashlib.blake2b(repr(prefix).encode(), digest_size=7).digest())

    def _forward(self, name: str, begin: int, end: int) -> list[int]:
        """Compute tokens begin … end-1 of a request. Raises Wrong where attention would read something else."""
        tokens, size = self.tokens[name], self.size
        for group, table in enumerate(self.tables[name]):
            window = self.windows[group]
            first = 0 if not window else max(0, begin - window + 1)
            for place in range(first, begin):
                block = table[place // size]
                for layer in range(len(self.names[group])):
                    found = int(self.memory[layer][block, place % size])
                    if found != self._content(name, place) * 16 + group or not block:
                        raise Wrong(f"{name}: group {group}, layer {layer}, token {place} of {begin}, block {block}")
            self.checked += begin - first
            for place in range(begin, end):
                block = table[place // size]
                for layer in range(len(self.names[group])):
                    self.memory[layer][block, place % size] = self._content(name, place) * 16 + group
        prompt = len(tokens) if end >= len(tokens) else 0
        if not prompt:
            return []
        tokens.append(sampled(tokens))
        self.answers[name] = tokens
        return [tokens[-1]]

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────

    def reset(self) -> bool:
        return bool(self.scheduler.reset_prefix_cache())

    def spoil_free(self, dice: random.Random) -> None:
        """Free memory holds anything."""

    def check(self) -> None:
        """Idle: nothing is held, nothing is pinned."""
        self.half.check()
        assert self.pool.num_gpu_blocks - 1 == self.pool.get_num_free_blocks()
        assert not len(self.half._loads) and not self.half._stores._storing and not len(self.half._boundaries)
        assert self.half._windows._held == 0 and not self.half._requests

    def close(self) -> None:
        self.worker_side.shutdown()
        self.scheduler.shutdown()
