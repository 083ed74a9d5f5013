"""A wall clock that was set: blocks in G1 live no longer than their terms, as in every tier."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.connectors.transformers import PrefixCache
from tests.connectors.transformers.support.models import generate, prompt

torch = pytest.importorskip("torch")


def turn(prefixes: PrefixCache, model: Any, ids: Any, **options: Any) -> None:
    """A prompt, run and stored."""
    cache, _ = prefixes.fetch(ids, **options)
    output = generate(model, ids, cache)
    prefixes.store(output, cache, attention_mask=torch.ones_like(output), **options)


@pytest.mark.parametrize("jump", [-172_800, 172_800])
def test_a_clock_that_is_set_makes_no_life_longer(config: Any, model: Any, clock: Any, jump: float) -> None:
    """Whichever of the two times is right: G1 went by the later set one alone."""
    ids, others = prompt(100), prompt(100, seed=1)
    with PrefixCache(config(), model, clock=clock, tiers=[]) as prefixes:
        turn(prefixes, model, ids, retention="5m")
        clock.jump_wall(jump)
        assert prefixes.fetch(ids)[1] == (96 if jump < 0 else 0)
        turn(prefixes, model, others, retention="5m")
        clock.advance(301)
        assert prefixes.fetch(ids)[1] == 0
        clock.jump_wall(-jump)
        clock.advance(1)
        assert prefixes.fetch(others)[1] == 0
        prefixes.check()


def test_what_a_wrong_clock_has_stamped_goes_when_the_right_time_is_accepted(
    config: Any, model: Any, clock: Any
) -> None:
    ids = prompt(100)
    with PrefixCache(config(), model, clock=clock, tiers=[]) as prefixes:
        turn(prefixes, model, ids, retention="24h")
        clock.jump_wall(-172_800)
        for _ in range(3):
            assert prefixes.fetch(ids)[1] == 96
            clock.advance(250)
        assert prefixes.fetch(ids)[1] == 0 == prefixes.pool.resident
        turn(prefixes, model, ids, retention="5m")
        assert prefixes.fetch(ids)[1] == 96
