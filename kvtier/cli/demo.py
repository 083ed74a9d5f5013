"""`kvtier demo`: the four tiers with a real model, in two processes."""

from __future__ import annotations

import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.output import Json, confirm, console, write_json
from kvtier.demo import real_model
from kvtier.demo.job import TIERS, Job
from kvtier.demo.stage import Act, perform, result, turns_in
from kvtier.errors import ConfigError

_REAL_TOKENS = 48
"""The greatest length of a real model's answer."""

Model = Annotated[
    Path | None, typer.Option("--model", metavar="PATH", help="A checkpoint instead of a small random Llama.")
]
Bucket = Annotated[
    str | None, typer.Option("--g4", metavar="URL", help="G4, such as s3://bucket/prefix, instead of a directory.")
]
Endpoint = Annotated[str | None, typer.Option("--g4-endpoint", metavar="URL", help="Endpoint of an S3 server.")]
Real = Annotated[
    bool, typer.Option("--real", help="A small real model, downloaded once (93 MB), or --model; shows its answers.")
]
Agreed = Annotated[bool, typer.Option("--yes", help="Do not ask before the download.")]
Folder = Annotated[Path | None, typer.Option("--folder", help="Working directory; none: a temporary one.")]


def demo(
    model: Model = None, real: Real = False, yes: Agreed = False, g4: Bucket = None, g4_endpoint: Endpoint = None,
    folder: Folder = None, json: Json = False,
) -> None:  # fmt: skip
    """Replay conversations through four tiers, end the process, start another, compare bytes and tokens."""
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"--model {model}: no directory with a transformers checkpoint (it has no config.json)")
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo runs a model and needs {' and '.join(missing)}: pip install 'kvtier[transformers]'"
        )
    if real and model is None:
        model = _fetched(yes)
    with ExitStack() as stack:
        parent = _parent(folder)
        work = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-demo-", dir=parent))
        job = Job(
            folder=work,
            g4=f"{g4.rstrip('/')}/kvtier-demo-{uuid.uuid4().hex[:12]}" if g4 else f"file://{work}/g4",
            g4_options={"endpoint_url": g4_endpoint} if g4_endpoint else {},
            model=str(model.absolute()) if model else None,
        )
        if real:
            job = replace(job, real=True, new_tokens=_REAL_TOKENS)
        first, second = _watched(job)
    outcome = result(first, second)
    if json:
        write_json(outcome)
    else:
        if real:
            _show_talk(first)
        _show(first, second)
    acts = (first, second)
    if not all(act.bytes_identical and act.tokens_identical for act in acts):
        raise typer.Exit(1)


def _fetched(yes: bool) -> Path:
    """The small real model, downloaded if it is not there and the user agrees. Raises Declined."""
    path = real_model.folder()
    if not real_model.is_there(path):
        print(real_model.TERMS, file=sys.stderr)
        if not yes:
            sizes = f"{real_model.DOWNLOAD_BYTES >> 20} MiB, kept as {real_model.DISK_BYTES >> 20} MiB in {path}"
            confirm(f"Download it under these terms ({sizes})?")
        real_model.fetch(path)
    return path


def _parent(folder: Path | None) -> Path | None:
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--folder {folder}: {error.strerror}") from None
    return folder


def _watched(job: Job) -> tuple[Act, Act]:
    """Both processes, with a progress bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("loading the model", total=turns_in([job, replace(job, resume=True)]))

        def watch(name: str, turn: Mapping[str, Any]) -> None:
            progress.update(task, advance=1, description=f"{name} process: {turn['conversation']}")

        return perform(job, watch)


def _show_talk(act: Act) -> None:
    """What was said, in the order of the conversations, and beside it where the prompt's tokens were found."""
    from rich.table import Table
    from rich.text import Text

    out = console()
    for name in dict.fromkeys(turn["conversation"] for turn in act.turns):
        table = Table(title=name, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
        table.add_column("said", ratio=1)
        table.add_column("served", justify="right", no_wrap=True)
        for turn in (turn for turn in act.turns if turn["conversation"] == name):
            found = [f"{turn['served'][tier]} in {tier.upper()}" for tier in TIERS if turn["served"].get(tier)]
            table.add_row(Text(turn["question"], style="dim"), f"{turn['prompt_tokens']} tokens of prompt")
            computed = f"{turn['served'].get('recomputed', 0)} computed"
            first_token = f"first token after {turn['ttft_hit_ms']:.0f} ms"
            table.add_row(turn["answer"], "\n".join([*found, computed, first_token]))
            table.add_row("", "")
        out.print(table)


def _show(first: Act, second: Act) -> None:
    from rich.table import Table

    out = console()
    for title, act in (("First process", first), ("Second process, same store", second)):
        table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 1, 0, 0))
        table.add_column("turn", no_wrap=True, min_width=12)
        for name in ("prompt", *TIERS, "saved", "hit ms", "full ms", "bytes", "tokens"):
            table.add_column(name, justify="right", no_wrap=True)
        for turn in act.turns:
            table.add_row(*_row(turn, act.end["gap"]))
        out.print(table)
        out.print(f"\n{_verdict(act)}\n")
    out.print(
        "prompt, g1 … g4, saved: prompt tokens, by the tier that had them; hit ms, full ms: time to the first token"
    )


def _row(turn: Mapping[str, Any], tolerance: float) -> list[str]:
    served, prompt = turn["served"], turn["prompt_tokens"]
    return [
        turn["conversation"],
        *(str(count) for count in (prompt, *(served.get(tier, 0) for tier in TIERS))),
        str(prompt - served.get("recomputed", 0)),
        f"{turn['ttft_hit_ms']:.0f}",
        f"{turn['ttft_recompute_ms']:.0f}",
        ("same" if turn["bytes_same"] else "DIFFER") if turn["blocks_restored"] else "-",
        "same" if turn["tokens_same"] and turn["gap"] < tolerance else "DIFFER",
    ]


def _by_group(groups: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Restored blocks of each KV group by tier; nothing for a model with one group."""
    return [
        f"{group}: {' + '.join(f'{tiers[tier]:,} {tier.upper()}' for tier in TIERS if tiers.get(tier)) or 'no'} blocks"
        for group, tiers in groups.items()
        if len(groups) > 1
    ]


def _verdict(act: Act) -> str:
    summary = act.summary()
    served, ttft, checks = summary["served_tokens"], summary["ttft_ms"], summary["checks"]
    total = sum(served.values())
    same = {True: "identical", False: "NOT identical"}
    parts = [
        f"{total - served['recomputed']:,} of {total:,} prompt tokens were not computed",
        f"{checks['blocks_compared']:,} blocks restored, bytes {same[act.bytes_identical]}",
        f"tokens {same[act.tokens_identical]}",
        *_by_group(summary["served_blocks_by_group"]),
    ]
    if ttft["hit"] is not None:
        parts.append(f"first token after {ttft['hit']:.0f} ms, recomputed {ttft['recompute']:.0f} ms (medians)")
    if checks["turns_parting_from_prefill"]:
        parts.append(
            f"{checks['turns_parting_from_prefill']} turns part from a full prefill at a near-tie (gap at most "
            f"{checks['largest_gap']:.2g}, tolerance {checks['gap_tolerance']:g})"
        )
    return "; ".join(parts) + "."
