"""Output of all commands: the `--json` option, one JSON object or tables on standard output, and records."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

from kvtier.bench.record import record, save
from kvtier.cli.exits import Declined
from kvtier.errors import InvalidRequest
from kvtier.units import printable

FILE_COLUMNS = 200
"""Of a pipe or file, whose reader looks for lines rather than at them."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]


def write_json(value: Mapping[str, Any]) -> None:
    """One object, keys in the order given. Paths and other values become text."""
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def deliver(
    name: str, results: dict[str, Any], show: Callable[[dict[str, Any]], None], folder: Path | None, *, as_json: bool
) -> None:
    """A measurement: its record into `folder`, if given, and as JSON or by `show` on standard output."""
    entry = record(name, ["kvtier", *sys.argv[1:]], results)
    if folder is not None:
        save(entry, folder)
    if as_json:
        write_json(entry)
    else:
        show(results)


def write_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """A table on standard output; numbers aligned right. No cell is cut: one that is too long goes on below."""
    table = Table(*map(printable, columns), title=title, title_justify="left", header_style="bold")
    listed = [list(row) for row in rows]
    for index, column in enumerate(table.columns):
        column.overflow = "fold"
        if listed and all(isinstance(row[index], int | float) for row in listed):
            column.justify = "right"
    for row in listed:
        table.add_row(*(_number(cell) if isinstance(cell, int | float) else printable(str(cell)) for cell in row))
    console().print(table)


def _number(value: float) -> str:
    """Without the noise of a binary fraction, which the median of two rounded figures may have."""
    return f"{round(value, 9):,}" if isinstance(value, float) else f"{value:,}"


class _Output(Console):
    def print(self, *objects: Any, **named: Any) -> None:
        """Texts may hold names that somebody else gave."""
        super().print(*(printable(one) if isinstance(one, str) else one for one in objects), **named)


def console() -> Console:
    """Standard output, plain and wide when it is not a terminal. Text is never read as markup, and controls no
    terminal."""
    wide = None if sys.stdout.isatty() else shutil.get_terminal_size((FILE_COLUMNS, 0)).columns  # COLUMNS goes before
    return _Output(markup=False, highlight=False, width=wide)


@contextmanager
def counting(total: int, title: str) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error, if that is a terminal; call what it gives after each of `total` pieces."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def replacing(file: Path) -> Iterator[TextIO]:
    """A text file that takes the place of `file`, or of what that links to, once all of it is written: until then, and
    where that fails, what was there stays. An error names the file. Raises InvalidRequest for a device or directory."""
    place = Path(os.path.realpath(file))
    if place.exists() and not place.is_file():
        raise InvalidRequest(f"{file} is no file; name one, or one to be made")
    new = place.with_name(f".kvtier-{secrets.token_hex(8)}.new")
    try:
        with new.open("x", encoding="utf-8") as text:
            yield text
        new.replace(place)
    except OSError as wrong:
        wrong.filename, wrong.filename2 = str(file), None
        raise
    finally:
        with suppress(OSError):  # there is none, or the error above is the one to tell
            new.unlink()


def confirm(question: str) -> None:
    """Ask on standard error before something is deleted. Raises Declined, also where nobody answers."""
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:
        agreed = False
    if not agreed:
        raise Declined("not confirmed, nothing was changed; --yes confirms")
