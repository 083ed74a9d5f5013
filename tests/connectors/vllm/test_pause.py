"""A step without work waits a moment for the promotion that a request waits for, and no other step does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors import promoted
from kvtier.connectors.promoted import Promoted
from kvtier.connectors.vllm.compat import pause_s
from kvtier.manager.lease import Lease
from tests.connectors.vllm.support.small_engine import SIZE, SmallEngine

PAUSE_S = 0.25
PROMPT = list(range(5 * SIZE + 2))


class Waiting(SmallEngine):
    """An engine whose request `waits` waits for a promotion. What its steps wait for it is in `waited`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pause_s: float = PAUSE_S) -> None:
        super().__init__()
        self.half._limits = replace(self.half._limits, pause_s=pause_s)
        self.waited: list[float] = []
        self.future: Future[Lease] = Future()
        monkeypatch.setattr(promoted, "wait", lambda futures, timeout_s: self.waited.append(timeout_s))
        self.add("waits", PROMPT)
        self.half._requests["waits"].promoted = Promoted(self.future)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    engine = Waiting(monkeypatch)
    yield engine
    engine.future.cancel()
    engine.close()


def test_a_step_without_work_waits_for_the_promotion(waiting: Waiting) -> None:
    waiting.step()
    waiting.step()
    assert waiting.waited == [PAUSE_S] * 2
    waiting.future.set_exception(RuntimeError())
    waiting.step()
    assert waiting.waited == [PAUSE_S] * 2 and waiting.requests["waits"].num_computed_tokens, "it is computed"
    waiting.run()


def test_a_step_that_computes_does_not_wait(waiting: Waiting) -> None:
    waiting.add("runs", [1, *PROMPT], wanted=2)
    waiting.step()
    waiting.step()
    assert waiting.waited == [] and "runs" not in waiting.requests
    assert waiting.step().stores and waiting.waited == [], "a step that copies"
    assert not waiting.step().stores and waiting.waited == [PAUSE_S], "the control"


def test_nor_does_one_behind_a_step_under_way(waiting: Waiting) -> None:
    waiting.half._launched.add(0, 1, waiting.half._launched)  # type: ignore[arg-type]
    waiting.connector.build_connector_meta(waiting._schedule())
    assert waiting.waited == []


def test_an_engine_that_others_step_with_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Waiting(monkeypatch, pause_s=0.0)
    engine.step()
    assert engine.waited == []
    engine.future.cancel()
    engine.close()
    for replicas, alone in ((1, True), (2, False), (None, False)):
        config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=replicas))
        assert (pause_s(config) > 0) is alone


def test_a_wait_ends_with_the_promotion_and_after_its_time() -> None:
    future: Future[Lease] = Future()
    Promoted(future).wait(0.001)
    assert not future.done()
    future.cancel()
    future.set_running_or_notify_cancel()
    Promoted(future).wait(60.0)
    Promoted().wait(60.0)
