"""The worker's copy engine: opened aside, behind a mark before the forward, kept for good where it did not end."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtier.connectors.vllm import worker as module
from kvtier.connectors.vllm.messages import Load, StepMeta, StepMoves
from kvtier.connectors.vllm.tensors import Described
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.errors import TierError
from kvtier.kernels import engine
from kvtier.kernels.copy import CopyEngine
from kvtier.tiers.host.arena import Arena
from tests.connectors.vllm.test_parts import LAYERS, PAGE, handle_of, layer_outside, pages
from tests.support.waiting import eventually


@pytest.fixture
def arena() -> Any:
    arena = Arena(PAGE * LAYERS, 1, 1 << 20)
    arena.open()
    yield arena
    arena.close()


def registered() -> tuple[WorkerHalf, dict[str, torch.Tensor]]:
    worker, tensors = WorkerHalf(pages()), layer_outside()
    worker.register(tensors)
    return worker, tensors


def test_an_engine_on_a_gpu_is_opened_aside_and_nothing_is_offered_until_it_is(
    monkeypatch: pytest.MonkeyPatch, arena: Arena
) -> None:
    may_open, opening = threading.Event(), engine.open_engine

    def slow(*args: Any, **options: Any) -> CopyEngine:
        assert may_open.wait(20.0)
        return opening(*args, **options)

    monkeypatch.setattr(engine, "open_engine", slow)
    monkeypatch.setattr(Described, "on_gpu", True)
    worker, tensors = registered()
    worker.attach(handle_of(arena))
    assert worker.answer().unreached == 1, "the scheduler is told to offer nothing"
    worker.load([Load("early", StepMoves(1, (2,), (0,), (0,)))])
    assert worker.received() == {"early"} and worker.bad_blocks() == {2}
    worker.attach(handle_of(arena))  # told again while it is being opened
    may_open.set()
    assert eventually(lambda: worker.answer().unreached == 0)
    worker.store([StepMoves(2, (4,), (3,), (0,))])
    done: dict[int, int] = {}

    def answered(job: int) -> bool:
        worker.poll()
        done.update(worker.answer().done)
        return job in done

    assert eventually(lambda: answered(2))
    worker.load([Load("r", StepMoves(3, (1,), (3,), (0,)))])
    assert eventually(lambda: answered(3))
    assert worker.received() == {"r"} and worker.bad_blocks() == set()
    assert all(torch.equal(tensor[1], tensor[4]) for tensor in tensors.values())
    worker.close()


def test_a_load_in_step_is_refused_where_another_thread_would_copy(
    monkeypatch: pytest.MonkeyPatch, arena: Arena
) -> None:
    """The forward would read the block before it is filled: its request computes instead."""
    monkeypatch.setattr(Described, "on_gpu", True)
    worker, _ = registered()
    worker.attach(handle_of(arena))
    assert eventually(lambda: worker.answer().unreached == 0)
    worker.load([Load("r", StepMoves(1, (2,), (0,), (0,)), in_step=True)])
    answer = worker.answer()
    assert (answer.done, answer.failed) == ({1: 1}, {1: {0}})
    assert worker.bad_blocks() == {2} and worker.received() == set(), "the request does not wait"
    worker.close()


def test_an_engine_that_cannot_be_opened_is_tried_again_when_the_scheduler_asks(
    monkeypatch: pytest.MonkeyPatch, arena: Arena
) -> None:
    failures, opening = iter([True]), engine.open_engine

    def first_broken(*args: Any, **options: Any) -> CopyEngine:
        if next(failures, False):
            raise OSError("no libcuda")
        return opening(*args, **options)

    monkeypatch.setattr(engine, "open_engine", first_broken)
    monkeypatch.setattr(Described, "on_gpu", True)
    worker, _ = registered()
    worker.attach(handle_of(arena))
    assert eventually(lambda: worker._engine.failure)  # type: ignore[union-attr]
    assert worker.answer().unreached == 1
    worker.attach(handle_of(arena))
    assert eventually(lambda: worker.answer().unreached == 0)
    worker.close()


def test_a_steps_copies_wait_for_the_mark_before_its_forward(monkeypatch: pytest.MonkeyPatch, arena: Arena) -> None:
    class Mark:
        passed = False

        def query(self) -> bool:
            return self.passed

    worker, _ = registered()
    worker.attach(handle_of(arena))
    mark = Mark()
    assert isinstance(worker._engine, CopyEngine)
    monkeypatch.setattr(worker._engine, "mark", lambda: mark)
    worker.mark()
    worker.store([StepMoves(1, (4,), (3,), (0,))])
    worker.poll()
    assert worker.answer().done == {}
    mark.passed = True
    worker.poll()
    assert worker.answer().done == {1: 1}

    def refused() -> None:
        raise TierError("g1", "record event", "the device is busy")

    monkeypatch.setattr(worker._engine, "mark", refused)
    mark.passed = False
    with pytest.raises(TierError):
        worker.mark()
    assert worker._mark is None, "an earlier step's mark would be too early"
    monkeypatch.setattr(worker._engine, "mark", lambda: mark)
    worker.mark()
    worker.suspend()
    assert worker._mark is None, "it was of the engine that is closed"
    worker.resume()
    worker.mark(copies=False)
    worker.store([StepMoves(2, (4,), (3,), (1,))])
    worker.poll()
    assert worker.answer().done == {2: 1}
    worker.close()


def test_the_connector_marks_before_the_forward_and_only_steps_with_copies() -> None:
    from kvtier.connectors.vllm.connector import KVTierConnector

    class Half:
        marks: list[bool] = []

        def mark(self, copies: bool) -> None:
            self.marks.append(copies)

    connector = KVTierConnector.__new__(KVTierConnector)
    connector._worker = Half()  # type: ignore[assignment]
    moves = StepMoves(1, (4,), (3,), (0,))
    for meta in (StepMeta(1), replace(StepMeta(2), stores=[moves]), replace(StepMeta(3), loads=[Load("r", moves)])):
        connector.bind_connector_metadata(meta)
        assert connector._connector_metadata is meta
    assert Half.marks == [False, True, True]


@pytest.mark.parametrize("raises", [False, True])
def test_memory_of_copies_that_did_not_end_stays_mapped(
    monkeypatch: pytest.MonkeyPatch, arena: Arena, raises: bool
) -> None:
    worker, _ = registered()
    worker.attach(handle_of(arena))

    def unclean(timeout_s: float) -> bool:
        if raises:
            raise RuntimeError("the device is lost")
        return False

    monkeypatch.setattr(module, "_UNENDED", [])
    worker._engine.close = unclean  # type: ignore[union-attr, method-assign]  (a patch of pytest's would hold the engine)
    mapping, pool = weakref.ref(worker._arena), weakref.ref(worker._engine)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) if raises else monkeypatch.context():
        worker.close()
    gc.collect()
    assert mapping() is not None and pool() is not None
    module._UNENDED.clear()
    if not raises:  # the error's traceback may hold frames that hold it
        assert eventually(lambda: gc.collect() >= 0 and mapping() is None), "the control: nothing else keeps it"
