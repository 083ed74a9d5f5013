"""The first divergent block against an earlier request."""

from __future__ import annotations

import pytest

import kvtier
from kvtier.identity.keys import BlockKey
from kvtier.manager.divergence import RecentChains
from kvtier.testing import sample_namespace


def chain(tokens: list[int]) -> list[BlockKey]:
    return [BlockKey(key) for key in kvtier.chain_hashes(tokens, sample_namespace())]


TOKENS = list(range(160))  # ten blocks of 16


@pytest.mark.parametrize("changed", [0, 1, 5, 9])
def test_a_change_is_found_at_its_block(changed: int) -> None:
    recent = RecentChains()
    recent.record("a", chain(TOKENS))
    other = list(TOKENS)
    other[changed * 16 + 3] = 999
    assert recent.divergence("a", chain(other)) == changed


def test_a_longer_or_shorter_prompt_agrees_as_far_as_both_go() -> None:
    recent = RecentChains()
    recent.record("a", chain(TOKENS))
    assert recent.divergence("a", chain([*TOKENS, *range(32)])) == 10
    assert recent.divergence("a", chain(TOKENS[:64])) == 4
    assert recent.divergence("b", chain(TOKENS)) is None


def test_memory_is_bounded_by_requests_and_by_blocks() -> None:
    recent = RecentChains(requests_max=3, blocks_max=25)
    for name in "abcd":
        recent.record(name, chain(TOKENS))
    assert len(recent) == 2  # 25 blocks hold two chains of ten
    assert recent.divergence("b", chain(TOKENS)) is None and recent.divergence("d", chain(TOKENS)) == 10
    recent.record("d", chain(TOKENS[:16]))
    recent.record("e", chain(TOKENS[:16]))
    assert len(recent) == 3
