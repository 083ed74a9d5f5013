"""Loads: blocks on their way from G2 into vLLM's pool, from the request's allocation to every rank's answer.

Called on the engine's one scheduler thread; nothing here waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.connectors.counters import tokens_by_tier
from kvtier.connectors.vllm.messages import Load, StepMoves
from kvtier.connectors.vllm.requests import RequestState
from kvtier.manager.lease import Lease
from kvtier.manager.manager import Manager
from kvtier.tiers.protocol import Miss


@dataclass(slots=True, eq=False)
class _Loading:
    state: RequestState
    lease: Lease
    start: int
    count: int
    ranks: int = 0
    failed: set[int] = field(default_factory=set)


class Loads:
    """See the module. Owns the leases of loads under way; `counters` are the half's."""

    def __init__(self, ranks: int, block_tokens: int, counters: Counter[str], job: Callable[[], int]) -> None:
        """`job` returns a new number of a job at each call."""
        self.ranks = ranks
        self._block_tokens = block_tokens
        self._counters = counters
        self._job = job
        self._planned: list[Load] = []
        self._loading: dict[int, _Loading] = {}

    def __len__(self) -> int:
        """Loads that some rank has not answered."""
        return len(self._loading)

    def plan(self, manager: Manager | None, state: RequestState, count: int) -> None:
        """Load `count` blocks into the request's table, from the start of its lease on, which this object owns from now
        on. Raises AssertionError where fewer are pinned."""
        lease, state.lease, start = state.lease, None, state.lease_start
        pinned = 0 if lease is None else len(lease)
        if lease is None or not 0 < count <= pinned:
            self._record(manager, state, None if count else lease, start, 0)
            if lease is not None:
                lease.release()
            if count:
                raise AssertionError(f"{count} blocks are to be loaded, {pinned} are pinned")
            return
        job = self._job()
        self._loading[job] = _Loading(state, lease, start, count)
        slots = lease.slots[:count]
        moves = StepMoves(
            job,
            tuple(state.track.table[start : start + count]),
            tuple(slot.number for slot in slots),
            tuple(slot.generation for slot in slots),
        )
        self._planned.append(Load(state.track.name, moves))

    def refuse(self, name: str, blocks: Sequence[int]) -> None:
        """The request's load went wrong here, and it waits: have the workers report these blocks as failed."""
        self._planned.append(Load(name, StepMoves(self._job(), tuple(blocks), (), ())))

    def take(self) -> list[Load]:
        """Loads that are planned and were not taken yet: their requests wait for an answer, whatever happens."""
        loads, self._planned = self._planned, []
        return loads

    def sources(self, name: str) -> dict[str, int]:
        """Tokens of the load that was just planned for a request, by the tier they were found in."""
        for work in self._loading.values():
            if work.state.track.name == name:
                return tokens_by_tier(work.state.promoted.tiers(work.start, work.count), self._block_tokens)
        return {}

    def answer(self, manager: Manager | None, job: int, ranks: int, failed: set[int]) -> bool:
        """So many more ranks are done with a job, whose moves at these positions went wrong. False: it is no load."""
        work = self._loading.get(job)
        if work is None:
            return False
        work.ranks += ranks
        work.failed |= failed
        if work.ranks >= self.ranks:
            del self._loading[job]
            self._loaded(manager, work)
        return True

    def _loaded(self, manager: Manager | None, work: _Loading) -> None:
        good = min(work.failed, default=work.count)
        track = work.state.track
        track.load_begin = work.start * self._block_tokens
        track.loaded = (work.start + good) * self._block_tokens
        self._counters["load_failures"] += len(work.failed)
        with work.lease:
            self._record(manager, work.state, work.lease, work.start, good, bool(work.failed))

    def _record(
        self,
        manager: Manager | None,
        state: RequestState,
        lease: Lease | None,
        start: int,
        good: int,
        failed: bool = False,
    ) -> None:
        """Record what a request asked for, once per question: `good` blocks from `start` on were truly read."""
        asked, state.asked = state.asked, 0
        if manager is None or lease is None or not asked:
            return
        lease.miss = Miss.ERROR if failed else state.promoted.miss(start + good) or lease.miss
        lease.tiers = state.promoted.tiers(start, good)
        tokens = tokens_by_tier(lease.tiers, self._block_tokens)
        state.read += tokens
        self._counters.update({f"tokens_read_{tier}": count for tier, count in tokens.items()})
        manager.count(lease, asked)

    def close(self) -> None:
        """Release every lease."""
        for work in self._loading.values():
            work.lease.release()
