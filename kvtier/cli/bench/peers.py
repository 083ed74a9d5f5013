"""`kvtier bench peers`: prompt tokens that an engine computes with kvtier, and with other caches."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.bench.peers import sglang as sglang_peers
from kvtier.bench.peers import vllm as vllm_peers
from kvtier.bench.peers.contest import Contest
from kvtier.bench.peers.prompts import PROMPT_BLOCKS_MAX, make_model, prompts_of, reusable, slice_of
from kvtier.bench.peers.rounds import summed, turned
from kvtier.bench.record import commit, record, save
from kvtier.cli.output import Json, console, deliver, write_table
from kvtier.errors import ConfigError

_RESUMED_BLOCKS = 8

Engine = Annotated[str, typer.Option(help="The engine: vllm or sglang.")]
Trace = Annotated[Path | None, typer.Option(help="A trace to slice; none: the slice that comes with kvtier.")]
Requests = Annotated[int, typer.Option(min=4, help="How many requests.")]
Model = Annotated[Path | None, typer.Option(help="A checkpoint; none: a small random Llama.")]
GpuBlocks = Annotated[int, typer.Option(min=80, help="Blocks of the engine's own pool.")]
HostBlocks = Annotated[int, typer.Option(min=64, help="Blocks of host memory that every contender has.")]
Again = Annotated[int, typer.Option(min=0, help="Requests that are repeated after a restart.")]
Only = Annotated[str, typer.Option(help="Contenders, separated by commas; none: all of the engine's.")]
LMCache = Annotated[Path | None, typer.Option(help="A Python interpreter that has vLLM and LMCache.")]
SGLang = Annotated[Path | None, typer.Option(help="One that has SGLang; none: .venv-sglang here, or this one.")]
Folder = Annotated[Path | None, typer.Option(help="Directory on the disk to use; none: the temporary one.")]
Seed = Annotated[int, typer.Option(help="Random seed that selects conversations of --trace.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often; with --save those of an earlier run count.")]
Save = Annotated[Path | None, typer.Option("--save", help="Directory to write peers_ENGINE.json to.")]


def peers(
    engine: Engine = "vllm", trace: Trace = None, requests: Requests = 120, model: Model = None,
    gpu_blocks: GpuBlocks = 160, host_blocks: HostBlocks = 512, again: Again = 30, only: Only = "",
    lmcache: LMCache = None, sglang: SGLang = None, path: Folder = None, seed: Seed = 0, rounds: Rounds = 1,
    folder: Save = None, json: Json = False,
) -> None:  # fmt: skip
    """Start an engine per contender, and once more after a restart: minutes for each round."""
    if engine not in ("vllm", "sglang"):
        raise ConfigError(f"--engine {engine}: vllm and sglang can be compared")
    usual = vllm_peers.NAMES if engine == "vllm" else sglang_peers.NAMES
    known = (*usual, *vllm_peers.VARIANTS) if engine == "vllm" else usual
    names = [name.strip() for name in only.split(",") if name.strip()] or list(usual)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only {unknown[0]}: no such contender; known: {', '.join(known)}")
    chains, load_before = slice_of(trace, requests, seed), os.getloadavg()
    reuse, blocks = reusable(chains), sum(min(len(chain), PROMPT_BLOCKS_MAX) for chain in chains)
    settings: dict[str, Any] = {
        "slice": {
            "requests": len(chains),
            "source": "packaged" if trace is None else trace.name,
            "blocks": blocks,
            "reusable_share": sum(reuse) / blocks,
            "resumed": sum(found >= _RESUMED_BLOCKS for found in reuse),
        },
        "gpu_blocks": gpu_blocks,
        "host_blocks": host_blocks,
        "again": min(again, len(chains)),
        "model": "packaged" if model is None else model.name,
    }
    name = f"peers_{engine}"
    found = _kept(folder, name, settings, names)
    results = _summed_up(settings, found, load_before) if found else {}
    with tempfile.TemporaryDirectory(prefix="kvtier-peers-", dir=path) as temporary, _progress(json) as progress:
        where = Path(temporary)
        checkpoint = model if model is not None else make_model(where / "tiny-llama")
        for number in range(len(found), rounds):
            contest = Contest(
                model=checkpoint,
                prompts=prompts_of(chains),
                gpu_blocks=gpu_blocks,
                host_blocks=host_blocks,
                folder=where / f"round-{number}",
                again=settings["again"],
                lmcache=lmcache,
                progress=progress,
            )
            contest.folder.mkdir()
            if engine == "vllm":
                figures = vllm_peers.compare(contest, turned(names, number))
            else:
                figures = sglang_peers.compare(contest, _python_with_sglang(sglang), turned(names, number))
            shutil.rmtree(contest.folder)
            _resumed(figures, reuse)
            found.append(figures)
            results = _summed_up(settings, found, load_before)
            if folder is not None:
                save(record(name, ["kvtier", *sys.argv[1:]], results), folder)
            if any(one.get("not_run") == "interrupted" for one in figures.values()):
                break
    deliver(name, results, _show, folder, as_json=json)


def _kept(folder: Path | None, name: str, settings: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Whole rounds that an earlier run of this commit with the same settings and contenders left; else none."""
    path = folder / f"{name}.json" if folder is not None else None
    if path is None or not path.exists():
        return []
    entry = loads(path.read_text())
    earlier = entry["results"]
    if entry["commit"] != commit() or any(earlier.get(what) != value for what, value in settings.items()):
        return []
    return [
        one
        for one in earlier.get("rounds", [])
        if set(names) == set(one) - {"without_any_cache"}
        and not any(figures.get("not_run") == "interrupted" for figures in one.values())
    ]


def _summed_up(
    settings: Mapping[str, Any], found: Sequence[Mapping[str, Any]], load_before: Sequence[float]
) -> dict[str, Any]:
    contenders = {name: summed([one[name] for one in found]) for name in found[0]}
    return {**settings, "load_average_before": load_before, "contenders": contenders, "rounds": found}


def _python_with_sglang(given: Path | None) -> Path:
    beside = Path(".venv-sglang/bin/python")
    return given or (beside if beside.exists() else Path(sys.executable))


def _resumed(contenders: Mapping[str, Any], reuse: list[int]) -> None:
    """Add the median time to the first token of requests that resume a conversation, and drop the single times."""
    for figures in contenders.values():
        for part in (figures, figures.get("after_restart", {})):
            times = part.pop("ttft_s", None)
            if times is not None:
                tail = reuse[-len(times) :]
                chosen = [t for t, found in zip(times, tail, strict=True) if found >= _RESUMED_BLOCKS]
                part["ttft_ms_median_resumed"] = 1e3 * statistics.median(chosen) if chosen else None


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int], None]]:
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    if quiet:
        yield lambda name, done: None
        return
    columns = (TextColumn("{task.description}"), TextColumn("{task.completed:.0f} requests"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting an engine", total=None)
        yield lambda name, done: progress.update(task, description=name, completed=done)


def _show(results: dict[str, Any]) -> None:
    part = results["slice"]
    rows: list[list[object]] = []
    for name, figures in results["contenders"].items():
        if "not_run" in figures:
            rows.append([name, "not run", "", "", "", "", ""])
            continue
        again = figures.get("after_restart")
        rows.append(
            [name, f"{figures['computed_prompt_tokens']:,}", f"{100 * figures['computed_share']:.1f} %",
             _ms(figures["ttft_ms_median"], figures.get("spread", {}).get("ttft_ms_median")),
             _ms(figures["ttft_ms_median_resumed"]),
             f"{100 * again['computed_share']:.1f} %" if again else "",
             figures["wrong_requests"] + (again["wrong_requests"] if again else 0)]
        )  # fmt: skip
    write_table(
        ["", "prompt tokens computed", "share", "TTFT ms", "resumed, ms", "share after restart", "wrong"],
        rows,
        title=f"{part['requests']} requests, {100 * part['reusable_share']:.0f} % of their blocks seen before; "
        f"{results['gpu_blocks']} blocks of G1, {results['host_blocks']} of host memory; "
        f"{len(results['rounds'])} rounds",
    )
    for name, figures in results["contenders"].items():
        if "not_run" in figures:
            console().print(f"{name}: {figures['not_run']}")


def _ms(value: float | None, spread: Sequence[float] | None = None) -> str:
    text = "" if value is None else f"{value:.0f}"
    return f"{text} ({spread[0]:.0f} to {spread[1]:.0f})" if spread else text
