"""Engines whose loads and prefill cost given times, for what decides between the two."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.connectors.load_gate import LoadGate

Cost = Callable[[random.Random, float, int], float]
"""Seconds for so many blocks, at this share of the replay."""


@dataclass(frozen=True)
class Replay:
    """Requests one after another: blocks found, and blocks that are computed in any case."""

    requests: int
    found: Callable[[random.Random], int]
    new: Callable[[random.Random], int]

    def draw(self, seed: int) -> list[tuple[int, int]]:
        dice = random.Random(seed)
        return [(self.found(dice), self.new(dice)) for _ in range(self.requests)]


class Costs(NamedTuple):
    """Seconds of all requests with the gate, with every load, and without any."""

    gated: float
    always: float
    never: float


@dataclass(frozen=True)
class Engine:
    prefill: Cost
    load: Cost
    others: int = 0
    stall: Cost | None = None
    """By what a load delays each other request that runs; prefill delays them by its own time."""

    def outcomes(self, replay: Replay, seed: int) -> Iterable[tuple[int, int, float, tuple[float, ...]]]:
        """Per request: blocks found, blocks new, seconds of a load alone, and what either choice would cost: the
        request's own seconds with and without a load, and those of the step that others wait for."""
        for number, (found, new) in enumerate(replay.draw(seed)):
            dice, at = random.Random(f"{seed} {number}"), number / replay.requests
            rest, whole = (self.prefill(random.Random(f"{seed} {number}"), at, size) for size in (new, new + found))
            load = self.load(dice, at, found) if found else 0.0
            stall = self.stall(dice, at, found) if self.stall and found else 0.0
            yield found, new, load, (load + rest, whole, rest + stall, whole)

    def costs(self, replay: Replay, seed: int, gate: LoadGate) -> Costs:
        """Of every request."""
        gated = always = never = 0.0
        for found, new, load, (loading, computing, load_step, compute_step) in self.outcomes(replay, seed):
            with_load, without = loading + self.others * load_step, computing + self.others * compute_step
            always += with_load if found else without
            never += without
            verdict = gate.decide("async", found, self.others) if found else None
            if verdict is not None and verdict.load and load > verdict.patience_s:  # given up, and computed
                loading, load_step = verdict.patience_s + computing, load_step + compute_step
                with_load = loading + self.others * load_step
            if verdict is not None and verdict.load:
                gate.loaded(verdict, new, loading)
                if self.others:
                    gate.stalled("async", found, new, load_step)
                gated += with_load
            else:
                gate.computed(new + found, computing, verdict)
                if self.others:
                    gate.ran(new + found, compute_step)
                gated += without
        return Costs(gated, always, never)
