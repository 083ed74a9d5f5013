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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
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
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtier.connectors.vllm.connector import KVTierConnector

_MODEL = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 1024, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 4096, "sliding_window": 64, "torch_dtype": "float32",
}  # fmt: skip


def sampled(prefix: Sequence[int]) -> int:
    """The token that follows: of all of the prefix."""
    return int.from_bytes(hashlib.blake2b(repr(prefix).encode(), digest_size=2).digest()) % 1000 + 3


class Wrong(AssertionError):
    """Attention would have read something else than it should."""


def configuration(folder: Path, size: int, connector: dict[str, Any], engine: dict[str, Any]) -> Any:
    """vLLM's of an engine with blocks of `size` tokens and these options; no weights are read."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(_MODEL))
    transfer = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "kvtier_config": {"tiers": {"g2": {"capacity": "2MiB"}}},
            "model": "tiny",
            "weights": "any",
            "lookup_deadline": "30s",
            "recompute": "never",
            **connector,
        },
    }
    given = {
        "model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512,
        "block_size": size, "max_num_batched_tokens": 64, "max_num_seqs": 6, "async_scheduling": False,
        "enforce_eager": True, "kv_transfer_config": transfer, "gpu_memory_utilization": 0.1, **engine,
    }  # fmt: skip
    config = EngineArgs(**given).create_engine_config()
    config.scheduler_config.async_scheduling = given["async_scheduling"]  # the CPU platform switches it off
    config.cache_config.block_size = size
    return config


STATE = (2, 3)
"""Numbers of a layer's two states, one behind the other; a page has some more."""


def groups_of_layers(
    windows: Sequence[tuple[int, int]],
    layers: int,
    size: int,
    full_at: int,
    states: Sequence[int] = (),
    checkpoints: bool = False,
    drafts: int = 0,
) -> list[Any]:
    """One group of full attention as number `full_at`, and `windows` (tokens, layers) and `states` (layers) around it.
    A page is one number per token. `checkpoints`: steps leave states in their middle, too, as those of Mamba 2."""
    shape = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec([f"window{window}.{number}.{layer}" for layer in range(count)],
                         SlidingWindowSpec(**shape, sliding_window=window))
        for number, (window, count) in enumerate(windows)
    ]  # fmt: skip
    page = FullAttentionSpec(**shape).page_size_bytes
    kinds: dict[str, Any] = {"shapes": tuple((count,) for count in STATE), "dtypes": (torch.int64,) * len(STATE)}
    kinds["num_speculative_blocks"] = drafts
    if checkpoints:
        kinds |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    groups += [
        KVCacheGroupSpec([f"state.{number}.{layer}" for layer in range(count)],
                         MambaSpec(size, **kinds, page_size_padded=page, mamba_cache_mode="align"))
        for number, count in enumerate(states)
    ]  # fmt: skip
    groups.insert(full_at, KVCacheGroupSpec([f"full.{layer}" for layer in range(layers)], FullAttentionSpec(**shape)))
    return groups


def parts_of_state(memory: torch.Tensor) -> list[torch.Tensor]:
    """A layer's two states in its pages."""
    return list(memory[:, : sum(STATE)].split(STATE, dim=1))


class Modelless:
    """See the module. `windows`: (tokens of the window, layers) of each group beside the full one of `layers`;
    `states`: layers of each group that keeps states."""

    loads_first = False  # whether loads begin before the forward, as vLLM has them; else none is over so early

    def __init__(
        self,
        folder: Path,
        windows: Sequence[tuple[int, int]],
        *,
        layers: int = 2,
        size: int = 8,
        blocks: int = 64,
        full_at: int = 0,
        states: Sequence[int] = (),
        checkpoints: bool = False,
        drafts: tuple[int, float] = (0, 0.0),
        drafter: tuple[str, int] = ("", 0),
        connector: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        """`drafts`: how many at most follow a sampled token, and the share that is right, as a model that needs no KV
        would guess them. `drafter`: vLLM's name of the way a model drafts that has KV, and the group whose last layer
        that is. `connector`: arguments of kvtier's; `engine`: options of vLLM's engine."""
        self.drafts_max, self._drafts_right = drafts
        if self.drafts_max:
            method = "ngram_gpu" if engine.get("async_scheduling") else "ngram"
            engine["speculative_config"] = {
                "method": method, "prompt_lookup_max": 3, "num_speculative_tokens": self.drafts_max
            }  # fmt: skip
        self._guess = random.Random(1)
        self._drafts: dict[str, list[int]] = {}  # of a request, for its next step
        self._given: list[int] = []  # of the request that is computed, in this step
        self._planned = 0  # as many tokens of it were planned to be drafts
        self.vllm_config = configuration(folder, size, connector or {}, engine)
        self.drafter, self._drafters_group = drafter
        if self.drafter:
            self.vllm_config.speculative_config.method = self.drafter
        self.stale = 0  # tokens that a drafter read, and that were made of another token behind them
        self.asynchronous = bool(self.vllm_config.scheduler_config.async_scheduling)
        cache = self.vllm_config.cache_config
        cache.num_gpu_blocks = blocks
        self.size = size
        self.unit = unit = size * self.vllm_config.parallel_config.decode_context_parallel_size  # tokens of a block
        groups = groups_of_layers(windows, layers, size, full_at, states, checkpoints, self.drafts_max)
        if self.drafter == "mtp":
            groups[self._drafters_group].is_eagle_group = True  # vLLM knows this one only
        self.checkpoints = checkpoints
        self.states = [n for n, group in enumerate(groups) if isinstance(group.kv_cache_spec, MambaSpec)]
        if states:
            cache.mamba_cache_mode = "align"
        self.windows = [getattr(group.kv_cache_spec, "sliding_window", None) or 0 for group in groups]
        self.layers = [len(group.layer_names) for group in groups]
        page = groups[0].kv_cache_spec.page_size_bytes
        shared = [
            [group.layer_names[layer] for group in groups if layer < len(group.layer_names)] for layer in range(layers)
        ]
        self.kv_config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[KVCacheTensor(page * blocks, names, 0, page) for names in shared],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=cache.prefix_cache_retention_interval,
            hash_block_size=unit,
            cache_hit_alignment_tokens=unit,
        )
        self.memory = [torch.full((blocks, size), -1, dtype=torch.int64) for _ in range(layers)]
        self.scheduler = (AsyncScheduler if self.asynchronous else Scheduler)(
            vllm_config=self.vllm_config, kv_cache_config=self.kv_config, block_size=unit, hash_block_size=unit,
            structured_output_manager=StructuredOutputManager(self.vllm_config), log_stats=True,
        )  # fmt: skip
        hashing = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self.hasher = get_request_block_hasher(unit, hashing)
        self.sessions: set[str] = set()
        self.tables: dict[str, list[list[int]]] = {}  # as the workers know them
        self.tokens: dict[str, list[int]] = {}  # of a request, as sampled by the workers
        self.queue: deque[tuple[Any, Any]] = deque()  # steps that have run, and were not told to the scheduler
        self.answers: dict[str, list[int]] = {}  # all tokens of a request that has sampled some
        self.reads: dict[str, int] = {}  # tokens that a request had when it was first computed
        self.checked = 0  # places of which the content was looked at
        self.state_at: dict[str, int] = {}  # depth of the block with a request's running state
        self._right_drafts: dict[str, int] = {}  # as many blocks behind that lies the state that goes on
        self._begin: dict[str, int] = {}  # of the requests in the step: the first token that is computed
        self._numbers = itertools.count()
        self._begin_workers(shared)

    def _begin_workers(self, shared: list[list[str]]) -> None:
        """The worker's half of the connector over the memory, and its handshake. `shared`: the layers of a page."""
        self.worker_side = KVTierConnector(self.vllm_config, KVConnectorRole.WORKER, self.kv_config)
        self._register(self.worker_side, shared)
        self.connector.set_xfer_handshake_metadata({0: self.worker_side.get_handshake_metadata()})

    def _register(self, side: Any, shared: list[list[str]]) -> None:
        side.register_kv_caches(
            {
                name: parts_of_state(self.memory[layer]) if name.startswith("state") else self.memory[layer]
                for layer, names in enumerate(shared)
                for name in names
            }
        )

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def half(self) -> Any:
        return self.connector._scheduler

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

    def add(
        self,
        prompt: list[int],
        tokens: int = 4,
        name: str = "",
        priority: int = 0,
        control: Any = None,
        *,
        session: bool = False,
        stops: Sequence[int] = (),
        salt: str | None = None,
        lora: Any = None,
    ) -> str:
        """A request, or a turn of the `session` of this name, of which the last turn is none; it ends before `tokens`
        with any of `stops`. `lora`: a LoRARequest."""
        name = name or f"r{next(self._numbers)}"
        extra = None if control is None else {"kv_transfer_params": {"kvtier": control}}
        request = Request(
            request_id=name, prompt_token_ids=list(prompt), pooling_params=None, block_hasher=self.hasher,
            sampling_params=SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra, stop_token_ids=list(stops)
            ),
            priority=priority, resumable=session, cache_salt=salt, lora_request=lora,
        )  # fmt: skip
        if name not in self.scheduler.requests:
            self.tokens[name] = list(prompt)
        if session:
            self.sessions.add(name)
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
            self._tell_drafts()

    def _tell_drafts(self) -> None:
        """The scheduler plans the next step with them; with asynchronous scheduling it plans their places alone."""
        if self.drafts_max and not self.asynchronous:
            names = list(self._drafts)
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [self._drafts[name] for name in names]))

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self.connector.has_pending_push_work())

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
        for memory in self.memory:
            memory[output.new_block_ids_to_zero or []] = 0
        sampled_ids: list[list[int]] = []
        names = list(output.num_scheduled_tokens)
        for name in {*output.finished_req_ids, *(output.preempted_req_ids or ()),
                     *output.scheduled_cached_reqs.resumed_req_ids}:  # fmt: skip
            self.state_at.pop(name, None)
            self._right_drafts.pop(name, None)
        drafts = self._take_drafts(output)
        for name in names if self.states else ():
            self._carry_state(name, self._begin[name], self._begin[name] + output.num_scheduled_tokens[name])
        if self.loads_first:
            side.start_load_kv(None)
        for name in names:
            begin, self._given = self._begin[name], drafts[name]
            self._planned = len(output.scheduled_spec_decode_tokens.get(name, []))
            sampled_ids.append(self._forward(name, begin, begin + output.num_scheduled_tokens[name]))
        if not self.loads_first:
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

    def _take_drafts(self, output: Any) -> dict[str, list[int]]:
        """The drafts with which the step's requests are computed. It was planned as if those of the step before were
        right: a request begins where it has got to."""
        taken = {}
        for name in output.num_scheduled_tokens:
            planned = output.scheduled_spec_decode_tokens.get(name, [])
            if planned or name in self._drafts:
                self._begin[name] = min(self._begin[name], len(self.tokens[name]) - 1)
            taken[name] = self._drafts.pop(name, [])[: len(planned)]
        return taken

    def _follow(self, output: Any) -> None:
        self._begin = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(table) for table in new.block_ids]
            self._begin[new.req_id] = new.num_computed_tokens
            if new.req_id in self.sessions:
                self.tokens[new.req_id] = list(new.prompt_token_ids)  # a turn, without what was dropped of the last
            self.reads.setdefault(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, blocks, begin in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            self._begin[name] = begin
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(table) for table in blocks]
            elif blocks is not None:
                for table, more in zip(self.tables[name], blocks, strict=True):
                    table += more

    def _located(self, places: range) -> Iterator[tuple[int, int, int]]:
        """Those of a request's tokens that this worker keeps, each with the depth of its block and its place there."""
        return ((place, place // self.size, place % self.size) for place in places)

    def _content(self, name: str, place: int) -> int:
        prefix = [*self.tokens[name], *self._given][: place + 1]
        return int.from_bytes(hashlib.blake2b(repr(prefix).encode(), digest_size=7).digest())

    def _forward(self, name: str, begin: int, end: int) -> list[int]:
        """Compute tokens begin … end-1 of a request. Raises Wrong where attention would read something else."""
        for group in self.states:
            self._advance_state(name, group, begin, end)
        for group, table in enumerate(self.tables[name]):
            if group in self.states:
                continue
            window = self.windows[group]
            first = 0 if not window else max(0, begin - window + 1)
            for place, depth, offset in self._located(range(first, begin)):
                block = table[depth]
                for layer in range(self._target_layers(group)):
                    found = int(self.memory[layer][block, offset])
                    if found != self._content(name, place) * 16 + group or not block:
                        raise Wrong(f"{name}: group {group}, layer {layer}, token {place} of {begin}, block {block}")
            self.checked += begin - first
            for place, depth, offset in self._located(range(begin, end)):
                block = table[depth]
                for layer in range(self._target_layers(group)):
                    self.memory[layer][block, offset] = self._content(name, place) * 16 + group
        fresh = self._sample(name, end)
        if self.states and self.drafts_max:
            self._choose_state(name, end - self._planned, max(0, len(fresh) - 1))
        if self.drafter:
            self._draft_with_kv(name, begin, end)
        return fresh

    def _target_layers(self, group: int) -> int:
        """Of a group's layers, those that are not the drafter's."""
        return self.layers[group] - bool(self.drafter and group == self._drafters_group)

    def _draft_with_kv(self, name: str, begin: int, end: int) -> None:
        """As vLLM's proposers have it: the drafter computes what the step has computed, but for refused tokens, and
        then guesses, behind that. EAGLE and MTP make each token's KV of the next token, too. Raises Wrong where it
        would read KV of other tokens; of another next one, it may at the end of a block."""
        group, size, tokens = self._drafters_group, self.size, self.tokens[name]
        table, window = self.tables[name][group], self.windows[group]
        memory = self.memory[self.layers[group] - 1]
        for place in range(0 if not window else max(0, begin - window + 1), begin):
            found, right = int(memory[table[place // size], place % size]), self._drafted(name, place)
            if found != right and (found >> 15 != right >> 15 or (place + 1) % size or self.drafter == "draft_model"):
                raise Wrong(
                    f"{name}: group {group}, the drafter's token {place} of {begin}, block {table[place // size]}"
                )
            self.stale += found != right
            self.checked += 1
        done = min(end, len(tokens) - 1)
        for place in range(begin, done + self.drafts_max):
            if place < len(table) * size:
                right = self._drafted(name, place) if place < done else -9
                memory[table[place // size], place % size] = right

    def _drafted(self, name: str, place: int) -> int:
        tokens = self.tokens[name]
        prefix = hashlib.blake2b(repr(tokens[: place + 1]).encode(), digest_size=5).digest()
        behind = 0 if self.drafter == "draft_model" else tokens[place + 1] + 1
        return (int.from_bytes(prefix) << 11 | behind) << 4 | self._drafters_group

    def _sample(self, name: str, end: int) -> list[int]:
        """The token that follows the first `end` without drafts, where it is not known yet, and those that follow the
        drafts which are right."""
        tokens = self.tokens[name]
        known = len(tokens)
        if end < known:
            return []
        tokens.append(sampled(tokens))
        for draft in self._given:
            if draft != tokens[-1]:
                break
            tokens.append(sampled(tokens))
        self.answers[name] = tokens
        if self.drafts_max:
            self._draft(name)
        return tokens[known:]

    def _draft(self, name: str) -> None:
        """Guess the tokens that follow: with asynchronous scheduling as many as the plan has places for."""
        guess, tokens = self._guess, list(self.tokens[name])
        count = self.drafts_max if self.asynchronous else guess.randrange(self.drafts_max + 1)
        for _ in range(count):
            tokens.append(sampled(tokens) if guess.random() < self._drafts_right else 1)
        self._drafts[name] = tokens[len(self.tokens[name]) :]

    def _carry_state(self, name: str, begin: int, end: int) -> None:
        """As vLLM's runner has it, before a step's loads: the running state moves on to the block of the last token."""
        before, now = self.state_at.get(name, (begin - 1) // self.size), -(-end // self.size) - 1
        self.state_at[name] = now
        if before in (-1, now):
            return
        behind = self._right_drafts.pop(name, 0)
        for group in self.states:
            self._copy_state(group, self.tables[name][group], before + behind, now)

    def _copy_state(self, group: int, table: list[int], source: int, target: int) -> None:
        for memory in self.memory[: self.layers[group]]:
            for part in parts_of_state(memory):
                part[table[target]] = part[table[source]]

    def _choose_state(self, name: str, certain: int, right: int) -> None:
        """As vLLM's runner has it, after a step that left a state after `certain` tokens and after each draft: go on
        with that after the `right` ones; one at the last boundary is put into the block of its last token."""
        now, boundary = self.state_at[name], (certain + right) // self.size * self.size
        self._right_drafts[name] = right
        if boundary < certain:
            return
        target = boundary // self.size - 1
        for group in self.states if (now, boundary) != (target, certain) else ():
            self._copy_state(group, self.tables[name][group], now + boundary - certain, target)
        if now == target:
            self._right_drafts[name] = 0

    def _advance_state(self, name: str, group: int, begin: int, end: int) -> None:
        table, at = self.tables[name][group], self.state_at[name]
        block = table[at + self._right_drafts.get(name, 0)]
        for layer, memory in enumerate(self.memory[: self.layers[group]]):
            found = torch.cat([part[block] for part in parts_of_state(memory)]).tolist()
            if not block or (begin and found != self._state(name, group, begin)):
                raise Wrong(f"{name}: group {group}, layer {layer}, state after {begin} tokens, block {block}")
            for draft in range(self._planned + 1):  # a state after each, in the blocks behind
                state = self._state(name, group, end - self._planned + draft)
                self._put_state(memory, table[at + draft], state if draft <= len(self._given) else [-9] * sum(STATE))
        self.checked += 1
        if self.checkpoints:
            self._leave_checkpoint(name, group, begin, end)

    @staticmethod
    def _put_state(memory: torch.Tensor, block: int, state: list[int]) -> None:
        for part, numbers in zip(parts_of_state(memory), torch.tensor(state).split(STATE), strict=True):
            part[block] = numbers

    def _leave_checkpoint(self, name: str, group: int, begin: int, end: int) -> None:
        """As the kernels of Mamba 2 do it, by vLLM's rule."""
        from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints  # not in older ones

        size = self.size
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [end], [end - begin], size, size, 1, drop_eagle_block=False, cache_hit_alignment_tokens=size
        )
        if offset and (block := self.tables[name][group][column]):
            for memory in self.memory[: self.layers[group]]:
                self._put_state(memory, block, self._state(name, group, begin + offset))

    def _state(self, name: str, group: int, tokens: int) -> list[int]:
        first = self._content(name, tokens - 1) * 16 + group
        return [first + 16 * number for number in range(sum(STATE))]

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────

    def reset(self) -> bool:
        return bool(self.scheduler.reset_prefix_cache())

    def check(self) -> None:
        """Idle: nothing is held, nothing is pinned."""
        self.half.check()
        half, pool = self.half, self.pool
        left = {
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "copies": len(half._stores._storing),
            "loads": len(half._loads),
            "requests": len(half._requests),
            "failed loads that are not told": len(self.worker._unloaded),
        }
        if len(self.windows) > 1:
            left["held"] = half._held.count
            left["waiting"] = len(half._held._pending) + len(half._held.ready)
            left["boundaries"] = len(half._boundaries)
        assert not any(left.values()), left

    def close(self) -> None:
        self.worker_side.shutdown()
        self.scheduler.shutdown()
