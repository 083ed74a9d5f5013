"""Runs: blocks of one chain at consecutive depths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def runs_of(items: Iterable[T], place: Callable[[T], tuple[object, int]]) -> list[list[T]]:
    """Cut `items` into runs, in their order. `place(item)` is its chain, compared by identity, and its depth."""
    runs: list[list[T]] = []
    chain, next_depth = None, -1
    for item in items:
        before, (chain, depth) = chain, place(item)
        if chain is before and depth == next_depth:
            runs[-1].append(item)
        else:
            runs.append([item])
        next_depth = depth + 1
    return runs
