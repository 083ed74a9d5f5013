"""Capacity planning: hit rates of tier sizes, and the sizes that are worth their price."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.bench.retention.curves import Reuse
from kvtier.bench.retention.trace import Request, Trace
from kvtier.bench.retention.worth import MONTH_S, Assumptions
from kvtier.errors import InvalidRequest

SSD_SHARE = 0.5
"""Of the SSD's read bandwidth, for the busiest hour; RAM is sized to stay below it."""

POINTS = 48
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Point:
    """A capacity and what it serves. `gpu_hours_per_day`: for the prefill that is left."""

    size_gb: float
    hit_percent: float
    prefill_left_percent: float
    gpu_hours_per_day: float


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """`curve` over all sizes up to the footprint; `targets`: the size that serves a share of all references that can be
    served; `sizes_gb` and `cost` ($ per month): the advised stack."""

    reachable_percent: float
    footprint_gb: float
    curve: tuple[Point, ...]
    targets: Mapping[str, float]
    sizes_gb: Mapping[str, float]
    hit_percent: float
    cost: Mapping[str, float]
    reasons: tuple[str, ...]


class _Workload:
    """A trace under one ttl: blocks served and GPU-hours of the prefill that is left, by capacity in blocks."""

    def __init__(self, trace: Trace, given: Assumptions, ttl: float, scale: float) -> None:
        self.trace, self.ttl = trace, ttl
        self.reuse = Reuse(trace)
        self.sizes = _sizes(trace.unique)
        self.block_gb = trace.block_tokens * given.shape.bytes_per_token / 1e9 * scale
        self._served = {blocks: float(self.reuse.served(blocks, ttl).sum()) for blocks in (0, *self.sizes)}
        days = max(trace.span_s, 1.0) / 86_400
        self._block_hours = trace.block_tokens / given.shape.prefill_tokens_s * scale / 3600 / days

    def percent(self, blocks: int) -> float:
        return 100 * self._served[blocks] / self.trace.references

    def gpu_hours(self, blocks: int) -> float:
        """Per day."""
        return (self.trace.references - self._served[blocks]) * self._block_hours

    def point(self, blocks: int) -> Point:
        percent = self.percent(blocks)
        hours = self.gpu_hours(blocks)
        return Point(round(blocks * self.block_gb, 3), round(percent, 3), round(100 - percent, 3), round(hours, 3))

    def reaching(self, share: float) -> int:
        """The smallest capacity that serves `share` of all that can be served."""
        most = self._served[self.sizes[-1]]
        return next(blocks for blocks in self.sizes if self._served[blocks] >= share * most)

    def memory(self, disk: int, bandwidth: float) -> int:
        """Blocks of RAM that keep reads from an SSD of `disk` blocks within `bandwidth` GB/s in the busiest hour."""
        import numpy as np

        hour = np.array([int(request.at // 3600) for request in self.trace.requests], dtype=np.int64)
        length = min(3600.0, max(self.trace.span_s, 1.0))
        whole = self.reuse.served(disk, self.ttl)
        for blocks in self.sizes:
            below = np.maximum(whole - self.reuse.served(blocks, self.ttl), 0)
            if np.bincount(hour, weights=below).max() * self.block_gb / length <= bandwidth:
                return min(blocks, disk)
        return disk


def plan_capacity(
    trace: Trace, given: Assumptions, ttl: float, budget: float | None = None, scale: float = 1.0
) -> CapacityPlan:
    """The curve, and the sizes of G2 and G3 with the lowest total cost, or the best that `budget` ($ per month) allows.

    `scale`: how many sessions each one of the trace stands for. Seconds for millions of references. Raises
    InvalidRequest for a budget below the price of one block.
    """
    load = _Workload(trace, given, ttl, scale)
    month = MONTH_S / 86_400 * given.gpu_hour
    prices = {blocks: blocks * load.block_gb * given.ssd_price for blocks in load.sizes}
    affordable = [blocks for blocks in load.sizes if budget is None or prices[blocks] <= budget]
    if not affordable:
        raise InvalidRequest(f"a budget of {budget:g} $ a month buys not one block of {load.block_gb:.3f} GB")
    disk = min(affordable, key=lambda blocks: load.gpu_hours(blocks) * month + prices[blocks])
    memory = load.memory(disk, SSD_SHARE * given.ssd_read_gb_s)
    reasons = (
        f"G3: {'within the budget, ' if budget is not None else ''}the size at which storage and the prefill that is "
        "left cost least together",
        f"G2: the smallest that keeps the busiest hour's reads below {100 * SSD_SHARE:g} % of an SSD of "
        f"{given.ssd_read_gb_s:g} GB/s",
    )
    return CapacityPlan(
        reachable_percent=round(load.percent(load.sizes[-1]), 3),
        footprint_gb=round(trace.unique * load.block_gb, 1),
        curve=tuple(map(load.point, load.sizes)),
        targets={f"{100 * share:g}%": round(load.reaching(share) * load.block_gb, 1) for share in TARGETS},
        sizes_gb={"g2": round(memory * load.block_gb, 1), "g3": round(disk * load.block_gb, 1)},
        hit_percent=round(load.percent(disk), 3),
        cost={
            "gpu_nothing_kept": round(load.gpu_hours(0) * month, 2),
            "gpu_left": round(load.gpu_hours(disk) * month, 2),
            "g2": round(memory * load.block_gb * given.ram_price, 2),
            "g3": round(prices[disk], 2),
        },
        reasons=reasons,
    )


def _sizes(unique: int) -> list[int]:
    """Capacities from a thousandth of the footprint to all of it, evenly spaced in their logarithm."""
    least = max(1.0, unique / 1000)
    steps = (least * (unique / least) ** (step / (POINTS - 1)) for step in range(POINTS))
    return sorted({max(1, min(unique, round(size))) for size in steps} | {unique})


RATES_BLOCK_TOKENS = 512
REFERENCES_MAX = 2_000_000
"""Of a workload made from rates; above it a sample of the sessions stands for all."""


@dataclass(frozen=True, slots=True)
class Rates:
    """A workload in figures, where there is no trace: conversations that grow turn by turn."""

    sessions_per_hour: float
    turns: int = 10
    prompt_tokens: int = 2000
    shared_tokens: int = 1000
    turn_tokens: int = 800
    pause_s: float = 120.0
    hours: float = 24.0

    @property
    def scale(self) -> float:
        """Sessions that each one of `trace` stands for: 1, unless there are more than REFERENCES_MAX allows."""
        return max(1.0, self.sessions_per_hour * self.hours / self._sessions_max)

    @property
    def _sessions_max(self) -> int:
        blocks = (self.prompt_tokens + self.turn_tokens * self.turns / 2) / RATES_BLOCK_TOKENS
        return max(1, int(REFERENCES_MAX / (self.turns * max(1.0, blocks))))

    def trace(self, seed: int = 1) -> Trace:
        """Sessions at random over the time, pauses drawn from an exponential distribution. Deterministic.

        Raises InvalidRequest for impossible rates, and for sessions so long that fewer than a hundred fit.
        """
        block_tokens = RATES_BLOCK_TOKENS
        for name in self.__slots__:
            value = getattr(self, name)
            if not (value > 0 or (name == "shared_tokens" and value == 0)) or value == float("inf"):
                option = name.removesuffix("_s").replace("_", "-")
                raise InvalidRequest(f"--{option} must be positive, got {value}")
        if self._sessions_max < 100:
            raise InvalidRequest(f"{self.turns} turns of {self.turn_tokens} tokens: sessions are too long to be tried")
        rng = random.Random(seed)
        shared = list(range(min(self.shared_tokens, self.prompt_tokens) // block_tokens))
        fresh, requests = len(shared), []
        for session in range(max(1, round(self.sessions_per_hour * self.hours / self.scale))):
            at, blocks, tokens = rng.uniform(0, self.hours * 3600), list(shared), self.prompt_tokens
            for _ in range(self.turns):
                while len(blocks) < tokens // block_tokens:
                    blocks.append(fresh)
                    fresh += 1
                if blocks:
                    requests.append(Request(at, list(blocks), tokens, self.turn_tokens // 2, session))
                tokens += self.turn_tokens
                at += rng.expovariate(1 / self.pause_s)
        requests.sort(key=lambda request: request.at)
        if not requests:
            raise InvalidRequest(f"prompts of {self.prompt_tokens} tokens fill not one block of {block_tokens}")
        return Trace("rates", "rates", block_tokens, tuple(requests), fresh)
