"""`kvtier purge`: delete a tenant's blocks from the lower tiers, for every process and replica."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cache import open as open_cache
from kvtier.cli.output import Json, confirm, console, write_json
from kvtier.cli.stored import as_stored, read_namespace
from kvtier.clock import SystemClock
from kvtier.config import Config
from kvtier.errors import InvalidRequest
from kvtier.identity.keys import TENANT_BYTES, scope_of
from kvtier.identity.namespace import Namespace

File = Annotated[Path, typer.Argument(help="The YAML file.", metavar="CONFIG")]
Fields = Annotated[
    Path,
    typer.Option("--namespace", help="JSON file with the fields of the namespace to purge in; `kvtier namespace`."),
]
Salt = Annotated[str | None, typer.Option("--salt", help="The tenant's salt.")]
Unsalted = Annotated[bool, typer.Option("--without-salt", help="The requests without a salt.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def purge(
    file: File, namespace: Fields, salt: Salt = None, without_salt: Unsalted = False, dry_run: DryRun = False,
    yes: Yes = False, json: Json = False,
) -> None:  # fmt: skip
    """Delete every block of a tenant that was stored until now; running caches miss them within a minute."""
    if (salt is None) != without_salt:
        raise InvalidRequest("name one tenant: --salt SALT or --without-salt")
    fields = read_namespace(namespace)
    given = Config.load(file)
    config = as_stored(given, fields)
    if given.tiers.g3 is not None and config.tiers.g3 is None:
        print(f"kvtier: there is no store in {given.tiers.g3.path[0]}: only the bucket is purged", file=sys.stderr)
    on_disk = _on_disk(config, fields, salt)
    where = [f"{on_disk} blocks in {config.tiers.g3.path[0]}"] if config.tiers.g3 is not None else []
    where += [f"what {config.tiers.g4.url} holds (not counted)"] if config.tiers.g4 is not None else []
    if dry_run:
        if json:
            write_json({"dry_run": True, "g3_blocks": on_disk})
        else:
            console().print(f"a purge would delete {' and '.join(where)}; nothing was changed")
        return
    if not yes:
        whose = "of requests without a salt" if salt is None else f"of the salt {salt!r}"
        confirm(f"Delete everything {whose}: {' and '.join(where)}?")
    with open_cache(config, fields) as cache:
        count = cache.purge(salt)
    if json:
        write_json({"purged_blocks": count})
    else:
        console().print(f"{count} blocks deleted; every block stored until now is a miss everywhere")


def _on_disk(config: Config, fields: Namespace, salt: str | None) -> int:
    """Blocks of the tenant in G3."""
    if config.tiers.g3 is None:
        return 0
    from kvtier.tiers.disk.maintenance import looking_after

    # Keys may have been made without the secret (`kvtier.chain_hashes`).
    tenants = {scope_of(salt, secret=secret)[:TENANT_BYTES] for secret in (config.scope_secret, b"")}
    with looking_after(config.tiers.g3.path, SystemClock()) as store:
        return sum(store.count(fields.digest + tenant) for tenant in tenants)
