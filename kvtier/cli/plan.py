"""`kvtier plan`: hit rate and cost over tier sizes."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer

from kvtier.bench.retention.capacity import CapacityPlan, Rates, plan_capacity
from kvtier.bench.retention.shapes import CacheShape, shape_of
from kvtier.bench.retention.traces import load_trace
from kvtier.bench.retention.worth import PRICES, SPEEDS_GB_S, Assumptions
from kvtier.cli.output import Json, console, write_json, write_table
from kvtier.errors import InvalidRequest
from kvtier.units import parse_duration

BAR = 24
BOUNDARIES = 2
"""That a request leaves where a model has windows or states: the end of its prompt, and that of its answer."""


def plan(
    trace: Annotated[Path | None, typer.Option(help="A trace in a format that docs/policies.md lists.")] = None,
    sessions_per_hour: Annotated[float | None, typer.Option(help="Instead of a trace: sessions per hour.")] = None,
    turns: Annotated[int, typer.Option(help="Requests of a session.")] = 10,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of its first request.")] = 2000,
    shared_tokens: Annotated[int, typer.Option(help="Tokens of it that all sessions share.")] = 1000,
    turn_tokens: Annotated[int, typer.Option(help="Tokens that each request adds.")] = 800,
    pause: Annotated[str, typer.Option(help="Mean pause between requests of a session.")] = "2m",
    model: Annotated[
        str, typer.Option(help="llama-3.1-8b, llama-3.1-70b, deepseek-v3, or a checkpoint's directory.")
    ] = "llama-3.1-8b",
    bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="KV bytes per token, instead of the shape's.")
    ] = None,
    prefill_rate: Annotated[float | None, typer.Option(min=1, help="Tokens/s that a GPU prefills.")] = None,
    gpu_hour: Annotated[float, typer.Option(min=0, help="$ per GPU-hour.")] = 3.0,
    ram_price: Annotated[float, typer.Option(min=0, help="$ per GB of RAM and month.")] = PRICES["g2"],
    ssd_price: Annotated[float, typer.Option(min=0, help="$ per GB of SSD and month.")] = PRICES["g3"],
    ssd_read: Annotated[float, typer.Option(min=0.01, help="GB/s that the SSD reads.")] = SPEEDS_GB_S["g3"],
    ttl: Annotated[str, typer.Option(help="Retention.")] = "24h",
    budget: Annotated[float | None, typer.Option(help="$ per month for G3 at most.")] = None,
    json: Json = False,
) -> None:
    """Compute the hit rate of RAM and SSD sizes on a workload, and advise the sizes that are worth their price."""
    if (trace is None) == (sessions_per_hour is None):
        raise InvalidRequest("give either --trace FILE or --sessions-per-hour N")
    began = time.perf_counter()
    if trace is not None:
        loaded, scale = load_trace(trace), 1.0
    else:
        rates = Rates(sessions_per_hour or 0, turns, prompt_tokens, shared_tokens, turn_tokens, parse_duration(pause))
        loaded, scale = rates.trace(), rates.scale
    shape = _shape(model, bytes_per_token, prefill_rate)
    apart = loaded.unique * loaded.block_tokens / (BOUNDARIES * len(loaded.requests))  # tokens of two boundaries
    given = Assumptions(
        shape.with_boundaries(apart), gpu_hour, ram_price=ram_price, ssd_price=ssd_price, ssd_read_gb_s=ssd_read
    )
    made = plan_capacity(loaded, given, parse_duration(ttl), budget, scale)
    doubts = loaded.doubts(parse_duration(ttl)) if trace is not None else []
    spent = round(time.perf_counter() - began, 2)
    if json:
        write_json(
            {
                "trace": loaded.name,
                "shape": dataclasses.asdict(shape),
                "bytes_per_token_with_boundaries": given.shape.bytes_per_token,
                **dataclasses.asdict(made),
                "seconds": spent,
                "doubts": doubts,
            }
        )
        return
    for doubt in doubts:
        console().print(f"too small a trace: {doubt}")
    if shape.boundary_bytes:
        console().print(
            f"{shape.boundary_bytes:,} bytes per boundary; with {BOUNDARIES} of each request, one in {apart:,.0f} "
            f"distinct tokens, that makes {given.shape.bytes_per_token:,} bytes per token"
        )
    _print(loaded.name, shape, made, spent)


def _shape(model: str, bytes_per_token: int | None, prefill_rate: float | None) -> CacheShape:
    known = shape_of(model)
    rate = prefill_rate or known.prefill_tokens_s
    if bytes_per_token:
        return CacheShape(model, bytes_per_token, rate)
    return CacheShape(model, known.bytes_per_token, rate, known.boundary_bytes)


def _print(name: str, shape: CacheShape, made: CapacityPlan, seconds: float) -> None:
    out = console()
    out.print(
        f"{name}, {shape.name} at {shape.bytes_per_token:,} bytes per token: all of it is {made.footprint_gb:,} GB; "
        f"{made.reachable_percent} % of block references could be served at all."
    )
    rows = [
        (f"{p.size_gb:,.0f}" if p.size_gb >= 10 else f"{p.size_gb:g}", p.hit_percent, p.prefill_left_percent,
         p.gpu_hours_per_day, "█" * round(BAR * p.hit_percent / 100))
        for p in made.curve[:: max(1, len(made.curve) // 16)]
    ]  # fmt: skip
    write_table(["GB", "hit %", "prefill left %", "GPU h/day", ""], rows)
    for share, size in made.targets.items():
        out.print(f"{share} of what can be served: {size:,} GB")
    out.print(f"Advice: G2 {made.sizes_gb['g2']:,} GB, G3 {made.sizes_gb['g3']:,} GB: {made.hit_percent} % served.")
    for reason in made.reasons:
        out.print(f"  {reason}")
    cost = made.cost
    out.print(
        f"Per month: GPU {cost['gpu_nothing_kept']:,} $ with nothing kept, {cost['gpu_left']:,} $ so; "
        f"G2 {cost['g2']:,} $, G3 {cost['g3']:,} $ (prices are assumptions; {seconds} s)"
    )
