"""`kvtier bench index`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtier.bench.record import record, save
from kvtier.bench.tiers.index import BLOCK_TOKENS, TARGETS_US, measure
from kvtier.cli.output import Json, console, write_json, write_table

Tokens = Annotated[int, typer.Option("--tokens", min=BLOCK_TOKENS, max=1 << 20, help="Tokens per prompt.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Interleaved rounds; the median counts.")]
Save = Annotated[Path | None, typer.Option("--save", help="Also write the JSON record into this folder.")]


def index(tokens: Tokens = 8192, rounds: Rounds = 9, folder: Save = None, json: Json = False) -> None:
    """Measure what naming, finding and making room cost per block, in microseconds."""
    figures = measure(tokens, rounds)
    results = {"unit": "microseconds of CPU time per block", "tokens": tokens, "targets": TARGETS_US, **figures}
    entry = record("index", ["kvtier", *sys.argv[1:]], results)
    if folder is not None:
        save(entry, folder)
    if json:
        write_json(entry)
        return
    rows = [[name, f["median"], f["min"], f["max"], TARGETS_US.get(name, "")] for name, f in figures.items()]
    write_table(["CPU µs per block", "median", "min", "max", "at most"], rows)
    console().print(f"{tokens} tokens, blocks of {BLOCK_TOKENS}; *_floor: the same work without kvtier")
