"""What reads of a tier are taken to cost, by those that were seen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.read_cost import FORGET_S, ReadCost
from kvtier.times import Mono


def told(*reads: tuple[float, float, int], cost: ReadCost | None = None) -> ReadCost:
    """Reads: when each began, how long it took, and the blocks that it brought."""
    cost = cost or ReadCost()
    begins = [(began, 1, 0, began) for began, _, _ in reads]
    ends = [(began + took, 0, blocks, began) for began, took, blocks in reads]
    for now, begin, blocks, began in sorted(begins + ends):
        cost.began() if begin else cost.ended(blocks, Mono(began), Mono(now))
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


@pytest.mark.parametrize("apart_s", [1.0, 0.0, -1.0])
def test_reads_side_by_side_that_take_seconds_and_end_at_once_are_not_taken_apart(apart_s: float) -> None:
    """As over a network that they share. The first had all of the time and few blocks, the others the reverse: by a
    line through both, long prompts cost nothing, and were loaded for ever. `apart_s`: between prompts."""
    cost = told(*(((2 + apart_s) * turn, 2 + part / 1000, 16) for turn in range(20) for part in range(16)))
    assert (1.8 if apart_s >= 0 else 0.9) < seconds(cost, 60, [256])[0] < 2.1


def test_beside_a_read_that_never_ends_the_time_between_others_is_none_of_theirs() -> None:
    cost = ReadCost()
    cost.began()
    told(*((20 * turn, 0.002, 16) for turn in range(1, 200)), cost=cost)
    assert 0.001 < seconds(cost, 3981, [16])[0] < 0.005
    assert len(cost._busy) <= 64, "what is remembered of them is bounded"


def test_reads_that_overlap_in_part_count_each_moment_once() -> None:
    reads = [(0, 0.8), (0.1, 0.1), (0.4, 0.1), (0.7, 0.2)]
    cost = told(*((100 * turn + at, took, 10) for turn in range(4) for at, took in reads))
    assert seconds(cost, 310, [40, 10]) == pytest.approx([0.9, 0.9 / 4], rel=0.1)


def test_a_tier_whose_first_read_is_slow_after_every_pause_is_loaded_from() -> None:
    """A connection that has to be made anew: its read was half of all that was known, once a minute, for ever."""
    for first, second in [(0.3, 0.02), (0.02, 0.3)]:
        cost = told((0, first, 16), (2, second, 16), (4, 0.02, 16))
        assert seconds(cost, 5, [16])[0] < 0.03
        assert cost.estimate(Mono(5 + FORGET_S)) is None
        told((100, first, 16), (102, second, 16), cost=cost)
        assert seconds(cost, 103, [16])[0] < 0.03
        for at in range(104, 110):
            told((at, 0.02, 16), cost=cost)
            assert seconds(cost, at + 0.5, [16])[0] < 0.05


@pytest.mark.parametrize(("every", "stands_s"), [(1000, 10.0), (20, 1.0)])
def test_one_read_that_stood_still_does_not_speak_against_small_ones(every: int, stands_s: float) -> None:
    """It was counted on the average of all: small prompts were not loaded for half an hour, while large ones were.
    Where it comes again and again, the average has it."""
    cost = ReadCost()
    for turn in range(100):
        blocks, stood = (512 if turn % 3 == 0 else 16), (stands_s if turn % every == 50 % every else 0.0)
        told((20 * turn, 0.001 + 0.00004 * blocks + stood, blocks), cost=cost)
    assert (seconds(cost, 2000, [16])[0] < 0.016) == (every > 100)


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([0.0, 0.001, 0.5, 3.0, 70.0]), st.integers(0, 1000)), max_size=40
    ),
    st.integers(0, 3),
)
def test_what_is_told_is_finite_not_negative_and_grows_with_the_blocks(
    reads: list[tuple[float, float, int]], stuck: int
) -> None:
    cost = ReadCost()
    for _ in range(stuck):
        cost.began()
    told(*reads, cost=cost)
    if (bound := cost.estimate(Mono(max((began + took for began, took, _ in reads), default=0.0)))) is not None:
        costs = [bound.at(blocks) for blocks in (1, 2, 16, 1000, 10**6)]
        assert costs == sorted(costs) and costs[0] >= 0 and costs[-1] < 1e9


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([0.0, 0.001, 0.5, 3.0]), st.sampled_from([0, 1, 64])), max_size=40
    ),
    st.integers(0, 2),
)
def test_every_block_counts_once_and_no_moment_twice(reads: list[tuple[float, float, int]], stuck: int) -> None:
    cost = ReadCost()
    samples: list[tuple[float, float]] = []
    cost._line.add = lambda *sample: samples.append(sample)  # type: ignore[method-assign]
    for _ in range(stuck):
        cost.began()
    told(*reads, cost=cost)
    assert sum(blocks for blocks, _ in samples) + cost._blocks == sum(blocks for _, _, blocks in reads)
    brought = sorted((began, began + took) for began, took, blocks in reads if blocks)
    busy_s, until = 0.0, 0.0
    for begin, end in brought:
        busy_s, until = busy_s + max(0.0, end - max(begin, until)), max(until, end)
    assert sum(took for _, took in samples) + cost._busy_s() <= busy_s + 1e-6
