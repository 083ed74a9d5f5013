"""A trace: requests in order of time, and the blocks that each named."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

DAY_S = 86_400.0
"""Over which the starts of sessions are drawn that have none."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `blocks` are ids from the root on, as the trace gives them (its last may be a partial one), each
    once; `at` in seconds from the start."""

    at: float
    blocks: list[int]
    input_tokens: int
    output_tokens: int
    session: int = -1


REQUESTS_MIN = 200
"""Requests from which shares of hits are worth money."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. Ids of blocks are dense: 0 … `unique` - 1."""

    name: str
    format: str
    block_tokens: int
    requests: tuple[Request, ...]
    unique: int

    @property
    def references(self) -> int:
        """Blocks named, over all requests."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def span_s(self) -> float:
        """Seconds from the first request to the last."""
        return self.requests[-1].at - self.requests[0].at if self.requests else 0.0

    def doubts(self, kept_s: float = 0.0) -> list[str]:
        """Why figures of this trace say little; `kept_s`: the longest retention that is asked about, in seconds."""
        found = []
        if len(self.requests) < REQUESTS_MIN:
            found.append(
                f"{len(self.requests)} requests are too few: below {REQUESTS_MIN}, a few more change every figure"
            )
        if kept_s != float("inf") and self.span_s < kept_s:
            found.append(
                f"the trace spans {self.span_s / 60:,.0f} minutes: what keeping KV for {kept_s / 60:,.0f} saves cannot "
                "show in it"
            )
        return found

    def squeezed(self, span_s: float, seed: int) -> Trace:
        """The same sessions with their starts drawn anew, uniformly over `span_s`: more of them live at once.

        Pauses inside a session do not change. A request without a session is a session of its own.
        """
        rng = random.Random(seed)
        starts: dict[int, float] = {}
        shift: dict[int, float] = {}
        moved = []
        for number, request in enumerate(self.requests):
            session = request.session if request.session >= 0 else -1 - number
            if session not in starts:
                starts[session] = request.at
                shift[session] = rng.uniform(0, span_s)
            moved.append(replace(request, at=request.at - starts[session] + shift[session]))
        moved.sort(key=lambda request: request.at)
        return replace(self, name=f"{self.name}@{span_s / 3600:g}h", requests=tuple(moved))

    def sampled(self, share: float, seed: int) -> Trace:
        """A share of the sessions (of the requests, where there are none), all of each."""
        rng = random.Random(seed)
        kept: dict[int, bool] = {}
        names = Names()
        requests = []
        for number, request in enumerate(self.requests):
            session = request.session if request.session >= 0 else -1 - number
            if session not in kept:
                kept[session] = rng.random() < share
            if kept[session]:
                requests.append(replace(request, blocks=[names.of(block) for block in request.blocks]))
        return replace(self, name=f"{self.name}×{share:g}", requests=tuple(requests), unique=len(names))


class Names:
    """Dense integers for names, each one object however often it occurs."""

    def __init__(self) -> None:
        self._dense: dict[Any, int] = {}

    def of(self, name: Any) -> int:
        return self._dense.setdefault(name, len(self._dense))

    def chain(self, parts: Sequence[Any], root: Any = None) -> list[int]:
        """Names of blocks that are distinct only together with the blocks before them."""
        out: list[int] = []
        parent: Any = root
        for part in parts:
            parent = self.of((parent, part))
            out.append(parent)
        return out

    def __len__(self) -> int:
        return len(self._dense)


def finish(name: str, kind: str, block_tokens: int, requests: list[Request], unique: int) -> Trace:
    """The trace of these requests, whatever their order, from the first one's time on."""
    requests.sort(key=lambda request: request.at)
    start = requests[0].at if requests else 0.0
    return Trace(name, kind, block_tokens, tuple(replace(r, at=r.at - start) for r in requests), unique)
