"""Rounds of a comparison: the same contenders again and again, another one first in each, and their figures summed up.

A busy or uneven machine favours whoever runs at the right moment: medians over rounds, and their extremes, tell what a
single run does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

WORST = ("wrong_requests", "requests_that_differ_at_a_tie")
"""Figures of which the most counts, not the median."""


def turned(names: Sequence[T], number: int) -> list[T]:
    """The contenders in the order of a round: each stands first in its turn. Pure."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def summed(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One contender's figures over its rounds, in the order of the first: medians, the extremes of each that differs as
    `spread`, and how many `rounds`. Those within a figure are summed up alike. A round in which it could not be run is
    left out; where there is no other, the reason is all. Pure."""
    whole = [one for one in rounds if "not_run" not in one]
    if not whole:
        return dict(rounds[-1])
    out: dict[str, Any] = {}
    spread: dict[str, list[float]] = {}
    for name, first in whole[0].items():
        if isinstance(first, Mapping):
            out[name] = summed([one[name] for one in whole])
            continue
        figures = [one[name] for one in whole if one[name] is not None]
        if not figures:
            out[name] = None
            continue
        if name in WORST:
            out[name] = max(figures)
        else:
            out[name] = statistics.median_low(figures) if isinstance(first, int) else statistics.median(figures)
        if min(figures) != max(figures):
            spread[name] = [min(figures), max(figures)]
    return {**out, "spread": spread, "rounds": len(whole)}
