"""Clients of a real engine that go away at every stage of a request, beside others that stay."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from tests.connectors.vllm.support.prompts import IDLE


def goes_away_before_it_has_blocks(engine: Any, name: str, chance: random.Random) -> None:
    engine.abort(name=name)


def goes_away_while_held(hold: str, steps: range, engine: Any, name: str, chance: random.Random) -> None:
    """After so many steps in which the engine's method `hold` keeps its copies or stores from ending."""
    getattr(engine, hold)()
    engine.steps(count=chance.choice(steps))
    engine.abort(name=name)
    engine.steps(count=chance.randrange(0, 5))
    engine.mend()


def goes_away_before_its_load_fails(engine: Any, name: str, chance: random.Random) -> None:
    engine.break_loads(how="fail", positions=[chance.randrange(9)])
    engine.steps(count=chance.randrange(1, 3))
    engine.abort(name=name)
    engine.steps(count=2)
    engine.mend()


def goes_away_while_it_computes(engine: Any, name: str, chance: random.Random) -> None:
    engine.steps(count=chance.randrange(1, 8))
    engine.abort(name=name)


def goes_away_after_its_end(engine: Any, name: str, chance: random.Random) -> None:
    engine.run_out()
    engine.abort(name=name)


STAGES = [
    goes_away_before_it_has_blocks,
    partial(goes_away_while_held, "hold_copies", range(1, 4)),
    goes_away_before_its_load_fails,
    goes_away_while_it_computes,
    partial(goes_away_while_held, "hold_stores", range(2, 8)),
    goes_away_after_its_end,
]


def storm(
    engine: Any, asked: list[list[int]], right: list[list[int]] | None, chance: random.Random, turns: int
) -> None:
    """In each turn one client goes away and one stays, which gets the `right` tokens, where these are known; in the end
    nothing is held."""
    for turn in range(turns):
        if turn % 5 == 0:
            engine.reset()
        which = chance.randrange(len(asked))
        engine.add(name=f"stays{turn}", prompt=asked[which])
        engine.add(name=f"gone{turn}", prompt=chance.choice(asked))
        STAGES[turn % len(STAGES)](engine, f"gone{turn}", chance)
        ended = engine.run_out()
        if right is not None and STAGES[turn % len(STAGES)] is not goes_away_after_its_end:
            assert ended[f"stays{turn}"] == right[which], turn
    engine.settle()
    assert engine.check() == IDLE
