"""Fixtures of the transformers connector's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.testing import VirtualClock

torch = pytest.importorskip("torch")
models = pytest.importorskip("tests.connectors.transformers.support.models")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The order of additions, and with it the last bits, then depends on nothing outside the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(one_thread: None) -> Any:
    return models.llama()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., kvtier.Config]:
    """Tiers of a few blocks; `g1` and `g2` in blocks."""

    def make(g1: int = 64, g2: int = 128, **sections: Any) -> kvtier.Config:
        tiers = {
            "g1": {"blocks": g1},
            "g2": {"capacity": g2 * models.BLOCK_BYTES},
            "g3": {"path": str(tmp_path / "g3"), "capacity": "64MiB"},
            "g4": {"url": f"file://{tmp_path}/g4", "stride": 4},
        }
        return kvtier.Config.parse({"version": 1, "tiers": tiers, **sections})

    return make
