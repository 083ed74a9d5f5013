"""vLLM's own scheduler over several ranks without a model: pipeline stages, and in each those of tensor parallelism.
Each rank is a worker of its own with its stage's layers, its own part of them and its own half of the connector, and
runs the steps in their order, some steps behind the rank before it.

As in vLLM the next steps are planned while the first one runs, and its answers are those of all ranks, put together by
vLLM's own aggregator when the last rank has run it.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from kvtier.connectors.vllm import connector
from kvtier.connectors.vllm.connector import KVTierConnector
from kvtier.testing.clock import VirtualClock
from tests.connectors.vllm.support.modelless import Modelless, groups_of_layers


class Rank(Modelless):
    """One rank's worker: the part of an engine that runs steps. No two leave the same bytes."""

    loads_first = True

    def __init__(self, engine: Staged, number: int, layers: int) -> None:
        """Shares what is sampled, and what is known of requests, with the other ranks of `engine`."""
        self.engine, self.number, self.last = engine, number, number == engine.output_rank
        self.size, self.states, self.windows = engine.size, engine.states, engine.windows
        parallel = engine.vllm_config.parallel_config
        self.contexts, self.interleave = parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size
        self.checkpoints, self._drafts, self._given = engine.checkpoints, engine._drafts, []
        self.drafts_max, self._drafts_right, self._guess = engine.drafts_max, engine._drafts_right, engine._guess
        self.drafter, self._right_drafts, self.asynchronous = "", {}, engine.asynchronous
        self._lengths: dict[str, int] = {}  # tokens of the step's requests when the first rank began it
        self.tables, self.state_at, self.checked, self.ran = {}, {}, 0, 0
        self.tokens, self.answers, self.sessions = engine.tokens, engine.answers, engine.sessions
        self.reads = engine.reads if self.last else {}
        blocks = engine.kv_config.num_blocks
        self.memory = [torch.full((blocks, self.size), -1, dtype=torch.int64) for _ in range(layers)]
        stage = number // engine.width
        groups = engine.groups_of(stage)
        for group in groups:
            group.layer_names = [f"{name}.stage{stage}" for name in group.layer_names]
        self.layers = [len(group.layer_names) for group in groups]
        page = groups[0].kv_cache_spec.page_size_bytes
        shared = [[group.layer_names[at] for group in groups if at < len(group.layer_names)] for at in range(layers)]
        self.kv_config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[KVCacheTensor(page * blocks, names, 0, page) for names in shared],
            kv_cache_groups=groups,
            hash_block_size=engine.unit,
            cache_hit_alignment_tokens=engine.unit,
        )
        with patch.object(parallel, "rank", number):
            self.worker_side = KVTierConnector(engine.vllm_config, KVConnectorRole.WORKER, self.kv_config)
        self._register(self.worker_side, shared)

    def runs(self, output: Any) -> Any:
        self.ran += 1
        return self._run(output)

    def ready(self, output: Any) -> bool:
        """Whether all tokens that the step computes are known: some are sampled by an earlier step."""
        if self.drafts_max:
            return True  # of one stage, whose first rank samples them
        cached = output.scheduled_cached_reqs
        ends = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return all(begin + output.num_scheduled_tokens[name] <= len(self.tokens[name]) for name, begin in ends)

    def _located(self, places: range) -> Iterator[tuple[int, int, int]]:
        """With decode context parallelism as vLLM's kernel of the slot mapping has it."""
        contexts, run = self.contexts, self.interleave
        for place in places:
            depth, offset = divmod(place, self.size * contexts)
            if offset // run % contexts == self.number % contexts:
                yield place, depth, offset // (contexts * run) * run + offset % run

    def _take_drafts(self, output: Any) -> dict[str, list[int]]:
        """Those that the first rank has taken: it samples, and guesses anew, before the others run the step."""
        if not self.drafts_max:
            return super()._take_drafts(output)
        if not self.number:
            drafts = super()._take_drafts(output)
            lengths = {name: len(self.tokens[name]) for name in drafts}
            self.engine.given.append((dict(self._begin), drafts, lengths))
        begins, drafts, self._lengths = self.engine.given[self.ran - 1]
        self._begin = dict(begins)
        return drafts

    def _content(self, name: str, place: int) -> int:
        """Of a draft: what its rank computed, though the right token is known by then."""
        if not self.drafts_max:
            return super()._content(name, place) + (self.number << 56)
        prefix = [*self.tokens[name][: self._lengths[name]], *self._given][: place + 1]
        return int.from_bytes(hashlib.blake2b(repr(prefix).encode(), digest_size=7).digest()) + (self.number << 56)

    def _sample(self, name: str, end: int) -> list[int]:
        return super()._sample(name, end) if self.last else []


class Staged(Modelless):
    """See the module. `stages`: the layers of each, which `width` ranks divide among them."""

    def __init__(
        self,
        folder: Path,
        windows: Sequence[tuple[int, int]] = (),
        *,
        stages: tuple[int, ...] = (2, 2),
        width: int = 1,
        chance: random.Random | None = None,
        full_at: int = 0,
        states: Sequence[int] = (),
        lacking: Collection[tuple[int, int]] = (),
        **options: Any,
    ) -> None:
        """Of a group beside the full one a stage has as many layers as the group is said to have, but no more than of
        the full one; none where (stage, place of the group) is `lacking`."""
        self.count, self.width, self.chance = len(stages), width, chance or random.Random(0)
        self.output_rank = (self.count - 1) * width
        self.widths, self.kept, self.full_at, self.lacking = windows, states, full_at, lacking
        self._layers = stages
        first = self._parts(0)
        self.clock = VirtualClock()
        self.under_way = 0  # steps that were planned and had not ended, at most
        self.ranks = list[Rank]()
        self.given = list[tuple[dict[str, int], dict[str, list[int]], dict[str, int]]]()  # see `Rank._take_drafts`
        engine = {
            "pipeline_parallel_size": self.count, "tensor_parallel_size": width, "distributed_executor_backend": "mp"
        }  # fmt: skip
        with patch.object(connector, "SystemClock", lambda: self.clock):
            super().__init__(folder, first[0], layers=stages[0], full_at=full_at, states=first[1], **engine, **options)

    def _parts(self, number: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Windows and states of a stage, with their layers there."""
        most = self._layers[number]
        counts = [
            0 if (number, place) in self.lacking else min(count, most)
            for place, count in enumerate([*(count for _, count in self.widths), *self.kept])
        ]
        windows = [(window, count) for (window, _), count in zip(self.widths, counts, strict=False)]
        return windows, counts[len(windows) :]

    def groups_of(self, number: int) -> list[Any]:
        windows, states = self._parts(number)
        return groups_of_layers(windows, self._layers[number], self.size, self.full_at, states, self.checkpoints)

    def _begin_workers(self, shared: list[list[str]]) -> None:
        """One for each rank. Their handshakes come as vLLM has them."""
        width = self.width
        self.ranks = [Rank(self, number, self._layers[number // width]) for number in range(self.count * width)]
        told = {divmod(one.number, width): one.worker_side.get_handshake_metadata() for one in self.ranks}
        self.connector.set_xfer_handshake_metadata_pp_aware(told)
        self.aggregator = KVOutputAggregator.from_connector(self.connector, len(self.ranks))
        self.depth = self.count + self.asynchronous
        # Of asynchronous scheduling with stages vLLM has the newer runner's, which CPUs lack.
        self.scheduler.use_v2_model_runner = self.asynchronous and self.count > 1
        self.queue = deque[tuple[Any, Any]]()  # steps that are planned, with the answers of ranks that have run them
        self.ended = 0  # steps whose answers the scheduler has
        self.worker_side = self.ranks[-1].worker_side
        self.memory = self.ranks[-1].memory

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """Plan a step if there is room for one, and let the ranks go on; the first one's end is told to the scheduler,
        where there is no room for more, and now and then before."""
        self.clock.advance(0.002)
        planned = False
        if self.busy and len(self.queue) < self.depth:
            self.queue.append((self.scheduler.schedule(), []))
            self.under_way, planned = max(self.under_way, len(self.queue)), True
            for _ in range(self.chance.randrange(4)):
                self._advance(self.chance.randrange(len(self.ranks)))
        if self.queue and not (planned and len(self.queue) < self.depth and self.chance.random() < 0.7):
            output, answers = self.queue[0]
            for number in range(len(answers), len(self.ranks)):
                self._advance(number)
            assert len(answers) == len(self.ranks)
            self.queue.popleft()
            self.ended += 1
            answer = self.aggregator.aggregate(answers, output_rank=self.output_rank)
            self.scheduler.update_from_output(output, answer)
            self._tell_drafts()

    def _advance(self, number: int) -> None:
        """Let a rank run its next step, if that is planned and the rank before has run it."""
        rank = self.ranks[number]
        place = rank.ran - self.ended
        if place >= len(self.queue) or (number and self.ranks[number - 1].ran <= rank.ran):
            return
        output, answers = self.queue[place]
        if rank.ready(output):
            assert len(answers) == number
            answers.append(rank.runs(output))

    @property
    def looked_at(self) -> int:
        """Places of which the content was looked at, on all ranks."""
        return sum(one.checked for one in self.ranks)

    def check(self) -> None:
        super().check()
        assert not any(one.worker_side._worker._unloaded for one in self.ranks)

    def close(self) -> None:
        for one in self.ranks:
            one.worker_side.shutdown()
        self.scheduler.shutdown()
