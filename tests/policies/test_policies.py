"""What every policy promises its tier, on sessions that grow, branch, pause and share heads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.bench.policies import COMPARED
from kvtier.errors import ConfigError
from kvtier.policies import policy as policies

make_policy = partial(policies.make_policy, among=COMPARED)

CLOSED = ["lru", "gapduel", "lru-freq"]
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))]
VERBS = ["reference", "insert", "remove", "evict", "room"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("capacity", [7, 60, 400])
@pytest.mark.parametrize("name", sorted(COMPARED))
def test_a_tier_never_outgrows_its_capacity_and_agrees_with_its_policy(name, capacity, seed, make_owner, make_sessions):
    owner = make_owner(make_policy(name, capacity), capacity)
    for number, (now, chain) in enumerate(make_sessions(seed, 600, 40)):
        owner.request(now, chain)
        assert len(owner.resident) <= capacity
        if number % 20 == 0:
            owner.policy.check(owner.resident)
    owner.policy.check(owner.resident)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("capacity", [7, 60, 400])
@pytest.mark.parametrize("name", CLOSED)
def test_residents_stay_prefix_closed(name, capacity, seed, make_owner, make_sessions):
    owner = make_owner(make_policy(name, capacity, refuses=True), capacity)
    parents = {}
    for number, (now, chain) in enumerate(make_sessions(seed, 600, 40)):
        parents.update(zip(chain[1:], chain, strict=False))
        owner.request(now, chain)
        if number % 5 == 0:
            orphans = [key for key in owner.resident if key in parents and parents[key] not in owner.resident]
            assert not orphans


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", sorted(COMPARED))
def test_no_policy_hits_more_than_belady(name, seed, make_owner, make_sessions, ceiling):
    requests = make_sessions(seed, 800, 40)
    for capacity in (20, 150):
        owner = make_owner(make_policy(name, capacity), capacity)
        owner.run(requests)
        assert 0 < owner.hits <= ceiling(requests, capacity)


@given(
    capacity=st.integers(1, 12),
    requests=st.lists(
        st.lists(st.integers(0, 25).map(lambda number: b"%d" % number), min_size=1, max_size=18, unique=True),
        max_size=60,
    ),
)
@settings(max_examples=200, deadline=None)
def test_lru_is_the_textbook_lru_for_any_names(capacity, requests):
    """Each block touched tail first, the least recent evicted: also for names that are no chains."""
    order: OrderedDict[bytes, None] = OrderedDict()
    policy, resident = make_policy("lru", capacity), set()
    for now, chain in enumerate(requests):
        hit = next((i for i, key in enumerate(chain) if key not in order), len(chain))
        assert hit == next((i for i, key in enumerate(chain) if key not in resident), len(chain))
        for key in reversed(chain):
            if key in order:
                order.move_to_end(key)
                continue
            if len(order) >= capacity:
                order.popitem(last=False)
            order[key] = None
        policy.reference(chain, hit, now)
        for key in chain[hit:]:
            if key in resident:
                continue
            if len(resident) >= capacity:
                victim = policy.victim(key, lambda _: True)
                if victim is None:
                    break
                policy.remove(victim)
                resident.remove(victim)
            policy.insert(key)
            resident.add(key)
        policy.check(resident)
        assert resident == set(order)


@given(
    name=st.sampled_from(sorted(COMPARED)),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["reference", "insert", "remove", "evict", "room"]), st.integers(0, 6), st.integers(1, 8)
        ),
        max_size=80,
    ),
)
@example("s3fifo", [("insert", 4, 1), ("reference", 4, 1), ("reference", 4, 1), ("room", 0, 1)])
@settings(max_examples=300, deadline=None)
def test_an_owner_may_insert_late_and_remove_anything(name, steps):
    """Arrivals long after their reference, expiry in the middle of a chain, leased leaves: counts stay right."""
    policy, resident = make_policy(name, 20), set()

    def chain(user: int, length: int) -> list[bytes]:
        return [b"shared"] + [b"%d-%d" % (user, depth) for depth in range(length)]

    for now, (verb, user, length) in enumerate(steps):
        key = chain(user, length)[-1]
        if verb == "reference":
            names = chain(user, length)
            hit = next((i for i, name in enumerate(names) if name not in resident), len(names))
            policy.reference(names, hit, float(now))
        elif verb == "insert":
            policy.insert(key)
            resident.add(key)
        elif verb == "remove":
            policy.remove(key)
            resident.discard(key)
        else:
            leased = {chain(user, 1)[-1]}
            victim = policy.victim(None if verb == "room" else key, lambda k: k not in leased)  # noqa: B023
            if victim is not None:
                assert victim in resident and victim not in leased
                policy.remove(victim)
                resident.remove(victim)
            elif verb == "room":
                assert resident <= leased
        policy.check(resident)


@pytest.mark.parametrize("name", CLOSED)
def test_a_leased_leaf_protects_its_ancestors(name, make_owner):
    owner = make_owner(make_policy(name, 4), 4)
    owner.request(0.0, [b"a0", b"a1"])
    owner.request(1.0, [b"b0", b"b1"])
    newcomer = b"c0"
    owner.policy.reference([newcomer], 0, 2.0)
    assert owner.policy.victim(newcomer, lambda _: True) == b"a1"  # the control
    assert owner.policy.victim(newcomer, lambda key: key != b"a1") == b"b1"
    assert owner.policy.victim(newcomer, lambda key: key not in (b"a1", b"b1")) is None


@pytest.mark.parametrize("name", CLOSED)
def test_a_block_that_arrives_late_enters_at_the_rank_of_its_reference(name):
    policy = make_policy(name, 3)
    policy.reference([b"old"], 0, 0.0)
    policy.reference([b"new"], 0, 1.0)
    policy.insert(b"new")
    policy.insert(b"old")  # referenced first, arrived last
    assert policy.victim(None, lambda _: True) == b"old"


@pytest.mark.parametrize("name", CLOSED)
def test_looking_up_and_storing_is_one_reference(name):
    policy = make_policy(name, 8)
    chain = [b"a", b"b"]
    policy.reference(chain, 0, 0.0)
    policy.insert(b"a")
    before = policy._tick
    policy.chain_stored(chain, 1, 5.0)
    assert policy._tick == before
    policy.chain_stored([b"x", b"y"], 0, 6.0)  # stored without having been looked up
    assert policy._tick == before + 1


@pytest.mark.parametrize("name", CLOSED)
def test_a_block_that_comes_back_after_long_may_enter(name):
    """What is promoted was evicted once, so everything here was used after it: that is no reason to refuse it."""
    policy = make_policy(name, 1)
    policy.reference([b"back"], 0, 0.0)
    policy.reference([b"here"], 0, 1.0)
    policy.insert(b"here")
    assert policy.victim(b"back", lambda _: True) == b"here"


def test_what_is_remembered_is_bounded(make_sessions):
    from kvtier.policies.run import SLACK
    from kvtier.policies.runs import MEMORY_MIN

    for name in CLOSED:
        policy = make_policy(name, 100)
        for number in range(400):
            policy.reference([b"%d-%d" % (number, depth) for depth in range(120)], 0, float(number))
        remembered = policy._known
        assert MEMORY_MIN / 2 < remembered <= MEMORY_MIN + 2 * 120 + 8
        listed = sum(run.end - run.base for run in policy._history)
        assert listed <= 2 * remembered + SLACK * len(policy._history)


def test_an_unknown_policy_names_those_that_exist():
    with pytest.raises(ConfigError, match="gapduel, lru, lru-freq"):
        make_policy("fifo", 10)


def test_ties_in_the_order_do_not_depend_on_hash_seeds(make_owner, make_sessions):
    def evicted(name: str) -> list[bytes]:
        owner, out = make_owner(make_policy(name, 50), 50), []
        drop: Callable[[bytes], None] = owner.drop
        owner.drop = lambda key: (out.append(key), drop(key))
        owner.run(make_sessions(5, 300, 20))
        return out

    for name in COMPARED:
        assert evicted(name) == evicted(name)
