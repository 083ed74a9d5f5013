"""Which run each block is in: looked up and renewed by stretches, whatever the names."""

from __future__ import annotations

import time

import pytest

from kvtier.identity.keys import BlockKey
from kvtier.policies.memory import ARRIVING_MAX, FADED_AT_ONCE
from kvtier.policies.policy import POLICIES, make_policy
from kvtier.policies.run import COMPARED_MAX, Run
from kvtier.policies.runs import Ranking
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


def request(policy: Ranking, number: int, resident: set[BlockKey], blocks: int = 20) -> list[BlockKey]:
    """Name and store a chain."""
    chain = chain_of(number, blocks)
    policy.reference(chain, 0, Mono(number))
    for depth, key in enumerate(chain):
        policy.insert(key, depth)
    resident.update(chain)
    return chain


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_of_evicted_blocks_only_prints_are_remembered_and_they_are_found_again(name: str) -> None:
    """A name costs 96 bytes and its entry, a print 8. The request that returns finds the whole chain known."""
    policy, resident = make_policy(name, 1000), set[BlockKey]()
    assert isinstance(policy, Ranking)
    chains = [request(policy, number, resident) for number in range(50)]
    for _ in range(25 * 20):
        victim = policy.victim(None, lambda _: True)
        assert victim is not None
        policy.remove(victim)
        resident.remove(victim)
    for number in range(50, 50 + ARRIVING_MAX):
        request(policy, number, resident, blocks=2)
    gone = [chain for chain in chains if chain[0] not in resident]
    while policy._fading:
        policy._fade_some()
    assert len(gone) == 25 and sum(map(len, policy._parts)) == len(resident)
    assert policy._known == len(resident) + 25 * 20
    policy.check(resident)
    again = gone[3]
    assert policy._remembers(again[:12]) and not policy._remembers([*again[:12], again[0][::-1]])
    policy.reference(again, 0, Mono(1000))
    assert policy._known == len(resident) + 25 * 20, "no block is known twice"
    policy.check(resident)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_block_that_was_lent_comes_back_to_its_rank(name: str) -> None:
    """However long it was out of the order: it does not count as referenced anew."""
    policy, resident = make_policy(name, 8000), set[BlockKey]()
    old = request(policy, 0, resident, blocks=4)
    for depth, key in enumerate(old):
        policy.remove(key, depth, returns=True)
    for number in range(1, 2 * ARRIVING_MAX):
        request(policy, number, resident, blocks=2)
    policy.check(resident - set(old))
    for depth, key in enumerate(old):
        policy.insert(key, depth)
    policy.check(resident)
    assert policy.victim(None, lambda _: True) == old[-1]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_block_that_comes_back_by_itself_long_after_its_request_is_known_once(name: str) -> None:
    policy, resident = make_policy(name, 8000), set[BlockKey]()
    late = chain_of(0, 10)
    policy.reference(late, 0, Mono(0))
    for number in range(1, 2 * ARRIVING_MAX):
        request(policy, number, resident, blocks=2)
    policy.insert(late[6], 6)
    resident.add(late[6])
    policy.check(resident)
    policy.reference(late, 0, Mono(1000))
    policy.check(resident)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_block_that_comes_back_while_its_run_loses_its_names_is_the_next_victim(name: str) -> None:
    """Of a run without residents the deepest names go first; the depth up to which it was resident is no depth then."""
    policy, resident = make_policy(name, 8000), set[BlockKey]()
    assert isinstance(policy, Ranking)
    late = request(policy, 0, set(), blocks=3 * FADED_AT_ONCE)
    for depth, key in reversed(list(enumerate(late))):
        policy.remove(key, depth)
    for number in range(1, ARRIVING_MAX + 1):
        policy.reference(chain_of(number, 1), 0, Mono(number))
    run = policy._find(late[3])
    assert run is not None
    policy._fade(run)
    while late[-1] in policy._parts[late[-1][-1]]:
        policy._fade_some()
    assert policy._find(late[3]) is run
    policy.insert(late[3], 3)
    resident.add(late[3])
    policy.check(resident)
    assert policy.victim(None, lambda _: True) == late[3]


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
