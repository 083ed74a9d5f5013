"""What a policy remembers of chains: which run each block is in, resident or not, and the oldest run first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import groupby

from kvtier.identity.key_parts import KeyParts
from kvtier.identity.keys import KEY_PARTS, BlockKey
from kvtier.policies.parts import Part
from kvtier.policies.run import AWAY, COMPARED_MAX, HERE, RUN_BLOCKS, SLACK, Run, Stretch, print_of, runs_for
from kvtier.policies.run_history import RunHistory
from kvtier.times import Mono

ARRIVING_MAX = 256
"""Later runs after which one that still has no residents gives up its place, and all others their names: bounds those
that a search passes over."""

FADED_AT_ONCE, FADED_MAX = 64, 4096
"""Blocks that lose their names when one leaves, 10 µs, and at most in any verb."""

NAMED_AT_ONCE = 256
"""Blocks that a step of a reference names, at most: half a millisecond."""


class RunMemory(ABC):
    """Runs by block, and at most `memory` blocks that are not resident. The subclass keeps the order of eviction.

    Named blocks are found by their names; those of which only prints are left, by the first of them in each run, and
    then by their places: in chains, blocks that agree at one depth agree at all before it.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._idents_by_key = KeyParts()  # of a named block's run
        self._parts = self._idents_by_key.dicts
        self._marks: list[dict[int, Run]] = [{} for _ in range(KEY_PARTS)]  # runs whose first block is not named
        self._number = 0  # of the latest run
        self._mono_s = Mono(0)  # of the latest reference
        self._known = 0  # blocks remembered
        self._residents = 0
        self._graded = False  # whether there ever was a priority but the usual one
        self._history = RunHistory()
        self._fading: deque[Run] = deque()  # they have names that nobody needs

    def reference(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None:
        """`reference_steps`, all of them."""
        for _ in self.reference_steps(chain, resident, mono_s):
            pass

    def chain_stored(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None:
        """A reference, unless one is remembered."""
        for _ in self.reference_steps(chain, resident, mono_s, stored=True):
            pass

    def reference_steps(
        self, chain: Sequence[BlockKey], resident: int, mono_s: Mono, *, stored: bool = False
    ) -> Iterator[None]:
        """Renew the chain's residents and remember all of it. O(1) per block. Of the blocks that have no name here only
        the first get one in the first step. Between two steps the chain is known as far as it is named."""
        if not chain or (stored and self._find(chain[-1]) is not None):
            return
        if not isinstance(chain, list):
            chain = list(chain)
        if self._fading:  # at least as many as may come
            self._fade_some(min(2 * len(chain) + FADED_AT_ONCE, FADED_MAX))
        old, depth = self._walk(chain)
        while not self._recall(old, chain):
            yield
            old, depth = self._walk(chain)
        if stored and depth == len(chain):
            for run, _, _ in old:
                if run is not None and not run.residents:
                    self._await(run)
            return
        keys, run, reached = self._refer(chain, old, depth, mono_s)
        if reached < len(keys):
            yield from self._go_on(keys, run, reached)

    def resize(self, capacity: int) -> None:  # noqa: B027
        """The owner's capacity is another one. As much is remembered as before."""

    @abstractmethod
    def _refer(
        self, chain: list[BlockKey], old: list[Part], depth: int, mono_s: Mono
    ) -> tuple[list[BlockKey], Run, int]:
        """A request named this chain, which was known up to `depth` in these parts. Returns it with each block once,
        the run of its end, and the depth up to which it is named."""

    @abstractmethod
    def _leave(self, run: Run) -> None:
        """The order of eviction loses a run."""

    @abstractmethod
    def _list(self, run: Run, to_come: int = 0, before: Run | None = None) -> None:
        """A run has a rank now: it gets its number, and a place in the order of eviction: right before another one, if
        that was listed with so many runs `to_come`."""

    @abstractmethod
    def _regrade(self, run: Run) -> None:
        """A run may have another place in the order of eviction."""

    @abstractmethod
    def _await(self, run: Run) -> None:
        """Blocks of a run may come."""

    def _is_young(self, run: Run) -> bool:
        """Whether the request that named a run may be under way: its blocks keep their names."""
        return self._number - run.named_at < ARRIVING_MAX

    def _needed_depth(self, run: Run) -> int:
        """Depth above which the subclass needs the run remembered."""
        return 0

    def _find(self, key: BlockKey) -> Run | None:
        """The run of a named block."""
        ident = self._parts[key[-1]].get(key)
        return None if ident is None else self._history[ident]

    def _first_at(self, key: BlockKey) -> Run | None:
        """The run that has this block, if it is named or its run's first."""
        ident = self._parts[key[-1]].get(key)
        if ident is not None:
            return self._history[ident]
        mark = print_of(key)
        return self._marks[mark % KEY_PARTS].get(mark)

    def _walk(self, chain: list[BlockKey]) -> tuple[list[Part], int]:
        """The parts of a known chain, each from the head of a run on, and the depth up to which it is known."""
        old, depth = list[Part](), 0
        while depth < len(chain):
            run = self._first_at(chain[depth])
            if run is None or depth != run.head or run.torn:
                break
            count = len(run.blocks)
            whole = not run.prints and depth == run.base and depth + count <= COMPARED_MAX
            if not whole or run.blocks != tuple(chain[depth : depth + count]):
                if not run.has_at(chain[depth], depth):
                    break
                count = run.matching(chain, depth)
            if run.prints and depth + count > run.named_end:
                count = self._absent(run, chain, depth, count)
            if not count:
                break
            old.append((run, depth, count))
            depth += count
        return old, depth

    def _absent(self, run: Run, chain: list[BlockKey], depth: int, count: int) -> int:
        """How many of these blocks are still the run's: those without a name may have come back by themselves, long
        after they were referenced. Then no more is remembered of the run from there on."""
        parts, start = self._parts, max(depth, run.named_end)
        for at in range(start, depth + count):
            if chain[at] in parts[chain[at][-1]]:
                self._forget_prints(run, run.end - at)
                return at - depth
        return count

    def _forget_prints(self, run: Run, blocks: int) -> None:
        """Forget the last so many blocks, which have no names."""
        run.forget_prints(blocks)
        run.live -= blocks
        self._known -= blocks
        if not run.live:
            self._drop_run(run)
        elif run.end - run.base > 2 * run.live + SLACK:
            self._compact(run)
        self._mark(run)

    def _recall(self, old: list[Part], chain: list[BlockKey]) -> bool:
        """Name the first blocks of these parts of a chain that have no names: they may come back. Whether that was all
        of them."""
        left = NAMED_AT_ONCE
        for run, depth, count in old:
            if run is not None and run.prints and depth + count > run.named_end:
                start, stop = run.named_end, min(depth + count, run.named_end + left)
                run.name(chain, stop)
                self._label(chain[start:stop], run)
                self._mark(run)
                run.named_at = self._number
                left -= stop - start
                if stop < depth + count:
                    return False
        return True

    def _look_up(self, chain: list[BlockKey], old: list[Part], depth: int) -> tuple[list[BlockKey], list[Part], bool]:
        """The chain, each block once, its parts that are in one run or unknown, and whether it is a known chain that
        goes on with blocks not known: then a run is looked at as a whole. `old`: what is known of it, named, up to
        `depth`. Of more than NAMED_AT_ONCE unknown blocks only the first are looked up."""
        if depth == len(chain):
            return chain, old, True
        parts, count = self._parts, len(chain) - depth
        rest = list(dict.fromkeys(chain[depth : depth + NAMED_AT_ONCE]))
        found = [parts[key[-1]].get(key) for key in rest]
        if not any(found) and (count <= NAMED_AT_ONCE or len(rest) == NAMED_AT_ONCE):
            if count <= NAMED_AT_ONCE:
                chain, count = (chain if len(rest) == count else chain[:depth] + rest), len(rest)
            old.append((None, depth, count))
            return chain, old, True
        if depth or count > NAMED_AT_ONCE:
            rest = list(dict.fromkeys(chain))
            found = [parts[key[-1]].get(key) for key in rest]
        old, depth = [], 0
        for ident, blocks in groupby(found):
            count = len(list(blocks))
            old.append((None if ident is None else self._history[ident], depth, count))
            depth += count
        return rest, old, False

    def _go_on(self, keys: list[BlockKey], last: Run, reached: int) -> Iterator[None]:
        """Name the rest of a request, whose last run ends at the depth reached. Where others take that run meanwhile,
        what is not known then gets a run of its own. Ends early where others store blocks of it, or it is forgotten."""
        parts, tick, rank = self._parts, last.tick, last.rank()
        run: Run | None = last
        while reached < len(keys):
            yield
            self._fade_some(2 * NAMED_AT_ONCE)
            if not self._ends_at(run, reached, tick) or self._find(keys[reached]) is not None:
                before, run = reached, None
                _, reached = self._walk(keys)
                if reached < before or reached == len(keys):
                    return
            more = keys[reached : reached + NAMED_AT_ONCE]
            if len(set(more)) < len(more) or any(key in parts[key[-1]] for key in more):
                return
            run = self._extend(run, more, reached, tick, rank, runs_for(len(keys) - reached))
            reached += len(more)
        for part, _, _ in reversed(self._walk(keys)[0]):  # the deepest is forgotten first
            if part is not None:
                self._history.renew(part)

    def _ends_at(self, run: Run | None, depth: int, tick: int) -> bool:
        """Whether a run is still a request's, whole up to this depth."""
        if run is None or run.torn or not run.live:
            return False
        return (run.tick, run.end, run.named_end) == (tick, depth, depth)

    def _extend(self, run: Run | None, more: list[BlockKey], depth: int, tick: int, rank: Stretch, to_come: int) -> Run:
        """Name blocks from `depth` on, where `run` ends; None: in a new one of this rank. One that would get too long
        goes on as another. Returns the run that has them. At most so many runs are `to_come`."""
        if run is None or len(run.blocks) + len(more) > RUN_BLOCKS:
            before, last = run, self._mono_s if run is None else run.last
            run = Run(tuple(more), bytearray(len(more)), depth, tick, last)
            run.take_rank(rank, tick, last)
            run.standing = None if before is None else before.standing
            self._enrol(run)
            self._list(run, to_come, before)
        else:
            run.blocks += tuple(more)
            run.here += bytes(len(more))
            run.live += len(more)
            self._label(more, run)
        self._known += len(more)
        self._forget(2 * len(more) + 8)
        return run

    def _enrol(self, run: Run) -> None:
        """Remember a new run, and the names of its blocks."""
        self._history.enrol(run)
        self._label(run.blocks, run)

    def _drop_run(self, run: Run) -> None:
        """Nothing is left of a run."""
        run.live = run.residents = 0
        self._leave(run)
        self._mark(run)
        self._history.remove(run)

    def _label(self, keys: Sequence[BlockKey], run: Run) -> None:
        parts, ident = self._parts, run.ident
        for key in keys:
            parts[key[-1]][key] = ident
        self._idents_by_key.added(len(keys))

    def _mark(self, run: Run) -> None:
        """The first block of a run may have lost its name, or have one again."""
        if run.mark is None and not run.prints:
            return
        mark = run.print_at(run.head) if run.live and run.head >= run.named_end else None
        if mark == run.mark:
            return
        if run.mark is not None and self._marks[run.mark % KEY_PARTS].get(run.mark) is run:
            del self._marks[run.mark % KEY_PARTS][run.mark]
        run.mark = mark
        if mark is not None:
            self._marks[mark % KEY_PARTS][mark] = run

    def _fade(self, run: Run) -> None:
        """Some names of a run may not be needed any more: all of one without residents, else those behind them."""
        if not run.fading:
            run.fading = True
            self._fading.append(run)

    def _fade_some(self, blocks_max: int = FADED_AT_ONCE) -> None:
        """Let blocks that nobody waits for lose their names, so many of them."""
        while self._fading and blocks_max > 0:
            run = self._fading[0]
            kept = max(run.head, run.top if run.residents else 0) - run.base
            count = min(len(run.blocks) - kept, blocks_max)
            if count <= 0 or not run.live or run.away or self._is_young(run):
                run.fading = False
                self._fading.popleft()
                continue
            blocks_max -= count
            if run.torn:
                self._forget_last(run, count)
                continue
            parts = self._parts
            for key in run.fade(count):
                del parts[key[-1]][key]
            self._mark(run)

    def _detach(self, run: Run, depth: int, count: int, keys: list[BlockKey], chained: bool) -> None:
        """Take keys[depth:depth+count] out of `run`: they belong to this request now. `_settle` follows."""
        run.live -= count
        if not run.live:
            return
        if chained:
            run.head = depth + count
            run.here[: run.head - run.base] = bytes(run.head - run.base)
        else:
            run.torn = True
            for place in run.places(keys, depth, count):
                run.here[place] = 0
            self._known -= run.unnamed  # nobody would find them
            run.live -= run.unnamed
            run.forget_prints(run.unnamed)

    def _settle(self, run: Run) -> None:
        """All that a request takes out of `run` was taken."""
        if not run.live:
            self._drop_run(run)
            return
        run.residents, run.away = run.here.count(HERE), run.here.count(AWAY)
        if run.end - run.base > 2 * run.live + SLACK:
            self._compact(run)
        self._mark(run)
        if self._graded or run.suspended is not None:
            self._regrade(run)

    def _compact(self, run: Run) -> None:
        """Delete the blocks that other runs took: in a chain, those at the head."""
        if run.torn:
            run.head = run.base + next(i for i, key in enumerate(run.blocks) if self._find(key) is run)
        run.cut(run.head - run.base)
        if len(run.blocks) > 2 * run.live + SLACK:  # the keys were no chains: keep our blocks, in order
            mine = [i for i, key in enumerate(run.blocks) if self._find(key) is run]
            run.blocks, run.here = tuple(run.blocks[i] for i in mine), bytearray(run.here[i] for i in mine)
            run.counts = ((run.end, 1),) if run.counts else ()
            run.top = run.end
        run.top = max(run.top, run.base)

    def _forget(self, blocks_max: int) -> None:
        """Forget up to `blocks_max` absent blocks past the limit, oldest run first, deepest block first."""
        while (run := self._history.oldest) and blocks_max > 0 and self._known - self._residents > self._memory:
            if run.end <= self._needed_depth(run) or (run.blocks and not run.prints and run.here[-1]):
                self._history.renew(run)
                blocks_max -= 1
                continue
            most = min(blocks_max, self._known - self._residents - self._memory)
            if run.prints:
                most = min(most, run.end - max(run.head, self._needed_depth(run), run.named_end))
                self._forget_prints(run, most)
            else:
                gone = len(run.here) - len(run.here.rstrip(b"\0"))
                most = min(most, gone, run.end - max(run.head, self._needed_depth(run)))
                self._forget_last(run, most)
            blocks_max -= most

    def _forget_last(self, run: Run, blocks: int) -> None:
        """Forget the last so many named blocks, none of which is here, where there are no prints behind them. Those
        that are not the run's were taken from its tail: these keys were no chains."""
        for key in reversed(run.blocks[len(run.blocks) - blocks :]):
            part = self._parts[key[-1]]
            if part.get(key) == run.ident:
                del part[key]
                self._known -= 1
                run.live -= 1
        run.blocks = run.blocks[: len(run.blocks) - blocks]
        del run.here[len(run.blocks) :]
        run.top = min(run.top, run.end)
        if not run.live:
            self._drop_run(run)
        elif len(run.blocks) > 2 * run.live + SLACK:
            self._compact(run)

    def _check_memory(self) -> dict[BlockKey, Run]:
        """Assert that what is remembered is found. Returns the runs of named blocks. O(n)."""
        runs = {key: self._history[ident] for part in self._parts for key, ident in part.items()}
        history, named = list(self._history), Counter(run.ident for run in runs.values())
        assert sum(run.live for run in history) == self._known, "remembered blocks are miscounted"
        for run in history:
            listed = named[run.ident] + run.unnamed - max(0, run.head - run.named_end)
            assert run.live and run.live == listed, "a run counts wrong"
            assert run.top <= run.named_end, "a block without a name counts as resident"
            assert run.torn or run.head + run.live == run.end, "a chain with a hole"
            assert not (run.torn and run.prints), "nobody finds these blocks"
            first = run.blocks[run.head - run.base] if run.head < run.named_end else None
            assert run.torn or first is None or (run.mark is None and runs[first] is run)
            assert first is not None or run.mark == run.print_at(run.head), "a run is marked by another block"
            assert run.live <= run.end - run.base <= 2 * run.live + SLACK, "a run lists too many blocks that it lost"
        marks = {mark: run for part in self._marks for mark, run in part.items()}
        assert all(run.mark == mark and self._history[run.ident] is run for mark, run in marks.items()), "a run is gone"
        return runs
