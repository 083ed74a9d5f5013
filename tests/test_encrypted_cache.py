"""A whole cache that encrypts: G3 in this process and in one of its own, and G4. Nothing plain leaves RAM."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtier
from kvtier.checksum import digest_of
from kvtier.testing import payloads_of, sample_namespace

BLOCK = 4096
NS = sample_namespace(BLOCK)
SALT = "a tenant's salt, which is a secret"
FILE = """version: 1
name_key: "{names}"
keys: [{{id: "a1a1a1a1a1a1a1a1", secret: "{secret}", state: active}}]
"""


def config(folder: Path, *, tiers: str = "g3 g4", keys: bool = True) -> kvtier.Config:
    file = folder / "keys.yaml"
    file.write_text(FILE.format(names="33" * 32, secret="b2" * 32))
    file.chmod(0o600)
    lower = {
        "g3": {"path": str(folder / "g3"), "capacity": "64MiB"},
        "g4": {"url": f"file://{folder}/g4", "stride": 4},
    }
    security = {"key_file": str(file)} | ({"data_keys": str(folder / "data-keys")} if keys else {})
    chosen = {name: lower[name] for name in tiers.split()}
    return kvtier.Config.parse({"tiers": {"g2": {"capacity": "4MiB"}, **chosen}, "security": security})


def served(cache: kvtier.Cache, keys: list[bytes]) -> tuple[int, set[str]]:
    with cache.get(keys) as hit:
        assert [bytes(block) for block in hit.blocks] == payloads_of(keys[: len(hit)], BLOCK), "wrong bytes"
        return len(hit), set(hit.tiers)


@pytest.mark.parametrize("computes", [False, True])
def test_what_leaves_ram_is_encrypted_and_comes_back_from_each_tier(tmp_path: Path, computes: bool) -> None:
    keys = kvtier.chain_hashes(range(128), NS, salt=SALT)
    with kvtier.open(config(tmp_path), NS, computes=computes) as cache:
        cache.put(keys, payloads_of(keys, BLOCK))
        assert cache.flush().pending == 0
    for tier in ("g3", "g4"):
        with kvtier.open(config(tmp_path, tiers=tier), NS, computes=computes) as cache:
            assert served(cache, keys) == (8, {tier})
    assert (tmp_path / "g3").exists() and list((tmp_path / "g4").rglob("*"))
    secrets = [SALT.encode(), bytes([0xB2]) * 32, b"b2" * 32]
    for payload in payloads_of(keys, BLOCK):
        secrets += [digest_of([payload]), payload[:16], payload[2048:2064], payload[-16:]]
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "keys.yaml":
            stored = path.read_bytes()
            assert not [secret for secret in secrets if secret in stored], path
    for tier in ("g3", "g4"):
        with kvtier.open(config(tmp_path, tiers=tier, keys=False), NS, computes=computes) as cache:
            assert served(cache, keys) == (0, set())


def test_encryption_without_a_key_that_wraps_is_a_mistake_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(kvtier.ConfigError, match=r"security\.data_keys: .*key_file"):
        kvtier.Config.parse({"security": {"data_keys": str(tmp_path)}})
    (tmp_path / "data-keys").mkdir()
    (tmp_path / "data-keys").chmod(0o777)
    with pytest.raises(kvtier.ConfigError, match=r"security\.data_keys: .*0700"):
        kvtier.open(config(tmp_path), NS)
