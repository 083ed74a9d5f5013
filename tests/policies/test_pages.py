"""Sorted pages against a sorted list, and the blocks that pass through a tier."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvtier.identity.keys import BlockKey
from kvtier.policies import transit
from kvtier.policies.lru import LRU
from kvtier.policies.pages import Pages
from kvtier.policies.transit import Transit
from kvtier.times import Mono


@pytest.mark.parametrize("seed", range(3))
def test_pages_are_sorted_whatever_enters_and_leaves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.policies.pages.PAGE", 4)
    rng, pages, here = random.Random(seed), Pages[SimpleNamespace]("number"), dict[int, SimpleNamespace]()
    for step in range(2_000):
        if here and rng.random() < 0.48:
            number = rng.choice([min(here), max(here), rng.choice(list(here))])
            pages.remove(here.pop(number))
        else:
            number = rng.choice([step, step, -step, rng.randrange(-3_000, 3_000)])
            if number in here:
                continue
            here[number] = SimpleNamespace(number=number)
            pages.add(here[number])
        if step % 50 == 0:
            assert [entry.number for entry in pages] == sorted(here)
            assert pages.first is (here[min(here)] if here else None) and bool(pages) == bool(here)
            assert all(0 < len(page) <= 8 for page in pages._pages)


def test_what_passes_through_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transit, "PASSING_MAX", 3)
    passing, keys = Transit(), [BlockKey(bytes([number]) * 48) for number in range(8)]
    for key in keys[:5]:
        passing.expect(key)
        passing.arrive(key)
    assert list(passing) == keys[2:5] and list(passing.newest()) == keys[4:1:-1]
    for key in keys[:5]:
        passing.suspend(key)
    assert not passing and [passing.resume(key) for key in keys[:5]] == [False, False, True, True, True]
    passing.leave(keys[2])
    passing.warm(keys[3])
    assert list(passing) == [keys[4]]
    for key in keys[4:]:
        passing.expect(key)
    assert passing.expected == {keys[7]}, "copies of the first three were given up"


def test_a_block_that_is_used_while_it_is_pinned_does_not_return_to_the_eviction_end() -> None:
    """A request used it after somebody had looked for a victim: it left first all the same."""
    policy, old, used = LRU(100), [BlockKey(bytes(48))], [BlockKey(bytes([1]) * 48)]
    for at, chain in enumerate((old, used)):
        policy.reference(chain, 0, Mono(at))
        if chain is used:
            policy._transit.expect(used[0])
        policy.insert(chain[0])
    assert policy.victim(None, lambda key: True) == used[0]
    policy.suspend(used[0])
    policy.reference(used, 1, Mono(3))
    policy.resume(used[0])
    assert policy.victim(None, lambda key: True) == old[0]
    policy.check({*old, *used})
