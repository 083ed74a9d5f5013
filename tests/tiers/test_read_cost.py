"""What reads of a tier are taken to cost, by those that were seen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.tiers.read_cost import FORGET_S, ReadCost
from kvtier.times import Mono


def told(*reads: tuple[float, float, int], cost: ReadCost | None = None) -> ReadCost:
    """Reads: when each began, how long it took, and the blocks that it brought."""
    cost = cost or ReadCost()
    events = [(began, 1, 0) for began, _, _ in reads] + [(began + took, 0, blocks) for began, took, blocks in reads]
    for now, begins, blocks in sorted(events):
        cost.began(Mono(now)) if begins else cost.ended(blocks, Mono(now))
    return cost


def seconds(cost: ReadCost, now: float, sizes: Sequence[int]) -> list[float]:
    bound = cost.estimate(Mono(now))
    assert bound is not None
    return [bound.at(size) for size in sizes]


def test_a_wait_that_does_not_grow_with_the_blocks_is_told_from_their_own() -> None:
    """As after a restart: a few short reads through a process that is young. Long prompts are worth a load all the
    same."""
    cost = told((0, 0.010, 1), (1, 0.006, 3))
    assert seconds(cost, 2, [44])[0] <= 0.010
    told((2, 0.011, 44), (3, 0.009, 31), cost=cost)
    one, many = seconds(cost, 4, [1, 44])
    assert 0.004 < one < 0.009 and many < 0.015


def test_one_read_alone_judges_nothing() -> None:
    cost = told((0, 2.0, 1))
    assert cost.estimate(Mono(3)) is None
    assert seconds(told((3, 2.0, 1), cost=cost), 6, [1]) == pytest.approx([2.0], rel=0.1)


def test_reads_side_by_side_cost_together_what_they_took_together() -> None:
    """A long prompt comes in sixteen of them, and each waits for the others."""
    cost = told(*((10 * turn, 0.5 + part / 100, 64) for turn in range(4) for part in range(16)))
    assert seconds(cost, 40, [1024, 64]) == pytest.approx([0.65, 0.65 / 16], rel=0.1)


def test_reads_without_end_are_counted_by_the_second() -> None:
    cost = told(*((at / 10, 0.35, 8) for at in range(200)))
    assert seconds(cost, 20, [80])[0] == pytest.approx(1.0, rel=0.1)


def test_reads_that_bring_nothing_make_no_sample() -> None:
    cost = told((0, 1.0, 0), (2, 1.0, 0), (4, 1.0, 0))
    assert cost.estimate(Mono(6)) is None


def test_a_tier_that_was_not_read_for_a_while_is_judged_anew() -> None:
    cost = told((0, 1.0, 4), (1, 1.0, 4))
    assert cost.estimate(Mono(2 + FORGET_S)) is not None
    assert cost.estimate(Mono(2.1 + FORGET_S)) is None
    told((100, 1.0, 4), cost=cost)
    assert cost.estimate(Mono(101)) is None, "nor by what was seen before"
