"""Fleets of virtual engines with vLLM's real connector: no forward reads a wrong byte, none is stored, everything is
given back; and bugs planted in the connector are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvtier.connectors.purges import Purges
from kvtier.connectors.vllm.loads import Loads
from kvtier.connectors.vllm.scheduler import SchedulerHalf
from kvtier.connectors.vllm.stores import Stores
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.kernels.ack import Outcome
from kvtier.sim import History, Played, make_history, play, shrink

HISTORIES = Path(__file__).parent / "histories"
TELLING = (8, 10, 11, 12, 21, 25, 30, 33, 37, 42, 44, 45, 49)
"""Seeds in which every kind of loss and hit happens, most of them in several."""
DIGESTS = (
    "from kvtier.sim import make_history, play\n"
    "import sys\n"
    "print([play(make_history(seed, 'engines')).digest for seed in range(6)], {'vllm', 'torch'} & set(sys.modules))"
)


def failures(seeds: range) -> list[str]:
    """One line for each history that breaks a promise."""
    played = (play(make_history(seed, "engines")) for seed in seeds)
    return [f"kvtier sim --mode engines --seeds {one.history.seed}: {one.failure}" for one in played if one.failure]


@pytest.mark.parametrize("part", range(12))
def test_no_engine_reads_or_stores_a_wrong_byte_in_any_history(part: int) -> None:
    assert not failures(range(10 * part, 10 * (part + 1)))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_no_engine_reads_or_stores_a_wrong_byte_in_ten_thousand_histories(part: int) -> None:
    assert not failures(range(500 * part, 500 * (part + 1)))


def test_a_seed_is_one_history_whatever_the_process_and_needs_no_vllm() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    other = subprocess.run(
        [sys.executable, "-c", DIGESTS], capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    mine = [play(make_history(seed, "engines")).digest for seed in range(6)]
    assert len(set(mine)) == 6
    assert other.stdout.strip() == f"{mine} set()"


def test_the_histories_say_something() -> None:
    played = [play(make_history(seed, "engines")) for seed in TELLING]
    said = "\n".join(line for one in played for line in one.lines)
    for word in ("is answered", "is aborted, loading", "is aborted, running", "is preempted", "reset: True"):
        assert word in said, word
    counted = Counter[str]()
    for name, count in re.findall(r"'(\w+)': (\d+)", said):
        counted[name] += int(count)
    for name in (
        "blocks_stored", "copies_failed", "load_failures", "loads_declined", "spill_lost", "stores_without_room",
        "tokens_read_g2", "tokens_read_g3", "tokens_read_g4",
    ):  # fmt: skip
        assert counted[name] > 0, name


def stored_late() -> Played:
    """A block that waits for its copy while its tenant is purged."""
    return play(History.decode((HISTORIES / "stored_after_its_purge.json").read_bytes()))


def first_failure(seeds: range) -> Played:
    for seed in seeds:
        if (one := play(make_history(seed, "engines"))).failure:
            return one
    raise AssertionError(f"none of {len(seeds)} histories shows it")


def freed_early(plain: Any) -> Any:
    def plan(loads: Loads, manager: Any, state: Any, *given: Any) -> None:
        lease = state.lease
        plain(loads, manager, state, *given)
        if lease is not None:
            lease.release()

    return plan


def hopeful(plain: Any) -> Any:
    def loaded(loads: Loads, manager: Any, work: Any) -> None:
        plain(loads, manager, work)
        if work.state is not None:
            work.state.load_failed = False

    return loaded


def deaf(plain: Any) -> Any:
    return lambda worker: set()


def never(plain: Any) -> Any:
    return lambda *_: None


def blind(plain: Any) -> Any:
    def take(worker: WorkerHalf, ack: Any) -> None:
        plain(worker, replace(ack, outcome=Outcome.DONE))

    return take


def raising(plain: Any) -> Any:
    def raises(*_: Any) -> None:
        raise RuntimeError("planted")

    return raises


def leaking(plain: Any) -> Any:
    leases = []

    def finish(half: Any, request: Any) -> Any:
        leases.append(half._manager.pin(half._requests[request.request_id].track.chain) if half._manager else None)
        return plain(half, request)

    return finish


BUGS: dict[str, tuple[Any, str, Callable[[Any], Any], str]] = {
    "slots of a load are freed before its copies end": (Loads, "plan", freed_early, "a slot of G2 that was given away"),
    "a load that failed is offered again": (Loads, "_loaded", hopeful, "is offered a load again that failed"),
    "ends of loads are not told": (WorkerHalf, "received", deaf, "waits for a load|is not idle"),
    "workers pass over failures": (WorkerHalf, "_take", blind, "other bytes"),
    "an error inside the connector": (Stores, "mark", raising, "RuntimeError: planted"),
    "a request leaves a lease behind": (SchedulerHalf, "finish", leaking, "is not well after .*: pinned"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_connector_would_show(bug: str) -> None:
    owner, name, planted, says = BUGS[bug]
    with mock.patch.object(owner, name, planted(getattr(owner, name))):
        one = first_failure(range(40))
    assert re.search(says, one.failure), one.failure


def test_a_block_that_outlives_its_purge_would_show() -> None:
    assert not stored_late().failure
    with mock.patch.object(Purges, "take_to", lambda *_: None):
        assert "purged later" in stored_late().failure


def test_a_failing_history_with_engines_is_shrunk_and_kept() -> None:
    with mock.patch.object(Loads, "plan", freed_early(Loads.plan)):
        failed = first_failure(range(40))
        small = shrink(failed)
        again = play(History.decode(small.history.encode()))
    assert len(small.history.steps) <= 8 < len(failed.history.steps)
    assert again.failure == small.failure and again.digest == small.digest
    assert not play(small.history).failure, "without the bug it passes"
