"""Stores that lie there already, and namespaces in them: for commands that create none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.clock import SystemClock
from kvtier.config import G2, G3, Config
from kvtier.config.strict_yaml import TEXT_BYTES_MAX
from kvtier.errors import ConfigError, IdentityError, InvalidRequest
from kvtier.identity.namespace import Namespace

if TYPE_CHECKING:
    from kvtier.tiers.disk.maintenance import Maintenance


def read_namespace(path: Path) -> Namespace:
    """The namespace whose fields `path` holds as JSON. Raises InvalidRequest or IdentityError naming the file."""
    try:
        with path.open("rb") as file:
            raw = json.loads(file.read(TEXT_BYTES_MAX))
    except OSError as wrong:
        raise InvalidRequest(f"{path} cannot be read: {wrong.strerror}") from wrong
    except (ValueError, RecursionError) as wrong:
        raise InvalidRequest(f"{path} is not a JSON file of a namespace's fields: {wrong}") from wrong
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{path} holds {type(raw).__name__}, not a mapping of a namespace's fields")
    try:
        return Namespace.parse(raw)
    except IdentityError as wrong:
        raise IdentityError(f"{path}: {wrong}") from wrong


def read_namespaces(path: Path) -> list[Namespace]:
    """The namespaces that a G3 directory holds, or the one of a JSON file. Raises like `read_namespace`."""
    if not path.is_dir():
        return [read_namespace(path)]
    held = namespaces_in([path])
    if not held:
        raise InvalidRequest(f"{path} holds no namespace yet")
    return [Namespace.parse(fields) for fields in held.values()]


def namespaces_in(paths: Sequence[Path]) -> dict[bytes, dict[str, Any]]:
    """Digest → fields of the namespaces of the G3 store at `paths`. Raises ConfigError or FormatError."""
    with _looking_after(paths) as store:
        return {digest: fields for digest, fields in store.namespaces().items() if fields}


def as_stored(config: Config, namespace: Namespace) -> Config:
    """`config` cut down to the stores that are there, for a command that works on what is stored: opening it creates
    none. A G3 path without a store is left out where there is a G4. Raises ConfigError where no
    store is left, InvalidRequest where it never held `namespace`."""
    tiers = config.tiers
    g3, g4 = tiers.g3, tiers.g4
    if g4 is not None and (folder := _folder_of(g4.url)) is not None and not folder.is_dir():
        raise ConfigError(f"tiers.g4.url: there is no directory {folder}; nothing was changed")
    if g3 is not None and not _is_there(g3):
        if g4 is None:
            named = ", ".join(map(str, g3.path))
            raise ConfigError(f"tiers.g3.path: there is no store in {named}; nothing was changed")
        g3 = None
    if g3 is None and g4 is None:
        raise ConfigError("neither tiers.g3 nor tiers.g4 is set: there is nothing that outlives a process")
    if g3 is not None and g4 is None:
        held = namespaces_in(g3.path)
        if namespace.digest not in held:
            named = ", ".join(sorted({str(fields.get("model")) for fields in held.values()})) or "none"
            raise InvalidRequest(
                f"{g3.path[0]} never held this namespace (model {namespace.model}); it has those of {named}; "
                f"`kvtier namespace {g3.path[0]}` prints them"
            )
    return cut_down(config.model_copy(update={"tiers": tiers.model_copy(update={"g3": g3})}), namespace)


def cut_down(config: Config, namespace: Namespace) -> Config:
    """`config` for a process that stores no blocks, beside those that do: with one slot of G2, without a trace socket,
    which is the engine's, and with the capacity that the G3 store has: opened with another one it would change its
    size, and lose what lies beyond. Raises ConfigError, FormatError or TierError."""
    tiers = config.tiers
    g3 = tiers.g3
    if g3 is not None and _is_there(g3):
        with _looking_after(g3.path) as store:
            g3 = g3.model_copy(update={"capacity": store.capacity})
    small = G2(capacity=namespace.block_bytes + 4096 * namespace.ranks_served)
    trace = config.trace.model_copy(update={"socket": None})
    return config.model_copy(update={"tiers": tiers.model_copy(update={"g2": small, "g3": g3}), "trace": trace})


def _is_there(g3: G3) -> bool:
    return any((path / "STORE.json").exists() for path in g3.path)


def _looking_after(paths: Sequence[Path]) -> AbstractContextManager[Maintenance]:
    from kvtier.tiers.disk.maintenance import looking_after

    return looking_after(paths, SystemClock())


def _folder_of(url: str) -> Path | None:
    """The directory of a `file://` URL, which is all path: nothing in it is quoted."""
    return Path(url.removeprefix("file://")) if url.startswith("file://") else None
