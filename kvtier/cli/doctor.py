"""`kvtier doctor`: problems of this machine with a configuration, and reasons why two stores do not share blocks."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.doctor_checks import Level, run_checks
from kvtier.cli.output import Json, console, write_json, write_table
from kvtier.cli.stored import read_namespaces
from kvtier.config import Config
from kvtier.identity.namespace import explain

Pair = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--explain-namespace",
        metavar="A B",
        help="Show the fields that differ between two namespaces; each is a JSON file of fields, or a G3 directory.",
    ),
]
File = Annotated[Path | None, typer.Argument(help="The YAML file.", metavar="[CONFIG]")]


def doctor(file: File = None, explain_namespace: Pair = None, json: Json = False) -> None:
    """Check this machine against CONFIG (default: the built-in one), or explain why two stores do not share blocks."""
    if explain_namespace is not None:
        _explain(*explain_namespace, as_json=json)
        return
    absent: dict[str, str] = {}
    config = Config.load(file, absent=absent) if file else Config.from_environment()
    findings = run_checks(config, absent)
    worst = max((finding.level for finding in findings), default=Level.OK)
    if json:
        write_json(
            {"healthy": worst < Level.FAIL, "findings": [asdict(f) | {"level": f.level.name.lower()} for f in findings]}
        )
    else:
        rows = [[f.level.name.lower(), f.subject, f.detail + (f"\n→ {f.advice}" if f.advice else "")] for f in findings]
        write_table(["", "what", "found"], rows)
    if worst is Level.FAIL:
        raise typer.Exit(1)


def _explain(left: Path, right: Path, *, as_json: bool) -> None:
    # Of directories, the two most similar namespaces: only these can have been meant to share.
    pairs = product(read_namespaces(left), read_namespaces(right))
    a, b = min(pairs, key=lambda pair: len(explain(*pair)))
    found = explain(a, b)
    if as_json:
        differences = [asdict(difference) for difference in found]
        write_json({"same": not found, "digests": [a.digest.hex(), b.digest.hex()], "differences": differences})
    elif not found:
        console().print(f"One namespace, {a.digest.hex()[:16]}…: these two share blocks.")
    else:
        write_table(["field", str(left), str(right)], [[d.field, repr(d.left), repr(d.right)] for d in found])
        console().print("Every field above must be equal for blocks to be shared; until then all lookups miss.")
    if found:
        raise typer.Exit(1)
