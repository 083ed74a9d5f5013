"""`kvtier bench index`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.bench.tiers.index import BLOCK_TOKENS, TARGETS_US, measure
from kvtier.cli.output import Json, console, deliver, write_table

Tokens = Annotated[int, typer.Option("--tokens", min=BLOCK_TOKENS, max=1 << 20, help="Tokens per prompt.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Interleaved rounds; the median counts.")]
Save = Annotated[Path | None, typer.Option("--save", help="Also write the JSON record into this folder.")]


def index(tokens: Tokens = 8192, rounds: Rounds = 9, folder: Save = None, json: Json = False) -> None:
    """Measure hashing, matching and the block pool, in CPU microseconds per block."""
    results = {"unit": "microseconds of CPU time per block", "tokens": tokens, "targets": TARGETS_US}
    deliver("index", results | measure(tokens, rounds), _show, folder, as_json=json)


def _show(results: dict[str, Any]) -> None:
    rows = [
        [name, f["median"], f["min"], f["max"], TARGETS_US.get(name, "")]
        for name, f in results.items()
        if isinstance(f, dict) and "median" in f
    ]
    write_table(["CPU µs per block", "median", "min", "max", "at most"], rows)
    console().print(f"{results['tokens']} tokens, blocks of {BLOCK_TOKENS}; *_floor: the same work without kvtier")
