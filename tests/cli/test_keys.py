"""`kvtier keys …`, beside a cache that encrypts."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.testing import payloads_of, sample_namespace

NS = sample_namespace(4096)
KEYS = """version: 1
name_key: "{name}"
keys:
{rows}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    ring(tmp_path, [("11" * 8, "22" * 32, "active")])
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        f"tiers: {{g2: {{capacity: 4MiB}}, g3: {{path: {tmp_path}/g3, capacity: 64MiB}}}}\n"
        f"security: {{key_file: {tmp_path}/keys.yaml, data_keys: {tmp_path}/data-keys}}\n"
    )
    return file


def ring(folder: Path, rows: list[tuple[str, str, str]]) -> None:
    lines = (f'  - {{id: "{id}", secret: "{secret}", state: {state}}}' for id, secret, state in rows)
    file = folder / "keys.yaml"
    file.write_text(KEYS.format(name="33" * 32, rows="\n".join(lines)))
    file.chmod(0o600)


def served(config: Path, salt: str, *, stored: bool = False) -> int:
    keys = kvtier.chain_hashes(range(64), NS, salt=salt)
    with kvtier.open(kvtier.Config.load(config), NS) as cache:
        if stored:
            cache.put(keys, payloads_of(keys, 4096))
            cache.flush()
        with cache.get(keys) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(keys[: len(hit)], 4096)
            return len(hit)


def test_a_destroyed_key_takes_its_tenants_blocks_and_no_others(run: Callable[..., Any], config: Path) -> None:
    for salt in ("a", "b"):
        assert served(config, salt, stored=True) == 4
    listed = run("keys", "list", config, "--json").json()
    assert listed["keyring"] == [{"id": "11" * 8, "state": "active"}]
    assert [row["wrapped_by"] for row in listed["data_keys"]] == ["11" * 8] * 2
    done = run("keys", "destroy", config, "--salt", "a", "--yes", "--json")
    assert done.status == 0 and len(done.json()["destroyed"]) == 1
    assert (served(config, "a"), served(config, "b")) == (0, 4)
    assert served(config, "a", stored=True) == 4, "a new key, and new blocks in the old ones' place"
    assert served(config, "a") == 4
    again = run("keys", "destroy", config, "--salt", "never seen", "--yes")
    assert again.status == 1 and "nothing was changed" in again.out


def test_a_rotation_wraps_anew_and_the_old_key_can_be_retired(
    run: Callable[..., Any], config: Path, tmp_path: Path
) -> None:
    assert served(config, "a", stored=True) == 4
    old = ("11" * 8, "22" * 32)
    ring(tmp_path, [("44" * 8, "55" * 32, "active"), (*old, "accept")])
    assert run("keys", "rotate", config, "--json").json() == {"rewrapped": 1, "unchanged": 0, "failed": {}}
    assert run("keys", "rotate", config, "--json").json() == {"rewrapped": 0, "unchanged": 1, "failed": {}}
    ring(tmp_path, [("44" * 8, "55" * 32, "active"), (*old, "retired")])
    assert served(config, "a") == 4
    ring(tmp_path, [("66" * 8, "77" * 32, "active")])
    assert served(config, "a") == 0
    failed = run("keys", "rotate", config, "--json")
    assert failed.status == 1 and "not in the keyring" in str(failed.json()["failed"])
    (row,) = run("keys", "list", config, "--json").json()["data_keys"]
    assert row["note"] == "not wrapped by a key of this keyring"
    assert run("keys", "list", config).status == 0


def test_destruction_asks_first_and_names_exactly_one_tenant(
    run: Callable[..., Any], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served(config, "a", stored=True) == 4
    for answer in ("n\n", ""):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert run("keys", "destroy", config, "--salt", "a").status == 4
    assert served(config, "a") == 4
    for words in ([], ["--salt", "a", "--without-salt"], ["--name", "0" * 32, "--salt", "a"]):
        wrong = run("keys", "destroy", config, *words, "--yes")
        assert wrong.status == 2 and "--salt SALT" in wrong.err
    assert run("keys", "destroy", config, "--name", "../x", "--yes").status == 2


def test_without_encryption_it_says_what_is_missing(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text(f"tiers: {{g3: {{path: {tmp_path}/g3, capacity: 64MiB}}}}\n")
    done = run("keys", "list", file)
    assert done.status == 2 and "security.data_keys" in done.err
    file.write_text(f"security: {{data_keys: {tmp_path}/keys}}\n")
    done = run("keys", "list", file)
    assert done.status == 2 and "key_file" in done.err


def test_what_was_done_to_keys_is_told_in_words(run: Callable[..., Any], config: Path, tmp_path: Path) -> None:
    assert served(config, "a", stored=True) == 4
    done = run("keys", "rotate", config)
    assert done.status == 0 and "0 data keys wrapped anew, 1 were already" in done.out
    ring(tmp_path, [("66" * 8, "77" * 32, "active")])
    (name,) = (row["name"] for row in run("keys", "list", config, "--json").json()["data_keys"])
    failed = run("keys", "rotate", config)
    assert failed.status == 1 and f"{name}: " in failed.told, "which one failed"
    done = run("keys", "destroy", config, "--name", name, "--yes")
    assert done.status == 0 and "1 data key(s) destroyed" in done.out


def test_a_mistyped_folder_of_data_keys_is_named_and_not_made(
    run: Callable[..., Any], config: Path, tmp_path: Path
) -> None:
    config.write_text(config.read_text().replace("data-keys", "data-keyz"))
    done = run("keys", "list", config)
    assert done.status == 2 and "data-keyz" in done.err and not (tmp_path / "data-keyz").exists()


def test_a_key_that_is_destroyed_while_it_is_listed_is_said_to_be(
    run: Callable[..., Any], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served(config, "a", stored=True) == 4
    monkeypatch.setattr("kvtier.tiers.key_directory.KeyDirectory.read", lambda self, name: None)
    (row,) = run("keys", "list", config, "--json").json()["data_keys"]
    assert row["note"] == "destroyed just now" and row["created"] == ""


DAMAGED: dict[str, Callable[[Path], object]] = {
    "is no key of version 1": lambda file: file.write_bytes(bytes(100)),
    "is no key": lambda file: file.write_text(file.read_text().replace('"created": ', '"created": 1e300, "was": ')),
}
OTHER: dict[str, Callable[[Path], object]] = {
    "is no regular file": os.mkfifo,
    "keys: read": lambda file: Path.symlink_to(file, "kept"),
}


@pytest.mark.parametrize(("says", "damage"), [*DAMAGED.items(), *OTHER.items()])
def test_a_key_that_cannot_be_read_is_listed_beside_the_others(
    run: Callable[..., Any], config: Path, says: str, damage: Callable[[Path], object]
) -> None:
    for salt in ("a", "b"):
        served(config, salt, stored=True)
    file = min((config.parent / "data-keys").glob("*.key"))
    if says in OTHER:
        file.rename(file.with_name("kept"))
    damage(file)
    listed = run("keys", "list", config, "--json")
    assert listed.status == 0
    notes = {row["name"]: row["note"] for row in listed.json()["data_keys"]}
    assert says in notes.pop(file.stem) and list(notes.values()) == [""]
    if says in OTHER:
        assert run("keys", "destroy", config, "--name", file.stem, "--yes").status == 3, "and it ends"


@pytest.mark.parametrize("damage", DAMAGED.values())
def test_a_damaged_key_may_be_destroyed(
    run: Callable[..., Any], config: Path, damage: Callable[[Path], object]
) -> None:
    """As one whose destruction was interrupted: without that its tenant never has another."""
    served(config, "a", stored=True)
    (file,) = (config.parent / "data-keys").glob("*.key")
    damage(file)
    destroyed = run("keys", "destroy", config, "--salt", "a", "--yes", "--json")
    assert destroyed.status == 0 and destroyed.json()["destroyed"] == [file.stem]
    assert run("keys", "list", config, "--json").json()["data_keys"] == []
    assert served(config, "a", stored=True) == 4
