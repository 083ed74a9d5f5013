"""Which run each block is in: looked up and renewed by stretches, whatever the names."""

from __future__ import annotations

import gc
import random
import time
from math import exp

import pytest

from kvtier.identity.keys import BlockKey
from kvtier.policies import memory, run, runs
from kvtier.policies.memory import ARRIVING_MAX, FADED_AT_ONCE, NAMED_AT_ONCE
from kvtier.policies.policy import POLICIES, make_policy
from kvtier.policies.run import COMPARED_MAX, RUN_BLOCKS, Run
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
    run = Run(tuple(chain[2:] or chain), bytearray(blocks), 2 if blocks > 2 else 0, 1, Mono(0))
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
    """A name costs 96 bytes and its entry, a print 4. The request that returns finds the whole chain known."""
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
    assert policy._walk(again[:12])[1] == policy._walk([*again[:12], again[0][::-1]])[1] == 12
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


def names(policy: Ranking) -> int:
    return sum(map(len, policy._parts))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_long_chain_that_is_new_is_named_in_steps(name: str) -> None:
    """All at once took 100 ms of 100,000 blocks. In the end it is one run, as if it had been one step."""
    chain = chain_of(0, 10 * NAMED_AT_ONCE + 7)
    policy, whole = make_policy(name, 2 * len(chain)), make_policy(name, 2 * len(chain))
    assert isinstance(policy, Ranking) and isinstance(whole, Ranking)
    before, steps = 0, 0
    for _ in policy.reference_steps(chain, 0, Mono(1)):
        assert names(policy) - before <= NAMED_AT_ONCE
        policy.check(set())
        before, steps = names(policy), steps + 1
    whole.reference(chain, 0, Mono(1))
    policy.check(set())
    assert steps == 10 and names(policy) == names(whole) == len(chain) == policy._known
    assert [(run.base, run.end, run.level) for run in policy._history] == [
        (run.base, run.end, run.level) for run in whole._history
    ]
    policy.chain_stored(chain, 0, Mono(2))
    assert policy._tick == 1, "it counts as referenced once"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_long_chain_that_was_evicted_gets_its_names_back_in_steps(name: str) -> None:
    chain = chain_of(0, 3 * NAMED_AT_ONCE)
    policy = make_policy(name, len(chain))
    assert isinstance(policy, Ranking)
    policy.reference(chain, 0, Mono(0))
    for number in range(1, ARRIVING_MAX + 3):
        policy.reference(chain_of(number, 1), 0, Mono(number))
    while policy._fading:
        policy._fade_some()
    before = names(policy)
    assert before < ARRIVING_MAX + 3 and policy._known == len(chain) + ARRIVING_MAX + 2
    for _ in policy.reference_steps(chain, 0, Mono(1000)):
        assert 0 < names(policy) - before <= NAMED_AT_ONCE
        before = names(policy)
        policy.check(set())
    assert names(policy) - before <= NAMED_AT_ONCE
    assert policy._known == len(chain) + ARRIVING_MAX + 2


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_of_requests_for_one_chain_the_later_goes_on_with_it(name: str) -> None:
    chain = chain_of(0, 4 * NAMED_AT_ONCE)
    policy = make_policy(name, len(chain))
    assert isinstance(policy, Ranking)
    first = policy.reference_steps(chain, 0, Mono(1))
    next(first)
    second = policy.reference_steps(chain, 0, Mono(2))
    next(second)
    next(first)  # what is not known yet gets a run of its own
    assert names(policy) == 3 * NAMED_AT_ONCE
    assert len(list(second)) + len(list(first)) <= 1 and policy._known == names(policy) == len(chain)
    policy.check(set())


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_requests_that_share_a_beginning_are_named_whole(name: str) -> None:
    """As a dozen agents ask at once: none ends up with a rank per block, by which a parent would leave first."""
    shared, blocks = chain_of(0, 2 * NAMED_AT_ONCE + 100), 4 * NAMED_AT_ONCE
    chains = [shared + chain_of(number, blocks)[len(shared) :] for number in (1, 2, 3)]
    policy, resident = make_policy(name, 4 * blocks), set[BlockKey]()
    assert isinstance(policy, Ranking)
    under_way = [policy.reference_steps(chain, 0, Mono(number)) for number, chain in enumerate(chains)]
    while under_way:
        for steps in list(under_way):
            if next(steps, under_way) is under_way:
                under_way.remove(steps)
            policy.check(set())
    assert names(policy) == len({key for chain in chains for key in chain}) == policy._known
    assert len(policy._history) <= 4 * len(chains)
    for chain in chains:
        new = [(key, depth) for depth, key in enumerate(chain) if key not in resident]
        policy.insert_all([key for key, _ in new], [depth for _, depth in new])
        resident.update(chain)
    depth_of = {key: depth for chain in chains for depth, key in enumerate(chain)}
    policy.check(resident)
    while resident:
        victim = policy.victim(None, lambda _: True)
        assert victim is not None
        if depth_of[victim] % 500 == 0:
            above = [chain for chain in chains if depth_of[victim] + 1 < blocks and chain[depth_of[victim]] == victim]
            assert not any(chain[depth_of[victim] + 1] in resident for chain in above), "a parent left before its child"
        policy.remove(victim, depth_of[victim])
        resident.remove(victim)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_any_verb_may_come_between_two_steps(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, runs):
        monkeypatch.setattr(module, "NAMED_AT_ONCE", 3)
        monkeypatch.setattr(module, "ARRIVING_MAX", 4)
    chance, resident = random.Random(seed), dict[BlockKey, int]()
    policy = make_policy(name, 40, refuses=bool(seed % 2))
    assert isinstance(policy, Ranking)
    policy._memory = 60
    under_way = []
    for turn in range(400):
        chain = chain_of(chance.randrange(6), 30)[: chance.randrange(1, 30)]
        what = chance.random()
        if what < 0.35:
            under_way.append(policy.reference_steps(chain, 0, Mono(turn), stored=chance.random() < 0.3))
        elif what < 0.6:
            start = chance.randrange(len(chain))
            new = [(key, depth) for depth, key in enumerate(chain) if depth >= start and key not in resident]
            if new and len(resident) + len(new) <= 80:
                policy.insert_all([key for key, _ in new], [depth for _, depth in new])
                resident.update(new)
        elif what < 0.75 and resident:
            victim = policy.victim(chain[-1], lambda _: True)
            if victim is not None:
                policy.remove(victim, resident.pop(victim))
        elif resident:
            gone = chance.choice(sorted(resident))
            policy.remove(gone, resident.pop(gone))
        if under_way and next(steps := chance.choice(under_way), under_way) is under_way:
            under_way.remove(steps)
        policy.check(set(resident))


def test_a_chain_longer_than_the_memory_costs_no_step_per_block_and_run() -> None:
    """Each block that was forgotten copied the names of all others of its run: 6 s for 100,000."""
    policy = make_policy("lru", 1000)
    assert isinstance(policy, Ranking)
    lists = 0

    class Counted(tuple):
        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            nonlocal lists
            lists += isinstance(at, slice)
            return tuple.__getitem__(self, at)

    policy.reference(chain_of(0, 20_000), 0, Mono(0))
    run = next(iter(policy._history))
    run.blocks = Counted(run.blocks)
    policy._memory = 5000
    policy._forget(40_000)
    assert policy._known == 5000 and lists < 10
    policy.check(set())


def test_the_garbage_collector_does_not_look_at_what_is_remembered() -> None:
    """A full collection stops every thread of the engine: 200 ms where it goes over a million blocks' requests."""
    policy, resident = make_policy("gapduel", 4000), set[BlockKey]()
    request(policy, 0, resident)
    gc.collect()
    before, requests = len(gc.get_objects()), 3 * ARRIVING_MAX
    for number in range(1, requests):
        chain = request(policy, number, resident, blocks=6)
        for key in chain if number % 2 else ():  # of every other one only prints are left
            policy.remove(key)
            resident.remove(key)
    policy.train()
    gc.collect()
    assert len(gc.get_objects()) - before < requests / 4
    policy.check(resident)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_long_chain_is_several_runs_that_give_up_their_blocks_from_the_end(name: str) -> None:
    """What grows or gives up a part is copied: of a run of 100,000 blocks that took milliseconds, in each step."""
    blocks = 3 * RUN_BLOCKS + 700
    policy, chain, resident = make_policy(name, 2 * blocks), chain_of(0, blocks), set[BlockKey]()
    early = request(policy, 1, resident)
    for number in range(3):  # new, as it was, and with some more
        policy.reference(chain[: blocks - 100] if number < 2 else chain, len(resident) - len(early), Mono(2 + number))
        assert max(run.end - run.base for run in policy._history) <= RUN_BLOCKS
        assert len(policy._history) <= blocks // RUN_BLOCKS + 3
        reached = blocks - 100 if number < 2 else blocks
        for depth in range(len(resident) - len(early), reached):
            policy.insert(chain[depth], depth)
        resident.update(chain[:reached])
        policy.train()
        policy.check(resident)
    gone = [key for _ in range(len(resident)) for key in policy.evict((None,), lambda _: True)]
    assert gone == early[::-1] + chain[::-1]
    policy.check(set())


def test_a_branch_of_a_long_chain_gives_few_blocks_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks before it got another run in one hold of the lock: 20 ms behind 60,000."""
    blocks, turn, labelled = 3 * RUN_BLOCKS, 2 * RUN_BLOCKS + 900, list[int]()
    policy, chain = make_policy("gapduel", 2 * blocks), chain_of(0, blocks)
    assert isinstance(policy, Ranking)
    policy.reference(chain, 0, Mono(0))
    policy.insert_all(chain, range(blocks))
    label = policy._label
    monkeypatch.setattr(policy, "_label", lambda keys, run: (labelled.append(len(keys)), label(keys, run)))
    next(policy.reference_steps(chain[:turn] + chain_of(1, 50), turn, Mono(1)), None)
    assert sum(labelled) <= RUN_BLOCKS
    policy.check({*chain})


def test_a_long_chain_counts_as_a_whole_in_the_shadows() -> None:
    blocks = 3 * RUN_BLOCKS
    policy, chain = make_policy("gapduel", 2 * blocks), chain_of(0, blocks)
    policy.reference(chain, 0, Mono(0))
    policy.insert_all(chain, range(blocks))
    for mono_s, end in ((1, blocks), (2, blocks - 500), (3, blocks)):
        before = policy.stats()["score_0"]
        policy.reference(chain[:end], blocks, Mono(mono_s))
        policy.train()
        fade = exp(-end / (10 * blocks))  # the window is five references per block of capacity
        assert policy.stats()["score_0"] == pytest.approx(before * fade + (end if mono_s < 3 else blocks))
    policy.check({*chain})


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_keys_that_are_no_chains_and_agree_at_the_ends_are_told_apart(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long run only its end is compared: what a request takes of it may be others' blocks, which nobody has."""
    for module in (memory, run):
        monkeypatch.setattr(module, "COMPARED_MAX", 2)
    policy, chain, other = make_policy(name, 100), chain_of(0, 40), chain_of(1, 40)
    policy.reference(chain, 0, Mono(0))
    policy.insert_all(chain, range(40))
    policy.reference(chain[:1] + other[1:19] + chain[19:20] + other[20:], 1, Mono(1))
    policy.check({*chain})
    gone = [key for _ in range(40) for key in policy.evict((None,), lambda _: True)]
    assert sorted(gone) == sorted(chain)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_blocks_that_are_new_to_the_policy_get_their_places_in_one_go(name: str) -> None:
    """As many as come before one that it knows, which has a rank of its own."""
    policy, resident = make_policy(name, 60), set[BlockKey]()
    for number in range(6):
        request(policy, number, resident)
    policy.reference(known := chain_of(7, 10), 0, Mono(9))
    new = chain_of(8, 10)
    gone = policy.evict([*new[:3], known[0], *new[3:]], lambda _: True)
    assert len(gone) == 3
    policy.check(resident - set(gone))
    assert len(policy.evict(new, lambda _: True)) > 3
