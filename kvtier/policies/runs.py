"""The order of eviction, kept for runs of chains instead of single blocks.

A request references all blocks of its chain in the same instant. So the facts that a policy goes by (last reference,
number of references, gap before) are equal over long stretches of a chain, and are kept once per stretch: a *run*. A
later request takes blocks out of older runs, from their heads on, since two chains share a prefix or nothing. One that
takes a run whole renews it in place, so that only blocks that change their run cost anything.

    rank of a run = (time of its last reference) + bonus · level / 2      level = floor(2 · log2 references)

The run of the lowest rank loses its deepest block first. A parent is in the same run as its child or in a later
one, and never referenced less often, so a leaf leaves before its parent without any tree.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import inf

from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.policies.memory import ARRIVING_MAX, FADED_AT_ONCE, NAMED_AT_ONCE, RunMemory
from kvtier.policies.order import RunOrder
from kvtier.policies.parts import Part, bounded, residence, runs_kept
from kvtier.policies.run import AWAY, HERE, LEVELS, ONCE, Run, Stretch, runs_for
from kvtier.policies.transit import Transit
from kvtier.retention.terms import PRIORITY, PRIORITY_MAX
from kvtier.times import Mono

EXPIRED_RUNS_MAX = 8
"""Runs of a priority above the newcomer's that are looked at, per level, for a block that has expired."""

TRANSIT_MAX = 256
"""Blocks at the eviction end that are looked at before the order: bounds `victim`."""

MEMORY_MIN = 16384
"""Blocks remembered at least, resident or not; fewer cost 0.9-1.75 points of hits on short chats."""

MEMORY_PER_BLOCK = 4
"""Blocks remembered per block of capacity."""


class Ranking(RunMemory):
    """Resident blocks of one tier by rank, and a bounded memory of what was referenced lately.

    Subclasses define how a chain is cut into runs (`_cut`) and what a newcomer may evict (`_yields`). Verbs as in
    `kvtier.policies.policy.Policy`; the owner's lock serialises them. At most `memory` absent blocks are remembered.
    """

    def __init__(self, memory: int, *, refuses: bool = True) -> None:
        """With `refuses` off, blocks that would be refused enter at the eviction end: they leave first unless they are
        referenced before. For a tier that blocks pass through on their way down."""
        super().__init__(memory)
        self._refuses = refuses
        self._transit = Transit()
        self._order = RunOrder()
        self._scoped = False
        self._scopes: dict[Scope, RunOrder] = {}  # the same runs, by the scope of their first block
        # With their numbers, and the latest then: in `_order` since their reference, though none of them may come.
        self._arriving: deque[tuple[Run, int, int]] = deque()
        self._priority_of: Callable[[BlockKey], int] = lambda _: PRIORITY
        self._tick = 0
        self._bonus_s = 0.0
        self._coldest: Run | None = None  # remembered between evictions of one request, for the same
        self._among: tuple[Scope | None, int] = (None, PRIORITY_MAX)
        self.refused = 0

    # -- verbs ---------------------------------------------------------------------------------------------

    def attach(self, priority_of: Callable[[BlockKey], int], *, scoped: bool) -> None:
        """Both before anything is resident."""
        self._priority_of = priority_of
        self._scoped = scoped

    def _refer(
        self, chain: list[BlockKey], old: list[Part], depth: int, mono_s: Mono
    ) -> tuple[list[BlockKey], Run, int]:
        self._tick += 1
        self._mono_s = mono_s
        self._coldest = None
        keys, old, chained = self._look_up(chain, old, depth)
        if self._transit.any_known:
            self._warm(old, keys)
        unknown, start, count = old[-1]
        named = min(len(keys), start + NAMED_AT_ONCE) if unknown is None and chained else len(keys)
        known = len(old) > 1 or unknown is not None
        here = residence(old, keys, chained) if known else bytearray(named)
        stretches = bounded(self._cut(keys, [(run, count) for run, _, count in old], mono_s), old)
        kept = runs_kept(old, stretches) if known and chained else {}
        last = self._take(stretches[-1], kept.get(len(stretches) - 1), keys, here, named)
        for number in range(len(stretches) - 2, -1, -1):  # tail first: the head is the warmest of its level
            self._take(stretches[number], kept.get(number), keys, here, named)
        shrunk: dict[Run, None] = {}
        for run, depth, count in old:
            if run is None:
                self._known += min(count, named - depth)
            elif run.tick != self._tick:
                self._detach(run, depth, count, keys, chained)
                shrunk[run] = None
        for run in shrunk:
            self._settle(run)
        self._forget(2 * min(len(keys), NAMED_AT_ONCE) + 8)
        return keys, last, named

    def insert(self, key: BlockKey, depth: int = 0) -> None:
        """`key` has become resident, at the rank of its last reference."""
        self.insert_all((key,), (depth,))

    def insert_all(self, keys: Sequence[BlockKey], depths: Sequence[int]) -> None:
        """`insert` for several, most of them one behind the other in one run."""
        parts, passing, last, run = self._parts, self._transit.expected, None, None
        for key, depth in zip(keys, depths, strict=True):
            ident = parts[key[-1]].get(key)
            if run is None or ident is None or ident != last:
                run, last = self._unreferenced(key) if ident is None else self._history[ident], ident
            place = run.top - run.base
            if place >= len(run.blocks) or run.blocks[place] != key:
                place = run.place(key, depth)
            was = run.here[place]
            if was == HERE:
                continue
            run.away -= was == AWAY
            if passing and key in passing:
                self._transit.arrive(key)
                run.transits = True
            self._residents += 1
            run.residents += 1
            run.here[place] = HERE
            if place >= run.top - run.base:
                run.top = run.base + place + 1
            if run.grade < 0 or run.priority != PRIORITY:
                self._regrade(run)

    def remove(self, key: BlockKey, depth: int = 0, *, returns: bool = False) -> None:
        """`key` is no longer resident. It stays remembered."""
        run = self._find(key)
        if run is None:
            return
        place = run.top - run.base - 1
        if place < 0 or run.blocks[place] != key:
            place = run.place(key, depth)
        was = run.here[place]
        run.here[place] = AWAY if returns else 0
        run.away += (1 if returns else 0) - (was == AWAY)
        if was == HERE:
            self._residents -= 1
            run.residents -= 1
            self._transit.leave(key)
            if not run.residents:
                self._leave(run)
            elif self._graded or run.suspended == key:
                self._regrade(run)
        if not run.residents or len(run.blocks) - place > FADED_AT_ONCE:
            self._fade_soon(run)
        if self._fading:
            self._fade_some()

    def _fade_soon(self, run: Run) -> None:
        """Blocks of a run are gone: their names are not needed unless the request that named them is under way."""
        if not self._is_young(run):
            self._fade(run)
        elif not run.residents:
            self._await(run)

    def regrade(self, key: BlockKey) -> None:
        """The priority of `key` has changed, or is not the usual one."""
        self._graded = True
        run = self._find(key)
        if run is not None and run.residents:
            self._regrade(run)

    def suspend(self, key: BlockKey) -> None:
        """`key`, a resident, is no victim until `resume`, nor are its ancestors in its run."""
        self._transit.suspend(key)
        run = self._find(key)
        if run is not None and run.residents and run.leaf() == key:
            self._leave(run)
            run.suspended = key

    def resume(self, key: BlockKey) -> None:
        """Undo `suspend`, if it was. The run returns to its place."""
        here, run = self._transit.resume(key), self._find(key)
        if run is None:
            return
        run.transits = run.transits or here
        if run.suspended == key:
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
        claim = None if newcomer is None else self._find(newcomer)
        tick = 0 if claim is None else claim.tick
        run = self._coldest
        if run is None or run.tick == tick or self._among != (scope, priority_max) or not movable(run.leaf()):
            run = self._coldest = self._search(tick, movable, scope, priority_max)
            self._among = (scope, priority_max)
        if run is None and claim is not None:
            run = self._own_tail(claim, newcomer, depth, movable)
        if run is not None and newcomer is not None and not self._yields(run, claim):
            self.refused += 1
            if self._refuses:
                return None
            self._transit.expect(newcomer)
        if self._transit:
            for key in islice(self._transit.newest(), TRANSIT_MAX):
                if movable(key):
                    return key
        return None if run is None else run.leaf()

    def evict(
        self,
        newcomers: Sequence[BlockKey | None],
        movable: Callable[[BlockKey], bool],
        *,
        depth: int = 0,
        scope: Scope | None = None,
        priority_max: int = PRIORITY_MAX,
    ) -> list[BlockKey]:
        """The coldest run serves the newcomers that are in one run, or that are new to the policy."""
        newcomer = newcomers[0]
        victim = self.victim(newcomer, movable, depth=depth, scope=scope, priority_max=priority_max)
        if victim is None:
            return []
        run, claim = self._coldest, None if newcomer is None else self._find(newcomer)
        if len(newcomers) < 2 or run is None or self._graded or self._transit or newcomer in self._transit.expected:
            self.remove(victim, depth)
            return [victim]
        alike = self._unknown(newcomers) if claim is None else claim.alike(newcomers, depth)
        return self._strip(run, alike, movable)

    def _unknown(self, keys: Sequence[BlockKey | None]) -> int:
        """How many leading ones of these no run has."""
        known = (at for at, key in enumerate(keys) if key is None or self._find(key) is not None)
        return next(known, len(keys))

    def _strip(self, run: Run, blocks_max: int, movable: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """`remove` so many residents of a run, the deepest first, as far as they are movable. The first is."""
        gone = [run.leaf()]
        run.here[run.top - run.base - 1] = 0
        while len(gone) < min(blocks_max, run.residents) and movable(key := run.leaf()):
            run.here[run.top - run.base - 1] = 0
            gone.append(key)
        run.residents -= len(gone)
        self._residents -= len(gone)
        if not run.residents:
            self._leave(run)
        if not run.residents or len(run.blocks) - (run.top - run.base) >= FADED_AT_ONCE:
            self._fade_soon(run)
        if self._fading:
            self._fade_some(max(FADED_AT_ONCE, 2 * len(gone)))
        return gone

    def train(self) -> None:
        for _ in self.train_steps():
            pass

    def train_steps(self) -> Iterator[None]:
        """None."""
        return iter(())

    def check(self, resident: set[BlockKey]) -> None:
        """Assert the invariants, and that exactly `resident` is ordered. O(n)."""
        runs = self._check_memory()
        history = list(self._history)
        assert resident.issuperset(self._transit), "a block in transit is not resident"
        assert all(runs[key].transits for key in self._transit), "a run does not know what is in transit"
        here = [(key, run) for run in history for key, at in zip(run.blocks, run.here, strict=True) if at == HERE]
        assert all(runs.get(key) is run for key, run in here), "a resident block was forgotten, or is in two runs"
        assert len(here) == self._residents, "residents are miscounted"
        assert {key for key, _ in here} == resident, "policy and tier disagree about what is resident"
        held = Counter(run.ident for _, run in here)
        for run in history:
            assert run.residents == held[run.ident], "a run counts wrong"
            assert run.away == run.here.count(AWAY), "a run counts wrong"
            assert run.suspended is None or (run.grade < 0 and run.leaf() == run.suspended), "a run is suspended"
            assert run.grade >= 0 or run.suspended is not None or not run.residents, "a run is in no queue"
            assert run.grade in (-1, run.priority * LEVELS + run.level), "a run is in another queue than its own"
            if run.residents:
                assert run.priority == self._priority_of(run.leaf()), "a run has another priority than its leaf"
        waiting = sorted(run.number for run in history if run.grade >= 0)
        for orders in ([self._order], self._scopes.values()) if self._scoped else ([self._order],):
            queues = [[run.number for run in queue] for order in orders for queue in order.queues.values()]
            assert all(queue and queue == sorted(queue) for queue in queues), "a queue is out of order"
            assert sorted(number for queue in queues for number in queue) == waiting, "runs and queues disagree"

    # -- for subclasses -----------------------------------------------------------------------------------

    def _cut(self, keys: list[BlockKey], old: list[tuple[Run | None, int]], mono_s: Mono) -> list[Stretch]:
        """The parts of this request that get equal rank, head first, together all of `keys`. `old`: the runs they were
        in before."""
        return [Stretch(0, len(keys), len(keys))]

    def _yields(self, run: Run, claim: Run | None) -> bool:
        """Whether `run`, the coldest, gives up a block for one of the run `claim` (None: never referenced)."""
        return True

    # -- runs --------------------------------------------------------------------------------------------------

    def _warm(self, old: list[Part], keys: list[BlockKey]) -> None:
        """Blocks that are referenced leave the eviction end."""
        for run, depth, count in old:
            if run is not None and run.transits:
                for key in islice(keys, depth, depth + count):
                    self._transit.warm(key)

    def _take(
        self, stretch: Stretch, kept: tuple[Run, int, int] | None, keys: list[BlockKey], here: bytearray, named: int
    ) -> Run:
        """Make the run of a stretch, out of one that had depths kept[1] … kept[2]-1 of it where there is one, as far as
        its blocks are `named` now."""
        start, stop = stretch.start, min(stretch.stop, named)
        if kept is None:
            run = Run(tuple(keys[start:stop]), here[start:stop], start, self._tick, self._mono_s)
            self._enrol(run)
        else:
            run, first, last = kept
            self._leave(run)
            run.renew(stretch, keys, (first, last), here[start:first], here[last:stop])
            if start < first:
                self._label(keys[start:first], run)
            if last < stop:
                self._label(keys[last:stop], run)
            self._history.renew(run)
            self._mark(run)
        run.take_rank(stretch, self._tick, self._mono_s)
        self._list(run, runs_for(stretch.stop - stop))
        return run

    def _list(self, run: Run, to_come: int = 0, before: Run | None = None) -> None:
        self._number += 0 if before is not None else 1 + to_come
        run.number = self._number if before is None else before.number - 1
        run.named_at = self._number
        if self._graded and run.residents:
            run.priority = self._priority_of(run.leaf())
        if self._scoped:
            run.scope = scope_of_key(run.blocks[0])
        self._enter(run)
        if not run.residents:
            self._await(run)

    def _await(self, run: Run) -> None:
        """Blocks of this run may come: it has none. After ARRIVING_MAX more runs it gives up its place."""
        self._arriving.append((run, run.number, self._number))
        while self._number - self._arriving[0][2] >= ARRIVING_MAX:
            late, number, _ = self._arriving.popleft()
            if late.number == number and not late.residents:
                self._leave(late)
                self._fade(late)

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
            priority = self._priority_of(run.leaf())
        if run.grade < 0 or priority != run.priority:
            self._leave(run)
            run.priority = priority
            if run.residents:
                self._enter(run)
            self._coldest = None

    def _unreferenced(self, key: BlockKey) -> Run:
        """A block of which no reference is remembered counts as referenced now, alone."""
        self._tick += 1
        run = Run((key,), bytearray(1), 0, self._tick, self._mono_s)
        run.counts = ONCE
        self._enrol(run)
        self._known += 1
        self._list(run)
        return run

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
                if run.residents and run.tick != tick and movable(run.leaf()):
                    coldest, rank_min = run, run.last + bonus_s
                    break
        return coldest

    def _own_tail(
        self, claim: Run, newcomer: BlockKey | None, depth: int, movable: Callable[[BlockKey], bool]
    ) -> Run | None:
        """The newcomer's own run, if it holds a deeper block: possible only while the residents have a hole."""
        if not claim.residents or newcomer is None:
            return None
        leaf = claim.leaf()
        deeper = claim.place(newcomer, depth) < claim.top - claim.base - 1
        return claim if deeper and movable(leaf) else None
