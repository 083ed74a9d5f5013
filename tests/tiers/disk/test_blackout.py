"""Power loss from a store's first call on, names and lengths included, on a file system that forgets."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.tiers.disk.support.subprocesses import must_notice, need, program, result


def blackout(tmp_path: Path, points: int, seed: int, *more: str) -> list[str]:
    """The words that run tests/tiers/disk/support/blackout.py."""
    fuse = os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)
    need(fuse and importlib.util.find_spec("pyfuse3") is not None, "pyfuse3 (the extra `fuse`), /dev/fuse and root")
    return program("blackout", tmp_path, points, seed, *more)


def test_20_places(tmp_path: Path) -> None:
    said = result(blackout(tmp_path, 20, 1))
    assert said["images"] == 84
    assert said["durable_checked"] > 100, "hardly a block was durable when the power went"
    assert said["places"] > 200


@pytest.mark.parametrize("left_out", ["blocks", "names"])
def test_without_a_sync_the_loss_would_be_noticed(tmp_path: Path, left_out: str) -> None:
    must_notice(blackout(tmp_path, 20, 1, left_out))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_every_place(tmp_path: Path, seed: int) -> None:
    assert result(blackout(tmp_path, 0, 20 + seed))["images"] > 1000


@pytest.mark.timeout(300)
def test_10_places_of_a_store_in_full_use(tmp_path: Path) -> None:
    """Sizes in turns, retained blocks, purges, a store opened anew."""
    said = result(blackout(tmp_path, 10, 3, "mixed"))
    assert said["images"] >= 40
    assert said["durable_checked"] > 40, "hardly a block was retained when the power went"


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [30, 31, 32])
def test_300_places_of_a_store_in_full_use(tmp_path: Path, seed: int) -> None:
    """A page cannot be written, or not read, in two of three."""
    assert result(blackout(tmp_path, 300, seed, "mixed"))["images"] > 1000
