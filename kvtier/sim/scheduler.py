"""The scheduler of a virtual engine: plans steps over a paged pool, and asks the real connector, as vLLM's does.

    a request comes  → `arrive`: waits in a queue, and is told to the connector
    `schedule`       → prefix of the pool and of the connector, blocks, chunks of prompts, decoding; preemption where
                       blocks run out
    `update`         → what a step has brought: tokens are known, loads have ended or failed, requests end

Nothing that the connector does may raise here. A request that waits for the connector waits within its bounds.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from kvtier.connectors.vllm.scheduler import SchedulerHalf
from kvtier.identity.keys import BlockKey
from kvtier.sim.asked import SIZE, Asked
from kvtier.sim.attach import ACK_S, LOOKUP_S
from kvtier.sim.device import HANG_S
from kvtier.sim.history import EngineShape
from kvtier.sim.ledger import Before, Ledger, Wrong
from kvtier.sim.pool import Pool, PoolBlock
from kvtier.sim.workers import Forward, Results, Workers

_LEASE_S = 1.0
"""The connector keeps what it found for a request so long."""
STEP_S = 2.0
"""No step takes longer, nor do steps without work come more rarely."""
LOAD_S = ACK_S + HANG_S + 15 * STEP_S
"""A load is answered by then: it is cancelled after ACK_S, and copies that were begun end, one after the other."""


class Scheduler:
    """See the module. `before` gives what the ledger knows of blocks; `told` hears what happens; `later` does something
    before the next step is planned."""

    def __init__(
        self,
        name: str,
        shape: EngineShape,
        half: SchedulerHalf,
        workers: Workers,
        ledger: Ledger,
        rng: random.Random,
        before: Callable[[Sequence[BlockKey]], dict[BlockKey, Before]],
        leapt: Callable[[], float],
        told: Callable[[str], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self.half, self.workers = half, workers
        self.pool = Pool(shape.blocks, shape.caching)
        self.requests: dict[str, Asked] = {}
        self.loaded = 0
        """Blocks."""
        self._name, self._shape, self._ledger, self._rng = name, shape, ledger, rng
        self._before, self._leapt, self._told, self._later = before, leapt, told, later
        self._waiting: deque[Asked] = deque()
        self._holding: deque[Asked] = deque()  # wait, too, with blocks of their own; they come first
        self._running: list[Asked] = []
        self._received: set[str] = set()
        self._lost: set[str] = set()  # requests whose loads failed
        self._preempted: list[str] = []  # outside of planning
        self._finished: list[str] = []
        self._deferred: deque[tuple[int, list[PoolBlock]]] = deque()
        self._numbers = self._step = self._over = 0
        half.bind(self.pool)

    def arrive(self, args: Mapping[str, Any]) -> None:
        self._numbers += 1
        asked = Asked(f"{self._name}.{self._numbers}", args, self._now())
        if -(-(asked.num_prompt_tokens + asked.wanted + 2) // SIZE) >= self._shape.blocks:
            return
        asked.uses.enter_context(self._ledger.using(asked.chain))
        self.requests[asked.request_id] = asked
        self._waiting.append(asked)
        self.half.arrive(asked)

    def abort(self, which: int) -> None:
        if living := [asked for asked in self.requests.values() if asked.state != "over"]:
            self._leave(living[which % len(living)])

    def _leave(self, asked: Asked) -> None:
        if asked.state != "over":
            self._told(f"{asked.request_id} is aborted, {asked.state}")
            self._finish(asked)

    def preempt_some(self, which: int) -> None:
        victims = (
            self._running[:] if which < 0 else self._running[which % len(self._running) :][:1] if self._running else []
        )
        for asked in reversed(victims):
            self._running.remove(asked)
            self._preempt(asked, drops=True)
            self._preempted.append(asked.request_id)

    def _now(self) -> float:
        return self._ledger.now() - self._leapt()

    # -- planning ---------------------------------------------------------------------------------------------------

    async def schedule(self) -> tuple[Any, list[Forward]]:
        self._step += 1
        preempted, self._preempted = self._preempted, []
        finished, self._finished = self._finished, []
        tokens: dict[str, int] = {}
        samples: set[str] = set()
        output = SimpleNamespace(
            num_scheduled_tokens=tokens, samples=samples, step=self._step, total_num_scheduled_tokens=0,
            scheduled_new_reqs=[], preempted_req_ids=preempted, finished_req_ids=finished,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
        )  # fmt: skip
        passes: list[Forward] = []
        self._plan_running(output, passes)
        if not preempted:
            await self._plan_waiting(output, passes)
        output.total_num_scheduled_tokens = sum(tokens.values())
        return output, passes

    def _left(self, output: Any) -> int:
        return int(self._shape.batch - sum(output.num_scheduled_tokens.values()))

    def _plan_running(self, output: Any, passes: list[Forward]) -> None:
        for asked in self._running[:]:
            if asked not in self._running:
                continue  # preempted for one before it
            count = min(self._new_tokens(asked), self._left(output))
            if count <= 0:
                continue
            while (more := self._lacks(asked, asked.num_computed_tokens + count)) > self.pool.get_num_free_blocks():
                victim = self._running.pop()
                self._preempt(victim, drops=False)
                output.preempted_req_ids.append(victim.request_id)
                if victim is asked:
                    return
            taken = self.pool.take(more)
            asked.blocks += taken
            self._plan(asked, count, [block.block_id for block in taken], output, passes)

    def _new_tokens(self, asked: Asked) -> int:
        """Tokens that it lacks. One that ends by its length is not planned beyond that, others by a step."""
        sampled = asked.sampled + asked.placeholders
        if sampled >= asked.wanted + (not asked.by_length):
            return 0
        return asked.num_tokens + asked.placeholders - asked.num_computed_tokens

    def _lacks(self, asked: Asked, tokens: int) -> int:
        return max(0, -(-tokens // SIZE) - len(asked.blocks))

    def _plan(self, asked: Asked, count: int, more: list[int], output: Any, passes: list[Forward]) -> None:
        """The step computes so many tokens of it; `more` blocks were appended to its table."""
        name, begin = asked.request_id, asked.num_computed_tokens
        end = begin + count
        cached = output.scheduled_cached_reqs
        if not asked.told:
            row = SimpleNamespace(req_id=name, block_ids=(asked.ids,), num_computed_tokens=begin)
            if asked.preempted:
                cached.resumed_req_ids.add(name)
                cached.req_ids.append(name)
                cached.new_block_ids.append((asked.ids,))
                cached.num_computed_tokens.append(begin)
            else:
                output.scheduled_new_reqs.append(row)
            asked.told = True
        else:
            cached.req_ids.append(name)
            cached.new_block_ids.append((more,) if more else None)
            cached.num_computed_tokens.append(begin)
        output.num_scheduled_tokens[name] = count
        if end >= asked.num_tokens + asked.placeholders:
            output.samples.add(name)
            asked.placeholders += 1
        asked.num_computed_tokens = end
        asked.num_in_flight_tokens += count
        asked.last_sched_step = output.step
        self._name_blocks(asked, min(end, asked.num_tokens))
        passes.append(Forward(asked, tuple(asked.ids), begin, end))

    def _name_blocks(self, asked: Asked, tokens: int) -> None:
        full = tokens // SIZE
        if self._shape.caching and full > asked.named:
            self.pool.name(asked.blocks[asked.named : full], asked.block_hashes[asked.named : full])
            asked.named = full

    async def _plan_waiting(self, output: Any, passes: list[Forward]) -> None:
        skipped: list[Asked] = []
        while len(self._running) < self._shape.running and self._left(output) > 0:
            queue = self._holding or self._waiting
            if not queue:
                break
            asked = queue.popleft()
            placed = (asked.state != "loading" or self._arrived(asked)) and await self._place(asked, output, passes)
            if placed is None:
                queue.appendleft(asked)
                break
            if not placed:
                skipped.append(asked)
        # As in vLLM from 0.31 on: what holds blocks is not kept waiting by what has none, and would wait for theirs.
        self._holding.extendleft(reversed([asked for asked in skipped if asked.blocks]))
        self._waiting.extendleft(reversed([asked for asked in skipped if not asked.blocks]))

    def _arrived(self, asked: Asked) -> bool:
        """Whether the load that it waits for has ended; then it waits for its turn."""
        name = asked.request_id
        if name not in self._received:
            if self._now() - asked.loads_since_s > LOAD_S:
                raise Wrong(f"{name} waits for a load for {self._now() - asked.loads_since_s:.1f} s")
            return False
        self._received.discard(name)
        asked.state = "waiting"
        if name in self._lost and not asked.num_computed_tokens:
            self._free(asked)
        else:
            self._name_blocks(asked, asked.num_computed_tokens)
        self._lost.discard(name)
        if asked.num_computed_tokens == asked.num_tokens:
            asked.num_computed_tokens -= 1
        return True

    async def _place(self, asked: Asked, output: Any, passes: list[Forward]) -> bool | None:
        """Give it blocks. False: it waits on, perhaps with blocks; None: there are not enough."""
        own: list[PoolBlock] = []
        count, apart = 0, False
        if not asked.num_computed_tokens:
            readable = (asked.num_tokens - 1) // SIZE
            own = self.pool.find(asked.block_hashes[:readable]) if self._shape.caching else []
            found, apart = self._match(asked, len(own) * SIZE)
            if found is None:
                return False
            count = found
            await self._yield()
        begin = (asked.num_computed_tokens or len(own) * SIZE) + count
        tokens = 0 if apart else min(asked.num_tokens - begin, self._left(output))
        more = -(-(begin + tokens) // SIZE) - len(asked.blocks) - len(own)
        whole = self._lacks(asked, asked.num_tokens) - len(own) + self._reserved() if apart else 0
        if max(0, more, whole) + sum(block.ref_cnt == 0 for block in own) > self.pool.get_num_free_blocks():
            return None
        self.pool.touch(own)
        if own:
            self._ledger.offered(asked.chain[: len(own)])
        taken = self.pool.take(max(0, more))
        asked.blocks += [*own, *taken]
        asked.named = max(asked.named, len(own))
        asked.num_computed_tokens = begin
        if count:
            first = begin - count
            asked.loads, asked.loads_since_s = range(first // SIZE, begin // SIZE), self._now()
            asked.before = self._known(asked)
        asked.asks.clear()
        ids = asked.ids
        self.half.allocated(asked, SimpleNamespace(get_block_ids=lambda: (ids,)), count)
        if apart:
            asked.state = "loading"
            if asked.leaves_loading:
                self._later(lambda: self._leave(asked))
            return False
        asked.state = "running"
        self._running.append(asked)
        self._plan(asked, tokens, [], output, passes)
        return True

    def _reserved(self) -> int:
        """Blocks that prompts under way lack. Loads hold theirs until their turn: without these, none might come."""
        return sum(self._lacks(asked, asked.num_tokens) for asked in [*self._holding, *self._running])

    def _known(self, asked: Asked) -> dict[BlockKey, Before]:
        """What is known of the blocks that it is offered. They may have been found some time ago, and purged since."""
        out: dict[BlockKey, Before] = {}
        for at, known in reversed(asked.asks):
            if at >= self._now() - _LEASE_S - STEP_S:
                for key, then in known.items():
                    late = out.get(key, then)
                    out[key] = replace(then, put_ended=late.put_ended, used=late.used)
        return out

    def _match(self, asked: Asked, computed: int) -> tuple[int | None, bool]:
        now, readable = self._now(), (asked.num_tokens - 1) // SIZE
        asked.asks.append((now, self._before(asked.chain[:readable])))
        found, apart = self.half.match(asked, computed)
        if found is None:
            since = asked.unsure_since_s = now if asked.unsure_since_s is None else asked.unsure_since_s
            if now - since > LOOKUP_S + 2 * STEP_S:
                raise Wrong(f"{asked.request_id} waits for a look-up for {now - since:.1f} s")
            return None, False
        asked.unsure_since_s = None
        if found and asked.failed:
            raise Wrong(f"{asked.request_id} is offered a load again that failed")
        if found % SIZE or computed + found >= asked.num_tokens or found < 0 or (apart and not found):
            raise Wrong(f"{asked.request_id} of {asked.num_tokens} tokens is offered {found} behind {computed}")
        return found, apart

    async def _yield(self) -> None:
        """Other threads of the process have a turn."""
        for _ in range(self._rng.choice((0, 0, 0, 1, 3))):
            await asyncio.sleep(0)

    # -- what a step has brought ------------------------------------------------------------------------------------

    def update(self, output: Any, results: Results) -> None:
        self._over = output.step
        while self._deferred and self._deferred[0][0] <= self._over:
            self.pool.free_blocks(reversed(self._deferred.popleft()[1]))
        spoilt = self._distrust(results.bad, output.num_scheduled_tokens)
        for name, count in output.num_scheduled_tokens.items():
            asked = self.requests.get(name)
            if asked is None:
                continue
            asked.num_in_flight_tokens -= count
            stale = asked.stale > 0
            asked.stale -= count if stale else 0
            samples = name in output.samples
            if name in spoilt:
                asked.placeholders = 0
                continue
            if asked.state == "over" or (stale and asked.drops_stale):
                continue
            if not stale:
                self._settle_in_step(asked)
                asked.placeholders -= samples
                self._ledger.offered(asked.chain[: (asked.num_computed_tokens - asked.num_in_flight_tokens) // SIZE])
            if samples and not asked.done:
                asked.sample()
                if asked.done:
                    self._told(f"{name} is answered")
                    self._finish(asked)
        self.half.completed(
            SimpleNamespace(kv_connector_worker_meta=results.meta, invalid_block_ids=results.bad or None)
        )
        for name in results.received:
            asked = self.requests[name]
            if asked.state == "over":
                self._forget(asked)
                continue
            if asked.state != "loading":
                raise Wrong(f"a load of {name} has ended, which waits for none")
            self._received.add(name)
            self._settle(asked)
        for name in results.freed:
            self._forget(self.requests[name])

    def _distrust(self, bad: set[int], planned: Mapping[str, int]) -> set[str]:
        """Loads left these blocks without content. Returns requests that compute again from there on, in place."""
        spoilt: set[str] = set()
        marked: set[int] = set()
        for asked in [*self._holding, *self._running] if bad else ():
            if asked.state == "waiting":
                continue
            computed = asked.num_computed_tokens - planned.get(asked.request_id, 0)
            held = asked.ids[: -(-computed // SIZE)]
            hit = [depth for depth, block in enumerate(held) if block in bad]
            if not hit:
                continue
            asked.failed = True
            fresh = [depth for depth in hit if held[depth] not in marked]
            marked.update(held[depth] for depth in fresh)
            asked.num_computed_tokens = fresh[0] * SIZE if fresh else computed
            if asked.state == "loading":
                self._lost.add(asked.request_id)
            else:
                spoilt.add(asked.request_id)
        return spoilt

    def _settle(self, asked: Asked) -> None:
        """A load of it has ended: what it has brought is compared, up to what has failed."""
        good = [depth for depth in asked.loads if (depth + 1) * SIZE <= asked.num_computed_tokens]
        keys = [asked.chain[depth] for depth in good]
        for copies in zip(*(self.workers.block(asked.blocks[depth].block_id) for depth in good), strict=True):
            self._ledger.compare(keys, copies, asked.before)
        self.loaded += len(good)
        self._told(f"{asked.request_id} has loaded {len(good)} of {len(asked.loads)}")
        asked.loads = range(0)

    def _settle_in_step(self, asked: Asked) -> None:
        if asked.loads:
            self._settle(asked)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _finish(self, asked: Asked) -> None:
        """It is answered, or its client has gone."""
        waits = asked.state == "loading" and asked.request_id not in self._received
        self._received.discard(asked.request_id)
        self._lost.discard(asked.request_id)
        if asked in self._running:
            self._running.remove(asked)
            if not asked.stale:  # of a step under way, too: it ends though nobody waits for its answer
                self._ledger.offered(asked.chain[: asked.num_computed_tokens // SIZE])
        for queue in (self._holding, self._waiting):
            if asked in queue:
                queue.remove(asked)
        asked.state = "over"
        held, _ = self.half.finish(asked)
        self._finished.append(asked.request_id)
        if not (waits or held):
            self._forget(asked)

    def _forget(self, asked: Asked) -> None:
        self._free(asked)
        asked.uses.close()
        del self.requests[asked.request_id]

    def _preempt(self, asked: Asked, *, drops: bool) -> None:
        self._free(asked)
        asked.state = "waiting"
        asked.num_computed_tokens = asked.placeholders = 0
        asked.drops_stale = drops or (asked.drops_stale and asked.stale > 0)
        asked.stale = asked.num_in_flight_tokens
        asked.preempted = True
        asked.loads = range(0)
        self._waiting.appendleft(asked)
        self._told(f"{asked.request_id} is preempted")

    def _free(self, asked: Asked) -> None:
        blocks, asked.blocks, asked.named, asked.told = asked.blocks, [], 0, False
        if self._shape.defers and asked.last_sched_step > self._over:
            self._deferred.append((asked.last_sched_step, blocks))
        else:
            self.pool.free_blocks(reversed(blocks))
