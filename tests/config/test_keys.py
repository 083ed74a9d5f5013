"""Where keys come from: a file, an environment secret, a plug-in, or nowhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import Config, key_file
from kvtier.errors import ConfigError
from kvtier.keyring import KeyState

SECRET = "5f" * 32
DOCUMENT: dict[str, Any] = {
    "version": 1,
    "name_key": "c0" * 32,
    "keys": [
        {"id": "a1" * 8, "secret": SECRET, "state": "active"},
        {"id": "b2" * 8, "secret": "6e" * 32, "state": "accept"},
    ],
}


def write(path: Path, document: object, mode: int = 0o600) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    path.chmod(mode)
    return path


def config(**security: object) -> Config:
    return Config.parse({"security": security}, {"KEY": SECRET})


def test_a_key_file_is_read(tmp_path: Path) -> None:
    ring = config(key_file=str(write(tmp_path / "keys", DOCUMENT))).keyring()
    assert ring.trusted and ring.active.id.hex() == "a1" * 8
    assert [key.state for key in ring.keys] == [KeyState.ACTIVE, KeyState.ACCEPT]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644])
def test_a_key_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=r"security\.key_file: .* mode 0600"):
        config(key_file=str(write(tmp_path / "keys", DOCUMENT, mode))).keyring()


def test_a_link_a_folder_and_an_absent_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(write(tmp_path / "keys", DOCUMENT))
    for name in ("link", "absent", "."):
        with pytest.raises(ConfigError, match=r"security\.key_file"):
            config(key_file=str(tmp_path / name)).keyring()


@pytest.mark.parametrize(
    ("name", "example"), [("key_file", "/etc/kvtier/keys.yaml"), ("data_keys", "/var/lib/kvtier/data-keys")]
)
def test_a_path_that_is_not_full_is_told_one_of_its_kind(name: str, example: str) -> None:
    """A directory of keys was given a file as its example."""
    with pytest.raises(ConfigError, match=rf"security\.{name}: 'keys': write the full path, such as {example}"):
        config(**{"key": "${KEY}" if name == "data_keys" else None, name: "keys"})


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(DOCUMENT))
    change(document)
    return document


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (changed(lambda d: d.update(version=2)), "version"),
        (changed(lambda d: d.update(more=1)), "more"),
        (changed(lambda d: d.pop("name_key")), "name_key"),
        (changed(lambda d: d.update(keys=[])), "keys"),
        (changed(lambda d: d["keys"][0].update(id="0" * 16)), r"keys\[0\]\.id"),
        (changed(lambda d: d["keys"][0].update(id=5)), r"keys\[0\]\.id"),
        (changed(lambda d: d["keys"][1].update(secret=SECRET[:-2])), r"keys\[1\]\.secret"),
        (changed(lambda d: d["keys"][1].update(state="on")), r"keys\[1\]\.state"),
        (changed(lambda d: d["keys"][1].update(state="active")), "2 of 2 are active"),
        (changed(lambda d: d["keys"][1].update(id="a1" * 8)), "given twice"),
        (f"version: 1\nname_key: {SECRET}\nname_key: {SECRET}\n", "not strict YAML"),
    ],
)
def test_a_mistake_names_the_field_and_shows_no_secret(tmp_path: Path, document: object, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"security\.key_file.*{field}") as caught:
        config(key_file=str(write(tmp_path / "keys", document))).keyring()
    assert SECRET[:8] not in str(caught.value)


def test_an_environment_secret_is_one_key() -> None:
    one, again = (config(key="${KEY}").keyring() for _ in range(2))
    assert one.trusted and one.tag("header", b"x") == again.tag("header", b"x")
    assert one.name("unit", b"x") == again.name("unit", b"x")
    shown = config(key="${KEY}")
    assert SECRET not in repr(shown) and SECRET not in json.dumps(shown.model_dump(mode="json"))


def test_an_environment_secret_of_another_form_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"security\.key: must be 64 hexadecimal digits") as caught:
        Config.parse({"security": {"key": "${KEY}"}}, {"KEY": "correct horse battery"}).keyring()
    assert "horse" not in str(caught.value)


def test_a_plugin_returns_a_key_document(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("vault", f"{__name__}:fetch_keys", key_file.PLUGINS)
    monkeypatch.setattr(EntryPoint, "load", lambda self: lambda: DOCUMENT)
    monkeypatch.setattr(key_file, "entry_points", lambda group: [point])
    assert config(kms="vault").keyring().active.id.hex() == "a1" * 8
    with pytest.raises(ConfigError, match=r"security\.kms: 0 plug-ins are called 'other'; installed: vault"):
        config(kms="other").keyring()


def test_a_plugin_that_fails_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(EntryPoint, "load", lambda self: fails)
    monkeypatch.setattr(key_file, "entry_points", lambda group: [EntryPoint("vault", "x:y", group)])
    with pytest.raises(ConfigError, match=r"'vault' failed: RuntimeError") as caught:
        config(kms="vault").keyring()
    assert SECRET not in str(caught.value)


def test_keys_come_from_one_place_or_none() -> None:
    assert not config().keyring().trusted
    with pytest.raises(ConfigError, match=r"security\.key: key_file is given, too"):
        config(key="${KEY}", key_file="/keys")


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "keys", DOCUMENT)
    if path.stat().st_uid == 0:
        path.chmod(0o600)
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="of this user"):
        config(key_file=str(path)).keyring()


def test_a_key_document_of_another_form_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "keys.yaml").write_bytes(b" " * (key_file.FILE_BYTES_MAX + 1))
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="has more than"):
        Config.parse({"security": {"key_file": str(file)}}).keyring()
    right = {"id": "11" * 8, "secret": "22" * 32, "state": "active"}
    for row in ("text", {**right, "comment": "x"}):
        with pytest.raises(ConfigError, match=r"keys\[0\]: must be a mapping of id, secret and state"):
            key_file.parse_keys({"version": 1, "name_key": "33" * 32, "keys": [row]}, "here")
