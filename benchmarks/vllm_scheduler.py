"""Cost of the vLLM connector's scheduler half to the engine's one scheduler thread, at size.

    python benchmarks/vllm_scheduler.py --save benchmarks/results

1,000 requests of 32k tokens run on a pool of 100k blocks of 16 tokens, in groups that share all but their last 50
blocks, with as many blocks in G2. No engine and no model: the half is called as vLLM's scheduler calls it, with
requests and steps made up here, and the pool is vLLM's own. CPU time of the thread, each figure over repetitions (four
times as many of events: at first none is forgotten for a later one).

    match         a new request finds 2,048 blocks in G2
    match_again   the engine asks for the same request once more, since it got no blocks
    allocated     the request has got blocks: its load
    plan          a step in which all requests decode one token; `completed` is its answer
    plan_storing  `plan` while 49,000 blocks wait to be stored, as after a mass start: steps in which some are chosen;
                  `completed_storing` publishes them
    failed_load   an answer in which one block of a load failed
    events        the engine's KV events of a request of 2,048 blocks: when it arrives, and when it is stored
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SIZE, REQUESTS, DEPTH, OWN, POOL = 16, 1000, 2048, 50, 100_000
GROUPS = (POOL - REQUESTS * OWN) // DEPTH
BLOCK_BYTES = 4096
KINDS = (
    "match", "match_again", "allocated", "plan", "completed", "plan_storing", "completed_storing", "failed_load",
    "events_arrived", "events_stored",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps in which all requests decode")
    parser.add_argument("--times", type=int, default=40, help="repetitions of everything else")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    from kvtier.bench.record import record, save

    entry = record("vllm_scheduler", ["python", *sys.argv], measured(args.steps, args.times))
    print(json.dumps(entry, indent=2))
    if args.save:
        save(entry, args.save)


def measured(steps: int, times: int) -> dict[str, Any]:
    """Milliseconds of CPU time: median, p99 and largest of each kind."""
    bench = Bench(steps)
    try:
        bench.fill()
        for _ in range(times):
            bench.load(failed=False)
        for _ in range(times):
            bench.load(failed=True)
        for _ in range(steps):
            bench.step()
        for _ in range(4 * times):  # so many that requests' contents are forgotten for later ones'
            bench.events()
    finally:
        bench.close()
    storing = Bench(steps, storing=True)
    try:
        storing.fill()
        for _ in range(steps):
            storing.step()
        bench.spent |= {kind: storing.spent[kind] for kind in ("plan_storing", "completed_storing")}
    finally:
        storing.close()
    shape = {"requests": REQUESTS, "blocks_each": DEPTH, "block_tokens": SIZE, "pool_blocks": POOL}
    return {**shape, "steps": steps, "times": times, "ms": {kind: summary(bench.spent[kind]) for kind in KINDS}}


def summary(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1e3 * one for one in seconds)
    figures = (statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], ordered[-1])
    return dict(zip(("median", "p99", "max"), (round(one, 4) for one in figures), strict=True))


class Asked(SimpleNamespace):
    """A request as vLLM's, as far as the connector looks at it."""

    lora_request = cache_salt = prompt_embeds = kv_transfer_params = None
    skip_reading_prefix_cache = False
    num_in_flight_tokens = 0

    def __init__(self, name: str, hashes: list[bytes], tokens: list[int]) -> None:
        super().__init__(request_id=name, block_hashes=hashes, all_token_ids=tokens)
        self.num_prompt_tokens = self.num_tokens = len(tokens)
        self.num_computed_tokens = 0


class Bench:
    """One scheduler half over a full G2, its requests, and what its calls cost."""

    def __init__(self, steps: int, storing: bool = False) -> None:
        """`storing`: of each request the blocks that are its own are not in G2 yet, and are to be stored at once."""
        from vllm.v1.core.block_pool import BlockPool

        import kvtier
        from kvtier.clock import SystemClock
        from kvtier.config import Config
        from kvtier.connectors.vllm.events import KVEvents
        from kvtier.connectors.vllm.messages import ArenaHandle
        from kvtier.connectors.vllm.requests import RequestReader
        from kvtier.connectors.vllm.scheduler import SchedulerHalf
        from kvtier.connectors.vllm.stores import ConnectorLimits
        from kvtier.testing import sample_namespace

        tiers = {"g2": {"capacity": f"{(POOL + 4096) * BLOCK_BYTES // 1024 + 1}KiB"}}
        config = Config.parse({"tiers": tiers, "offload": {"mode": "eager" if storing else "auto"}})
        self.cache = kvtier.open(config, sample_namespace(BLOCK_BYTES, block_tokens=SIZE))
        caches: Any = SimpleNamespace(
            cache=self.cache,
            namespace=self.cache.namespace,
            current=(self.cache, ArenaHandle(1, 0, (), 0, 0, 0)),
            close=lambda timeout_s: self.cache.close(),
        )
        limits = ConnectorLimits(1.0, 1.0, spill_ahead_blocks=64, weighs_loads=False)
        self._events = KVEvents(SIZE)
        self._half = SchedulerHalf(caches, RequestReader(config), config.offload, limits, 1, SystemClock())
        self._pool = BlockPool(POOL + DEPTH + REQUESTS * (steps // SIZE + 2), True, SIZE)
        self._half.bind(self._pool)
        self._dice = random.Random(0)
        self._running: list[Asked] = []
        self._heads = [self._hashes(DEPTH) for _ in range(GROUPS)]
        self._count = 0
        self._storing = storing
        self.spent: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def close(self) -> None:
        self.cache.close()

    def _hashes(self, count: int) -> list[bytes]:
        return [self._dice.randbytes(32) for _ in range(count)]

    def _timed(self, kind: str, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time()
        out = call(*arguments)
        self.spent[kind].append(time.thread_time() - began)
        return out

    def fill(self) -> None:
        """Everything is in G2, and all requests run."""
        from kvtier.identity.keys import SHARED, make_keys
        from kvtier.retention.terms import BUILTIN

        manager = self.cache.manager
        others = [self._hashes(DEPTH) for _ in range(POOL // DEPTH - GROUPS)]
        for hashes in others + self._heads:
            chain = make_keys(SHARED, hashes)
            manager.pin(chain).release()  # the request that computed them looked for them first
            for start in range(0, DEPTH, 256):
                slots, _ = manager.reserve(chain, start, start + 256, BUILTIN["1h"])
                manager.commit(chain, slots, [slot.generation for slot in slots])
            assert manager.prefix(chain) == DEPTH
        tables = [[block.block_id for block in self._pool.get_new_blocks(DEPTH)] for _ in self._heads]
        new = []
        for number in range(REQUESTS):
            group = number % GROUPS
            own = [block.block_id for block in self._pool.get_new_blocks(OWN)]
            hashes = self._heads[group][:-OWN] + self._hashes(OWN - 1)
            asked = Asked(f"running{number}", hashes, [1] * (SIZE * (DEPTH - 1) + number % SIZE + 1))
            asked.num_computed_tokens = asked.num_tokens
            self._half.arrive(asked)
            table = tables[group][:-OWN] + own
            if self._storing:
                named = 0 if number < GROUPS else DEPTH - OWN
                blocks = [self._pool.blocks[block] for block in table]
                self._pool.cache_full_blocks(asked, blocks, named, len(hashes), SIZE, 0)
            found = 0 if number < GROUPS else SIZE * (DEPTH - OWN)
            new.append(SimpleNamespace(req_id=asked.request_id, block_ids=(table,), num_computed_tokens=found))
            self._running.append(asked)
        for part in (slice(0, GROUPS), slice(GROUPS, None)):  # the first of each group finds its blocks in G2
            planned = {
                asked.request_id: asked.num_tokens - one.num_computed_tokens
                for asked, one in zip(self._running[part], new[part], strict=True)
            }
            self._answer(self._half.plan(self._output(planned, new=new[part])))
            while part.start == 0 and self._half._stores:
                self._answer(self._half.plan(self._output({})))

    def _output(self, planned: dict[str, int], new: Sequence[Any] = (), cached: Sequence[Any] = ()) -> Any:
        return SimpleNamespace(
            num_scheduled_tokens=planned,
            total_num_scheduled_tokens=sum(planned.values()),
            scheduled_new_reqs=new,
            scheduled_spec_decode_tokens={},
            preempted_req_ids=None,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one[0] for one in cached],
                new_block_ids=[one[1] for one in cached],
                num_computed_tokens=[one[2] for one in cached],
                resumed_req_ids=set(),
            ),
        )

    def _answer(self, meta: Any, kind: str = "", failed: bool = False) -> None:
        from kvtier.connectors.vllm.messages import WorkerMeta

        answers, bad = WorkerMeta(meta.step), set()
        for moves in (*meta.stores, *(load.moves for load in meta.loads)):
            answers.done[moves.job] = 1
        for load in meta.loads if failed else ():
            answers.failed[load.moves.job] = {7}
            bad = {load.moves.blocks[7]}
        info = SimpleNamespace(kv_connector_worker_meta=answers, invalid_block_ids=bad)
        if kind:
            self._timed(kind, self._half.completed, info)
        else:
            self._half.completed(info)

    def load(self, *, failed: bool) -> None:
        """A request finds all of its blocks, gets them, and ends."""
        self._count += 1
        head = self._heads[self._count % GROUPS]
        asked = Asked(f"new{self._count}", list(head), [1] * (SIZE * DEPTH + 1))
        self._half.arrive(asked)
        count, _ = self._timed("match", self._half.match, asked, 0)
        assert count == SIZE * DEPTH
        self._timed("match_again", self._half.match, asked, 0)
        blocks = self._pool.get_new_blocks(DEPTH)
        table = SimpleNamespace(get_block_ids=lambda: ([block.block_id for block in blocks],))
        self._timed("allocated", self._half.allocated, asked, table, count)
        self._answer(self._half.plan(self._output({})), "failed_load" if failed else "", failed)
        self._half.finish(asked)
        self._pool.free_blocks(reversed(blocks))

    def step(self) -> None:
        """All running requests decode one token; one in sixteen fills a block."""
        cached, planned = [], {}
        for asked in self._running:
            table = None
            if asked.num_computed_tokens % SIZE == 0:
                table = ([block.block_id for block in self._pool.get_new_blocks(1)],)
            cached.append((asked.request_id, table, asked.num_computed_tokens))
            planned[asked.request_id] = 1
        meta = self._timed("plan", self._half.plan, self._output(planned, cached=cached))
        if meta.stores:
            self.spent["plan_storing"].append(self.spent["plan"].pop())
        for asked in self._running:
            asked.num_tokens += 1
            asked.num_computed_tokens += 1
            if asked.num_tokens % SIZE == 0:
                asked.block_hashes.append(self._dice.randbytes(32))
        self._answer(meta, "completed_storing" if meta.stores else "completed")

    def events(self) -> None:
        """A request arrives, and its blocks are stored."""
        from kvtier.identity.keys import SHARED, make_keys
        from kvtier.manager.slices import MOVED_BLOCKS, slices

        asked = Asked("", self._hashes(DEPTH), list(range(SIZE * DEPTH)))
        chain = make_keys(SHARED, asked.block_hashes)
        self._timed("events_arrived", self._events.remember, asked, chain, 0)
        notify = self._events.events.of("g2")

        def stored() -> None:
            for part in slices(chain, MOVED_BLOCKS):
                notify(part, True)
            assert len(list(self._events.take())) == 1

        self._timed("events_stored", stored)


if __name__ == "__main__":
    main()
