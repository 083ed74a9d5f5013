"""`kvtier keys …`: the keys of encryption at rest."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.output import Json, confirm, console, write_json, write_table
from kvtier.clock import SystemClock
from kvtier.config import Config
from kvtier.errors import ConfigError, CorruptError, InvalidRequest, TierError
from kvtier.identity.keys import Scope, scope_of
from kvtier.keyring import UnknownKey
from kvtier.manager.build import data_keys
from kvtier.tiers.data_keys import KEY_CACHE_S, StoredKeys, wrapping_key_of

File = Annotated[Path, typer.Argument(help="The YAML file.", metavar="CONFIG")]
Salt = Annotated[str | None, typer.Option("--salt", help="The tenant's salt.")]
Unsalted = Annotated[bool, typer.Option("--without-salt", help="The requests without a salt.")]
Name = Annotated[str | None, typer.Option("--name", help="The key's name, as `keys list` shows it.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def listing(file: File, json: Json = False) -> None:
    """Show the keyring's keys, and each data key: its name, age, and the key that wraps it. No secret is shown."""
    config, keys = _opened(file)
    ring = [{"id": key.id.hex(), "state": str(key.state)} for key in config.keyring().keys]
    rows = [_row(keys, name) for name in keys.store.names()]
    if json:
        write_json({"keyring": ring, "data_keys": rows})
        return
    write_table(["key of the keyring", "state"], [[one["id"], one["state"]] for one in ring])
    write_table(["data key", "created", "wrapped by", "note"], [list(row.values()) for row in rows])


def _row(keys: StoredKeys, name: str) -> dict[str, Any]:
    try:
        found = keys.store.read(name)
    except (CorruptError, TierError) as error:
        return {"name": name, "created": "", "wrapped_by": "", "note": str(error)}
    if found is None:
        return {"name": name, "created": "", "wrapped_by": "", "note": "destroyed just now"}
    created = datetime.fromtimestamp(found.created, UTC).isoformat(timespec="seconds")
    note = "" if keys.unwraps(name, found) else "not wrapped by a key of this keyring"
    return {"name": name, "created": created, "wrapped_by": wrapping_key_of(found).hex(), "note": note}


def rotate(file: File, json: Json = False) -> None:
    """Wrap every data key by the keyring's active key. No block is written anew. Afterwards the earlier key may be
    retired. Exit status 1 if a key could not be wrapped."""
    _, keys = _opened(file)
    counts, failed = {"rewrapped": 0, "unchanged": 0}, {}
    for name in keys.store.names():
        try:
            counts["rewrapped" if keys.rewrap(name) else "unchanged"] += 1
        except (CorruptError, UnknownKey, TierError) as error:
            failed[name] = str(error)
    if json:
        write_json({**counts, "failed": failed})
    else:
        console().print(f"{counts['rewrapped']} data keys wrapped anew, {counts['unchanged']} were already")
        for name, why in failed.items():
            console().print(f"{name}: {why}")
    if failed:
        raise typer.Exit(1)


def destroy(
    file: File, salt: Salt = None, without_salt: Unsalted = False, name: Name = None, yes: Yes = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Destroy a tenant's data keys: no encrypted copy of its blocks, on a disk or in a bucket, can be read again.
    Running caches forget the key within a minute. Blocks in RAM stay until `kvtier purge`."""
    if sum((salt is not None, without_salt, name is not None)) != 1:
        raise InvalidRequest("name one tenant: --salt SALT, --without-salt or --name NAME")
    config, keys = _opened(file)
    names = [name] if name is not None else sorted({keys.name_of(scope) for scope in _scopes(config, salt)})
    there = [one for one in names if _is_there(keys, one)]
    if there and not yes:
        confirm(f"Destroy {len(there)} data key(s)? What they encrypted cannot be read again.")
    destroyed = [one for one in there if keys.store.destroy(one)]
    if json:
        write_json({"destroyed": destroyed, "forgotten_within_s": KEY_CACHE_S})
    elif destroyed:
        console().print(
            f"{len(destroyed)} data key(s) destroyed; running caches forget them within {KEY_CACHE_S:.0f} s"
        )
    else:
        console().print("no such data key; nothing was changed")
    if not destroyed:
        raise typer.Exit(1)


def _is_there(keys: StoredKeys, name: str) -> bool:
    """Also a damaged one: until that is gone, its tenant has no other."""
    try:
        return keys.store.read(name) is not None
    except CorruptError:
        return True


def _scopes(config: Config, salt: str | None) -> set[Scope]:
    """The tenant's, also as `kvtier.chain_hashes` makes it, without the secret."""
    return {scope_of(salt, secret=secret) for secret in (config.scope_secret, b"")}


def _opened(file: Path) -> tuple[Config, StoredKeys]:
    config = Config.load(file)
    folder = config.security.data_keys
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"security.data_keys: there is no directory {folder}; nothing was changed")
    keys = data_keys(config, SystemClock())
    if keys is None:
        raise ConfigError("security.data_keys is not set: nothing is encrypted; name a directory for the wrapped keys")
    return config, keys
