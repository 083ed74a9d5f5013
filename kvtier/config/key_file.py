"""The keyring of a configuration: from a key file, an environment secret, or a plug-in.

    security: {key_file: /etc/kvtier/keys.yaml}      or  {key: "${KVTIER_KEY}"}      or  {kms: NAME}

A key file is strict YAML (JSON is, too), readable by its owner only:

    version: 1
    name_key: 64 hexadecimal digits, never changed
    keys:
      - {id: 16 digits, secret: 64 digits, state: active}
      - {id: 16 digits, secret: 64 digits, state: accept}

An environment secret is one key of 64 hexadecimal digits, from which id and name key are derived: to rotate, use a
file. A plug-in is an entry point of the group `kvtier.kms`: called without arguments, it returns the mapping that a
key file holds.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kvtier.config.strict_yaml import read_document
from kvtier.errors import ConfigError
from kvtier.keyring import KEY_ID_BYTES, PUBLIC_ID, SECRET_BYTES, Key, Keyring, KeyState, hkdf

FILE_BYTES_MAX = 1 << 20
PLUGINS = "kvtier.kms"
"""Group of entry points that return a key document."""


def read_key_file(path: Path) -> Keyring:
    """The keyring in a file that only its owner (this user, or root) can read or change. Raises ConfigError; no message
    holds a secret."""
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW))  # noqa: SIM115
    except OSError as wrong:
        raise ConfigError(f"security.key_file: {path} cannot be read: {wrong.strerror}") from None
    with file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"security.key_file: {path} must be a file of this user with mode 0600 (chmod 600)")
        text = file.read(FILE_BYTES_MAX + 1)
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"security.key_file: {path} has more than {FILE_BYTES_MAX} bytes")
    try:
        document = read_document(text)
    except ConfigError:
        raise ConfigError(f"security.key_file: {path} is not strict YAML") from None  # its text may be a secret
    return parse_keys(document, f"security.key_file: {path}")


def parse_keys(document: object, where: str) -> Keyring:
    """The keyring of a key document. Pure. Raises ConfigError that begins with `where` and names the field."""
    if not isinstance(document, Mapping) or document.get("version") != 1:
        raise ConfigError(f"{where}: version must be 1")
    unknown = sorted(str(name)[:40] for name in document.keys() - {"version", "name_key", "keys"})
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]} is not a field; known: version, name_key, keys")
    rows = document.get("keys")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{where}: keys must be a list of id, secret and state")
    keys = [_key(row, f"{where}: keys[{index}]") for index, row in enumerate(rows)]
    try:
        return Keyring(keys, _hex(document.get("name_key"), SECRET_BYTES, f"{where}: name_key"))
    except ConfigError as wrong:
        raise ConfigError(str(wrong) if str(wrong).startswith(where) else f"{where}: {wrong}") from None


def _key(row: object, where: str) -> Key:
    if not isinstance(row, Mapping) or row.keys() - {"id", "secret", "state"}:
        raise ConfigError(f"{where}: must be a mapping of id, secret and state")
    state = row.get("state")
    if state not in [each.value for each in KeyState]:
        raise ConfigError(f"{where}.state: must be active, accept or retired")
    id = _hex(row.get("id"), KEY_ID_BYTES, f"{where}.id")
    if id == PUBLIC_ID:
        raise ConfigError(f"{where}.id: all zeros stands for no key; use random digits")
    return Key(id, _hex(row.get("secret"), SECRET_BYTES, f"{where}.secret"), KeyState(str(state)))


def _hex(value: object, size: int, where: str) -> bytes:
    """Never shows the value. An id of decimal digits only is an integer to YAML: its leading zeros are lost there."""
    try:
        raw = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        raw = b""
    if len(raw) != size:
        raise ConfigError(f'{where}: must be {2 * size} hexadecimal digits in quotes, such as "{"5f" * 3}…"')
    return raw


def key_of_secret(secret: str) -> Keyring:
    """The keyring of one environment secret. Pure. Raises ConfigError."""
    raw = _hex(secret, SECRET_BYTES, "security.key")
    salt = b"kvtier-environment-1"
    return Keyring([Key(hkdf(raw, salt, b"id", KEY_ID_BYTES), raw)], hkdf(raw, salt, b"name"))


def ask_plugin(name: str) -> Keyring:
    """The keyring that a plug-in returns. Runs its code. Raises ConfigError."""
    found = [each for each in entry_points(group=PLUGINS) if each.name == name]
    if len(found) != 1:
        known = ", ".join(sorted({each.name for each in entry_points(group=PLUGINS)})) or "none"
        raise ConfigError(f"security.kms: {len(found)} plug-ins are called {name!r}; installed: {known}")
    try:
        document: Any = found[0].load()()
    except ConfigError:  # it knows what it says
        raise
    except Exception as error:  # a plug-in may raise anything, and its text may hold a secret
        raise ConfigError(f"security.kms: the plug-in {name!r} failed: {type(error).__name__}") from None
    return parse_keys(document, f"security.kms: {name}")
