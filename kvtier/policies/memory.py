"""What a policy remembers of chains: which run each block is in, resident or not, and the oldest run first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from itertools import groupby

from kvtier.identity.keys import KEY_PARTS, BlockKey
from kvtier.policies.parts import Part, places_in
from kvtier.policies.run import SLACK, Run


class RunMemory(ABC):
    """Runs by block, and at most `memory` blocks that are not resident. The subclass keeps the order of eviction."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._parts: list[dict[BlockKey, Run]] = [{} for _ in range(KEY_PARTS)]  # by last byte
        self._known = 0  # blocks remembered
        self._residents = 0
        self._graded = False  # whether there ever was a priority but the usual one
        self._history: OrderedDict[Run, None] = OrderedDict()  # in order of forgetting

    @abstractmethod
    def _leave(self, run: Run) -> None:
        """The order of eviction loses a run."""

    @abstractmethod
    def _regrade(self, run: Run) -> None:
        """A run may have another place in the order of eviction."""

    def _needed_depth(self, run: Run) -> int:
        """Depth above which the subclass needs the run remembered."""
        return 0

    def _find(self, key: BlockKey) -> Run | None:
        return self._parts[key[-1]].get(key)

    def _look_up(self, chain: list[BlockKey]) -> tuple[list[BlockKey], list[Part], bool]:
        """The chain, each block once, its parts that are in one run or unknown, and whether it is a known chain that
        goes on with blocks not known: then a run is looked at as a whole."""
        parts, old, depth = self._parts, list[Part](), 0
        while depth < len(chain):
            key = chain[depth]
            run = parts[key[-1]].get(key)
            if run is None or depth != run.head or run.torn or run.blocks[depth - run.base] != key:
                break
            count = run.matching(chain, depth)
            old.append((run, depth, count))
            depth += count
        else:
            return chain, old, True
        rest = list(dict.fromkeys(chain[depth:] if depth else chain))
        found = [parts[key[-1]].get(key) for key in rest]
        if not any(found):
            old.append((None, depth, len(rest)))
            return (chain if len(rest) == len(chain) - depth else chain[:depth] + rest), old, True
        if depth:
            rest = list(dict.fromkeys(chain))
            found = [parts[key[-1]].get(key) for key in rest]
        old, depth = [], 0
        for run, blocks in groupby(found):
            count = len(list(blocks))
            old.append((run, depth, count))
            depth += count
        return rest, old, False

    def _label(self, keys: list[BlockKey], run: Run) -> None:
        parts = self._parts
        for key in keys:
            parts[key[-1]][key] = run

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
            for place in places_in(run, keys, depth, count):
                run.here[place] = 0

    def _settle(self, run: Run) -> None:
        """All that a request takes out of `run` was taken."""
        if not run.live:
            run.residents = 0
            self._leave(run)
            del self._history[run]
            return
        run.residents = run.here.count(1)
        if len(run.blocks) > 2 * run.live + SLACK:
            self._compact(run)
        if self._graded or run.suspended is not None:
            self._regrade(run)

    def _compact(self, run: Run) -> None:
        """Delete the blocks that other runs took: in a chain, those at the head."""
        if run.torn:
            run.head = run.base + next(i for i, key in enumerate(run.blocks) if self._find(key) is run)
        taken = run.head - run.base
        del run.blocks[:taken], run.here[:taken]
        run.base = run.head
        if len(run.blocks) > 2 * run.live + SLACK:  # the keys were no chains: keep our blocks, in order
            mine = [i for i, key in enumerate(run.blocks) if self._find(key) is run]
            run.blocks, run.here = [run.blocks[i] for i in mine], bytearray(run.here[i] for i in mine)
            run.counts = ((run.end, 1),) if run.counts else ()
            run.top = run.end
        run.top = max(run.top, run.base)

    def _forget(self, blocks_max: int) -> None:
        """Forget up to `blocks_max` absent blocks past the limit, oldest run first, deepest block first."""
        for _ in range(blocks_max):
            if self._known - self._residents <= self._memory:
                return
            run = next(iter(self._history))
            key = run.blocks[-1]
            part = self._parts[key[-1]]
            if part.get(key) is run:
                if run.here[-1] or run.end <= self._needed_depth(run):
                    self._history.move_to_end(run)
                    continue
                del part[key]
                self._known -= 1
                run.live -= 1
            run.blocks.pop()  # where it is not the run's, it was taken from the tail: these keys were no chains
            run.here.pop()
            run.top = min(run.top, run.end)
            if not run.live:
                self._leave(run)
                del self._history[run]
            elif len(run.blocks) > 2 * run.live + SLACK:
                self._compact(run)
