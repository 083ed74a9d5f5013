"""`kvtier reload`: a running engine reads its YAML file anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.ask import ask, shown
from kvtier.cli.output import Json, console, write_json
from kvtier.errors import FormatError

Source = Annotated[
    Path, typer.Argument(help="The engine's YAML file, or its trace.socket.", metavar="SOURCE", show_default=False)
]


def reload(source: Source, json: Json = False) -> None:
    """Have the cache that listens at trace.socket take over what its own file changes. Another file than its own, a
    mistake in the file, or a change that needs a restart, is named, and nothing is changed."""
    file = None if source.is_socket() else str(source.absolute())
    answer = ask(source, {"ask": "reload", "file": file})
    read, changed = answer.get("file"), answer.get("changed")
    if not isinstance(read, str) or not isinstance(changed, list):
        raise FormatError(f"{source}: what answers is no trace socket of this release of kvtier")
    names = [shown(key) for key in changed]
    if json:
        write_json({"file": read, "changed": names})
        return
    console().print(f"{shown(read, 4096)}: {', '.join(names) or 'nothing changed'}", soft_wrap=True)
