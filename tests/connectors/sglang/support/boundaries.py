"""Boundaries of prompts in an engine over the tiny model with windows: what is loaded for one, and what the engine says
where its own prefix cache ends there."""

from __future__ import annotations

from typing import Any

from tests.connectors.sglang.support.answers import TIE, alike

PAGE, WINDOW_PAGES, PARTS = 16, 4, 2
AWAY = {"load": False, "store": False}


def whole(tokens: int) -> int:
    return tokens // PAGE * PAGE


def moved(start: int, boundary: int) -> int:
    """Blocks that are loaded for a boundary where the device has `start` tokens."""
    return (boundary - start) // PAGE + PARTS * min(WINDOW_PAGES, (boundary - start) // PAGE)


def conversation(engine: Any, prompt: Any, seed: int, turns: int) -> list[list[int]]:
    """Prompts of a chat's turns: each is the last one, its answer, and something new."""
    asked, history = [], prompt(seed, 150)
    for turn in range(turns):
        asked.append(history)
        answer = engine.host.generate(history, new=40)[0]["tokens"]
        history = [*history, *answer, *prompt(seed + 500 + turn, 70)]
    return asked


def agree(found: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether two answers are the same one. KV that was computed in other pieces differs by 1e-6."""
    return alike(found, own) and abs(found["logprobs"][0] - own["logprobs"][0]) < TIE


def right_of(engine: Any, asked: list[int], boundary: int, new: int = 8) -> dict[str, Any]:
    """What the engine answers where its own prefix cache gives the prompt back up to there, and kvtier nothing."""
    engine.host.flush()
    if boundary:
        engine.host.generate(asked[:boundary], new=1, kvtier=AWAY)
    (own,) = engine.host.generate(asked, new=new, kvtier=AWAY)
    assert (own["cached"], own["host"]) == (boundary, 0)
    engine.host.flush()
    return own  # type: ignore[no-any-return]
