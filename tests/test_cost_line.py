"""A line is found in samples of blocks and seconds, and what may be said of sizes that were not seen."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cost_line import CostLine


def test_a_line_is_found_and_forgotten_when_it_changes() -> None:
    line, dice = CostLine(), random.Random(0)
    for _ in range(100):
        blocks = dice.randrange(1, 64)
        line.add(blocks, 0.01 + 0.001 * blocks + dice.gauss(0.0, 0.0005))
    assert line.at(10) == pytest.approx(0.02, rel=0.05) and line.between(10, 20) == pytest.approx(0.01, rel=0.1)
    assert len(line) <= 132 and 0 < line.error() < 0.001
    for _ in range(12):
        blocks = dice.randrange(1, 64)
        line.add(blocks, 0.2 + 0.001 * blocks)
    assert line.at(10) == pytest.approx(0.21, rel=0.2)


def test_an_outlier_among_the_first_samples_does_not_move_the_line() -> None:
    """The first steps of an engine compile and fill caches."""
    for outlier in range(6):
        line = CostLine()
        for number in range(6):
            line.add(4 + number, 3.0 if number == outlier else 0.01 + 0.001 * number)
        assert 0.003 < line.between(4, 10) < 0.013, outlier


def test_a_rare_sample_is_noise_and_not_a_change() -> None:
    line = CostLine()
    for turn in range(200):
        line.add(10, 0.5 if turn % 10 == 9 else 0.01)
    assert 0.03 < line.at(10) < 0.09


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0, 10)), min_size=1, max_size=40), st.integers(1, 400))
def test_the_bound_of_a_line_is_the_least_of_every_size(samples: list[tuple[int, float]], asked: int) -> None:
    """But for the rests of outliers, which the bound takes as they are at the usual size."""
    line = CostLine()
    for blocks, seconds in samples:
        line.add(blocks, seconds)
    rests = 0.0 if len(samples) <= 16 else max(seconds for _, seconds in samples) / 8
    assert line.bound().at(asked) == pytest.approx(line.least(asked), abs=1e-9 + rests)


def test_samples_of_one_size_say_little_of_others() -> None:
    line = CostLine()
    for _ in range(5):
        line.add(4, 0.02)
    costs = [line.bound().at(blocks) for blocks in (1, 2, 4, 8, 1000)]
    assert costs == pytest.approx([0.005, 0.01, 0.02, 0.02, 0.02])
    assert all(fewer <= more for fewer, more in pairwise(costs))


def test_a_line_without_samples_costs_nothing() -> None:
    line = CostLine()
    assert line.bound().at(10) == line.least(10) == line.cheapest_bound().at(10) == 0.0
    for blocks, seconds in ((4, math.inf), (math.nan, 0.1)):
        line.add(blocks, seconds)
    assert len(line) == 0, "what is no number is no sample"


def test_more_blocks_never_cost_less() -> None:
    """By two samples, of which the smaller took long by chance, long reads cost nothing."""
    line = CostLine()
    for blocks, seconds in ((8, 0.5), (64, 0.05)):
        line.add(blocks, seconds)
    assert 0.05 < line.bound().at(1000) < 0.5 and line.least(1000) == pytest.approx(line.least(1))
