"""Which run each block is in: looked up and renewed by stretches, whatever the names."""

from __future__ import annotations

import time

import pytest

from kvtier.identity.keys import BlockKey
from kvtier.policies.policy import POLICIES, make_policy
from kvtier.policies.run import COMPARED_MAX, Run
from kvtier.times import Mono

LONG = 100_000


def chain_of(number: int, blocks: int) -> list[BlockKey]:
    return [BlockKey(b"%016d%032d" % (number, depth)) for depth in range(blocks)]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_long_chain_is_renewed_at_once(name: str) -> None:
    """Nothing on the way is done block by block: 100,000 of them took 100 ms."""
    chain = chain_of(0, LONG + 3)
    policy = make_policy(name, 2 * LONG)
    policy.reference(chain[:LONG], 0, Mono(0))
    for depth in range(LONG):
        policy.insert(chain[depth], depth)

    def seconds(blocks: int, mono_s: float) -> float:
        named = [BlockKey(bytes(bytearray(key))) for key in chain[:blocks]]
        began = time.thread_time()
        policy.reference(named, LONG, Mono(mono_s))
        return time.thread_time() - began

    assert min(seconds(LONG, mono_s) for mono_s in (1.0, 2.0, 3.0)) < 0.01
    assert min(seconds(LONG + more, 3.0 + more) for more in (1, 2, 3)) < 0.01
    policy.check(set(chain[:LONG]))


@pytest.mark.parametrize("blocks", [1, 2, 9, COMPARED_MAX, COMPARED_MAX + 1, 3 * COMPARED_MAX + 5])
def test_a_run_agrees_up_to_where_a_chain_turns_off(blocks: int) -> None:
    chain, other = chain_of(0, blocks), chain_of(1, blocks)
    run = Run(chain[2:] or chain, bytearray(blocks), 2 if blocks > 2 else 0, 1, Mono(0))
    for agreed in {run.base + 1, blocks // 2, blocks - 1, blocks}:
        if agreed > run.base:
            assert run.matching(chain[:agreed] + other[agreed:], run.base) == agreed - run.base
            assert run.matching(chain[:agreed], run.base) == agreed - run.base


@pytest.mark.parametrize("depth", [0, 3, 7, 900])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_wrong_depth_costs_only_a_search(name: str, depth: int) -> None:
    policy, chain = make_policy(name, 8), chain_of(0, 8)
    policy.reference(chain, 0, Mono(0))
    for key in chain:
        policy.insert(key, depth)
    policy.remove(chain[3], depth)
    policy.remove(chain[3], depth)
    policy.check({*chain} - {chain[3]})


@pytest.mark.parametrize("at", [10, 150, 250, 299])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_run_may_be_taken_whole_in_several_parts(name: str, at: int) -> None:
    """Names that are no chains: another block stands in the middle of them now."""
    policy, chain = make_policy(name, 1000), chain_of(0, 300)
    policy.reference(chain, 0, Mono(0))
    for depth, key in enumerate(chain):
        policy.insert(key, depth)
    policy.reference(chain[:at] + chain_of(1, 1) + chain[at:], 300, Mono(1))
    policy.check({*chain})
    while (victim := policy.victim(None, lambda _: True)) is not None:
        chain.remove(victim)
        policy.remove(victim)
    assert not chain
