"""`kvtier g3 …`: inspect and maintain a G3 store, in use or not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.output import Json, confirm, console, write_json, write_table
from kvtier.clock import SystemClock
from kvtier.config import G3_CAPACITY_MIN
from kvtier.errors import InvalidRequest
from kvtier.tiers.disk.maintenance import Findings, MaintenanceProgress, looking_after
from kvtier.units import format_size, parse_rate, parse_size

Paths = Annotated[list[Path], typer.Argument(help="The store's path; all of them, in order, if it has several.")]
RATE = "100MiB/s"
"""At this rate engines on the same disk put and get about as fast as without."""
Rate = Annotated[str, typer.Option("--rate", help="Upper bound of the read rate, such as 200MiB/s.")]
Resize = Annotated[
    str | None, typer.Option("--resize", help="Change the capacity; no other process may use the store.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count what would be deleted.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before --resize deletes blocks.")]


def inspect(paths: Paths, json: Json = False) -> None:
    """Show the capacity, namespaces and writers of a G3 store. Reads the index, no payload."""
    with looking_after(paths, SystemClock()) as store:
        found = store.inspect()
    if json:
        write_json(found)
        return
    shown = {**found, "paths": " ".join(found["paths"])}
    write_table(["", ""], [[name, value] for name, value in shown.items() if not isinstance(value, list)])
    sizes = found["classes"]
    write_table(list(sizes[0]) if sizes else [], [list(one.values()) for one in sizes])
    rows = []
    for one in found["namespaces"]:
        fields = one["fields"] or {}
        what = f"{fields.get('model', '?')} {fields.get('dtype', '?')} {fields.get('block_bytes', '?')} B"
        rows.append([one["digest"][:16], what, one["blocks"], one["bytes"], one["expired"], one["scopes"]])
    write_table(["namespace", "of", "blocks", "bytes", "expired", "scopes"], rows)


def doctor(paths: Paths, json: Json = False) -> None:
    """Say what ails a G3 store, and what helps. Reads the index, no payload."""
    with looking_after(paths, SystemClock()) as store:
        found = store.diagnose()
    if json:
        write_json({"ailments": [asdict(one) for one in found]})
    else:
        write_table(["", "", "remedy"], [[one.name, one.figure, one.remedy] for one in found])
    if any(one.remedy for one in found):
        raise typer.Exit(1)


def verify(paths: Paths, rate: Rate = RATE, json: Json = False) -> None:
    """Check every block of a G3 store against its digest, and the index against itself. Changes nothing."""
    with looking_after(paths, SystemClock()) as store, _progress(json) as progress:
        found = store.verify(progress, bytes_per_s=parse_rate(rate))
    _report(found, as_json=json)


def scrub(paths: Paths, rate: Rate = RATE, json: Json = False) -> None:
    """Verify, and delete damaged blocks."""
    bytes_per_s = parse_rate(rate)
    with looking_after(paths, SystemClock()) as store, _progress(json) as progress:
        found = store.scrub(progress, bytes_per_s=bytes_per_s)
    _report(found, as_json=json)


def gc(paths: Paths, resize: Resize = None, dry_run: DryRun = False, yes: Yes = False, json: Json = False) -> None:
    """Free the slots of ended processes; delete expired and purged blocks."""
    clock = SystemClock()
    capacity = _capacity(resize) if resize is not None else None
    with looking_after(paths, clock) as store:
        cut = store.beyond(capacity) if capacity is not None else 0
        held = store.inspect()
        counts = store.due() if dry_run else {}
    if cut and not (dry_run or yes):
        confirm(f"A capacity of {resize} deletes {cut:,} of {held['blocks']:,} blocks. Resize {paths[0]}?")
    if not dry_run:
        with looking_after(paths, clock, capacity=capacity) as store:
            cut = store.shrink()
            counts = store.gc()
            held = store.inspect()
    sizes = {"blocks": held["blocks"], "bytes": held["bytes"], "capacity_bytes": held["capacity_bytes"]}
    result = {**counts, "resized_away_blocks": cut, **sizes} | ({"dry_run": True} if dry_run else {})
    if json:
        write_json(result)
    else:
        write_table(["", ""], result.items())
        if dry_run:
            console().print("nothing was changed")


def _capacity(text: str) -> int:
    """Raises InvalidRequest for a bare number, which is easily meant as GiB, and below what a configuration may say."""
    capacity = parse_size(text)
    if text.strip()[-1:].isdigit():
        raise InvalidRequest(f"--resize {text}: write a unit, such as {text}GiB ({text}B for bytes)")
    if capacity < G3_CAPACITY_MIN:
        raise InvalidRequest(f"--resize {text}: a store has at least {format_size(G3_CAPACITY_MIN)}")
    return capacity


def _report(found: Findings, *, as_json: bool) -> None:
    if as_json:
        write_json({"sound": found.sound, **asdict(found)})
    else:
        write_table(["", ""], [[name, value] for name, value in asdict(found).items() if name != "damaged"])
        for line in found.damaged:
            console().print(line)
    if not found.sound:
        raise typer.Exit(1)


@contextmanager
def _progress(quiet: bool) -> Iterator[MaintenanceProgress]:
    """A progress bar on standard error, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (*Bar.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("blocks", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
