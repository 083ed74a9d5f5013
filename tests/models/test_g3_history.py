"""The index of G3 takes the steps of the model that Spin has looked through (g3_write.pml), and ends where it does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.tiers.disk import owner
from kvtier.tiers.disk.index import Index
from tests.models.support.checker import HISTORIES
from tests.models.support.replay import Liveness, Replay, histories, make_index

PATH = HISTORIES / "g3_write.txt"


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """In memory where there is a place: a commit waits for the device."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        index = make_index(Path(folder))
        yield index
        index.close()


def test_the_index_takes_the_steps_of_the_model(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0
    for seed, steps in histories(PATH).items():
        liveness = Liveness()
        monkeypatch.setattr(owner, "_started", liveness.started)
        one = Replay(index, seed, liveness)
        one.run(steps)
        taken += one.taken
    assert taken > 1000
