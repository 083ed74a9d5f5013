"""Least recently used, tail of a chain first: one run per request, ordered by (tick, -depth)."""

from __future__ import annotations

from kvtier.policies.runs import MEMORY_MIN, MEMORY_PER_BLOCK, Ranking


class LRU(Ranking):
    """Leaf-first LRU. Always admits, unless the newcomer's request is older than everything resident.

    `capacity` (blocks) only bounds how long a request is remembered whose blocks have yet to arrive.
    """

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(max(MEMORY_PER_BLOCK * capacity, MEMORY_MIN))
