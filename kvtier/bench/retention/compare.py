"""Policies side by side on one trace, with the ceiling no policy exceeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvtier.bench.policies.arc import ARC
from kvtier.bench.policies.lru_freq import FrequencyLRU
from kvtier.bench.policies.s3fifo import S3FIFO
from kvtier.bench.retention.curves import CapacityCurve, ceiling_hits
from kvtier.bench.retention.simulate import capacity_of, drive
from kvtier.bench.retention.trace import Trace
from kvtier.policies.gapduel import GapDuel
from kvtier.policies.policy import Policy

FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.10, 0.25, 0.50)

FIXED: Mapping[str, Callable[[int], Policy]] = MappingProxyType(
    {
        "arc": ARC,
        "s3fifo": S3FIFO,
        "lru + 60 s·log2 f": lambda capacity: FrequencyLRU(capacity, 60.0),
        "lru + 300 s·log2 f": lambda capacity: FrequencyLRU(capacity, 300.0),
    }
)
"""Baselines of GapDuel beside leaf-first LRU; its regret is against the best of them at each size."""


def compare(
    trace: Trace,
    fractions: Sequence[float] = FRACTIONS,
    known: Mapping[float, Mapping[str, Any]] = MappingProxyType({}),
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Per capacity: percent of references hit by each policy, the ceiling, and GapDuel's regret in points.

    LRU comes from one exact pass, the rest are driven without a manager. Minutes for millions of references. Figures
    of the fixed policies and the ceiling are taken from `known` where it has them: they are deterministic.
    """
    curve = CapacityCurve(trace)
    for fraction in fractions:
        capacity = capacity_of(trace, fraction)

        def percent(hits: int) -> float:
            return round(100 * hits / trace.references, 3)

        row: dict[str, Any] = {"lru": percent(curve.hits(capacity))}
        earlier = known.get(fraction, {})
        for name, make in FIXED.items():
            row[name] = earlier[name] if name in earlier else percent(drive(trace, make(capacity), capacity))
        best = max(row.values())
        duel, began = GapDuel(capacity), time.process_time()
        row["gapduel"] = percent(drive(trace, duel, capacity))
        row["gapduel_cpu_us_per_reference"] = round((time.process_time() - began) / trace.references * 1e6, 3)
        row["ceiling"] = earlier["ceiling"] if "ceiling" in earlier else percent(ceiling_hits(trace, capacity))
        row["regret"] = round(best - row["gapduel"], 3)
        row["switches"] = duel.stats()["switches"]
        yield fraction, row
