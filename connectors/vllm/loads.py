"""Blocks on their way from G2 into vLLM's pool: promised to a request, commanded, answered by every rank, accounted.

Called on the engine's one scheduler thread; nothing here waits.
"""

from __future__ import annotations

import concurrent.futures
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.connectors.common import Control
from kvtier.connectors.feedback import Pinning
from kvtier.connectors.vllm.confirm import Track
from kvtier.connectors.vllm.messages import Load, StepMoves
from kvtier.identity.keys import Scope
from kvtier.manager.lease import Lease
from kvtier.manager.manager import Manager
from kvtier.tiers.protocol import Miss


@dataclass(frozen=True, slots=True)
class Fetched:
    """What promotion left in G2 for a request: blocks 0 … hit-1, those that came from below by depth and tier, and why
    it ended there; None: there is no more."""

    hit: int
    tiers: Mapping[int, str]
    miss: Miss | None


_NOTHING = Fetched(0, {}, None)


@dataclass(slots=True, eq=False)
class RequestState:
    """One request between arrival and end."""

    track: Track
    scope: Scope | None
    control: Control
    prefetch: concurrent.futures.Future[Fetched] | None = None
    pinning: Pinning | None = None
    ask_until: float | None = None
    lease: Lease | None = None
    lease_start: int = 0
    lease_usable: int = 0
    lease_until: float = 0.0
    asked: int = 0  # blocks beyond the engine's own hit, until they are booked
    read: Counter[str] = field(default_factory=Counter)  # tokens by tier

    def tiers(self, start: int, count: int) -> list[str]:
        """Where blocks from depth `start` on were found: G2, unless they were promoted for this request."""
        known = self._fetched().tiers
        return [known.get(depth, "g2") for depth in range(start, start + count)]

    def why(self, hit: int, miss: Miss | None) -> Miss | None:
        """Why blocks from depth `hit` on were not served, where G2 by itself says `miss`."""
        if self.prefetch is not None and not self.prefetch.done():
            return Miss.LATE
        fetched = self._fetched()
        return fetched.miss if fetched.miss is not None and fetched.hit == hit else miss

    def _fetched(self) -> Fetched:
        done = self.prefetch if self.prefetch is not None and self.prefetch.done() else None
        return _NOTHING if done is None or done.cancelled() or done.exception() is not None else done.result()

    def drop_lease(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None


@dataclass(slots=True, eq=False)
class _Loading:
    visit: RequestState
    lease: Lease
    start: int
    count: int
    ranks: int = 0
    failed: set[int] = field(default_factory=set)


class Loads:
    """See the module. Owns the leases of loads under way; `counters` are the half's."""

    def __init__(self, ranks: int, block_tokens: int, counters: Counter[str], job: Callable[[], int]) -> None:
        """`job` gives numbers that nobody else uses."""
        self.ranks = ranks
        self._block_tokens = block_tokens
        self._counters = counters
        self._job = job
        self._promised: list[Load] = []
        self._loading: dict[int, _Loading] = {}

    def __len__(self) -> int:
        """Loads that some rank has not answered."""
        return len(self._loading)

    def promise(self, manager: Manager | None, visit: RequestState, count: int) -> None:
        """`count` blocks that the visit's lease pins will be loaded into its table, from where the lease starts. Takes
        the lease over. Raises AssertionError where fewer are pinned."""
        lease, visit.lease, start = visit.lease, None, visit.lease_start
        if lease is None or not count:
            self._book(manager, visit, lease, start, 0)
            if lease is not None:
                lease.release()
            if count:
                raise AssertionError(f"{count} blocks are to be loaded, none is pinned")
            return
        if len(lease) < count:
            lease.release()
            raise AssertionError(f"{count} blocks are to be loaded, {len(lease)} are pinned")
        job = self._job()
        self._loading[job] = _Loading(visit, lease, start, count)
        slots = lease.slots[:count]
        moves = StepMoves(
            job,
            tuple(visit.track.table[start : start + count]),
            tuple(slot.number for slot in slots),
            tuple(slot.generation for slot in slots),
        )
        self._promised.append(Load(visit.track.name, moves))

    def refuse(self, name: str, blocks: Sequence[int]) -> None:
        """Something went wrong after a load was promised: have the workers report these blocks as failed."""
        self._promised.append(Load(name, StepMoves(self._job(), tuple(blocks), (), ())))

    def take(self) -> list[Load]:
        """Loads that were promised and not handed out yet: their requests wait for an answer, whatever happens."""
        loads, self._promised = self._promised, []
        return loads

    def sources(self, name: str) -> dict[str, int]:
        """Tokens of the load that was just planned for a request, by the tier they were found in."""
        for work in self._loading.values():
            if work.visit.track.name == name:
                tiers = Counter(work.visit.tiers(work.start, work.count))
                return {tier: n * self._block_tokens for tier, n in tiers.items()}
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
        track = work.visit.track
        track.load_begin = work.start * self._block_tokens
        track.loaded = (work.start + good) * self._block_tokens
        self._counters["load_failures"] += len(work.failed)
        with work.lease:
            self._book(manager, work.visit, work.lease, work.start, good, bool(work.failed))

    def _book(
        self,
        manager: Manager | None,
        visit: RequestState,
        lease: Lease | None,
        start: int,
        good: int,
        failed: bool = False,
    ) -> None:
        """Account for what a request asked for, once per question: `good` blocks from `start` on were truly read."""
        asked, visit.asked = visit.asked, 0
        if manager is None or lease is None or not asked:
            return
        lease.miss = Miss.ERROR if failed else visit.why(start + good, lease.miss)
        lease.tiers = visit.tiers(start, good)
        for tier, count in Counter(lease.tiers).items():
            visit.read[tier] += count * self._block_tokens
            self._counters[f"tokens_read_{tier}"] += count * self._block_tokens
        manager.count(lease, asked)

    def close(self) -> None:
        """Let go of everything that is pinned."""
        for work in self._loading.values():
            work.lease.release()
