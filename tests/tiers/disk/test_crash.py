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
def test_80_kills_lose_nothing_durable_and_serve_nothing_wrong(tmp_path: Path) -> None:
    """More than twice as many as show the sabotage below."""
    survive(tmp_path / "g3", 80, seed=1)


def test_publishing_before_writing_would_be_noticed(tmp_path: Path) -> None:
    must_notice(program("crash", tmp_path / "g3", 30, 2, "sabotage"))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_10000_kills_lose_nothing_durable_and_serve_nothing_wrong(tmp_path: Path) -> None:
    survive(tmp_path / "g3", 10_000, seed=3)


def survive_mixed(
    path: Path, cycles: int, seed: int, workers: int = 2, encrypted: int = 0, shrinks: int = 0
) -> dict[str, int]:
    said = result(program("crash_mixed", path, cycles, seed, workers, encrypted, shrinks))
    assert said["killed"] > cycles / 2, "most workers ended before they were killed"
    assert said["blocks"] > 50 * cycles, "hardly a block was there"
    return said


@pytest.mark.timeout(400)
@pytest.mark.parametrize("medium", ["sound", "a page cannot be written", "a page cannot be read"])
def test_kills_at_any_write_of_a_store_in_full_use(tmp_path: Path, medium: str) -> None:
    """Sizes in turns, retained blocks, purges, bad places, a store opened anew, a neighbour."""
    seed = ["sound", "a page cannot be written", "a page cannot be read"].index(medium)
    said = survive_mixed(tmp_path / "g3", 5, seed)
    assert said["kept"] > 10


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(3, 6))
def test_600_kills_at_any_write_of_a_store_in_full_use(tmp_path: Path, seed: int) -> None:
    said = survive_mixed(tmp_path / "g3", 200, seed)
    assert said["guests"] > 100 and said["kept"] > 1000
    assert said["places"] > 20 or seed % 3 == 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_processes_with_two_sizes(tmp_path: Path) -> None:
    """They drain segments for one another at the same time, and one of them is killed."""
    assert survive_mixed(tmp_path / "g3", 24, 3, workers=10)["guests"] > 20


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("cycles", "workers"), [(3, 2), pytest.param(60, 10, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_kills_where_half_of_the_workers_encrypt(tmp_path: Path, cycles: int, workers: int) -> None:
    """Retained blocks survive, plain or encrypted, whichever worker wrote them, and nothing is taken for damage."""
    said = survive_mixed(tmp_path / "g3", cycles, 6, workers, encrypted=1)
    assert said["kept"] > cycles and said["encrypted"] > 10 * cycles


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cycles", [12, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_kills_while_the_capacity_changes(tmp_path: Path, cycles: int) -> None:
    """A store that becomes smaller goes on with that, or has its old capacity, whatever it was killed in."""
    assert survive_mixed(tmp_path / "g3", cycles, 3000, workers=3, shrinks=1)["shrunk"]
