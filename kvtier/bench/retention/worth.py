"""The value of a stack of tiers on a trace: hits over the day, time to first token, SSD wear, break-even, cost.

Hits are exact for leaf-first LRU in every tier with write-through (`curves.py`). Times and money are
modelled from the rates and prices below; replace these assumptions by your own:

    time to first token = latency + Σ bytes per tier below G1 / its bandwidth + missing tokens / prefill rate
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvtier.bench.retention.charts import duration
from kvtier.bench.retention.curves import Reuse, TtlCurve
from kvtier.bench.retention.shapes import CacheShape
from kvtier.bench.retention.trace import Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MONTH_S = 30 * 86_400.0
TTLS_S = (60, 300, 600, 1800, 3600, 4 * 3600, 12 * 3600, 86_400)
GAPS_S = ((0, 60), (60, 300), (300, 600), (600, 3600), (3600, 4 * 3600), (4 * 3600, float("inf")))
GAP_NAMES = ("< 1 min", "1-5 min", "5-10 min", "10-60 min", "1-4 h", "> 4 h")


@dataclass(frozen=True, slots=True)
class PricedTier:
    """A tier as the model sees it. `read_gb_s` and `price` ($ per GB and month) are assumptions."""

    name: str
    size_bytes: int
    read_gb_s: float
    price: float


SPEEDS_GB_S: Mapping[str, float] = {"g1": 2000.0, "g2": 50.0, "g3": 6.0, "g4": 1.5}
PRICES: Mapping[str, float] = {"g1": 0.0, "g2": 2.0, "g3": 0.08, "g4": 0.023}
"""$ per GB and month: RAM and SSD over three years of use, object storage at list prices. G1 costs nothing extra."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Inputs of a result that are not in the trace."""

    shape: CacheShape
    gpu_hour: float = 3.0  # $
    drive_writes_per_day: float = 1.0  # rated over `drive_years`
    drive_years: float = 5.0
    latency_s: float = 0.02  # of scheduling, with or without a cache
    ram_price: float = PRICES["g2"]  # $ per GB and month, as are those in PRICES
    ssd_price: float = PRICES["g3"]
    ssd_read_gb_s: float = SPEEDS_GB_S["g3"]


@dataclass(frozen=True, slots=True)
class Worth:
    """All figures of one stack on one trace. Percentages are of block references."""

    trace: Mapping[str, Any]
    assumptions: Assumptions
    stores: tuple[PricedTier, ...]
    ttl: float
    ttl_points: tuple[tuple[float, float], ...]  # (seconds, prefill left in percent), unbounded capacity
    percent: Mapping[str, float]  # by tier
    hours: tuple[Mapping[str, float], ...]  # by tier, of each hour's references
    gaps: Mapping[str, Mapping[str, float]]  # by the pause before a request: how many, and their times to first token
    ssd: Mapping[str, float] = field(default_factory=dict)
    break_even: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by tier
    cost: Mapping[str, float] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()  # why the trace is too small for ratios and prices

    @property
    def prefill_left_percent(self) -> float:
        return 100 - sum(self.percent.values())

    def summary(self) -> dict[str, Any]:
        """For tables and JSON, rounded; without prices where there are doubts. Pure."""
        cost = {} if self.doubts else {"cost_per_month": _rounded(self.cost)}
        return {
            "prefill_left_percent_kept_for": {duration(ttl): round(left, 3) for ttl, left in self.ttl_points},
            "served_percent": _rounded(self.percent),
            "first_token_s_after_pause": _rounded(self.gaps),
            "ssd": _rounded(self.ssd),
            "break_even": _rounded(self.break_even),
            **cost,
            "hours": [_rounded(hour) for hour in self.hours],
        }


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def appraise(
    trace: Trace, reuse: Reuse, stores: Sequence[PricedTier], given: Assumptions, ttl: float = float("inf")
) -> Worth:
    """Every figure for `stores`, nearest first. Seconds for millions of references."""
    import numpy as np

    block_bytes = trace.block_tokens * given.shape.bytes_per_token
    reached = [reuse.served(store.size_bytes // block_bytes, ttl) for store in stores]
    by_tier = [reached[0], *(np.maximum(b - a, 0) for a, b in pairwise(reached))]
    asked = np.array([len(request.blocks) for request in trace.requests], dtype=np.float64)
    total, references = np.sum(by_tier, axis=0), float(asked.sum())
    curve = TtlCurve(trace)
    percent = {s.name: 100 * float(part.sum()) / references for s, part in zip(stores, by_tier, strict=True)}
    missed_blocks = references - float(total.sum())
    return Worth(
        trace=describe(trace, block_bytes),
        assumptions=given,
        stores=tuple(stores),
        ttl=ttl,
        ttl_points=tuple((float(t), curve.prefill_left_percent(t)) for t in TTLS_S if t <= max(trace.span_s, 600)),
        percent=percent,
        hours=_hours(trace, stores, by_tier, asked),
        gaps=_gaps(trace, stores, by_tier, asked, given),
        ssd=_ssd(trace, stores, missed_blocks * block_bytes, given),
        break_even={store.name: _break_even(store, given) for store in stores},
        cost=_cost(trace, stores, reached[0].sum(), total.sum(), given),
        doubts=tuple(trace.doubts()),
    )


def describe(trace: Trace, block_bytes: int) -> dict[str, Any]:
    """A trace in figures."""
    return {
        "name": trace.name,
        "requests": len(trace.requests),
        "references": trace.references,
        "unique_blocks": trace.unique,
        "block_tokens": trace.block_tokens,
        "hours": round(trace.span_s / 3600, 2),
        "footprint_gb": round(trace.unique * block_bytes / 1e9, 1),
    }


def _hours(
    trace: Trace, stores: Sequence[PricedTier], by_tier: Sequence[NDArray[np.float64]], asked: NDArray[np.float64]
) -> tuple[Mapping[str, float], ...]:
    import numpy as np

    # A trace of an hour is drawn in minutes' detail, one of days by the hour.
    width = max(300.0, min(3600.0, trace.span_s / 24))
    slot = np.array([int(request.at // width) for request in trace.requests], dtype=np.int64)
    whole = np.bincount(slot, weights=asked)
    parts = [np.bincount(slot, weights=part, minlength=len(whole)) for part in by_tier]
    out = []
    for number, references in enumerate(whole):
        if references:
            shares = {s.name: 100 * float(p[number]) / references for s, p in zip(stores, parts, strict=True)}
            out.append({"hour": number * width / 3600, "references": float(references), **shares})
    return tuple(out)


def _gaps(
    trace: Trace,
    stores: Sequence[PricedTier],
    by_tier: Sequence[NDArray[np.float64]],
    asked: NDArray[np.float64],
    given: Assumptions,
) -> dict[str, dict[str, float]]:
    """Requests by the time since the blocks they go on from were used last; times to first token of each class."""
    import numpy as np

    last: dict[int, float] = {}
    idle = np.full(len(trace.requests), np.nan)
    for number, request in enumerate(trace.requests):
        known = [last[block] for block in request.blocks if block in last]
        if known:
            idle[number] = request.at - known[-1]
        last.update(dict.fromkeys(request.blocks, request.at))
    block_bytes = trace.block_tokens * given.shape.bytes_per_token
    rate, latency = given.shape.prefill_tokens_s, given.latency_s
    loads = sum(
        # Blocks in G1 need no load.
        (p * block_bytes / (s.read_gb_s * 1e9) for s, p in zip(stores, by_tier, strict=True) if s.name != "g1"),
        start=np.zeros(len(asked)),
    )
    tokens = asked * trace.block_tokens
    served = np.sum(by_tier, axis=0) * trace.block_tokens
    with_all = latency + loads + (tokens - served) / rate
    with_g1 = latency + (tokens - by_tier[0] * trace.block_tokens) / rate
    out = {}
    for (low, high), name in zip(GAPS_S, GAP_NAMES, strict=True):
        these = (idle >= low) & (idle < high)
        if these.any():
            out[name] = {
                "requests": int(these.sum()),
                "reused_tokens_mean": float(served[these].mean()),
                **{f"ttft_p{n}_s": float(np.quantile(with_all[these], n / 100)) for n in (10, 50, 90)},
                **{f"without_p{n}_s": float(np.quantile(with_g1[these], n / 100)) for n in (10, 50, 90)},
            }
    return out


def _ssd(trace: Trace, stores: Sequence[PricedTier], written_bytes: float, given: Assumptions) -> dict[str, float]:
    """Every block that no tier holds is written once, on creation."""
    disk = next((store for store in stores if store.name == "g3"), None)
    if disk is None:
        return {}
    per_day = written_bytes / max(trace.span_s, 1.0) * 86_400
    rated = disk.size_bytes * given.drive_writes_per_day * 365 * given.drive_years
    return {
        "written_gb": written_bytes / 1e9,
        "written_gb_per_day": per_day / 1e9,
        "drive_writes_per_day": per_day / disk.size_bytes,
        "endurance_days": rated / per_day if per_day else float("inf"),
    }


def _break_even(store: PricedTier, given: Assumptions) -> dict[str, float]:
    """A tier pays off if it delivers faster than the engine computes."""
    needed = given.shape.bytes_per_token * given.shape.prefill_tokens_s / 1e9
    return {"needed_gb_s": needed, "read_gb_s": store.read_gb_s, "factor": store.read_gb_s / needed}


def _cost(
    trace: Trace, stores: Sequence[PricedTier], in_g1: float, served: float, given: Assumptions
) -> dict[str, float]:
    """Per month, were every day like the trace."""
    scale = MONTH_S / max(trace.span_s, 1.0)
    tokens = trace.references * trace.block_tokens
    seconds = trace.block_tokens / given.shape.prefill_tokens_s

    def gpu(blocks: float) -> float:
        return blocks * seconds / 3600 * given.gpu_hour * scale

    return {
        "prefill_tokens": tokens * scale,
        "gpu_without": gpu(trace.references - float(in_g1)),
        "gpu_with": gpu(trace.references - float(served)),
        "storage": sum(store.size_bytes / 1e9 * store.price for store in stores),
    }
