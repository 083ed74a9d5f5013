"""`kvtier bench retention`: what keeping KV for longer is worth on a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.bench.shapes import shape_of
from kvtier.bench.simulate import FOREVER, Level, capacity_of, simulate, simulate_stack
from kvtier.bench.traces import Trace, load_trace
from kvtier.cli.output import Json, write_json, write_table
from kvtier.errors import InvalidRequest
from kvtier.terms import Terms, parse_duration
from kvtier.units import parse_size

TracePath = Annotated[
    Path,
    typer.Option(
        "--trace", help="Trace: .npz arrays, Mooncake, Bailian or prompt .jsonl, .txt, session .json or folder."
    ),
]
PolicyName = Annotated[str, typer.Option("--policy", help="lru, gapduel, arc, s3fifo or lru-freq.")]
Fraction = Annotated[
    float | None, typer.Option("--capacity-fraction", help="Capacity as a share of the trace's distinct blocks.")
]
Ttl = Annotated[
    str | None, typer.Option("--ttl", help="Idle time in seconds, or as 10m, 24h; unbounded capacity unless given.")
]
Tiers = Annotated[str | None, typer.Option("--tiers", help="Sizes of a stack, nearest first: 60GB,256GB,4TB.")]
Model = Annotated[str, typer.Option("--model", help="Shape that sizes are reckoned with, see docs/policies.md.")]
TokenBytes = Annotated[int | None, typer.Option("--bytes-per-token", help="Instead of a known shape.")]
Limit = Annotated[int | None, typer.Option("--limit", help="Only the first requests of the trace.")]
Simulate = Annotated[bool, typer.Option("--simulate", help="Without bytes, in the time of the trace.")]


def retention(
    trace: TracePath,
    simulate: Simulate = False,
    policy: PolicyName = "gapduel",
    capacity_fraction: Fraction = None,
    ttl: Ttl = None,
    tiers: Tiers = None,
    model: Model = "llama-3.1-8b",
    bytes_per_token: TokenBytes = None,
    limit: Limit = None,
    json: Json = False,
) -> None:
    """Replay a trace and say what a cache of this size, policy and retention would have served."""
    if not simulate:
        raise InvalidRequest("only --simulate is here yet")
    loaded = load_trace(trace, limit=limit)
    head = {
        "trace": loaded.name,
        "format": loaded.format,
        "requests": len(loaded.requests),
        "references": loaded.references,
        "unique_blocks": loaded.unique,
        "block_tokens": loaded.block_tokens,
    }
    if tiers is not None:
        per_token = bytes_per_token or shape_of(model).bytes_per_token
        results = _stack(loaded, policy, tiers, per_token)
    else:
        results = _single(loaded, policy, capacity_fraction, ttl)
    if json:
        write_json(head | results)
    else:
        write_table(["", loaded.name], [(key.replace("_", " "), value) for key, value in (head | results).items()])


def _single(trace: Trace, policy: str, fraction: float | None, ttl: str | None) -> dict[str, Any]:
    if fraction is not None and not 0 < fraction <= 1:
        raise InvalidRequest(f"--capacity-fraction must lie above 0 and at most 1, got {fraction}")
    if fraction is None and ttl is None:
        raise InvalidRequest("give --capacity-fraction, --ttl or --tiers")
    terms = FOREVER if ttl is None else Terms("ttl", ttl=_seconds(ttl))
    capacity = trace.unique if fraction is None else capacity_of(trace, fraction)
    outcome = simulate(trace, policy if fraction is not None else "lru", capacity, terms)
    results: dict[str, Any] = {"policy": policy, "capacity_fraction": fraction, "capacity_blocks": capacity}
    if fraction is None:
        results = {}
    if ttl is not None:
        results["ttl_s"] = terms.ttl
    return results | {
        "hit_percent": round(outcome.hit_percent, 6),
        "prefill_left_percent": round(100 - outcome.hit_percent, 6),
        "evictions": outcome.evictions,
        "seconds": round(outcome.seconds, 2),
        "cpu_seconds": round(outcome.cpu_seconds, 2),
    }


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return parse_duration(text)


def _stack(trace: Trace, policy: str, text: str, bytes_per_token: int) -> dict[str, Any]:
    sizes = [parse_size(part.strip()) for part in text.split(",")]
    if not 1 <= len(sizes) <= 4:
        raise InvalidRequest(f"--tiers: give one to four sizes, nearest first, got {len(sizes)}")
    block_bytes = trace.block_tokens * bytes_per_token
    levels = [Level(f"g{depth}", max(1, size // block_bytes)) for depth, size in enumerate(sizes, 1)]
    split = simulate_stack(trace, policy, levels)
    return {
        "policy": policy,
        "bytes_per_token": bytes_per_token,
        "footprint_gb": round(trace.unique * block_bytes / 1e9, 1),
        "tiers": {
            level.name: {
                "gb": round(level.blocks * block_bytes / 1e9, 1),
                "hit_percent": round(split.hit_percent[level.name], 3),
                "served_gb": round(split.hit_percent[level.name] / 100 * split.references * block_bytes / 1e9, 1),
                "written_gb": round(split.written[level.name] * block_bytes / 1e9, 1),
            }
            for level in levels
        },
        "hit_percent": round(split.total_percent, 6),
        "prefill_left_percent": round(100 - split.total_percent, 6),
    }
