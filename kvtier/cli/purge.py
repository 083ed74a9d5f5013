"""`kvtier purge`: delete a tenant's blocks from the lower tiers, for every process and replica."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cache import open as open_cache
from kvtier.cli.doctor import read_namespace
from kvtier.cli.output import Json, console, write_json
from kvtier.config import G2, Config

File = Annotated[Path, typer.Argument(help="The YAML file.", metavar="CONFIG")]
Fields = Annotated[Path, typer.Option("--namespace", help="JSON file with the fields of the namespace to purge in.")]
Salt = Annotated[str | None, typer.Option("--salt", help="The tenant's salt; default: requests without one.")]


def purge(file: File, namespace: Fields, salt: Salt = None, json: Json = False) -> None:
    """Delete every block of SALT that was stored until now; running caches miss them within a minute."""
    fields = read_namespace(namespace)
    config = Config.load(file)
    # This process stores no blocks: one slot of G2 is enough.
    small = config.tiers.model_copy(update={"g2": G2(capacity=fields.block_bytes + 4096 * fields.ranks_served)})
    with open_cache(config.model_copy(update={"tiers": small}), fields) as cache:
        count = cache.purge(salt)
    if json:
        write_json({"purged_blocks": count})
    else:
        console().print(f"{count} blocks purged; every block stored until now is a miss everywhere")
