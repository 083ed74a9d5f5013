"""An engine as small as the connector's scheduler half can be driven by: vLLM's own block pool, no model.

A block's content is the name of what was computed into it, and a copy moves it; so wrong content is seen by its name.
Copies are made with the step that orders them, unless `held`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

import kvtier
from kvtier.config import Config, Offload
from kvtier.connectors.vllm.connector import KVTierConnector
from kvtier.connectors.vllm.messages import ArenaHandle, Load, StepMeta, StepMoves, WorkerMeta
from kvtier.connectors.vllm.requests import RequestReader
from kvtier.connectors.vllm.scheduler import SchedulerHalf
from kvtier.connectors.vllm.stores import ConnectorLimits
from kvtier.identity.keys import SHARED, BlockKey, make_keys
from kvtier.testing import VirtualClock, sample_namespace
from kvtier.tiers.host.slot import SlotState

SIZE = 4


@dataclass(eq=False)
class Asked:
    """A request as vLLM's, as far as the connector looks at it."""

    request_id: str
    all_token_ids: list[int]
    wanted: int = 3  # tokens to sample
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    blocks: list[Any] = field(default_factory=list)
    waits: bool = False  # for its load
    told: int = 0  # blocks that the workers were told of
    named: int = 0  # in the pool
    new: bool = True
    lora_request: Any = None
    cache_salt: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)
        self.name()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def name(self) -> None:
        """The names of its full blocks; those that are named keep theirs."""
        for depth in range(len(self.block_hashes), self.num_tokens // SIZE):
            parent = self.block_hashes[-1] if self.block_hashes else b""
            tokens = repr(self.all_token_ids[depth * SIZE : (depth + 1) * SIZE]).encode()
            self.block_hashes.append(hashlib.sha256(parent + tokens).digest())

    def sample(self) -> None:
        self.all_token_ids.append(sum(self.all_token_ids) % 1009)
        self.name()


class Caches:
    """One cache, whose arena the workers are told of."""

    def __init__(self, cache: kvtier.Cache) -> None:
        self.cache: kvtier.Cache | None = cache
        self.namespace = cache.namespace
        self.current = (cache, ArenaHandle(1, 0, (), 0, 0, 0))

    def close(self, timeout_s: float) -> None:
        assert self.cache is not None
        self.cache.close()


class SmallEngine:
    """Schedules, computes and copies as vLLM does, one step per call."""

    def __init__(
        self,
        caching: bool = True,
        blocks: int = 64,
        clock: VirtualClock | None = None,
        capacity: str = "4MiB",
        in_step_bytes: int = 0,
        weighs: bool = False,
        gives_up: bool = True,
    ) -> None:
        self.clock = clock or VirtualClock()
        config = Config.parse({"tiers": {"g2": {"capacity": capacity}}})
        self.cache = kvtier.open(config, sample_namespace(4096, block_tokens=SIZE))
        self.caches = Caches(self.cache)
        limits = ConnectorLimits(
            1.0,
            1.0,
            flush_timeout_s=5.0,
            ack_timeout_s=30.0,
            spill_ahead_blocks=8,
            weighs_loads=weighs,
            gives_up=gives_up,
            in_step_bytes=in_step_bytes,
        )
        caches: Any = self.caches
        self.half = SchedulerHalf(caches, RequestReader(config), Offload(mode="eager"), limits, 1, self.clock)
        self.connector: Any = object.__new__(KVTierConnector)
        self.connector._scheduler, self.connector._worker = self.half, None
        self.pool = BlockPool(blocks, caching, SIZE)
        self.half.bind(self.pool)
        self.caching = caching
        self.requests: dict[str, Asked] = {}
        self.ended: dict[str, Asked] = {}  # their blocks are kept
        self.content: dict[int, bytes] = {}  # by block
        self.slots: dict[int, bytes] = {}
        self.metas: list[StepMeta] = []
        self.held = False  # copies are not answered
        self.fails: Callable[[Load], set[int]] = lambda load: set()
        self.unreached = 0
        self.attached: list[int] = []
        self.step_number = 0
        self._open: list[tuple[str, StepMoves]] = []
        self.calls: Counter[str] = Counter()
        self.answers: dict[str, dict[str, Any] | None] = {}  # to the senders of requests that are over
        self.misled: list[str] = []  # requests that computed behind wrong content, once per step

    # ── the engine's scheduler ──────────────────────────────────────────────────────────────────────────────

    def add(self, name: str, tokens: list[int], wanted: int = 3) -> Asked:
        request = self.requests[name] = Asked(name, list(tokens), wanted)
        self.connector.on_new_request(request)
        return request

    def step(self, between: Callable[[], None] = lambda: None) -> StepMeta:
        """Plan, compute and finish one step; `between` is called when it has run, before its answers are taken."""
        output = self._schedule()
        meta = self.connector.build_connector_meta(output)
        self.metas.append(meta)
        answers, received, bad = self._work(meta, output)
        between()
        self._update(output, answers, received, bad)
        return meta

    def run(self, limit: int = 60) -> int:
        """Step until nothing is left to do; the number of steps. Raises where that takes more than `limit`."""
        for count in range(limit):
            if not self.requests and not self.ended and not self.half.pending():
                return count
            self.step()
            self.clock.advance(0.05)
        raise AssertionError(
            f"the engine still steps after {limit} steps: {sorted(self.requests)} {sorted(self.ended)}"
        )

    def _schedule(self) -> Any:
        new, cached, planned = [], [], {}
        for request in self.requests.values():
            if request.waits:
                continue
            if not request.blocks and not self._place(request):
                continue
            begin, end = request.num_computed_tokens, request.num_tokens
            self._grow(request, end)
            self._name(request, end)  # before anything is computed
            ids = [block.block_id for block in request.blocks]
            if request.new:
                new.append(SimpleNamespace(req_id=request.request_id, block_ids=(ids,), num_computed_tokens=begin))
            else:
                cached.append((request.request_id, (ids[request.told :],) if ids[request.told :] else None, begin))
            request.new, request.told = False, len(ids)
            planned[request.request_id] = end - begin
            request.num_computed_tokens = end
            request.num_in_flight_tokens = end - begin
        return SimpleNamespace(
            num_scheduled_tokens=planned,
            total_num_scheduled_tokens=sum(planned.values()),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one[0] for one in cached],
                new_block_ids=[one[1] for one in cached],
                num_computed_tokens=[one[2] for one in cached],
                resumed_req_ids=set(),
            ),
        )

    def _place(self, request: Asked) -> bool:
        """Find the request's prefix and give it blocks. False: it waits."""
        own: list[Any] = []
        for digest in request.block_hashes[: (request.num_tokens - 1) // SIZE] if self.caching else []:
            found = self.pool.get_cached_block(digest, [0])
            if found is None:
                break
            own += found
        count, loads = self.connector.get_num_new_matched_tokens(request, len(own) * SIZE)
        self.calls["offered"] += bool(count)
        if count is None:
            return False
        self.pool.touch(own)
        request.blocks, request.told, request.new, request.named = own, 0, True, len(own)
        request.num_computed_tokens = len(own) * SIZE + count
        self._grow(request, request.num_computed_tokens if loads else request.num_tokens)
        self._allocated(request, count)
        request.waits = loads
        return not loads

    def _allocated(self, request: Asked, count: int) -> None:
        ids = [block.block_id for block in request.blocks]
        self.connector.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (ids,)), count)

    def _grow(self, request: Asked, tokens: int) -> None:
        request.blocks += self.pool.get_new_blocks(max(0, -(-tokens // SIZE) - len(request.blocks)))

    def _name(self, request: Asked, tokens: int) -> None:
        full = tokens // SIZE
        if self.caching and full > request.named:
            self.pool.cache_full_blocks(request, request.blocks, request.named, full, SIZE, 0)  # type: ignore[arg-type]
            request.named = full

    # ── the worker ──────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, meta: StepMeta, output: Any) -> tuple[WorkerMeta, set[str], set[int]]:
        if meta.arena is not None:
            self.attached.append(meta.arena.number)
        answers = WorkerMeta(meta.step, unreached=self.unreached)
        received: set[str] = set()
        bad: set[int] = set()
        for load in meta.loads:
            if load.in_step:
                self._work_on(load.request, load.moves, meta, answers, set(), bad)
        for name in output.num_scheduled_tokens:
            self._compute(self.requests[name])
        late = [load for load in meta.loads if not load.in_step]
        jobs = self._open + [(load.request, load.moves) for load in late] + [("", moves) for moves in meta.stores]
        self._open = []
        for name, moves in jobs:
            if self.held and moves.job not in meta.cancelled:
                self._open.append((name, moves))
                continue
            self._work_on(name, moves, meta, answers, received, bad)
        self.freed = set(meta.freed)
        return answers, received, bad

    def _work_on(
        self, name: str, moves: StepMoves, meta: StepMeta, answers: WorkerMeta, received: set[str], bad: set[int]
    ) -> None:
        failed = self._copy(name, moves, cancelled=moves.job in meta.cancelled)
        answers.done[moves.job] = 1
        if failed:
            answers.failed[moves.job] = failed
        if name:
            received.add(name)
            bad |= {moves.blocks[position] for position in failed}

    def _compute(self, request: Asked) -> None:
        """Content is right only behind content that is."""
        right = True
        begin = request.num_computed_tokens - request.num_in_flight_tokens
        for depth, block in enumerate(request.blocks[: request.num_computed_tokens // SIZE]):
            if depth >= begin // SIZE:
                self.content[block.block_id] = request.block_hashes[depth] if right else b"wrong"
            right &= self.content.get(block.block_id) == request.block_hashes[depth]
        if not right:
            self.misled.append(request.request_id)

    def _copy(self, name: str, moves: StepMoves, *, cancelled: bool) -> set[int]:
        every = set(range(len(moves.blocks)))
        if cancelled or self.unreached or len(moves.slots) != len(moves.blocks):
            failed = every
        else:
            failed = self.fails(Load(name, moves)) if name else set()
        for position in every:
            block = moves.blocks[position]
            if position in failed:
                if name and moves.slots:
                    self.content[block] = b"sevens"
            elif name:
                self.content[block] = self.slots[moves.slots[position]]
            else:
                self.slots[moves.slots[position]] = self.content.get(block, b"nothing")
        return failed

    # ── after the step ──────────────────────────────────────────────────────────────────────────────────────

    def _update(self, output: Any, answers: WorkerMeta, received: set[str], bad: set[int]) -> None:
        for request in self.requests.values():
            if request.waits and bad:
                first = next((i for i, block in enumerate(request.blocks) if block.block_id in bad), None)
                if first is not None:
                    request.num_computed_tokens = min(request.num_computed_tokens, first * SIZE)
        for name in output.num_scheduled_tokens:
            if name not in self.requests:
                continue  # its client went away
            request = self.requests[name]
            begin, request.num_in_flight_tokens = request.num_computed_tokens - request.num_in_flight_tokens, 0
            blocks = request.blocks[: begin // SIZE]
            first = next((depth for depth, block in enumerate(blocks) if block.block_id in bad), None)
            if first is not None:  # it stays running, and computes from there on in the next step
                request.num_computed_tokens = first * SIZE
                continue
            request.sample()
            if request.num_tokens - request.num_prompt_tokens >= request.wanted:
                self.end(name)
        info = SimpleNamespace(kv_connector_worker_meta=answers, invalid_block_ids=bad)
        self.connector.update_connector_output(info)
        for name in received:
            if name in self.ended:
                self._free(self.ended.pop(name))
                continue
            request = self.requests[name]
            assert request.waits, "a load ended that nobody waits for"
            request.waits = False
            self._name(request, request.num_computed_tokens)
            if not request.num_computed_tokens:
                self._free(request)
            else:
                self._grow(request, request.num_tokens)
                self._allocated(request, 0)
        for name in self.freed:
            self._free(self.ended.pop(name))  # a KeyError here ends vLLM's engine

    def end(self, name: str) -> None:
        """The request is over, or its client went away."""
        request = self.requests.pop(name)
        delayed, self.answers[name] = self.connector.request_finished(request, [])
        if delayed or request.waits:
            self.ended[name] = request
        else:
            self._free(request)

    def preempt(self, name: str) -> None:
        """Take the request's blocks away; it is placed again."""
        request = self.requests[name]
        self._free(request)
        request.num_computed_tokens = 0
        request.new = True

    def _free(self, request: Asked) -> None:
        self.pool.free_blocks(reversed(request.blocks))
        request.blocks = []

    # ── what is to hold ─────────────────────────────────────────────────────────────────────────────────────

    def chain(self, tokens: list[int]) -> list[BlockKey]:
        return make_keys(SHARED, Asked("probe", list(tokens)).block_hashes)

    def stored(self, tokens: list[int]) -> int:
        """Leading blocks of these tokens in G2."""
        return self.cache.manager.prefix(self.chain(tokens))

    def reset(self) -> None:
        assert self.pool.reset_prefix_cache()

    def check(self) -> None:
        """Nothing leaked, and what is stored is right."""
        self.half.check()
        self.cache.check()
        assert not self.requests and not self.ended
        assert not self.half._requests and not self.half._kept and not len(self.half._loads)
        assert not self.half._stores._storing
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1, "blocks of the pool leaked"
        stats = self.cache.stats()["g2"]
        assert stats["pinned"] == stats["quarantined"] == 0, stats
        host = self.cache.manager.host
        filling = [slot.number for slot in host.index.values() if slot.state is not SlotState.READY]
        assert not filling, "slots that nobody fills"
        wrong = [slot.number for key, slot in host.index.items() if self.slots[slot.number] != key[-32:]]
        assert not wrong, "stored under another name than it was computed under"

    def close(self) -> None:
        self.cache.close()
