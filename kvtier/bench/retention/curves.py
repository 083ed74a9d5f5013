"""Hits for every capacity or every ttl from one pass over a trace, exactly.

Leaf-first LRU is a stack algorithm (Mattson et al., IBM Systems Journal 1970): a reference hits in every cache larger
than its stack distance, the number of distinct blocks used since. A chain's blocks leave tail first, so distances grow
along a chain and the longest resident prefix is all that is within reach. As in `kvtier.policies.runs`, blocks last
used by one request are handled together, which makes a pass a matter of seconds for millions of references.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from kvtier.bench.retention.trace import Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class CapacityCurve:
    """Prefix hits of leaf-first LRU as a function of capacity. Exact for chained ids."""

    def __init__(self, trace: Trace) -> None:
        """One pass over the trace: some seconds for millions of references."""
        self.references = trace.references
        self.unique = trace.unique
        density = [0] * (trace.unique + 2)
        for distance, count in _distances(trace):
            density[distance + 1] += 1
            density[distance + count + 1] -= 1
        self._hits = list(accumulate(accumulate(density)))

    def hits(self, blocks: int) -> int:
        """References served by a cache of this many blocks."""
        return self._hits[max(0, min(blocks, self.unique))]

    def percent(self, blocks: int) -> float:
        return 100 * self.hits(blocks) / self.references


class _Counts:
    """Sums over a growing range: a Fenwick tree (Fenwick, Software: Practice and Experience 1994)."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)

    def add(self, place: int, amount: int) -> None:
        place += 1
        while place < len(self._tree):
            self._tree[place] += amount
            place += place & -place

    def up_to(self, place: int) -> int:
        """Sum of places 0 … place."""
        place += 1
        total = 0
        while place:
            total += self._tree[place]
            place &= place - 1
        return total


def _distances(trace: Trace) -> Iterable[tuple[int, int]]:
    """(d, n): n consecutive references with stack distances d+1 … d+n, for all that were seen before."""
    last: dict[int, int] = {}
    live = _Counts(len(trace.requests))  # blocks by the request that used them last
    seen = 0
    for number, request in enumerate(trace.requests):
        new = 0
        for tick, blocks in groupby(map(last.get, request.blocks)):
            count = len(list(blocks))
            if tick is None:
                new += count
                continue
            yield seen - live.up_to(tick), count
            live.add(tick, -count)
            live.add(number, count)
        live.add(number, new)
        seen += new
        last.update(dict.fromkeys(request.blocks, number))


class Reuse:
    """Every run of references that a cache could serve: its request, stack distance and age.

    Arrays of equal length. `served` answers for any capacity and ttl, per request, so that figures of a stack of tiers,
    an hour of the day or an idle gap follow.
    """

    def __init__(self, trace: Trace) -> None:
        """One pass over the trace."""
        import numpy as np

        rows: list[tuple[int, int, int, float]] = []
        last: dict[int, float] = {}
        segments = iter(_distances(trace))
        for number, request in enumerate(trace.requests):
            longest, place = 0.0, 0
            known = sum(block in last for block in request.blocks)
            while place < known:
                distance, count = next(segments)
                longest = max(longest, request.at - last.get(request.blocks[place], request.at))
                rows.append((number, distance, count, longest))
                place += count
            last.update(dict.fromkeys(request.blocks, request.at))
        self.requests = len(trace.requests)
        columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
        self.request = np.array(columns[0], dtype=np.int64)
        self.distance = np.array(columns[1], dtype=np.int64)
        self.count = np.array(columns[2], dtype=np.int64)
        self.gap = np.array(columns[3], dtype=np.float64)

    def served(self, blocks: int, ttl: float = float("inf")) -> NDArray[np.float64]:
        """Per request: prefix blocks that a leaf-first LRU of this capacity serves within a sliding ttl."""
        import numpy as np

        reach = np.clip(blocks - self.distance, 0, self.count) * (self.gap <= ttl)
        return np.bincount(self.request, weights=reach, minlength=self.requests).astype(np.float64)


class TtlCurve:
    """Share of references left to prefill as a function of a sliding ttl, without a bound on capacity. Exact."""

    def __init__(self, trace: Trace) -> None:
        self.references = trace.references
        gaps: dict[float, int] = {}
        last: dict[int, float] = {}
        for request in trace.requests:
            longest = 0.0
            for used, blocks in groupby(map(last.get, request.blocks)):
                if used is None:
                    break
                longest = max(longest, request.at - used)  # a prefix lives as long as its stalest block
                gaps[longest] = gaps.get(longest, 0) + len(list(blocks))
            last.update(dict.fromkeys(request.blocks, request.at))
        self._gaps = sorted(gaps)
        self._hits = list(accumulate((gaps[gap] for gap in self._gaps), initial=0))

    def prefill_left_percent(self, ttl: float) -> float:
        """References not in a prefix used at most `ttl` seconds before."""
        return 100 - 100 * self._hits[bisect_right(self._gaps, ttl)] / self.references


def ceiling_hits(trace: Trace, blocks: int) -> int:
    """Upper bound of any policy: Belady's with bypass over single blocks (IBM Systems Journal 1966), offline."""
    from heapq import heappop, heappush

    never = len(trace.requests)
    coming: list[list[int]] = []
    ahead: dict[int, int] = {}
    for number in range(never - 1, -1, -1):
        coming.append([ahead.get(block, never) for block in trace.requests[number].blocks])
        ahead.update(dict.fromkeys(trace.requests[number].blocks, number))
    coming.reverse()
    held: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []  # (-next use, block); stale where `held` says otherwise
    hits = 0
    for request, nexts in zip(trace.requests, coming, strict=True):
        for block, use in zip(request.blocks, nexts, strict=True):
            if block in held:
                hits += 1
            elif use == never:
                continue
            elif len(held) >= blocks:
                while held.get(farthest[0][1]) != -farthest[0][0]:
                    heappop(farthest)
                if -farthest[0][0] <= use:
                    continue
                del held[heappop(farthest)[1]]
            held[block] = use
            heappush(farthest, (-use, block))
    return hits
