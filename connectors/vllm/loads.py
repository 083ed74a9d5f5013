"""Loads: blocks on their way from G2 into vLLM's pool, from the request's allocation to every rank's answer.

A load *in step* is over before the forward of the step that it is planned for, which computes the rest of the request.
The engine has named its blocks by then, and those that are computed behind them: until the step has run no other
request may build upon them, and if the load failed, their names are taken back.

A load that takes longer than its request's patience is cancelled: what has not come is computed. So is one that some
rank leaves unanswered for `ack_timeout_s`; until all such loads are answered, none is offered: `late`. The memory of a
cancelled load belongs to the copy until its answer, like that of any other.

Called on the engine's one scheduler thread; nothing here waits.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import takewhile

from kvtier.clock import Clock
from kvtier.connectors.counters import tokens_by_tier
from kvtier.connectors.vllm.compat import EnginePool
from kvtier.connectors.vllm.messages import Load, StepMoves
from kvtier.connectors.vllm.requests import RequestState
from kvtier.identity.keys import BlockKey
from kvtier.manager.lease import Lease
from kvtier.manager.manager import Manager
from kvtier.tiers.protocol import Miss
from kvtier.times import Mono

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Loading:
    """One job. A refused one has no lease: all of it fails."""

    name: str
    state: RequestState | None
    lease: Lease | None
    also: Lease | None  # of other groups' blocks, which come with these or not at all
    blocks: tuple[int, ...]
    start: int
    count: int  # leading `blocks` that are the chain's
    since_s: Mono
    in_step: bool = False
    patience_s: float = math.inf
    given_up: bool = False
    ranks: int = 0
    failed: set[int] = field(default_factory=set)
    table: tuple[int, ...] = ()  # of a load in step: the request's, as it was then


class Loads:
    """See the module. Owns the leases of loads under way; `counters` are the half's."""

    def __init__(
        self,
        ranks: int,
        block_tokens: int,
        ack_timeout_s: float,
        in_step_max: int,
        clock: Clock,
        counters: Counter[str],
        job: Callable[[], int],
    ) -> None:
        """At most `in_step_max` blocks are loaded within one step. `job` returns a new number of a job at each call."""
        self.ranks = ranks
        self.ack_timeout_s = ack_timeout_s
        self._in_step_max = in_step_max
        self._clock = clock
        self._block_tokens = block_tokens
        self._counters = counters
        self._job = job
        self._planned: list[Load] = []
        self._loading: dict[int, _Loading] = {}
        self._job_of: dict[str, int] = {}  # of a request that waits
        self._cancelled: set[int] = set()  # since a rank left them unanswered
        self._patience: list[tuple[float, int]] = []  # a heap: until when a job is waited for
        self._in_step_blocks = 0  # of loads within the step being planned
        self._named: list[tuple[int, BlockKey | None]] = []  # depth and name of the first block of loads in this step

    def __len__(self) -> int:
        """Loads that some rank has not answered."""
        return len(self._loading)

    @property
    def late(self) -> bool:
        """Whether a rank has left a load unanswered that is still under way."""
        return bool(self._cancelled)

    def waits(self, name: str) -> bool:
        """Whether the request has a load that some rank has not answered: until then its blocks belong to the copy. One
        within a step is over with the step."""
        work = self._loading.get(self._job_of.get(name, -1))
        return work is not None and not work.in_step

    def fit_in_step(self, blocks: int) -> bool:
        """Whether so many more may be loaded within the step being planned."""
        return self._in_step_blocks + blocks <= self._in_step_max

    def builds_upon(self, chain: Sequence[BlockKey], blocks: int) -> bool:
        """Whether the first `blocks` of a chain, which the engine's pool has, contain some that are loaded in the step
        being planned. A request without names may be any."""
        return any(
            depth < blocks and (name is None or depth >= len(chain) or chain[depth] == name)
            for depth, name in self._named
        )

    def read(self, state: RequestState) -> Counter[str]:
        """Tokens by tier that a request has read which ends now. If it ends with the step that loaded them, no answer
        has been taken yet; had that load failed, the engine would not have ended it."""
        return state.read + self._within(state)

    def reread(self, state: RequestState) -> Counter[str]:
        """Those of `read` that it had before, until it lost its blocks: of its prompt, and of what it generated."""
        return state.reread + (self._within(state) if state.resumed else Counter[str]())

    def _within(self, state: RequestState) -> Counter[str]:
        """Tokens by tier of the load in the step that it ends with."""
        return Counter(self.sources(state.track.name) if state.in_step else {})

    def unname(self, pool: EnginePool | None, bad: set[int]) -> None:
        """Take back the names of blocks that do not hold what the engine named them, since loads in the step that has
        run left these `bad` ones without content: all of their requests from the first bad one on."""
        found: set[int] = set()
        for work in self._loading.values():
            first = next((at for at, block in enumerate(work.blocks) if block in bad), None) if work.in_step else None
            if first is not None:
                found.update(work.table[work.start + first :])
        if found and pool is not None:
            pool.unname(found)

    def plan(self, manager: Manager | None, state: RequestState, count: int, patience_s: float = math.inf) -> None:
        """Load `count` blocks into the request's table, from the start of its lease on, and with them its `more` of
        other groups; they are waited for so long. Both leases are this object's from now on. Raises AssertionError
        where fewer are pinned."""
        lease, start = state.lease, state.lease_start
        pinned = 0 if lease is None else len(lease)
        if lease is not None:  # now, since it is forgotten when the request ends, which may be before the answer
            lease.tiers = state.promoted.tiers(start, count)
            lease.miss = state.promoted.miss(start + count) or lease.miss
        if lease is None or not 0 < count <= pinned:
            self._record(manager, state, None if count else lease, 0)
            state.drop_lease()
            if count:
                raise AssertionError(f"{count} blocks are to be loaded, {pinned} are pinned")
            return
        numbers, generations = lease.places(count)
        moves = StepMoves(
            self._job(),
            (*state.track.table[start : start + count], *(block for block, _ in state.more)),
            (*numbers, *(slot.number for _, slot in state.more)),
            (*generations, *(slot.generation for _, slot in state.more)),
        )
        if state.in_step:
            self._named.append((start, state.track.chain[start]))
            self._in_step_blocks += count
        self._begin(state.track.name, state, lease, moves, start, count)
        self._loading[moves.job].patience_s = math.inf if state.in_step else patience_s
        state.lease, state.also, state.more = None, None, ()

    def refuse(self, name: str, state: RequestState | None, table: Sequence[int]) -> None:
        """The load into the request's table went wrong here, and it waits: have the workers report the blocks as failed
        from where it was to begin. Those before hold what they should, and others may be computing with them."""
        blocks = table if state is None else table[state.lease_start :]
        if state is not None and state.in_step:
            self._named.append((0, None))
        self._begin(name, state, None, StepMoves(self._job(), tuple(blocks), (), ()), 0, 0)

    def _begin(
        self, name: str, state: RequestState | None, lease: Lease | None, moves: StepMoves, start: int, count: int
    ) -> None:
        also = state.also if state is not None and lease is not None else None
        in_step = state is not None and state.in_step
        work = _Loading(name, state, lease, also, moves.blocks, start, count, self._clock.monotonic(), in_step)
        if state is not None and in_step:
            work.table = tuple(state.track.table) if lease is not None else moves.blocks
        load = Load(name, moves, state.adapter if state is not None and lease is not None else None, in_step)
        self._loading[moves.job] = work
        self._job_of[name] = moves.job
        self._planned.append(load)

    def overdue(self) -> list[int]:
        """Loads that have waited for an answer for too long: the workers are to cancel them."""
        now = self._clock.monotonic()
        until = now - self.ack_timeout_s
        old = takewhile(lambda item: item[1].since_s <= until, self._loading.items())
        jobs = [job for job, _ in old if job not in self._cancelled]
        if jobs:
            log.error("%d loads unanswered for %.0f s are cancelled", len(jobs), self.ack_timeout_s)
            self._counters["loads_cancelled"] += len(jobs)
            self._cancelled.update(jobs)
        while self._patience and self._patience[0][0] <= now:
            work = self._loading.get(job := heapq.heappop(self._patience)[1])
            if work is not None and job not in self._cancelled:
                work.given_up = True
                jobs.append(job)
        return jobs

    def own(self, bad: set[int], failed: Mapping[int, set[int]]) -> set[int]:
        """The `bad` blocks that these `failed` moves account for, where their request alone has them, and waits."""
        loads = ((self._loading.get(job), places) for job, places in failed.items())
        own = [
            work.blocks[at]
            for work, places in loads
            if work is not None and work.lease is not None and not work.in_step
            for at in places
        ]
        return bad.intersection(own)

    def take(self) -> list[Load]:
        """Loads that are planned and were not taken yet: their requests wait for an answer, whatever happens."""
        now = self._clock.monotonic()
        for load in self._planned:  # from now on they are waited for: a worker cannot cancel what it was not told of
            work = self._loading.get(load.moves.job)
            if work is not None and math.isfinite(work.patience_s):
                heapq.heappush(self._patience, (now + work.patience_s, load.moves.job))
        loads, self._planned = self._planned, []  # after all that can fail: what is lost here is waited for in vain
        self._named.clear()  # the next step is planned when this one has been answered
        self._in_step_blocks = 0
        return loads

    def sources(self, name: str) -> dict[str, int]:
        """Tokens of the load that was just planned for a request, by the tier they were found in."""
        work = self._loading.get(self._job_of.get(name, -1))
        if work is None or work.state is None or work.lease is None:
            return {}
        return tokens_by_tier(work.lease.tiers, self._block_tokens)

    def answer(self, manager: Manager | None, job: int, ranks: int, failed: set[int]) -> bool:
        """So many more ranks are done with a job, whose moves at these positions went wrong. False: it is no load."""
        work = self._loading.get(job)
        if work is None:
            return False
        work.ranks += ranks
        work.failed |= failed
        if work.ranks >= self.ranks:
            del self._loading[job]
            self._cancelled.discard(job)
            if self._job_of.get(work.name) == job:
                del self._job_of[work.name]
            self._loaded(manager, work)
        return True

    def _loaded(self, manager: Manager | None, work: _Loading) -> None:
        given_up = work.given_up and bool(work.failed)
        self._counters["loads_given_up" if given_up else "load_failures"] += 1 if given_up else len(work.failed)
        state, lease = work.state, work.lease
        if state is None:
            return
        state.load_failed |= bool(work.failed)  # it would fail again: nothing more is offered to this request
        state.given_up |= given_up
        if lease is None:
            return
        with lease, work.also or nullcontext():
            good = min(work.failed, default=work.count) if work.also is None or not work.failed else 0
            state.track.load_begin = work.start * self._block_tokens
            state.track.loaded = (work.start + good) * self._block_tokens
            miss = Miss.SLOWER if given_up else Miss.ERROR if work.failed else None
            self._record(manager, state, lease, good, miss)

    def _record(
        self,
        manager: Manager | None,
        state: RequestState,
        lease: Lease | None,
        good: int,
        miss: Miss | None = None,
    ) -> None:
        """Record what a request asked for, once per question: the first `good` blocks of `lease` were truly read, and
        the next was not, because of `miss`; None: for the lease's own reason."""
        asked, state.asked = state.asked, 0
        if lease is not None:
            state.why = str(miss or lease.miss or "")
        if manager is None or lease is None or not asked:
            return
        lease.miss, lease.tiers = miss or lease.miss, lease.tiers[:good]
        tokens = tokens_by_tier(lease.tiers, self._block_tokens)
        state.read += tokens
        if state.resumed:
            state.reread += tokens
        self._counters.update({f"tokens_read_{tier}": count for tier, count in tokens.items()})
        manager.count(lease, asked)

    def close(self) -> None:
        """Release every lease."""
        for work in self._loading.values():
            for lease in (work.lease, work.also):
                if lease is not None:
                    lease.release()
