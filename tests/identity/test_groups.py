"""The boundary rule against brute force: what attention reads, and the largest boundary of all that have it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from math import lcm
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.identity.groups import (
    Group,
    Kind,
    boundary_keys,
    first_boundary_key,
    lacking_blocks,
    longest_boundary,
)
from kvtier.identity.keys import SCOPE_BYTES, BlockKey


@cache
def reads(group: Group, boundary: int, ahead: int = 40) -> frozenset[int]:
    """Depths of the blocks before the boundary that some of the tokens from it on read, by the attention mask."""
    if group.kind is Kind.STATE:
        return frozenset({(boundary - 1) // group.block_tokens} if boundary else ())
    tokens: set[int] = set()
    for token in range(boundary, boundary + ahead):
        first = 0 if group.kind is Kind.FULL else token - group.window + 1
        tokens.update(range(max(0, first), boundary))
    return frozenset(token // group.block_tokens for token in tokens)


class Case(NamedTuple):
    groups: list[Group]
    residency: list[set[int]]
    limit: int
    alignment: int


def make_case(number: Callable[[int, int], int]) -> Case:
    """`number(low, high)` chooses one of low … high."""
    groups, kinds = [], list(Kind)
    for _ in range(number(1, 4)):
        kind = kinds[number(0, len(kinds) - 1)]
        window = number(1, 24) if kind is Kind.WINDOW else 0
        groups.append(Group(kind, [1, 2, 3, 4, 6][number(0, 4)], window))
    limit = number(0, 60)
    alignment = lcm(*(group.block_tokens for group in groups)) * number(1, 2)
    residency = []
    for group in groups:
        blocks = -(-limit // group.block_tokens) + 1
        missing = {number(0, blocks) for _ in range(number(0, 4))}
        residency.append(set(range(blocks)) - missing)
    return Case(groups, residency, limit, alignment)


@st.composite
def cases(draw: Callable[..., int]) -> Case:
    return make_case(lambda low, high: draw(st.integers(low, high)))


def brute_force(case: Case) -> int:
    fits = [
        boundary
        for boundary in range(0, case.limit + 1, case.alignment)
        if all(reads(group, boundary) <= has for group, has in zip(case.groups, case.residency, strict=True))
    ]
    return max(fits)


def found(case: Case) -> int:
    lacking = [lacking_blocks(g, has.__contains__) for g, has in zip(case.groups, case.residency, strict=True)]
    return longest_boundary(case.limit, case.alignment, lacking)


def check(case: Case, extra: int) -> None:
    best = found(case)
    assert best == brute_force(case)
    more = [has | {(extra * (place + 3)) % 61} for place, has in enumerate(case.residency)]
    assert found(case._replace(residency=more)) >= best, "more blocks never make a hit shorter"


@given(cases(), st.integers(0, 1000))
def test_the_longest_boundary_is_the_one_of_brute_force(case: Case, extra: int) -> None:
    check(case, extra)


@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 1 << 32))
def test_the_longest_boundary_in_100_000_cases(seed: int) -> None:
    """A hundred cases of each seed: to draw every number by itself takes ten times as long as to check them."""
    chance = random.Random(seed)
    for _ in range(100):
        check(make_case(chance.randint), chance.randrange(1000))


@pytest.mark.parametrize(
    ("group", "boundary", "depths"),
    [
        (Group(Kind.FULL, 16), 32, [0, 1]),
        (Group(Kind.FULL, 16), 33, [0, 1, 2]),
        (Group(Kind.STATE, 16), 49, [3]),
        (Group(Kind.WINDOW, 16, 64), 128, [4, 5, 6, 7]),  # the 63 tokens before it
        (Group(Kind.WINDOW, 16, 65), 128, [4, 5, 6, 7]),
        (Group(Kind.WINDOW, 16, 66), 128, [3, 4, 5, 6, 7]),
        (Group(Kind.WINDOW, 16, 64), 32, [0, 1]),
        (Group(Kind.WINDOW, 16, 1), 32, []),  # attends to itself only
        (Group(Kind.STATE, 16), 48, [2]),
        (Group(Kind.STATE, 16), 0, []),
    ],
)
def test_what_a_group_needs_at_a_boundary(group: Group, boundary: int, depths: list[int]) -> None:
    assert list(group.needed(boundary)) == depths


def test_a_wrong_rule_would_be_noticed() -> None:
    """The control: one token less of the window is another set for some boundary."""
    wrong = Group(Kind.WINDOW, 4, 8)
    assert any(
        reads(Group(Kind.WINDOW, 4, 10), boundary) != set(wrong.needed(boundary)) for boundary in range(0, 40, 4)
    )


def test_names_of_a_boundary_are_its_own() -> None:
    heads = [BlockKey(bytes([scope]) * SCOPE_BYTES + bytes([digest]) * 32) for scope in (1, 2) for digest in (1, 2)]
    keys = [boundary_keys(head, counts) for head in heads for counts in ([2, 3],)]
    assert len({key for some in keys for key in some}) == 4 * 5
    assert all(key[:SCOPE_BYTES] == head[:SCOPE_BYTES] for head, some in zip(heads, keys, strict=True) for key in some)
    for counts in ([2, 3], [0, 3], [0, 0], []):
        assert first_boundary_key(heads[0], counts) == next(iter(boundary_keys(heads[0], counts)), None)
    assert boundary_keys(heads[0], [2, 3]) == keys[0] and boundary_keys(heads[0], [2])[:2] == keys[0][:2]
