"""What commands share: the `--json` option, one JSON object on standard output, tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]


def write_json(value: Mapping[str, Any]) -> None:
    """One object, keys in the order given. Paths and other plain values become text."""
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def write_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """A table on standard output; figures to the right."""
    table = Table(*columns, title=title, title_justify="left", header_style="bold")
    listed = [list(row) for row in rows]
    for index, column in enumerate(table.columns):
        if listed and all(isinstance(row[index], int | float) for row in listed):
            column.justify = "right"
    for row in listed:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int | float) else str(cell) for cell in row))
    console().print(table)


def console() -> Console:
    """Standard output, plain when it is not a terminal. Text is printed as it is, never read as markup."""
    return Console(markup=False, highlight=False)
