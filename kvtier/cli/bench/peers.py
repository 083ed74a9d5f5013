"""`kvtier bench peers`: what an engine still computes with kvtier, and with other caches."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.bench.peers import sglang as peers_sglang
from kvtier.bench.peers import vllm as vllm_peers
from kvtier.bench.peers.vllm import Setting, make_model, prompts_of, reusable, slice_of
from kvtier.bench.record import record, save
from kvtier.cli.output import Json, console, write_json, write_table
from kvtier.errors import ConfigError

_RESUMED_BLOCKS = 8


def peers(
    engine: Annotated[str, typer.Option(help="The engine: vllm or sglang.")] = "vllm",
    trace: Annotated[
        Path | None, typer.Option(help="A trace to slice; none: the slice that comes with kvtier.")
    ] = None,
    requests: Annotated[int, typer.Option(min=4, help="How many requests.")] = 120,
    model: Annotated[Path | None, typer.Option(help="A checkpoint; none: a small random Llama.")] = None,
    gpu_blocks: Annotated[int, typer.Option(min=80, help="Blocks of the engine's own pool.")] = 160,
    host_blocks: Annotated[int, typer.Option(min=64, help="Blocks of host memory that every contender has.")] = 512,
    again: Annotated[int, typer.Option(min=0, help="Requests asked once more after a restart.")] = 30,
    only: Annotated[str, typer.Option(help="Contenders, separated by commas; none: all of the engine's.")] = "",
    lmcache: Annotated[Path | None, typer.Option(help="A Python interpreter that has vLLM and LMCache.")] = None,
    sglang: Annotated[
        Path | None, typer.Option(help="A Python interpreter that has SGLang; none: .venv-sglang here, or this one.")
    ] = None,
    path: Annotated[Path | None, typer.Option(help="Directory on the disk to use; none: the temporary one.")] = None,
    seed: Annotated[int, typer.Option(help="Which conversations of --trace.")] = 0,
    folder: Annotated[Path | None, typer.Option("--save", help="Directory to write peers_ENGINE.json to.")] = None,
    json: Json = False,
) -> None:
    """Starts an engine per contender, and once more after a restart: minutes."""
    if engine not in ("vllm", "sglang"):
        raise ConfigError(f"--engine {engine}: vllm and sglang can be compared")
    known = vllm_peers.NAMES if engine == "vllm" else peers_sglang.NAMES
    names = [name.strip() for name in only.split(",") if name.strip()] or list(known)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only {unknown[0]}: no such contender; known: {', '.join(known)}")
    blocks = slice_of(trace, requests, seed)
    with tempfile.TemporaryDirectory(prefix="kvtier-peers-", dir=path) as temporary, _progress(json) as tell:
        where = Path(temporary)
        setting = Setting(
            model=model if model is not None else make_model(where / "tiny-llama"),
            prompts=prompts_of(blocks),
            gpu_blocks=gpu_blocks,
            host_blocks=host_blocks,
            folder=where,
            again=min(again, len(blocks)),
            lmcache=lmcache,
            tell=tell,
        )
        load_before = os.getloadavg()
        figures = (
            vllm_peers.compare(setting, names)
            if engine == "vllm"
            else peers_sglang.compare(setting, _python_with_sglang(sglang), names)
        )
    reuse = reusable(blocks)
    results = {
        "slice": {
            "requests": len(blocks),
            "source": "packaged" if trace is None else trace.name,
            "blocks": sum(min(len(chain), 64) for chain in blocks),
            "reusable_share": sum(reuse) / sum(min(len(chain), 64) for chain in blocks),
            "resumed": sum(found >= _RESUMED_BLOCKS for found in reuse),
        },
        "gpu_blocks": gpu_blocks,
        "host_blocks": host_blocks,
        "load_average_before": load_before,
        "contenders": figures,
    }
    _resumed(results, reuse)
    # Where things lie on this machine is nobody's business.
    hidden = {
        str(where): what
        for where, what in ((lmcache, "PYTHON"), (sglang, "PYTHON"), (path, "DIR"), (folder, "DIR"))
        if where
    }
    hidden |= {str(where): where.name for where in (trace, model) if where is not None}
    entry = record(f"peers_{engine}", ["kvtier", *(hidden.get(word, word) for word in sys.argv[1:])], results)
    if folder is not None:
        save(entry, folder)
    if json:
        write_json(entry)
    else:
        _show(results)


def _python_with_sglang(given: Path | None) -> Path:
    beside = Path(".venv-sglang/bin/python")
    return given or (beside if beside.exists() else Path(sys.executable))


def _resumed(results: dict[str, Any], reuse: list[int]) -> None:
    """Add the median time to the first token of requests that resume a conversation, and drop the single times."""
    for figures in results["contenders"].values():
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
             f"{figures['ttft_ms_median']:.0f}", _ms(figures["ttft_ms_median_resumed"]),
             f"{100 * again['computed_share']:.1f} %" if again else "",
             figures["wrong_requests"] + (again["wrong_requests"] if again else 0)]
        )  # fmt: skip
    write_table(
        ["", "prompt tokens computed", "share", "TTFT ms", "resumed, ms", "share after restart", "wrong"],
        rows,
        title=f"{part['requests']} requests, {100 * part['reusable_share']:.0f} % of their blocks seen before; "
        f"{results['gpu_blocks']} blocks of G1, {results['host_blocks']} of host memory",
    )
    for name, figures in results["contenders"].items():
        if "not_run" in figures:
            console().print(f"{name}: {figures['not_run']}")


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
