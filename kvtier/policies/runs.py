"""The order of eviction, kept for runs of chains instead of single blocks.

A request references all blocks of its chain in the same instant. So the facts that a policy goes by (last reference,
number of references, gap before) are equal over long stretches of a chain, and are kept once per stretch: a *run*. A
later request takes blocks out of older runs, from their heads on, since two chains share a prefix or nothing. A
reference costs each block a dictionary look-up and a store, both in C; everything else is per run.

    rank of a run = (time of its last reference) + bonus · level / 2      level = floor(2 · log2 references)

The run of the lowest rank loses its deepest block first. A parent is in the same run as its child or in a later
one, and never referenced less often, so a leaf leaves before its parent without any tree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby, islice
from math import ceil, inf, log2
from operator import neg

from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.policies.order import LEVELS, Run, RunOrder
from kvtier.retention.terms import PRIORITY, PRIORITY_MAX
from kvtier.times import Mono

ARRIVING_MAX = 256
"""Runs without residents that keep their place for blocks to come: bounds those that a search passes over."""

EXPIRED_RUNS_MAX = 8
"""Runs of a priority above the newcomer's that are looked at, per level, for a block that has expired."""

TRANSIT_MAX = 256
"""Blocks at the eviction end that are looked at before the order: bounds `victim`."""

MEMORY_MIN = 16384
"""Blocks remembered at least, resident or not; fewer cost 0.9-1.75 points of hits on short chats."""

MEMORY_PER_BLOCK = 4
"""Blocks remembered per block of capacity."""


def level_of(references: int) -> int:
    """Half powers of two in a reference count. Pure."""
    return min(LEVELS - 1, int(2 * log2(references) + 1e-9))


PASSING_MAX = 65536
"""Bounds the newcomers that were given a slot, will pass through, and have not arrived."""

SLACK = 64
"""Blocks taken by later requests that a run may still list, beyond as many as it has left."""

_LEAST = [ceil(2 ** (level / 2) - 1e-9) for level in range(LEVELS)]  # references that reach a level


class Ranking:
    """Resident blocks of one tier by rank, and a bounded memory of what was referenced lately.

    Subclasses define how a chain is cut into runs (`_cut`) and what a newcomer may evict (`_yields`). Verbs as in
    `kvtier.policies.policy.Policy`; the owner's lock serialises them. At most `memory` absent blocks are remembered.
    """

    def __init__(self, memory: int, *, refuses: bool = True) -> None:
        """With `refuses` off, blocks that would be refused enter at the eviction end: they leave first unless they are
        referenced before. For a tier that blocks pass through on their way down."""
        self._memory = memory
        self._refuses = refuses
        self._transit: OrderedDict[BlockKey, None] = OrderedDict()  # resident, at the eviction end
        self._passing: set[BlockKey] = set()  # to enter `_transit` when they arrive
        self._runs: dict[BlockKey, Run] = {}  # every block remembered
        self._resident: set[BlockKey] = set()
        self._suspended_transit: set[BlockKey] = set()  # to return to `_transit`
        self._order = RunOrder()
        self._scoped = False
        self._scopes: dict[Scope, RunOrder] = {}  # the same runs, by the scope of their first block
        self._arriving: deque[Run] = deque()  # in `_order` since their reference, though none of them may come
        self._priority_of: Callable[[BlockKey], int] = lambda _: PRIORITY
        self._graded = False  # whether there ever was a priority but the usual one
        self._number = 0  # of the latest run
        self._history: OrderedDict[Run, None] = OrderedDict()  # in order of forgetting
        self._tick = 0
        self._mono_s = Mono(0)
        self._bonus_s = 0.0
        self._coldest: Run | None = None  # remembered between evictions of one request, for the same
        self._among: tuple[Scope | None, int] = (None, PRIORITY_MAX)
        self.refused = 0

    # -- verbs ---------------------------------------------------------------------------------------------

    def attach(self, priority_of: Callable[[BlockKey], int], *, scoped: bool) -> None:
        """Both before anything is resident."""
        self._priority_of = priority_of
        self._scoped = scoped

    def reference(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None:
        """Renew the chain's residents and remember all of it. O(1) per block."""
        if not chain:
            return
        self._tick += 1
        self._mono_s = mono_s
        self._coldest = None
        keys = list(dict.fromkeys(chain))
        if self._transit:
            for key in keys:
                self._transit.pop(key, None)
        old: list[tuple[Run | None, int]] = []
        for was, blocks in groupby(map(self._runs.get, keys)):
            old.append((was, len(list(blocks))))
        for run in reversed(self._cut(keys, old, mono_s)):  # tail first: the head is the warmest of its level
            self._list(run)
        depth = 0
        for was, count in old:
            if was is not None:
                self._detach(was, depth, count, keys)
            depth += count
        self._forget(2 * len(keys) + 8)

    def insert(self, key: BlockKey, depth: int = 0) -> None:
        """`key` has become resident, at the rank of its last reference."""
        if key in self._resident:
            return
        run = self._runs.get(key)
        if run is None:
            run = self._unreferenced(key)
        if key in self._passing:
            self._passing.remove(key)
            self._transit[key] = None
        self._resident.add(key)
        run.residents += 1
        index = run.top - run.base
        if index < len(run.blocks) and run.blocks[index] == key:
            run.top += 1
        else:
            run.top = max(run.top, run.base + self._place(run, key, depth) + 1)
        if run.grade < 0 or run.priority != PRIORITY:
            self._regrade(run)

    def chain_stored(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None:
        """A reference, unless one is remembered."""
        if chain and chain[-1] not in self._runs:
            self.reference(chain, resident, mono_s)

    def remove(self, key: BlockKey) -> None:
        """`key` is no longer resident. It stays remembered."""
        if key not in self._resident:
            return
        self._resident.remove(key)
        run = self._runs[key]
        run.residents -= 1
        self._transit.pop(key, None)
        self._suspended_transit.discard(key)
        if not run.residents:
            self._leave(run)
        elif self._graded or run.suspended == key:
            self._regrade(run)

    def regrade(self, key: BlockKey) -> None:
        """The priority of `key` has changed, or is not the usual one."""
        self._graded = True
        if key in self._resident:
            self._regrade(self._runs[key])

    def suspend(self, key: BlockKey) -> None:
        """`key`, a resident, is no victim until `resume`, nor are its ancestors in its run."""
        if key in self._transit:
            del self._transit[key]
            self._suspended_transit.add(key)
        run = self._runs.get(key)
        if run is not None and run.residents and self._leaf(run) == key:
            self._leave(run)
            run.suspended = key

    def resume(self, key: BlockKey) -> None:
        """Undo `suspend`, if it was. The run returns to its place."""
        if key in self._suspended_transit:
            self._suspended_transit.remove(key)
            self._transit[key] = None
        run = self._runs.get(key)
        if run is not None and run.suspended == key:
            self._regrade(run)

    def victim(
        self,
        newcomer: BlockKey | None,
        movable: Callable[[BlockKey], bool],
        *,
        depth: int = 0,
        scope: Scope | None = None,
        priority_max: int = PRIORITY_MAX,
    ) -> BlockKey | None:
        """The coldest movable block if the newcomer is warmer."""
        claim = None if newcomer is None else self._runs.get(newcomer)
        tick = 0 if claim is None else claim.tick
        run = self._coldest
        if run is None or run.tick == tick or self._among != (scope, priority_max) or not movable(self._leaf(run)):
            run = self._coldest = self._search(tick, movable, scope, priority_max)
            self._among = (scope, priority_max)
        if run is None and claim is not None:
            run = self._own_tail(claim, newcomer, depth, movable)
        if run is not None and newcomer is not None and not self._yields(run, claim):
            self.refused += 1
            if self._refuses:
                return None
            if len(self._passing) >= PASSING_MAX:  # their copies were given up
                self._passing.clear()
            self._passing.add(newcomer)
        for key in islice(reversed(self._transit), TRANSIT_MAX):
            if movable(key):
                return key
        return None if run is None else self._leaf(run)

    def train(self) -> None:
        """Nothing."""

    def check(self, resident: set[BlockKey]) -> None:
        """Assert the invariants, and that exactly `resident` is ordered. O(n)."""
        assert self._resident == resident, "policy and tier disagree about what is resident"
        assert self._resident <= self._runs.keys(), "a resident block was forgotten"
        assert self._transit.keys() <= resident, "a block in transit is not resident"
        live: dict[Run, int] = {}
        held: dict[Run, int] = {}
        for key, run in self._runs.items():
            live[run] = live.get(run, 0) + 1
            held[run] = held.get(run, 0) + (key in resident)
        assert set(live) == set(self._history), "runs and their blocks disagree"
        for run in self._history:
            assert run.live == live[run] and run.residents == held[run], "a run counts wrong"
            assert run.suspended is None or (run.grade < 0 and self._leaf(run) == run.suspended), "a run is suspended"
            assert run.grade >= 0 or run.suspended is not None or not run.residents, "a run is in no queue"
            assert run.grade in (-1, run.priority * LEVELS + run.level), "a run is in another queue than its own"
            if run.residents:
                assert run.priority == self._priority_of(self._leaf(run)), "a run has another priority than its leaf"
            assert run.live <= len(run.blocks) <= 2 * run.live + SLACK, "a run lists too many blocks that it lost"
        waiting = sorted(run.number for run in self._history if run.grade >= 0)
        for orders in ([self._order], self._scopes.values()) if self._scoped else ([self._order],):
            queues = [[run.number for run in queue] for order in orders for queue in order.queues.values()]
            assert all(queue and queue == sorted(queue) for queue in queues), "a queue is out of order"
            assert sorted(number for queue in queues for number in queue) == waiting, "runs and queues disagree"

    # -- for subclasses -----------------------------------------------------------------------------------

    def _cut(self, keys: list[BlockKey], old: list[tuple[Run | None, int]], mono_s: Mono) -> list[Run]:
        """The runs of this request, head first, together all of `keys`. `old`: the runs they were in before."""
        return [Run(keys, 0, self._tick, mono_s)]

    def _yields(self, run: Run, claim: Run | None) -> bool:
        """Whether `run`, the coldest, gives up a block for one of the run `claim` (None: never referenced)."""
        return True

    def _needed_depth(self, run: Run) -> int:
        """Depth above which the subclass needs the run remembered."""
        return 0

    # -- runs --------------------------------------------------------------------------------------------------

    def _detach(self, run: Run, depth: int, count: int, keys: list[BlockKey]) -> None:
        """Take keys[depth:depth+count] out of `run`: they belong to this request now."""
        run.live -= count
        if run.residents:
            run.residents -= sum(map(self._resident.__contains__, islice(keys, depth, depth + count)))
        if not run.live:
            self._leave(run)
            del self._history[run]
            return
        if len(run.blocks) > 2 * run.live + SLACK:
            self._compact(run)
        if self._graded or run.suspended is not None:
            self._regrade(run)

    def _compact(self, run: Run) -> None:
        """Delete the blocks that other runs took: in a chain, those at the head."""
        runs, blocks = self._runs, run.blocks
        taken = next(i for i, key in enumerate(blocks) if runs.get(key) is run)
        del blocks[:taken], run.counts[:taken]
        run.base += taken
        if len(blocks) > 2 * run.live + SLACK:  # the keys were no chains: keep our blocks, in order
            run.blocks = [key for key in blocks if runs.get(key) is run]
            run.counts = [1] * len(run.blocks) if run.counts else []
            run.top = run.base + len(run.blocks)
        run.top = max(run.top, run.base)

    def _list(self, run: Run) -> None:
        self._runs.update(dict.fromkeys(run.blocks, run))
        run.residents = sum(map(self._resident.__contains__, run.blocks))
        closed = self._resident.isdisjoint(islice(run.blocks, run.residents, None))
        run.top = run.base + (run.residents if closed else len(run.blocks))
        self._history[run] = None
        self._number += 1
        run.number = self._number
        if self._graded and run.residents:
            run.priority = self._priority_of(self._leaf(run))
        if self._scoped:
            run.scope = scope_of_key(run.blocks[0])
        self._enter(run)
        if not run.residents:
            self._arriving.append(run)
            if len(self._arriving) > ARRIVING_MAX:
                late = self._arriving.popleft()
                if not late.residents:
                    self._leave(late)

    def _enter(self, run: Run) -> None:
        run.grade = run.priority * LEVELS + run.level
        self._order.add(run)
        if run.scope is not None:
            if (order := self._scopes.get(run.scope)) is None:
                order = self._scopes[run.scope] = RunOrder()
            order.add(run)

    def _leave(self, run: Run) -> None:
        run.suspended = None
        if run.grade < 0:
            return
        if run is self._coldest:
            self._coldest = None
        self._order.remove(run)
        if run.scope is not None:
            order = self._scopes[run.scope]
            order.remove(run)
            if not order.queues:
                del self._scopes[run.scope]
        run.grade = -1

    def _regrade(self, run: Run) -> None:
        """Bring a run into the queue of its leaf."""
        priority = run.priority
        if self._graded and run.residents:
            priority = self._priority_of(self._leaf(run))
        if run.grade < 0 or priority != run.priority:
            self._leave(run)
            run.priority = priority
            if run.residents:
                self._enter(run)
            self._coldest = None

    def _unreferenced(self, key: BlockKey) -> Run:
        """A block of which no reference is remembered counts as referenced now, alone."""
        self._tick += 1
        run = Run([key], 0, self._tick, self._mono_s)
        run.counts = [1]
        self._list(run)
        return run

    def _leaf(self, run: Run) -> BlockKey:
        """The deepest resident block of a run that holds one. Lowers `top` to it."""
        while True:
            key = run.blocks[run.top - run.base - 1]
            if key in self._resident and self._runs[key] is run:
                return key
            run.top -= 1

    def _search(
        self, tick: int, movable: Callable[[BlockKey], bool], scope: Scope | None, priority_max: int
    ) -> Run | None:
        """The run of the lowest rank whose leaf is movable, except those of the request `tick`.

        A run whose leaf is not movable is skipped as a whole: the rest of it are the leaf's ancestors. Passes over runs
        of the newcomer's own request, and over pinned leaves, which the owner suspends after the first time.
        """
        order = self._order if scope is None or not self._scoped else self._scopes.get(scope)
        queues = {} if order is None else order.queues
        coldest, rank_min = None, inf
        for number in sorted(queues):
            bonus_s = self._bonus_s * (number % LEVELS) / 2
            runs: Iterable[Run] = queues[number]
            if number >= (priority_max + 1) * LEVELS:
                runs = islice(runs, EXPIRED_RUNS_MAX)
            for run in runs:
                if run.last + bonus_s >= rank_min:
                    break
                if run.residents and run.tick != tick and movable(self._leaf(run)):
                    coldest, rank_min = run, run.last + bonus_s
                    break
        return coldest

    def _own_tail(
        self, claim: Run, newcomer: BlockKey | None, depth: int, movable: Callable[[BlockKey], bool]
    ) -> Run | None:
        """The newcomer's own run, if it holds a deeper block: possible only while the residents have a hole."""
        if not claim.residents or newcomer is None:
            return None
        leaf = self._leaf(claim)
        deeper = self._place(claim, newcomer, depth) < claim.top - claim.base - 1
        return claim if deeper and movable(leaf) else None

    def _place(self, run: Run, key: BlockKey, depth: int) -> int:
        """Where a block is in its run. `depth`: in its chain, as far as the owner knows; else O(blocks)."""
        place = depth - run.base
        return place if run.blocks[place : place + 1] == [key] and place >= 0 else run.blocks.index(key)

    def _forget(self, blocks_max: int) -> None:
        """Forget up to `blocks_max` absent blocks past the limit, oldest run first, deepest block first."""
        for _ in range(blocks_max):
            if len(self._runs) - len(self._resident) <= self._memory:
                return
            run = next(iter(self._history))
            key = run.blocks[-1]
            if self._runs.get(key) is not run:  # taken from the tail: these keys were no chains
                run.blocks.pop()
            elif key in self._resident or run.base + len(run.blocks) <= self._needed_depth(run):
                self._history.move_to_end(run)
                continue
            else:
                run.blocks.pop()
                del self._runs[key]
                run.live -= 1
            del run.counts[len(run.blocks) :]
            run.top = min(run.top, run.base + len(run.blocks))
            if not run.live:
                self._leave(run)
                del self._history[run]
            elif len(run.blocks) > 2 * run.live + SLACK:
                self._compact(run)


def references_after(old: list[tuple[Run | None, int]], keys: list[BlockKey]) -> tuple[list[int], int]:
    """References of each block, this one included, and how many leading blocks are remembered.

    A block counts at most as often as its parent, or a forgotten parent would outlive its child's rank. Stops
    at the first block that is unknown, or in another place (keys that are no chains).
    """
    counts: list[int] = []
    for run, count in old:
        if run is None:
            break
        depth = len(counts)
        start = depth - run.base
        if start < 0 or run.blocks[start : start + 1] != keys[depth : depth + 1]:
            break
        counts += run.counts[start : start + count]
    known = len(counts)
    after = list(accumulate([c + 1 for c in counts], min))
    after += [1] * (len(keys) - known)
    return after, known


def level_borders(counts: Sequence[int]) -> list[int]:
    """Indices at which a level begins in non-increasing reference counts, 0 included. Pure; O(levels · log n)."""
    borders, at = [], 0
    while at < len(counts):
        borders.append(at)
        at = bisect_right(counts, -_LEAST[level_of(counts[at])], lo=at, key=neg)
    return borders
