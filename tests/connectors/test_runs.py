"""Runs of blocks at consecutive depths."""

from __future__ import annotations

from kvtier.connectors.runs import runs_of


def test_runs_end_at_gaps_and_with_their_chain() -> None:
    one, other = [b"k"], [b"k"]  # equal, and two chains all the same
    placed = [(one, 3), (one, 4), (one, 6), (other, 7), (other, 8), (one, 9), (one, 8)]
    runs = runs_of(placed, lambda item: item)
    assert [[depth for _, depth in run] for run in runs] == [[3, 4], [6], [7, 8], [9], [8]]
    assert runs_of([], lambda item: item) == []
    assert runs_of([0, 1, 2], lambda depth: (None, depth)) == [[0, 1, 2]], "one chain, not named"
