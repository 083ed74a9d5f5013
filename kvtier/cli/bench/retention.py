"""`kvtier bench retention`: what keeping KV for longer is worth on a trace."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.bench.record import record, save
from kvtier.bench.retention.charts import duration
from kvtier.bench.retention.curves import Reuse, TtlCurve
from kvtier.bench.retention.replay import Replayed, Setup, replay
from kvtier.bench.retention.report import write_report
from kvtier.bench.retention.shapes import CacheShape, shape_of
from kvtier.bench.retention.simulate import ALL, FOREVER, Admit, TierLevel, capacity_of, simulate, simulate_stack
from kvtier.bench.retention.traces import Trace, load_trace
from kvtier.bench.retention.worth import PRICES, SPEEDS_GB_S, Assumptions, PricedTier, Worth, appraise
from kvtier.cli.output import Json, console, write_json, write_table
from kvtier.errors import InvalidRequest
from kvtier.retention.terms import Terms
from kvtier.tiers.host.arena import SLOT_ALIGN
from kvtier.units import parse_duration, parse_size

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
Admission = Annotated[
    bool, typer.Option("--admission", help="With --tiers: what writing less below G2 costs in hits and saves in bytes.")
]
Simulate = Annotated[bool, typer.Option("--simulate", help="Without bytes, in the time of the trace.")]
Report = Annotated[Path | None, typer.Option("--report", help="Write an HTML report here, with PNG files beside it.")]
Ttls = Annotated[str, typer.Option("--ttls", help="Replay: retentions to compare.")]
Sample = Annotated[float, typer.Option("--sample", help="Replay: share of the sessions.")]
Folder = Annotated[Path | None, typer.Option("--folder", help="Replay: where G3 lies; a temporary folder if absent.")]
G2 = Annotated[
    str | None, typer.Option("--g2", help="Replay: RAM; a twentieth of the sample's KV, or room for its four longest.")
]
G3 = Annotated[str | None, typer.Option("--g3", help="Replay: SSD; twice the sample's KV, a quarter of it above a G4.")]
G4 = Annotated[
    str | None,
    typer.Option(
        "--g4",
        help="Replay: directory, beside G3; seaweedfs, a server started on loopback; or an fsspec URL. Off if absent.",
    ),
]
Kill = Annotated[
    bool, typer.Option("--kill/--no-kill", help="Replay: kill the process halfway and go on with another.")
]

Save = Annotated[Path | None, typer.Option("--save", help="Also write the JSON record into this folder.")]

REPLAY_BYTES_PER_TOKEN = 8
REPORT_TIERS = "60GB,256GB,4TB"
ADMISSIONS = (Admit(threshold=2), Admit(threshold=3), Admit(min_prefix=1024), Admit(min_prefix=4096))
SEED = 3


def retention(
    trace: TracePath,
    simulate: Simulate = False,
    policy: PolicyName = "gapduel",
    capacity_fraction: Fraction = None,
    ttl: Ttl = None,
    tiers: Tiers = None,
    admission: Admission = False,
    model: Model = "llama-3.1-8b",
    bytes_per_token: TokenBytes = None,
    limit: Limit = None,
    report: Report = None,
    ttls: Ttls = "10m,24h",
    sample: Sample = 0.05,
    folder: Folder = None,
    g2: G2 = None,
    g3: G3 = None,
    g4: G4 = None,
    kill: Kill = True,
    folder_saved: Save = None,
    json: Json = False,
) -> None:
    """Replay a trace and say what a cache of this size, policy and retention would have served.

    With --simulate without bytes, in the trace's own time; otherwise with real ones through kvtier over RAM, SSD and,
    if asked, object storage, KV scaled and every byte compared.
    """
    loaded = load_trace(trace, limit=limit)
    head = {
        "trace": loaded.name,
        "format": loaded.format,
        "requests": len(loaded.requests),
        "references": loaded.references,
        "unique_blocks": loaded.unique,
        "block_tokens": loaded.block_tokens,
    }
    per_token = bytes_per_token or shape_of(model).bytes_per_token
    replays: list[Replayed] = []
    if not simulate:
        part = loaded.sampled(sample, SEED) if sample < 1 else loaded
        scale = bytes_per_token or REPLAY_BYTES_PER_TOKEN
        sizes = _sizes(part, scale, g2, g3, above_g4=g4 is not None)
        with tempfile.TemporaryDirectory(prefix="kvtier-", dir=folder) as place, _bucket(g4, Path(place)) as target:
            setups = [
                Setup(Path(place) / f"kept-{text.strip()}", _seconds(text.strip()), scale, *sizes, *target,
                      policy=policy, kill=kill)
                for text in ttls.split(",")
            ]  # fmt: skip
            replays = [replay(part, setup) for setup in setups]
        results = {"sample": sample, **_told(part, replays)}
        per_token = shape_of(model).bytes_per_token
    elif tiers is not None:
        results = _stack(loaded, policy, tiers, per_token, ttl, admission=admission)
    elif report is not None and capacity_fraction is None and ttl is None:
        results = {}
    else:
        results = _single(loaded, policy, capacity_fraction, ttl)
    if report is not None:
        shape = CacheShape(model, per_token, shape_of(model).prefill_tokens_s)
        seconds = float("inf") if ttl is None else _seconds(ttl)
        results |= _report(report, loaded, shape, tiers or REPORT_TIERS, seconds, replays)
    if folder_saved is not None:
        kind = "retention_simulated" if simulate else "retention_replay"
        save(record(kind, ["kvtier", *sys.argv[1:]], head | results), folder_saved)
    if json:
        write_json(head | results)
    else:
        worth = results.pop("worth", None)
        write_table(["", loaded.name], _rows(head | results))
        if worth is not None:
            _show(worth)


def _show(worth: Mapping[str, Any]) -> None:
    """The report's figures as tables."""
    kept = worth["prefill_left_percent_kept_for"]
    write_table(["idle KV kept for", *kept], [["left to prefill, %", *kept.values()]])
    rows = [
        [name, share, tier["read_gb_s"], tier["factor"]]
        for (name, share), tier in zip(worth["served_percent"].items(), worth["break_even"].values(), strict=True)
    ]
    write_table(["tier", "served %", "read GB/s", "× break-even"], rows)
    shown = ("requests", "ttft_p50_s", "ttft_p90_s", "without_p50_s", "without_p90_s")
    rows = [[pause, *(gap[name] for name in shown)] for pause, gap in worth["first_token_s_after_pause"].items()]
    write_table(["first token after", "requests", "p50 s", "p90 s", "VRAM only p50 s", "p90 s"], rows)
    wear, cost = worth["ssd"], worth["cost_per_month"]
    if wear:
        console().print(
            f"SSD: {wear['written_gb_per_day']:,.0f} GB written a day, {wear['drive_writes_per_day']:.2g} drive writes;"
            f" its endurance lasts {wear['endurance_days']:,.0f} days."
        )
    console().print(
        f"A month's prefill costs {cost['gpu_with']:,.0f} $ of GPU time, with VRAM alone {cost['gpu_without']:,.0f} $; "
        f"RAM, SSD and objects {cost['storage']:,.0f} $."
    )


def _rows(results: dict[str, Any], above: str = "") -> list[tuple[str, object]]:
    """Nested results as lines."""
    out: list[tuple[str, object]] = []
    for key, value in results.items():
        name = f"{above} {key}".strip().replace("_", " ")
        if isinstance(value, dict):
            out += _rows(value, name)
        elif value is not None and not isinstance(value, list):
            out.append((name, value))
    return out


def _sizes(trace: Trace, scale: int, g2: str | None, g3: str | None, *, above_g4: bool) -> tuple[int, int]:
    """Bytes of G2 and G3 for a replay: as given, or small enough that every tier below G2 has something to serve."""
    if not trace.requests:
        raise InvalidRequest("--sample: not one session was drawn; take a larger share")
    slot = -(-trace.block_tokens * scale // SLOT_ALIGN) * SLOT_ALIGN
    whole = trace.unique * slot
    longest = max(len(request.blocks) for request in trace.requests) * slot
    memory = parse_size(g2) if g2 is not None else max(whole // 20, 4 * longest)
    disk = parse_size(g3) if g3 is not None else max(whole // 4, 4 * longest) if above_g4 else max(2 * whole, 2**30)
    return int(memory), int(disk)


@contextlib.contextmanager
def _bucket(g4: str | None, folder: Path) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """URL and options of G4."""
    if g4 == "directory":
        yield (folder / "objects").as_uri(), {}
        return
    if g4 != "seaweedfs":
        yield g4, {}
        return
    from kvtier.testing.servers import SeaweedFS

    server = SeaweedFS(folder / "seaweedfs")
    server.start()
    try:
        yield f"{server.new_bucket()}/replay", server.options
    finally:
        server.stop()


def _told(trace: Trace, replays: Sequence[Replayed]) -> dict[str, Any]:
    first = replays[0].setup
    out: dict[str, Any] = {
        "references_replayed": replays[0].references,
        "requests_replayed": len(replays[0].served),
        "bytes_per_token": first.bytes_per_token,
        "block_bytes": trace.block_tokens * first.bytes_per_token,
        "kv_mb": round(trace.unique * trace.block_tokens * first.bytes_per_token / 1e6, 1),
        "g2_mb": round(first.g2_bytes / 1e6, 1),
        "g3_mb": round(first.g3_bytes / 1e6, 1),
        "g4": first.g4_url and first.g4_url.partition("://")[0],
    }
    exact = TtlCurve(trace)
    for done in replays:
        loads = sorted(one.load_s * 1000 for one in done.served if one.tiers)
        out[duration(done.setup.ttl).replace(" min", "m").replace(" ", "")] = {
            "prefill_left_percent": round(done.prefill_left_percent, 3),
            "unbounded_percent": round(exact.prefill_left_percent(done.setup.ttl), 3),
            "tiers_percent": done.tier_percent,
            "missed_percent": {why: round(100 * n / done.references, 3) for why, n in done.misses.items()},
            "dropped_by_last_process": done.stats["requests"]["dropped"],
            "gb_checked": round(done.bytes_checked / 1e9, 3),
            "wrong_bytes": 0,
            "killed_before_request": done.killed_at,
            "files_under_o_direct": done.stats["direct_files"],
            "load_p50_ms": round(loads[len(loads) // 2], 3) if loads else None,
            "load_p99_ms": round(loads[int(len(loads) * 0.99)], 3) if loads else None,
            "seconds": round(done.seconds, 1),
        }
    if len(replays) > 1:
        out["prefill_ratio"] = round(replays[-1].prefill_left_percent / replays[0].prefill_left_percent, 4)
    return out


def _report(
    path: Path, trace: Trace, shape: CacheShape, tiers: str, ttl: float, replays: Sequence[Replayed]
) -> dict[str, Any]:
    sizes = [parse_size(part.strip()) for part in tiers.split(",")]
    stores = [
        PricedTier(name, size, SPEEDS_GB_S[name], PRICES[name]) for name, size in zip(SPEEDS_GB_S, sizes, strict=False)
    ]
    worth = appraise(trace, Reuse(trace), stores, Assumptions(shape), ttl)
    origin = record("retention", ["kvtier", *sys.argv[1:]], {})
    written = write_report(path, worth, origin, replays)
    return {"worth": _summary(worth), "report": [str(part) for part in written]}


def _summary(worth: Worth) -> dict[str, Any]:
    """The report's figures, for the terminal and as JSON."""

    def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}

    return {
        "prefill_left_percent_kept_for": {duration(ttl): round(left, 3) for ttl, left in worth.ttl_points},
        "served_percent": rounded(worth.percent),
        "first_token_s_after_pause": {
            gap["gap"]: rounded({k: v for k, v in gap.items() if k != "gap"}) for gap in worth.gaps
        },
        "ssd": rounded(worth.ssd),
        "break_even": {
            str(tier["tier"]): rounded({k: v for k, v in tier.items() if k != "tier"}) for tier in worth.break_even
        },
        "cost_per_month": rounded(worth.cost),
        "hours": [rounded(hour) for hour in worth.hours],
    }


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


def _stack(
    trace: Trace, policy: str, text: str, bytes_per_token: int, ttl: str | None, *, admission: bool
) -> dict[str, Any]:
    sizes = [parse_size(part.strip()) for part in text.split(",")]
    if not 1 <= len(sizes) <= 4:
        raise InvalidRequest(f"--tiers: give one to four sizes, nearest first, got {len(sizes)}")
    block_bytes = trace.block_tokens * bytes_per_token
    levels = [TierLevel(f"g{depth}", max(1, size // block_bytes)) for depth, size in enumerate(sizes, 1)]
    terms = FOREVER if ttl is None else Terms("ttl", ttl=_seconds(ttl))
    split = simulate_stack(trace, policy, levels, terms)
    tried = {ALL: split}
    if admission:
        tried |= {admit: simulate_stack(trace, policy, levels, terms, admit) for admit in ADMISSIONS}
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
        "seconds": round(split.seconds, 2),
        "cpu_seconds": round(split.cpu_seconds, 2),
        "admission": {
            str(admit): {
                "hit_percent": round(found.total_percent, 3),
                "written_below_g2_gb": round(
                    sum(found.written[level.name] for level in levels if level.name > "g2") * block_bytes / 1e9, 1
                ),
            }
            for admit, found in tried.items()
        }
        if admission
        else None,
    }
