"""Whole fleets, simulated: every promise holds in every history, the same seed is the same history, and a planted bug
is found, and shrunk to a few steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from kvtier.errors import InvalidRequest
from kvtier.retention.lifetime import Lifetime
from kvtier.sim import History, Played, make_history, play, shrink
from kvtier.testing import verification_off
from kvtier.tiers.host.refusals import Refusals

HISTORIES = Path(__file__).parent / "histories"
DIGESTS = "from kvtier.sim import make_history, play; print([play(make_history(seed)).digest for seed in range(4)])"


def failures(mode: str, seeds: range) -> list[str]:
    """One line for each history that breaks a promise."""
    played = (play(make_history(seed, mode)) for seed in seeds)
    return [f"kvtier sim --mode {mode} --seeds {one.history.seed}: {one.failure}" for one in played if one.failure]


def first_failure(seeds: range, mode: str = "safety") -> Played:
    """Of a planted bug. `seeds` begin with one that shows it; the others are for when histories are made otherwise."""
    for seed in seeds:
        if (one := play(make_history(seed, mode))).failure:
            return one
    raise AssertionError(f"none of {len(seeds)} histories shows it")


@pytest.mark.parametrize("part", range(40))
def test_no_promise_is_broken_in_any_history(part: int) -> None:
    assert not failures("safety", range(50 * part, 50 * (part + 1)))


@pytest.mark.parametrize("part", range(8))
def test_every_fleet_works_again_once_all_is_well(part: int) -> None:
    assert not failures("liveness", range(6 * part, 6 * (part + 1)))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("mode", "part"), [("safety", part) for part in range(95)] + [("liveness", p) for p in range(5)]
)
def test_no_promise_is_broken_in_a_hundred_thousand_histories(mode: str, part: int) -> None:
    assert not failures(mode, range(1000 * part, 1000 * (part + 1)))


def test_a_seed_is_one_history_whatever_the_process() -> None:
    """Another process, whose sets of strings and bytes have another order, plays the same."""
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    other = subprocess.run(
        [sys.executable, "-c", DIGESTS], capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    mine = [play(make_history(seed)).digest for seed in range(4)]
    assert len(set(mine)) == 4
    assert mine == [play(make_history(seed)).digest for seed in range(4)]
    assert other.stdout.strip() == str(mine)


def test_the_histories_say_something() -> None:
    played = [play(make_history(seed)) for seed in range(12)]
    assert sum(one.served for one in played) > 150, "blocks are served, and compared"
    said = "\n".join(line for one in played for line in one.lines)
    for word in ("from g4", "from g3", "from g2", "given up", "computed", "preempted", "kill", "purge: ", "pin: "):
        assert word in said, word


@pytest.mark.parametrize("file", sorted(HISTORIES.glob("*.json")), ids=lambda file: file.stem)
def test_histories_that_once_failed_pass(file: Path) -> None:
    assert not play(History.decode(file.read_bytes())).failure


def test_wrong_bytes_would_show() -> None:
    with verification_off():
        one = first_failure(range(9, 300))
    assert "other bytes" in one.failure


def test_a_purged_block_would_show() -> None:
    with mock.patch.object(Refusals, "has_purged", lambda *_: False):
        one = first_failure(range(200))
    assert "purged later" in one.failure


def test_an_expired_block_would_show() -> None:
    with (
        mock.patch.object(Lifetime, "servable", lambda *_: True),
        mock.patch.object(Lifetime, "ends", lambda *_: float("inf")),
    ):
        one = first_failure(range(200))
    assert " for " in one.failure and "is served" in one.failure


def test_a_failing_history_is_shrunk_and_kept() -> None:
    with mock.patch.object(Refusals, "has_purged", lambda *_: False):
        failed = first_failure(range(2, 202))
        small = shrink(failed)
        again = play(History.decode(small.history.encode()))
    assert len(small.history.steps) <= 6 < len(failed.history.steps)
    assert again.failure == small.failure and again.digest == small.digest
    assert not play(small.history).failure, "without the bug it passes"


@pytest.mark.parametrize("wrong", [{"mode": "both"}, {"hosts": 9}, {"steps": 0}])
def test_a_history_that_cannot_be_made_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"mode|hosts|steps"):
        make_history(1, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"seed": "x"}', make_history(1).encode().replace(b'"put"', b'"run"')])
def test_a_file_that_is_no_history_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a history"):
        History.decode(raw)
