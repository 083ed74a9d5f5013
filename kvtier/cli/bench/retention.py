"""`kvtier bench retention …`: what keeping KV for longer saves on a trace."""

from __future__ import annotations

import json as jsonlib
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.bench.policies import COMPARED
from kvtier.bench.record import record, save
from kvtier.bench.retention import compare as comparison
from kvtier.bench.retention import replay as replaying
from kvtier.bench.retention import simulate as simulation
from kvtier.bench.retention.curves import Reuse
from kvtier.bench.retention.report import write_report
from kvtier.bench.retention.shapes import CacheShape, shape_of
from kvtier.bench.retention.simulate import ALL, FOREVER, Admit, TierLevel
from kvtier.bench.retention.trace import REQUESTS_MIN, Trace
from kvtier.bench.retention.traces import load_trace
from kvtier.bench.retention.worth import PRICES, SPEEDS_GB_S, Assumptions, PricedTier, appraise
from kvtier.cli.output import Json, console, counting, write_json, write_table
from kvtier.errors import InvalidRequest
from kvtier.policies.policy import POLICIES
from kvtier.retention.terms import Terms
from kvtier.tiers.host.arena import SLOT_ALIGN
from kvtier.units import parse_duration, parse_size

TracePath = Annotated[Path, typer.Option("--trace", help="A trace in one of the formats that docs/policies.md lists.")]
PolicyName = Annotated[str, typer.Option("--policy", help="lru, gapduel, arc, s3fifo or lru-freq.")]
CachePolicy = Annotated[str, typer.Option("--policy", help="auto, lru or gapduel.")]
_FRACTION = typer.Option("--capacity-fraction", help="Capacity as a share of the trace's distinct blocks.")
Fraction = Annotated[float | None, _FRACTION]
Fractions = Annotated[list[float], _FRACTION]
Ttl = Annotated[str | None, typer.Option("--ttl", help="Longest idle time: seconds, or 10m, 24h; none: unbounded.")]
Tiers = Annotated[str | None, typer.Option("--tiers", help="Sizes of a stack, nearest first: 60GB,256GB,4TB.")]
Model = Annotated[str, typer.Option("--model", help="Model shape that gives KV bytes per token, see docs/policies.md.")]
TokenBytes = Annotated[int | None, typer.Option("--bytes-per-token", help="KV bytes per token; none: the shape's.")]
Limit = Annotated[int | None, typer.Option("--limit", help="Only the first requests of the trace.")]
Admission = Annotated[bool, typer.Option("--admission", help="With --tiers: try admission rules below G2 as well.")]
Html = Annotated[Path, typer.Option("--html", help="Write the page here, with PNG files beside it.")]
Replay = Annotated[Path | None, typer.Option("--replay", help="Include this record, a retention_replay.json.")]
Ttls = Annotated[str, typer.Option("--ttls", help="Retentions to compare.")]
Sample = Annotated[float, typer.Option("--sample", help="Share of the sessions.")]
Folder = Annotated[Path | None, typer.Option("--folder", help="Where G3 lies; none: a temporary folder.")]
G2 = Annotated[str | None, typer.Option("--g2", help="RAM; none: 5 % of the sample's KV, at least 4 longest requests.")]
G3 = Annotated[str | None, typer.Option("--g3", help="SSD; none: twice the sample's KV, a quarter of it above a G4.")]
_G4_HELP = "directory (beside G3), seaweedfs (started on loopback) or an fsspec URL; none: off."
G4 = Annotated[str | None, typer.Option("--g4", help=_G4_HELP)]
Kill = Annotated[bool, typer.Option("--kill/--no-kill", help="Kill the process halfway and go on with another.")]
Save = Annotated[Path | None, typer.Option("--save", help="Also write the JSON record into this folder.")]

REPLAY_BYTES_PER_TOKEN = 8
REPORT_TIERS = "60GB,256GB,4TB"
ADMISSIONS = (Admit(threshold=2), Admit(threshold=3), Admit(min_prefix=1024), Admit(min_prefix=4096))
SEED = 3


def simulate(
    trace: TracePath, policy: PolicyName = "gapduel", capacity_fraction: Fraction = None, ttl: Ttl = None,
    tiers: Tiers = None, admission: Admission = False, model: Model = "llama-3.1-8b",
    bytes_per_token: TokenBytes = None, limit: Limit = None, folder: Save = None, json: Json = False,
) -> None:  # fmt: skip
    """Simulate a cache, or a stack of tiers, without bytes and in the trace's own time."""
    check_policy(policy)
    loaded = load_trace(trace, limit=limit)
    if tiers is None:
        results = _single(loaded, policy, capacity_fraction, ttl)
    else:
        results = _stack(loaded, policy, tiers, _shape(model, bytes_per_token), ttl, admission=admission)
    _deliver("retention_simulated", loaded, results, folder, as_json=json)


def replay(
    trace: TracePath, policy: CachePolicy = "gapduel", ttls: Ttls = "10m,24h", sample: Sample = 0.05,
    bytes_per_token: TokenBytes = REPLAY_BYTES_PER_TOKEN, folder: Folder = None, g2: G2 = None, g3: G3 = None,
    g4: G4 = None, kill: Kill = True, limit: Limit = None, folder_saved: Save = None, json: Json = False,
) -> None:  # fmt: skip
    """Replay a trace with real, scaled-down KV through RAM, SSD and, if asked, object storage; compare every byte."""
    check_policy(policy, ("auto", *POLICIES))
    loaded = load_trace(trace, limit=limit)
    results = _replay(loaded, policy, ttls, sample, bytes_per_token, folder, (g2, g3, g4), kill=kill)
    _deliver("retention_replay", loaded, results, folder_saved, as_json=json)


def report(
    trace: TracePath, html: Html, replay: Replay = None, tiers: Tiers = REPORT_TIERS, ttl: Ttl = None,
    model: Model = "llama-3.1-8b", bytes_per_token: TokenBytes = None, limit: Limit = None, folder: Save = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Write an HTML page on a stack of tiers over a trace: hits, time to first token, SSD wear and cost."""
    loaded = load_trace(trace, limit=limit)
    replayed = _read_replay(replay, loaded) if replay is not None else {}
    results = _report(html, loaded, _shape(model, bytes_per_token), tiers, ttl, replayed)
    _deliver("retention_report", loaded, results, folder, as_json=json)


def compare(
    trace: TracePath, capacity_fraction: Fractions = list(comparison.FRACTIONS),  # noqa: B006
    limit: Limit = None, folder: Save = None, json: Json = False,
) -> None:  # fmt: skip
    """Compare eviction policies at several capacities: percent of block references hit, and the offline optimum."""
    loaded = load_trace(trace, limit=limit)
    rows = comparison.compare(loaded, [_checked(fraction) for fraction in capacity_fraction])
    results = {"percent_of_footprint": {f"{100 * fraction:g}": row for fraction, row in rows}}
    _deliver("retention_compared", loaded, results, folder, as_json=json)


def retention(
    trace: TracePath, simulate: bool = False, policy: PolicyName = "gapduel", capacity_fraction: Fraction = None,
    ttl: Ttl = None, tiers: Tiers = None, admission: Admission = False, model: Model = "llama-3.1-8b",
    bytes_per_token: TokenBytes = None, limit: Limit = None, report: Path | None = None, ttls: Ttls = "10m,24h",
    sample: Sample = 0.05, folder: Folder = None, g2: G2 = None, g3: G3 = None, g4: G4 = None, kill: Kill = True,
    folder_saved: Save = None, json: Json = False,
) -> None:  # fmt: skip
    """The former command: a simulation or a replay, and a report with --report."""
    check_policy(policy, COMPARED if simulate else ("auto", *POLICIES))
    loaded = load_trace(trace, limit=limit)
    shape, results = _shape(model, bytes_per_token if simulate else None), dict[str, Any]()
    if not simulate:
        results = _replay(loaded, policy, ttls, sample, bytes_per_token, folder, (g2, g3, g4), kill=kill)
    elif tiers is not None:
        results = _stack(loaded, policy, tiers, shape, ttl, admission=admission)
    elif report is None or capacity_fraction is not None or ttl is not None:
        results = _single(loaded, policy, capacity_fraction, ttl)
    if report is not None:
        results |= _report(report, loaded, shape, tiers or REPORT_TIERS, ttl, {} if simulate else results)
    _deliver("retention_simulated" if simulate else "retention_replay", loaded, results, folder_saved, as_json=json)


def check_policy(name: str, known: Iterable[str] = COMPARED) -> None:
    """Raises InvalidRequest for a policy that is not among `known`, with the nearest one."""
    names = list(known)
    if name not in names:
        near = get_close_matches(name, names, 1, 0.4)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise InvalidRequest(f"--policy {name[:40]!r} is not one of {', '.join(names)}{meant}")


def _deliver(kind: str, trace: Trace, results: dict[str, Any], folder: Path | None, *, as_json: bool) -> None:
    found: dict[str, Any] = {
        "trace": trace.name,
        "format": trace.format,
        "requests": len(trace.requests),
        "references": trace.references,
        "unique_blocks": trace.unique,
        "block_tokens": trace.block_tokens,
        "doubts": doubts_of(trace, results),
    } | results
    if folder is not None:
        save(record(kind, ["kvtier", *sys.argv[1:]], found), folder)
    if as_json:
        write_json(found)
        return
    for doubt in found.pop("doubts"):
        console().print(f"too small a trace: {doubt}")
    if len(trace.requests) < REQUESTS_MIN:
        found.pop("prefill_ratio", None)
    worth, compared = found.pop("worth", None), found.pop("percent_of_footprint", {})
    write_table(["", trace.name], _rows(found))
    if compared:
        names = next(iter(compared.values()))
        rows = [[name, *(row[name] for row in compared.values())] for name in names]
        write_table(["capacity", *(f"{size} %" for size in compared)], rows)
    if worth is not None:
        _show(worth)


def doubts_of(trace: Trace, results: Mapping[str, Any]) -> list[str]:
    """Reasons why the trace is too small for these results."""
    kept = [_seconds(text) for text in results.get("ttls", ())] + [results.get("ttl_s") or 0.0]
    return trace.doubts(max(kept))


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
    wear, cost = worth["ssd"], worth.get("cost_per_month")
    if wear:
        console().print(
            f"SSD: {wear['written_gb_per_day']:,.0f} GB written a day, {wear['drive_writes_per_day']:,.2f} drive "
            f"writes; its endurance lasts {wear['endurance_days']:,.0f} days."
        )
    if cost:
        console().print(
            f"A month's prefill costs {cost['gpu_with']:,.0f} $ of GPU time, with VRAM alone "
            f"{cost['gpu_without']:,.0f} $; RAM, SSD and objects {cost['storage']:,.0f} $."
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


def _shape(model: str, bytes_per_token: int | None) -> CacheShape:
    known = shape_of(model)
    return CacheShape(model, bytes_per_token or known.bytes_per_token, known.prefill_tokens_s)


def _terms(ttl: str | None) -> Terms:
    return FOREVER if ttl is None else Terms("ttl", ttl=_seconds(ttl))


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return parse_duration(text)


def _checked(fraction: float) -> float:
    if not 0 < fraction <= 1:
        raise InvalidRequest(f"--capacity-fraction must lie above 0 and at most 1, got {fraction}")
    return fraction


def _single(trace: Trace, policy: str, fraction: float | None, ttl: str | None) -> dict[str, Any]:
    results: dict[str, Any] = {}
    capacity, terms = trace.unique, _terms(ttl)
    if fraction is not None:
        capacity = simulation.capacity_of(trace, _checked(fraction))
        results = {"policy": policy, "capacity_fraction": fraction, "capacity_blocks": capacity}
    elif ttl is None:
        raise InvalidRequest("give --capacity-fraction, --ttl or --tiers")
    outcome = simulation.simulate(trace, policy if fraction is not None else "lru", capacity, terms)
    if ttl is not None:
        results["ttl_s"] = terms.ttl
    return results | {
        "hit_percent": round(outcome.hit_percent, 6),
        "prefill_left_percent": round(100 - outcome.hit_percent, 6),
        "evictions": outcome.evictions,
        "seconds": round(outcome.seconds, 2),
        "cpu_seconds": round(outcome.cpu_seconds, 2),
    }


def _stack(
    trace: Trace, policy: str, tiers: str, shape: CacheShape, ttl: str | None, *, admission: bool
) -> dict[str, Any]:
    sizes = [parse_size(part.strip()) for part in tiers.split(",")]
    if not 1 <= len(sizes) <= 4:
        raise InvalidRequest(f"--tiers: give one to four sizes, nearest first, got {len(sizes)}")
    block_bytes = trace.block_tokens * shape.bytes_per_token
    levels = [TierLevel(f"g{depth}", max(1, size // block_bytes)) for depth, size in enumerate(sizes, 1)]
    tried = {
        admit: simulation.simulate_stack(trace, policy, levels, _terms(ttl), admit)
        for admit in (ALL, *(ADMISSIONS if admission else ()))
    }
    split = tried[ALL]

    def gb(blocks: float) -> float:
        return round(blocks * block_bytes / 1e9, 1)

    return {
        "policy": policy,
        "bytes_per_token": shape.bytes_per_token,
        "footprint_gb": gb(trace.unique),
        "tiers": {
            level.name: {
                "gb": gb(level.blocks),
                "hit_percent": round(split.hit_percent[level.name], 3),
                "served_gb": gb(split.hit_percent[level.name] / 100 * split.references),
                "written_gb": gb(split.written[level.name]),
            }
            for level in levels
        },
        "hit_percent": round(split.total_percent, 6),
        "prefill_left_percent": round(100 - split.total_percent, 6),
        "seconds": round(split.seconds, 2),
        "cpu_seconds": round(split.cpu_seconds, 2),
        "admission": None if not admission else {
            str(admit): {
                "hit_percent": round(found.total_percent, 3),
                "written_below_g2_gb": gb(sum(blocks for name, blocks in found.written.items() if name > "g2")),
            }
            for admit, found in tried.items()
        },
    }  # fmt: skip


def _replay(
    trace: Trace, policy: str, ttls: str, sample: float, bytes_per_token: int | None, folder: Path | None,
    given: tuple[str | None, str | None, str | None], *, kill: bool,
) -> dict[str, Any]:  # fmt: skip
    """A replay per ttl, in figures. `given`: the sizes of G2 and G3, and G4, as the options give them."""
    part = trace.sampled(sample, SEED) if sample < 1 else trace
    scale, (g2, g3, g4) = bytes_per_token or REPLAY_BYTES_PER_TOKEN, given
    sizes = _sizes(part, scale, g2, g3, above_g4=g4 is not None)
    with tempfile.TemporaryDirectory(prefix="kvtier-", dir=folder) as place, _bucket(g4, Path(place)) as target:
        setups = [
            replaying.Setup(
                Path(place) / f"kept-{ttl}", _seconds(ttl), scale, *sizes, *target, policy=policy, kill=kill
            )
            for ttl in map(str.strip, ttls.split(","))
        ]
        with counting(len(setups) * len(part.requests), "requests") as advance:
            replays = [replaying.replay(part, setup, advance) for setup in setups]
    return {"sample": sample, "ttls": [part.strip() for part in ttls.split(",")], **replaying.summary(part, replays)}


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


@contextmanager
def _bucket(g4: str | None, folder: Path) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """URL and options of G4."""
    if g4 == "seaweedfs":
        from kvtier.bench.tiers.objects import on_loopback

        with on_loopback(folder) as bucket:
            yield f"{bucket.url}/replay", bucket.options
    else:
        yield (folder / "objects").as_uri() if g4 == "directory" else g4, {}


def _read_replay(path: Path, trace: Trace) -> dict[str, Any]:
    """The results in the record of a replay of `trace`. Raises InvalidRequest naming the file."""
    try:
        results = dict(jsonlib.loads(path.read_text())["results"])
        if results["trace"] != trace.name or "references_replayed" not in results:
            raise ValueError(f"it holds another result, of {results['trace']}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as wrong:
        raise InvalidRequest(f"{path} is not the record of a replay of {trace.name}: {wrong}") from wrong
    return results


def _report(
    path: Path, trace: Trace, shape: CacheShape, tiers: str | None, ttl: str | None, replayed: Mapping[str, Any]
) -> dict[str, Any]:
    sizes = [parse_size(part.strip()) for part in (tiers or REPORT_TIERS).split(",")]
    stores = [
        PricedTier(name, size, SPEEDS_GB_S[name], PRICES[name]) for name, size in zip(SPEEDS_GB_S, sizes, strict=False)
    ]
    seconds = float("inf") if ttl is None else _seconds(ttl)
    worth = appraise(trace, Reuse(trace), stores, Assumptions(shape), seconds)
    written = write_report(path, worth, record("retention", ["kvtier", *sys.argv[1:]], {}), replayed)
    kept = {"ttls": replayed["ttls"]} if "ttls" in replayed else {}
    return {**kept, "worth": worth.summary(), "report": [str(part) for part in written]}
