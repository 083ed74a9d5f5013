"""Whatever lies before it, a block that may leave is found, and without a look at all that may not."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvtier.bench.retention.byteless import EmptyArena
from kvtier.identity.hashing import chain_hashes, chain_root
from kvtier.identity.keys import SHARED, BlockKey, Scope, make_keys, scope_of
from kvtier.policies.policy import make_policy
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN, PRIORITY
from kvtier.testing import sample_namespace
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Miss

NOW = 1.8e9
LIFE = Lifetime.of(BUILTIN["24h"], NOW)
POLICIES = ["lru", "gapduel"]
ROOT = chain_root(sample_namespace().digest, SHARED)


def block(number: int, scope: Scope = SHARED) -> BlockKey:
    """A chain of one block."""
    return make_keys(scope, chain_hashes(ROOT, [number] * 16, 16))[0]


def chain(number: int, blocks: int, scope: Scope = SHARED) -> list[BlockKey]:
    return make_keys(scope, chain_hashes(ROOT, [number] * 16 * blocks, 16))


class Stored:
    """A tier, and a clock that each request moves by a second."""

    def __init__(self, policy: str, slots: int, quota: float = 0.0) -> None:
        self.tier = HostTier(EmptyArena(slots), make_policy(policy, slots), quota)
        self.tier.open()
        self.now = 0.0

    def put(self, keys: list[BlockKey], priority: int = PRIORITY, life: Lifetime = LIFE, wall_s: float = NOW) -> int:
        """How many of a chain's blocks found a place."""
        self.now += 1
        self.tier.policy.reference(keys, 0, self.now)
        stored = 0
        for index, key in enumerate(keys):
            slot = self.tier.reserve(key, index, priority=priority, wall_s=wall_s)
            if slot is None:
                break
            self.tier.commit(slot, slot.generation, life)
            stored += 1
        return stored

    def pin(self, key: BlockKey) -> Slot:
        slot = self.tier.pin(key, NOW)
        assert slot is not None
        return slot


@pytest.mark.parametrize("policy", POLICIES)
def test_a_scope_at_its_quota_finds_its_own_behind_a_thousand_colder_ones(policy: str) -> None:
    full = Stored(policy, 2000, quota=0.2)
    for number in range(1000):
        full.put([block(number, scope_of(f"other-{number % 10}"))])
    mine = scope_of("mine")
    assert sum(full.put([block(number, mine)]) for number in range(400)) == 400
    assert sum(full.put([block(number, mine)]) for number in range(1000, 1100)) == 100
    assert [full.tier.peek(block(number, mine), NOW) for number in (0, 99, 100)] == [Miss.ABSENT, Miss.ABSENT, None]
    full.tier.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_lowest_priority_leaves_first_behind_a_thousand_above_it(policy: str) -> None:
    full = Stored(policy, 1100)
    for number in range(1000):
        full.put([block(number)], priority=90)
    for number in range(1000, 1100):
        full.put([block(number)], priority=10)
    for number in range(2000, 2100):
        assert full.put([block(number)], priority=90) == 1
    assert all(full.tier.peek(block(number), NOW) is None for number in range(1000)), "90 left before 10"
    assert full.put([block(3000)], priority=50) == 0, "nothing ranks below it"
    full.tier.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_leaf_of_lower_priority_counts_and_so_does_what_it_covered(policy: str) -> None:
    """A chain's head is worth more than its tail: the tail leaves as what it is, then the head does."""
    full = Stored(policy, 404)
    for number in range(400):
        full.put([block(number)], priority=50)
    full.put(chain(9000, 2), priority=90)
    full.put(chain(9000, 4), priority=10)
    assert full.put(chain(5000, 2), priority=20) == 2
    assert [full.tier.peek(key, NOW) for key in chain(9000, 4)] == [None, None, Miss.ABSENT, Miss.ABSENT]
    full.tier.check()
    assert full.put(chain(6000, 3), priority=20) == 2, "then only its own kind and what ranks higher is left"
    full.tier.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_priority_that_is_raised_counts_from_then_on(policy: str) -> None:
    full = Stored(policy, 300)
    for number in range(300):
        full.put([block(number)], priority=10)
    for number in range(299):
        full.tier.raise_priority(full.tier.index[block(number)], 90)
    full.tier.check()
    assert full.put([block(1000)], priority=10) == 1 and full.tier.peek(block(299), NOW) is Miss.ABSENT


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_blocks_hide_nothing_and_are_asked_for_once(policy: str) -> None:
    full = Stored(policy, 1500)
    for number in range(1500):
        full.put([block(number)])
    held = [full.pin(block(number)) for number in range(1000)]
    asked = 0
    before = full.tier.policy.victim

    def victim(newcomer, movable, **more):  # type: ignore[no-untyped-def]
        def counted(key: BlockKey) -> bool:
            nonlocal asked
            asked += 1
            return movable(key)

        return before(newcomer, counted, **more)

    full.tier.policy.victim = victim  # type: ignore[method-assign]
    for number in range(2000, 2100):
        assert full.put([block(number)]) == 1
    assert asked < 1000 + 10 * 100
    full.tier.check()
    for slot in reversed(held):  # in another order than theirs: each returns to its place
        full.tier.unpin(slot, slot.generation)
    full.tier.check()
    for number in range(3000, 3003):
        assert full.put([block(number)]) == 1
    assert [full.tier.peek(block(number), NOW) for number in range(4)] == [Miss.ABSENT] * 3 + [None]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_leaf_that_is_pinned_covers_its_chain_until_a_deeper_block_comes(policy: str) -> None:
    full = Stored(policy, 6)
    full.put(chain(1, 3))
    leaf = full.pin(chain(1, 3)[2])
    full.put(chain(2, 3))
    assert full.put(chain(3, 4)) == 3
    assert [full.tier.peek(key, NOW) for key in chain(1, 3)] == [None] * 3
    full.tier.check()
    full.tier.unpin(leaf, leaf.generation)
    assert full.put(chain(4, 2)) == 2
    assert [full.tier.peek(key, NOW) for key in chain(1, 3)] == [None, Miss.ABSENT, Miss.ABSENT]
    full.tier.check()


def steps(seed: int) -> Iterator[tuple[str, int, int, int]]:
    rng = random.Random(seed)
    verbs = ["put", "put", "put", "put", "pin", "unpin", "raise", "drop", "retain", "release", "touch"]
    for _ in range(1500):
        yield rng.choice(verbs), rng.randrange(30), rng.randrange(1, 9), rng.choice([10, 50, 50, 90])


@pytest.mark.parametrize("quota", [0.0, 0.3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_every_block_is_found_again_after_any_verbs(policy: str, seed: int, quota: float) -> None:
    """Pinned, raised, dropped, retained, at random: the invariants hold all along, and in the end all may leave."""
    full = Stored(policy, 60, quota)
    tier, held = full.tier, []
    scopes = [scope_of(name) for name in "abc"]
    for number, (verb, user, blocks, priority) in enumerate(steps(seed)):
        keys = chain(user, blocks, scopes[user % 3])
        slot = tier.index.get(keys[-1])
        if verb == "put":
            full.put(keys, priority)
        elif verb == "touch":
            full.now += 1
            tier.policy.reference(keys, tier.prefix(keys, NOW), full.now)
        elif verb == "unpin" and held:
            slot = held.pop(user % len(held))
            tier.unpin(slot, slot.generation)
        elif verb == "drop" and blocks > 6:
            tier.drop(keys[-1])
        elif verb == "release":
            tier.release_retained(keys)
        elif slot is None:
            continue
        elif verb == "pin":
            held.append(full.pin(keys[-1]))
        elif verb == "raise":
            tier.raise_priority(slot, priority)
        elif verb == "retain" and len(tier.retained) < 20:
            tier.retain(keys)
        if number % 5 == 0:
            tier.check()
    for slot in held:
        tier.unpin(slot, slot.generation)
    tier.release_retained(list(tier.index))
    tier.check()
    if quota == 0.0:
        fresh = chain(999, 60)
        full.now += 1
        tier.policy.reference(fresh, 0, full.now)
        assert all(tier.reserve(key, index, insist=True) for index, key in enumerate(fresh)), (
            "a free block was not found"
        )
