"""The order in which runs give up blocks: one queue per priority and level, the coldest run of each first.

A run enters a queue at its warm end, in C. One that comes back (a pin ended, its leaf's priority changed) enters where
it belongs, by its number: those are few, and lie in short sorted pages.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter

from kvtier.policies.run import Run

PAGE = 512
"""Runs on a page are at most twice this: bounds what moves when one enters or leaves."""

_number = attrgetter("number")


class Pages:
    """Runs sorted by number. O(PAGE + n / PAGE) machine words per change, in C."""

    __slots__ = ("_firsts", "_pages")

    def __init__(self) -> None:
        self._pages: list[list[Run]] = []
        self._firsts: list[int] = []  # of each page: a number up to that of its first run

    def add(self, run: Run) -> None:
        """Runs have distinct numbers."""
        if not self._pages:
            self._pages, self._firsts = [[run]], [run.number]
            return
        place = max(0, bisect_right(self._firsts, run.number) - 1)
        page = self._pages[place]
        insort(page, run, key=_number)
        self._firsts[place] = min(self._firsts[place], run.number)
        if len(page) > 2 * PAGE:
            self._pages.insert(place + 1, page[PAGE:])
            self._firsts.insert(place + 1, page[PAGE].number)
            del page[PAGE:]

    def remove(self, run: Run) -> None:
        """It is here."""
        place = bisect_right(self._firsts, run.number) - 1
        page = self._pages[place]
        del page[bisect_left(page, run.number, key=_number)]
        if not page:
            del self._pages[place], self._firsts[place]

    def __bool__(self) -> bool:
        return bool(self._pages)

    def __iter__(self) -> Iterator[Run]:
        return (run for page in self._pages for run in page)


class RunQueue:
    """Runs of one priority and level, by number."""

    __slots__ = ("_latest", "_pages", "_runs")

    def __init__(self) -> None:
        self._runs: OrderedDict[Run, None] = OrderedDict()
        self._pages = Pages()
        self._latest = -1  # number of the last run that entered at the warm end

    def add(self, run: Run) -> None:
        if run.number > self._latest:
            self._latest = run.number
            self._runs[run] = None
        else:
            self._pages.add(run)

    def remove(self, run: Run) -> None:
        if run in self._runs:
            del self._runs[run]
        else:
            self._pages.remove(run)

    def __bool__(self) -> bool:
        return bool(self._runs or self._pages)

    def __iter__(self) -> Iterator[Run]:
        return heapq.merge(self._runs, self._pages, key=_number) if self._pages else iter(self._runs)


class RunOrder:
    """Queues with at least one run. A run is in the queue that its `grade` names."""

    __slots__ = ("queues",)

    def __init__(self) -> None:
        self.queues: dict[int, RunQueue] = {}  # by priority * LEVELS + level

    def add(self, run: Run) -> None:
        queue = self.queues.get(run.grade)
        if queue is None:
            queue = self.queues[run.grade] = RunQueue()
        queue.add(run)

    def remove(self, run: Run) -> None:
        queue = self.queues[run.grade]
        queue.remove(run)
        if not queue:
            del self.queues[run.grade]
