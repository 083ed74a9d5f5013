"""The order in which runs give up blocks: one queue per priority and level, the coldest run of each first.

A run mostly enters a queue at its warm end. One that comes back (a pin ended, its leaf's priority changed) enters where
it belongs, by its number.
"""

from __future__ import annotations

from kvtier.policies.pages import Pages
from kvtier.policies.run import Run


class RunOrder:
    """Queues with at least one run, each by number. A run is in the queue that its `grade` names."""

    __slots__ = ("queues",)

    def __init__(self) -> None:
        self.queues: dict[int, Pages[Run]] = {}  # by priority * LEVELS + level

    def add(self, run: Run) -> None:
        queue = self.queues.get(run.grade)
        if queue is None:
            queue = self.queues[run.grade] = Pages("number")
        queue.add(run)

    def remove(self, run: Run) -> None:
        queue = self.queues[run.grade]
        queue.remove(run)
        if not queue:
            del self.queues[run.grade]
