"""States over SGLang's own tree, without a model: splits, evictions and locks, slow copies, loads that are taken back,
purges and new weights, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

World = Callable[..., Any]


@pytest.fixture
def world(bench: Any) -> World:
    from tests.connectors.sglang.support.tree_world import TreeWorld

    def make(seed: int, **options: Any) -> Any:
        chance = random.Random(seed)
        given = {"spare": chance.choice([1, 2, 4]), "g2": chance.choice(["96KiB", "300KiB", "4MiB"]), **options}
        return TreeWorld(bench, seed, **given)

    return make


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, *range(2, 40)))])
def test_requests_are_given_the_right_pages_and_states(world: World, seed: int) -> None:
    here = world(seed)
    for _ in range(500):
        here.turn()
    here.end()
    assert here.own > 0 and here.linker.stats()["engine"]["events"]["blocks_stored"] > 0


def test_states_that_wait_for_slow_copies_leave_the_engine_its_slots(world: World) -> None:
    here = world(3, spare=1, g2="4MiB")
    here.slow = 1.0
    for _ in range(60):
        here.requests.append(here._request())
        here.finish()
    assert here.linker.stats()["engine"]["events"]["stores_put_off"] > 0
    here.end()


def test_a_wrong_state_from_below_would_be_noticed(world: World) -> None:
    """The control."""
    here = world(1, g2="4MiB")
    blocks = here.linker._beside.blocks
    here.linker._beside.blocks = lambda slot: blocks(slot % here.slots.size + 1)
    with pytest.raises(AssertionError, match="another state"):
        for _ in range(500):
            here.turn()
