"""kill −9, at named points and at random: nothing wrong, nothing lost that was reported durable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.disk.support.subprocesses import must_notice, program, result


def survive(path: Path, cycles: int, seed: int) -> None:
    said = result(program("crash", path, cycles, seed))  # in a process of its own: it forks
    assert sum(said["killed"].values()) > cycles / 3, "most workers ended before they were killed"
    assert said["durable_checked"] > cycles, "hardly a block was reported durable before the end"


@pytest.mark.timeout(400)
def test_500_kills_lose_nothing_durable_and_serve_nothing_wrong(tmp_path: Path) -> None:
    survive(tmp_path / "g3", 500, seed=1)


def test_publishing_before_writing_would_be_noticed(tmp_path: Path) -> None:
    must_notice(program("crash", tmp_path / "g3", 30, 2, "sabotage"))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_10000_kills_lose_nothing_durable_and_serve_nothing_wrong(tmp_path: Path) -> None:
    survive(tmp_path / "g3", 10_000, seed=3)
