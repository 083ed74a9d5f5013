"""Of the latest requests: which beginnings of prompts are asked for, and which requests were slow, and why. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.journal.breaks import prefix_name
from kvtier.journal.served import Remembered, ServedRequest

ROWS = 10
_TAIL_BYTES = 8


@dataclass(slots=True)
class PrefixHeat:
    """Requests whose prompts begin with the same block. `shared_tokens`: what all of them have in common, in whole
    blocks; `given`: tokens by tier; `computed`: those that no cache had."""

    prefix: str
    requests: int = 0
    shared_tokens: int = 0
    input_tokens: int = 0
    given: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    ago_s: float = 0.0


def heat(latest: Sequence[Remembered], block_tokens: int, secret: bytes, now_s: float) -> list[PrefixHeat]:
    """By tokens asked for, the most first; ROWS of them at most."""
    families: defaultdict[str, list[Remembered]] = defaultdict(list)
    for one in latest:
        families[prefix_name(one, 1, secret)].append(one)
    rows = []
    for name, members in families.items():
        row, given = PrefixHeat(name, len(members)), Counter[str]()
        for one in members:
            row.input_tokens += one.served.input_tokens
            given.update(one.served.given)
            row.computed += one.served.computed_tokens
        row.given = dict(given)
        # In the order of bytes, what the first and the last have in common all between them have.
        first, last = min(one.tails for one in members), max(one.tails for one in members)
        row.shared_tokens = _same_bytes(first, last) // _TAIL_BYTES * block_tokens
        row.ago_s = round(max(0.0, now_s - max(one.served.at_s for one in members)), 1)
        rows.append(row)
    return sorted(rows, key=lambda row: -row.input_tokens)[:ROWS]


def _same_bytes(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def reason_of(served: ServedRequest, block_tokens: int, block_s: float | None) -> str:
    """The largest part of the time until its first token: `queued` for the engine, `tiers` that it waited for,
    `computed` for the tokens that it computed; "" where nothing was measured."""
    waited = served.waited_s or 0.0
    parts = {"tiers": waited}
    if served.placed_s is not None:
        parts["queued"] = max(0.0, served.placed_s - waited)
    if served.first_s is not None and served.placed_s is not None:
        parts["computed"] = max(0.0, served.first_s - served.placed_s)
    elif block_s is not None:
        parts["computed"] = served.computed_tokens / block_tokens * block_s
    longest = max(parts, key=lambda name: parts[name])
    return longest if parts[longest] > 0 else ""


def slow(latest: Sequence[Remembered], block_tokens: int, block_s: float | None, now_s: float) -> list[dict[str, Any]]:
    """The slowest until their first token, or until they were given blocks where that is all that is known."""

    def begun_s(one: ServedRequest) -> float:
        return one.first_s if one.first_s is not None else one.placed_s or 0.0

    rows = sorted((one.served for one in latest), key=begun_s, reverse=True)[:ROWS]
    return [{**told(one, now_s), "reason": reason_of(one, block_tokens, block_s)} for one in rows if begun_s(one) > 0]


def told(served: ServedRequest, now_s: float) -> dict[str, Any]:
    """A request as plain values, without its scope."""
    times = {name: getattr(served, name) for name in ("placed_s", "waited_s", "first_s", "whole_s")}
    return {
        "name": served.name,
        "ago_s": round(max(0.0, now_s - served.at_s), 1),
        "input_tokens": served.input_tokens,
        "output_tokens": served.output_tokens,
        "given": dict(served.given),
        "computed_tokens": served.computed_tokens,
        "why": served.why,
        **{name: None if seconds is None else round(seconds, 4) for name, seconds in times.items()},
    }
