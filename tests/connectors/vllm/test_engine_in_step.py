"""Loads within the step that computes the rest, in a real vLLM engine: right bytes whatever becomes of them.

test_in_step has the same without a model, where a request can also go away between a step and its answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.configurations import with_paths
from tests.connectors.vllm.support.prompts import IDLE, prompt, tiers, tokens
from tests.connectors.vllm.support.storms import storm

pytestmark = [pytest.mark.timeout(600)]

PLAIN = {"load": False, "store": False}


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.long)],
    ids=["caching", "no caching"],
)
def stepping(
    request: pytest.FixtureRequest, start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    engine = start(config=tiers(tmp_path_factory.mktemp("in-step")), engine={"enable_prefix_caching": request.param})
    engine.caching = request.param
    return engine


@pytest.fixture
def engine(stepping: Any) -> Iterator[Any]:
    yield stepping
    if stepping.process.poll() is None:
        stepping.mend()


def stored(engine: Any, *prompts: list[int]) -> list[list[int]]:
    """The prompts are in G2, and not in the engine's own pool. Returns their tokens without kvtier."""
    right = tokens([engine.generate(prompts=[one], control={"load": False})[0] for one in prompts])
    engine.settle()
    assert engine.reset()
    return right


def test_a_hit_costs_no_step_and_its_bytes_are_right(engine: Any) -> None:
    right = stored(engine, prompt(1))
    engine.record_calls()
    warm = engine.generate(prompts=[prompt(1)])
    calls = engine.calls()
    assert tokens(warm) == right and warm[0]["read"] == {"g2": 288}
    assert [288, False] in [out for name, out in calls if name == "match"], "the engine does not wait for it"
    assert engine.reset()
    engine.add(name="counted", prompt=prompt(1), tokens=1)
    assert engine.steps_to_end(limit=5) == 1, "its first token comes with the step that loads"
    engine.settle()
    assert engine.check() == IDLE


def test_its_bytes_are_those_of_a_load_between_steps(engine: Any) -> None:
    """And those that the engine computes."""
    found = []
    stored(engine, prompt(15))
    for name, room, load in (("computed", 0, False), ("between", 0, True), ("within", 16 << 20, True)):
        engine.limit(in_step_bytes=room)
        engine.add(name=name, prompt=prompt(15), load=load)
        engine.steps(count=3)
        found.append(engine.contents(name=name, blocks=9))
        ended = engine.run_out()
        engine.settle()
        assert engine.reset()
        found.append(ended[name])
    assert found[0::2] == [found[0]] * 3 and len(set(found[0])) == 9
    assert found[1::2] == [found[1]] * 3
    assert engine.check() == IDLE


def test_wrong_bytes_would_be_noticed(engine: Any) -> None:
    right = stored(engine, prompt(2))
    engine.break_loads(how="zeros")
    warm = engine.generate(prompts=[prompt(2)], control={"store": False})
    engine.mend()
    assert tokens(warm) != right, "the control"
    assert engine.reset()
    assert tokens(engine.generate(prompts=[prompt(2)])) == right
    assert engine.check() == IDLE


@pytest.mark.parametrize("positions", [[0], [4], [8], [6, 2]])
def test_one_that_fails_is_computed_from_its_first_bad_block_on(engine: Any, positions: list[int]) -> None:
    right = stored(engine, prompt(3), prompt(4))
    engine.break_loads(how="fail", positions=positions)
    warm = engine.generate(prompts=[prompt(3), prompt(4)])
    engine.mend()
    assert tokens(warm) == right
    assert sorted(out["read"].get("g2", 0) for out in warm) == [32 * min(positions), 288]
    assert engine.reset()
    assert tokens(engine.generate(prompts=[prompt(3), prompt(4)])) == right, "nothing wrong was stored"
    assert engine.check() == IDLE


@pytest.mark.parametrize("positions", [[0], [5]])
def test_one_that_fails_before_many_chunks(engine: Any, positions: list[int]) -> None:
    """The rest of the prompt takes three steps."""
    whole = prompt(16) + prompt(17, 1100)
    right = tokens(engine.generate(prompts=[whole], control=PLAIN))
    stored(engine, prompt(16))
    engine.break_loads(how="fail", positions=positions)
    assert tokens(engine.generate(prompts=[whole])) == right
    engine.mend()
    assert engine.reset()
    assert tokens(engine.generate(prompts=[whole])) == right
    assert engine.check() == IDLE


@pytest.mark.parametrize("fails", [False, True])
def test_a_client_that_goes_away_during_the_step(engine: Any, fails: bool) -> None:
    """Its blocks are free, and named, before anybody looks at how the load went."""
    longer = prompt(18) + prompt(19, 100)
    right = tokens(engine.generate(prompts=[longer], control=PLAIN))
    stored(engine, prompt(18))
    if fails:
        engine.break_loads(how="fail", positions=[3])
    engine.add(name="gone", prompt=prompt(18))
    engine.go_away_in_step(name="gone")
    engine.steps(count=1)
    engine.mend()
    assert engine.unfinished() == []
    named = engine.named_in_pool(prompt=prompt(18))  # without prefix caching no block has a name
    assert named in ((0, 3) if fails else (9,)) if engine.caching else named == 0
    assert tokens(engine.generate(prompts=[longer])) == right
    engine.settle()
    assert engine.check() == IDLE


@pytest.mark.parametrize("fails", [False, True])
def test_requests_of_one_step_over_a_shared_prefix(engine: Any, fails: bool) -> None:
    """vLLM names a request's blocks before they hold anything, and others of the same step find them."""
    asked = [prompt(5, 200) + prompt(6 + i, 100) for i in range(4)]
    right = tokens([engine.generate(prompts=[one], control=PLAIN)[0] for one in asked])
    stored(engine, prompt(5, 200))
    if fails:
        engine.break_loads(how="fail", positions=[2])
    together = engine.generate(prompts=asked)
    engine.mend()
    assert tokens(together) == right
    assert engine.reset()
    assert tokens(engine.generate(prompts=asked)) == right
    assert engine.check() == IDLE


def test_a_copy_that_never_ends_costs_hits_only(engine: Any) -> None:
    right = stored(engine, prompt(12))
    engine.wait_at_most(seconds=0.2)
    engine.stall_copies()
    held = engine.generate(prompts=[prompt(12)], settle=False)
    engine.mend()
    assert tokens(held) == right and held[0]["read"] == {}
    engine.wait_at_most(seconds=5.0)
    engine.find_arena()
    engine.settle()
    engine.generate(prompts=[prompt(13)])  # takes the arena up again
    assert engine.reset()
    warm = engine.generate(prompts=[prompt(12)])
    assert tokens(warm) == right
    assert engine.check() == IDLE


def test_new_weights_end_loads_of_the_old(engine: Any) -> None:
    """The worker knows of them before the scheduler does: the load fails, and its request computes."""
    right = stored(engine, prompt(14))
    engine.forget_weights()
    warm = engine.generate(prompts=[prompt(14)])
    assert tokens(warm) == right and warm[0]["read"] == {}, "the same bytes here, under no name of before"
    assert engine.open_anew()
    assert engine.check() == IDLE


def test_preempted_requests_load_again(engine: Any) -> None:
    """Five prompts of 23 blocks that grow to 27 on a pool of 127: all found in G2, some of them twice."""
    asked = [prompt(30 + i, 736) for i in range(5)]
    right = tokens([engine.generate(prompts=[one], tokens=110, control={"load": False})[0] for one in asked])
    for turn in range(2):
        engine.settle()
        assert engine.reset()
        before = engine.sources().get("vllm:num_preemptions", 0)
        if turn:
            engine.break_loads(how="now and then")
        together = engine.generate(prompts=asked, tokens=110, settle=False)
        engine.mend()
        assert tokens(together) == right, turn
        assert engine.sources().get("vllm:num_preemptions", 0) > before
    engine.settle()
    assert engine.check() == IDLE


def test_clients_go_away_around_their_loads(engine: Any) -> None:
    chance = random.Random(1)
    asked = [prompt(50 + i // 2, 200) + prompt(60 + i, 100) for i in range(6)]
    right = stored(engine, *asked)
    for turn in range(40):
        if turn % 4 == 0:
            engine.reset()
        if turn % 5 == 0:
            engine.break_loads(how="fail", positions=[chance.randrange(9)])
        which = chance.randrange(len(asked))
        engine.add(name=f"stays{turn}", prompt=asked[which])
        engine.add(name=f"gone{turn}", prompt=chance.choice(asked))
        engine.steps(count=chance.randrange(4))
        engine.abort(name=f"gone{turn}")
        assert engine.run_out()[f"stays{turn}"] == right[which], turn
        engine.mend()
    engine.settle()
    assert engine.check() == IDLE
    assert engine.reset()
    assert tokens(engine.generate(prompts=asked)) == right
    assert engine.check() == IDLE


SPECULATION: dict[str, dict[str, Any]] = {
    "n-gram": {"method": "ngram", "prompt_lookup_max": 3},
    "draft model": {"method": "draft_model", "model": {"checkpoint": 1}},
    "EAGLE": {"method": "eagle", "model": {"other": "eagle"}},
}


@pytest.mark.long
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", SPECULATION)
def test_beside_drafts(
    start: Callable[..., Any],
    make_checkpoint: Callable[[int], Path],
    make_other: Callable[[str], Path],
    tmp_path: Path,
    kind: str,
    caching: bool,
) -> None:
    """Drafts that follow a token which the failed load made wrong are drafts like any others."""
    makes: dict[str, Callable[[Any], object]] = {"checkpoint": make_checkpoint, "other": make_other}
    given = {"speculative_config": {"num_speculative_tokens": 3, **SPECULATION[kind]}}
    options = {**with_paths(given, lambda which, value: str(makes[which](value))), "enable_prefix_caching": caching}
    engine = start(config=tiers(tmp_path), engine=options)
    phrase = prompt(20, 10) * 4
    asked = [prompt(21 + i // 2, 200) + phrase + prompt(25 + i, 60) + phrase for i in range(6)]
    right = tokens([engine.generate(prompts=[one], control=PLAIN)[0] for one in asked])
    stored(engine, *asked)
    for turn in range(6):
        engine.break_loads(how="fail", positions=[turn % 9, turn % 4])
        together = asked if turn % 3 == 0 else asked[turn % 6 :][:2]
        found = tokens(engine.generate(prompts=together, settle=False))
        engine.mend()
        assert found == (right if turn % 3 == 0 else right[turn % 6 :][:2]), turn
        engine.settle()
        assert engine.reset()
    assert engine.counters()["load_failures"] > 0
    assert engine.check() == IDLE
    storm(engine, asked, right, random.Random(1), turns=12)
