"""`kvtier namespace`: the fields of a namespace, as `purge` and `pin` take them."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.output import Json, console, replacing, write_json, write_table
from kvtier.cli.stored import namespaces_in, read_namespace
from kvtier.config import Config
from kvtier.errors import ConfigError, InvalidRequest
from kvtier.identity.namespace import Namespace

Source = Annotated[
    Path,
    typer.Argument(
        help="A G3 directory, an engine's YAML file or its trace.socket, or a JSON file.",
        metavar="SOURCE",
        show_default=False,
    ),
]
Digest = Annotated[str, typer.Option("--digest", help="Of several namespaces, the one whose digest begins so.")]
Save = Annotated[Path | None, typer.Option("--save", help="Write the fields into this file.")]


def namespace(source: Source, digest: Digest = "", save: Save = None, json: Json = False) -> None:
    """Print the fields of the one namespace that SOURCE holds, or list several. A running engine's is in its G3
    directory, or told by its trace.socket; its YAML file names both."""
    held = {name: fields for name, fields in _held(source).items() if name.startswith(digest.lower())}
    if not held:
        raise InvalidRequest(
            f"{source} holds no namespace" + (f" whose digest begins with {digest}" if digest else " yet")
        )
    if save is not None and len(held) > 1:
        raise InvalidRequest(f"{source} holds {len(held)} namespaces; name one by --digest: {', '.join(_short(held))}")
    texts = [jsonlib.dumps(fields, indent=2) for fields in held.values()]
    if save is not None:
        if save.exists() and save.read_bytes() != f"{texts[0]}\n".encode():
            raise InvalidRequest(f"{save} exists, with other content; name another file")
        with replacing(save) as file:
            file.write(texts[0] + "\n")
    if json:
        write_json({"namespaces": [{"digest": name, "fields": fields} for name, fields in held.items()]})
    elif len(held) > 1:
        rows = [[name[:16], *_described(fields)] for name, fields in held.items()]
        write_table(["digest", "model", "weights", "dtype", "tokens", "bytes"], rows)
    else:
        console().print(f"{save}: written" if save is not None else texts[0], soft_wrap=True)


def _held(source: Path) -> dict[str, dict[str, Any]]:
    """Hex digest → fields."""
    if source.is_dir():
        found = namespaces_in([source])
    elif source.is_socket():
        found = _of_running(source)
    elif source.suffix in (".yaml", ".yml"):
        config = Config.load(source, absent={})  # the engine's secrets say nothing of it
        if config.tiers.g3 is not None:
            found = namespaces_in(config.tiers.g3.path)
        elif config.trace.socket is not None:
            found = _of_running(config.trace.socket)
        else:
            raise ConfigError(f"{source}: tiers.g3 is not set, nor trace.socket: nothing tells the namespace")
    else:
        one = read_namespace(source)
        found = {one.digest: one.fields()}
    return {name.hex(): fields for name, fields in found.items()}


def _of_running(socket: Path) -> dict[bytes, dict[str, Any]]:
    """Of the cache that listens there."""
    from kvtier.cli.trace_socket import told_namespace

    told = Namespace.parse(told_namespace(socket))
    return {told.digest: told.fields()}


def _short(held: dict[str, dict[str, Any]]) -> list[str]:
    return [name[:16] for name in held]


def _described(fields: dict[str, Any]) -> list[str]:
    return [str(fields.get(name, "")) for name in ("model", "weights", "dtype", "block_tokens", "block_bytes")]
