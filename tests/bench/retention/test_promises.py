"""What the policy promises on real traces, at length: regret, cost, and staying below the ceiling."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.bench.retention.compare import FIXED
from kvtier.bench.retention.curves import CapacityCurve, ceiling_hits
from kvtier.bench.retention.simulate import capacity_of, drive, policy_cost
from kvtier.bench.retention.trace import Trace
from kvtier.policies.gapduel import GapDuel
from kvtier.policies.lru import LRU

FRACTIONS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.10, 0.25, 0.50]


def regret(trace: Trace, fraction: float) -> float:
    """Points of hits by which the best fixed policy beats GapDuel at this size."""
    capacity = capacity_of(trace, fraction)
    ours = drive(trace, GapDuel(capacity), capacity)
    assert ours <= ceiling_hits(trace, capacity)
    best = max(hits for hits in _fixed(trace, capacity))
    return 100 * (best - ours) / trace.references


def _fixed(trace: Trace, capacity: int) -> Iterator[int]:
    yield CapacityCurve(trace).hits(capacity)
    for make in FIXED.values():
        yield drive(trace, make(capacity), capacity)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_gapduel_is_near_the_best_fixed_policy_on_chats(mooncake: Trace, fraction: float) -> None:
    assert regret(mooncake, fraction) <= 0.2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_gapduel_is_near_the_best_fixed_policy_on_agents(claude: Trace, fraction: float) -> None:
    assert regret(claude, fraction) <= 0.2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hours", [6, 2])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_gapduel_is_near_the_best_fixed_policy_when_squeezed(claude: Trace, hours: int, fraction: float) -> None:
    assert regret(claude.squeezed(hours * 3600.0, seed=7), fraction) <= 0.05


@pytest.mark.parametrize("fraction", [pytest.param(0.01, marks=pytest.mark.long), 0.10])
def test_gapduel_stays_near_lru_or_above_on_the_mooncake_trace(mooncake: Trace, fraction: float) -> None:
    capacity = capacity_of(mooncake, fraction)
    ours = drive(mooncake, GapDuel(capacity), capacity)
    assert CapacityCurve(mooncake).hits(capacity) < ours <= ceiling_hits(mooncake, capacity)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fraction", [0.01, 0.05])
@pytest.mark.parametrize("kind", [LRU, GapDuel])
def test_a_reference_costs_the_request_less_than_two_microseconds(
    claude: Trace, kind: type[LRU] | type[GapDuel], fraction: float
) -> None:
    """CPU time of the policy's own verbs; shadows learn off the request's path."""
    capacity = capacity_of(claude, fraction)
    assert policy_cost(claude, kind(capacity), capacity).path_us <= 2.0
