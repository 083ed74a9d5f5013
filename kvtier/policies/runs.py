"""The order in which resident blocks leave: runs of chains instead of single blocks.

A request names a chain, and all of its blocks are referenced in the same instant. So what a policy has to know
about a block (when it was last used, how often, after what gap) is the same for long stretches of a chain, and
is kept once per stretch: a *run*. A later request takes blocks out of older runs, from their heads on, since two
chains share a prefix or nothing. What a reference costs per block is a dictionary look-up and a store, both in
C; everything else is per run.

    rank of a run = (time of its last reference) + bonus · level / 2      level = floor(2 · log2 references)

The run of the lowest rank loses its deepest block first. A parent is in the same run as its child or in a later
one, and never referenced less often, so a leaf leaves before its parent without any tree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby, islice
from math import ceil, log2
from operator import neg

from kvtier.identity.keys import BlockKey

LEVELS = 40
"""Reference counts above 2^19.5 are not told apart."""

SCAN_RUNS_MAX = 256
"""Runs looked at for a movable victim before the newcomer is refused: bounds `victim`."""

MEMORY_MIN = 16384
"""Blocks remembered at least, resident or not; fewer cost 0.9-1.75 points of hits on short chats."""

MEMORY_PER_BLOCK = 4
"""Blocks remembered per block of capacity."""


def level_of(references: int) -> int:
    """Half powers of two in a reference count. Pure."""
    return min(LEVELS - 1, int(2 * log2(references) + 1e-9))


PASSING_MAX = 65536
"""Newcomers on their way in that will pass through; bounds a set."""

SLACK = 64
"""Blocks that a run may still list, beyond as many as it has, after later requests took them."""

_LEAST = [ceil(2 ** (level / 2) - 1e-9) for level in range(LEVELS)]  # references that reach a level


class Run:
    """Blocks of one chain, head first, that were last referenced by the same request and rank alike.

    `blocks[0]` lies at depth `base`. `live` counts the blocks that no later request took and that are not
    forgotten; `held` those of them that are resident. Above depth `top` nothing is resident.
    """

    __slots__ = ("base", "blocks", "counts", "gap", "held", "last", "length", "level", "listed", "live", "marks",
                 "tick", "top")  # fmt: skip

    def __init__(self, blocks: list[BlockKey], base: int, tick: int, last: float) -> None:
        self.blocks = blocks
        self.base = base
        self.tick = tick
        self.last = last
        self.live = len(blocks)
        self.held = 0
        self.top = base
        self.listed = False
        self.level = 0
        self.counts: list[int] = []  # references per block, where the policy asks
        self.gap = 0.0  # time since the reference before, as far as known
        self.length = 0  # blocks of the request
        self.marks: list[int] = []  # the duel's: up to which depth each shadow holds this run


class Ranking:
    """Resident blocks of one tier by rank, and a bounded memory of what was referenced lately.

    Subclasses say how a chain is cut into runs (`_cut`) and what a newcomer may evict (`_yields`). Verbs as in
    `kvtier.policies.policy.Policy`; the owner's lock serialises them. At most `memory` blocks that are not resident are
    remembered.
    """

    def __init__(self, memory: int, *, refuses: bool = True) -> None:
        """With `refuses` off, what would be refused is taken in at the eviction end: it leaves before all others
        unless a reference comes first. For a tier that blocks must pass through on their way."""
        self._memory = memory
        self._refuses = refuses
        self._transit: OrderedDict[BlockKey, None] = OrderedDict()
        self._passing: set[BlockKey] = set()  # given room, not here yet
        self._runs: dict[BlockKey, Run] = {}  # every block remembered
        self._resident: set[BlockKey] = set()
        self._levels: list[OrderedDict[Run, None]] = [OrderedDict() for _ in range(LEVELS)]  # coldest first
        self._top_level = 0
        self._history: OrderedDict[Run, None] = OrderedDict()  # what to forget first
        self._tick = 0
        self._now = 0.0
        self._bonus = 0.0
        self._coldest: Run | None = None  # remembered between evictions of one request
        self.refused = 0

    # -- the verbs ---------------------------------------------------------------------------------------------

    def reference(self, chain: Sequence[BlockKey], resident: int, now: float) -> None:
        """Renew the chain's residents and remember all of it. O(1) per block."""
        if not chain:
            return
        self._tick += 1
        self._now = now
        self._coldest = None
        names = list(dict.fromkeys(chain))
        if self._transit:
            for key in names:
                self._transit.pop(key, None)
        old: list[tuple[Run | None, int]] = []
        for was, blocks in groupby(map(self._runs.get, names)):
            old.append((was, len(list(blocks))))
        for run in reversed(self._cut(names, old, now)):  # tail first: the head is the warmest of its level
            self._enlist(run)
        depth = 0
        for was, count in old:
            if was is not None:
                self._take(was, depth, count, names)
            depth += count
        self._forget(2 * len(names) + 8)

    def insert(self, key: BlockKey) -> None:
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
        run.held += 1
        index = run.top - run.base
        if index < len(run.blocks) and run.blocks[index] == key:
            run.top += 1
        else:
            run.top = max(run.top, run.base + run.blocks.index(key) + 1)
        if not run.listed:  # it had been the coldest when it was struck off, so that is its place
            level = self._levels[run.level]
            level[run] = None
            level.move_to_end(run, last=False)
            run.listed = True
            self._coldest = None

    def chain_stored(self, chain: Sequence[BlockKey], resident: int, now: float) -> None:
        """A reference, unless one is remembered."""
        if chain and chain[-1] not in self._runs:
            self.reference(chain, resident, now)

    def remove(self, key: BlockKey) -> None:
        """`key` is no longer resident. It stays remembered."""
        if key in self._resident:
            self._resident.remove(key)
            self._runs[key].held -= 1
            self._transit.pop(key, None)

    def victim(self, newcomer: BlockKey | None, movable: Callable[[BlockKey], bool]) -> BlockKey | None:
        """The coldest movable block if the newcomer is warmer. Looks at up to SCAN_RUNS_MAX runs."""
        claim = None if newcomer is None else self._runs.get(newcomer)
        tick = 0 if claim is None else claim.tick
        run = self._coldest
        if run is None or not run.held or run.tick == tick or not movable(self._leaf(run)):
            run = self._coldest = self._search(tick, movable)
        if run is None and claim is not None:
            run = self._own_tail(claim, newcomer, movable)
        if run is not None and newcomer is not None and not self._yields(run, claim):
            self.refused += 1
            if self._refuses:
                return None
            if len(self._passing) >= PASSING_MAX:  # their transfers were given up: nothing is owed to them
                self._passing.clear()
            self._passing.add(newcomer)
        for key in islice(reversed(self._transit), SCAN_RUNS_MAX):
            if movable(key):
                return key
        return None if run is None else self._leaf(run)

    def train(self) -> None:
        """Nothing."""

    def check(self, resident: set[BlockKey]) -> None:
        """Assert the invariants, and that exactly `resident` is ordered. O(n)."""
        assert self._resident == resident, "policy and tier disagree about what is resident"
        assert self._resident <= self._runs.keys(), "a resident block was forgotten"
        assert self._transit.keys() <= resident, "something passes through that is not there"
        live: dict[Run, int] = {}
        held: dict[Run, int] = {}
        for key, run in self._runs.items():
            live[run] = live.get(run, 0) + 1
            held[run] = held.get(run, 0) + (key in resident)
        assert set(live) == set(self._history), "runs and their blocks disagree"
        for run in self._history:
            assert run.live == live[run] and run.held == held[run], "a run counts wrong"
            assert run.listed == (run in self._levels[run.level]) and (run.listed or not run.held)
            assert run.live <= len(run.blocks) <= 2 * run.live + SLACK, "a run keeps what it lost"

    # -- what subclasses say -----------------------------------------------------------------------------------

    def _cut(self, names: list[BlockKey], old: list[tuple[Run | None, int]], now: float) -> list[Run]:
        """The runs of this request, head first, together all of `names`. `old`: the runs they were in before."""
        return [Run(names, 0, self._tick, now)]

    def _yields(self, run: Run, claim: Run | None) -> bool:
        """Whether `run`, the coldest, gives a block up for one of `claim` (None: never referenced)."""
        return True

    def _kept(self, run: Run) -> int:
        """Depth below which the run must not be forgotten for reasons of the subclass."""
        return 0

    # -- runs --------------------------------------------------------------------------------------------------

    def _take(self, run: Run, depth: int, count: int, names: list[BlockKey]) -> None:
        """`count` blocks of `run`, names[depth:depth+count], now belong to this request."""
        run.live -= count
        if run.held:
            run.held -= sum(map(self._resident.__contains__, islice(names, depth, depth + count)))
        if not run.live:
            self._strike(run)
            del self._history[run]
        elif len(run.blocks) > 2 * run.live + SLACK:
            self._compact(run)

    def _compact(self, run: Run) -> None:
        """Let go of the blocks that other runs took: in a chain, those at the head."""
        runs, blocks = self._runs, run.blocks
        lost = next(i for i, key in enumerate(blocks) if runs.get(key) is run)
        del blocks[:lost], run.counts[:lost]
        run.base += lost
        if len(blocks) > 2 * run.live + SLACK:  # the names were no chains: keep what is ours, in order
            run.blocks = [key for key in blocks if runs.get(key) is run]
            run.counts = [1] * len(run.blocks) if run.counts else []
            run.top = run.base + len(run.blocks)
        run.top = max(run.top, run.base)

    def _enlist(self, run: Run) -> None:
        self._runs.update(dict.fromkeys(run.blocks, run))
        run.held = sum(map(self._resident.__contains__, run.blocks))
        closed = self._resident.isdisjoint(islice(run.blocks, run.held, None))
        run.top = run.base + (run.held if closed else len(run.blocks))
        self._levels[run.level][run] = None
        run.listed = True
        self._top_level = max(self._top_level, run.level)
        self._history[run] = None

    def _strike(self, run: Run) -> None:
        if run.listed:
            del self._levels[run.level][run]
            run.listed = False

    def _unreferenced(self, key: BlockKey) -> Run:
        """A block of which no reference is remembered counts as referenced now, alone."""
        self._tick += 1
        run = Run([key], 0, self._tick, self._now)
        run.counts = [1]
        self._enlist(run)
        return run

    def _leaf(self, run: Run) -> BlockKey:
        """The deepest resident block of a run that holds one. Lowers `top` to it."""
        while True:
            key = run.blocks[run.top - run.base - 1]
            if key in self._resident and self._runs[key] is run:
                return key
            run.top -= 1

    def _search(self, tick: int, movable: Callable[[BlockKey], bool]) -> Run | None:
        """The run of the lowest rank, but none of the request `tick`, whose leaf is movable.

        A run whose leaf is not movable is passed over as a whole: the rest of it are the leaf's ancestors.
        """
        heads: list[tuple[float, Run, Iterator[Run]]] = []
        for number in range(self._top_level + 1):
            level = self._levels[number]
            while level:  # runs without residents are struck off when they have become the coldest
                run = next(iter(level))
                if run.held:
                    break
                self._strike(run)
            walk = iter(level)
            if (head := next(walk, None)) is not None:
                heads.append((head.last + self._bonus * number / 2, head, walk))
        for _ in range(SCAN_RUNS_MAX):
            if not heads:
                return None
            place = min(range(len(heads)), key=lambda i: heads[i][0])
            _, run, walk = heads[place]
            if run.held and run.tick != tick and movable(self._leaf(run)):
                return run
            after = next(walk, None)
            if after is None:
                del heads[place]
            else:
                heads[place] = (after.last + self._bonus * after.level / 2, after, walk)
        return None

    def _own_tail(self, claim: Run, newcomer: BlockKey | None, movable: Callable[[BlockKey], bool]) -> Run | None:
        """The newcomer's own run, if it holds a deeper block: possible only while the residents have a hole."""
        if not claim.held or newcomer is None:
            return None
        leaf = self._leaf(claim)
        return claim if claim.blocks.index(newcomer) < claim.top - claim.base - 1 and movable(leaf) else None

    def _forget(self, blocks_max: int) -> None:
        """Drop memories past the limit, oldest first and deepest first, never of a resident block."""
        for _ in range(blocks_max):
            if len(self._runs) - len(self._resident) <= self._memory:
                return
            run = next(iter(self._history))
            key = run.blocks[-1]
            if self._runs.get(key) is not run:  # taken from the tail: these names were no chains
                run.blocks.pop()
            elif key in self._resident or run.base + len(run.blocks) <= self._kept(run):
                self._history.move_to_end(run)
                continue
            else:
                run.blocks.pop()
                del self._runs[key]
                run.live -= 1
            del run.counts[len(run.blocks) :]
            run.top = min(run.top, run.base + len(run.blocks))
            if not run.live:
                self._strike(run)
                del self._history[run]
            elif len(run.blocks) > 2 * run.live + SLACK:
                self._compact(run)


def references_after(old: list[tuple[Run | None, int]], names: list[BlockKey]) -> tuple[list[int], int]:
    """References of each block, this one included, and how many leading blocks are remembered.

    A block counts at most as often as its parent, or a forgotten parent would outlive its child's rank. Stops
    at the first block that is unknown, or out of its place (names that are no chains).
    """
    counts: list[int] = []
    for run, count in old:
        if run is None:
            break
        depth = len(counts)
        start = depth - run.base
        if start < 0 or run.blocks[start : start + 1] != names[depth : depth + 1]:
            break
        counts += run.counts[start : start + count]
    known = len(counts)
    after = list(accumulate([c + 1 for c in counts], min))
    after += [1] * (len(names) - known)
    return after, known


def level_borders(counts: Sequence[int]) -> list[int]:
    """Where in non-increasing reference counts a level begins, 0 included. Pure; O(levels · log n)."""
    borders, at = [], 0
    while at < len(counts):
        borders.append(at)
        at = bisect_right(counts, -_LEAST[level_of(counts[at])], lo=at, key=neg)
    return borders
