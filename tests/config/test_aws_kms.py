"""The plug-in `aws`, against a server on loopback that speaks AWS KMS."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvtier import Config
from kvtier.config import aws_kms, key_file
from kvtier.errors import ConfigError

if not os.environ.get("CI"):  # where CI promises them, their absence is an error
    pytest.importorskip("flask_cors")
    pytest.importorskip("moto")

DOCUMENT = {
    "version": 1,
    "name_key": "33" * 32,
    "keys": [{"id": "a1" * 8, "secret": "b2" * 32, "state": "active"}],
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    kms = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    kms.start()
    yield "http://{}:{}".format(*kms.get_host_and_port())
    kms.stop()


@pytest.fixture
def encrypted(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bytes, dict[str, str]], Path]:
    """A file that KMS has encrypted, of which the environment tells."""
    import botocore.session

    environment = {
        "AWS_ENDPOINT_URL_KMS": endpoint, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret", "KVTIER_KMS_FILE": str(tmp_path / "keys.kms"),
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    point = EntryPoint("aws", "kvtier.config.aws_kms:key_document", key_file.PLUGINS)
    monkeypatch.setattr(key_file, "entry_points", lambda group: [point])

    def encrypt(plain: bytes, context: dict[str, str]) -> Path:
        client = botocore.session.get_session().create_client("kms")
        key = client.create_key()["KeyMetadata"]["KeyId"]
        answer: dict[str, Any] = client.encrypt(KeyId=key, Plaintext=plain, EncryptionContext=context)
        (tmp_path / "keys.kms").write_bytes(answer["CiphertextBlob"])
        return tmp_path / "keys.kms"

    return encrypt


def keyring() -> Any:
    return Config.parse({"security": {"kms": "aws"}}).keyring()


def test_the_keyring_comes_out_of_a_file_that_only_kms_can_open(encrypted: Callable[..., Path]) -> None:
    file = encrypted(json.dumps(DOCUMENT).encode(), {"kvtier": "keyring"})
    assert b"b2b2" not in file.read_bytes()
    ring = keyring()
    assert ring.active.id.hex() == "a1" * 8
    assert ring.unwrap(ring.wrap(bytes(32), b"tenant"), b"tenant") == bytes(32)


def test_a_file_of_another_context_or_a_damaged_one_is_refused(encrypted: Callable[..., Path]) -> None:
    file = encrypted(json.dumps(DOCUMENT).encode(), {"other": "thing"})
    with pytest.raises(ConfigError, match=r"security\.kms: AWS KMS answers InvalidCiphertextException; .*context"):
        keyring()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="AWS KMS answers"):
        keyring()


def test_what_is_no_key_document_shows_nothing_of_it(encrypted: Callable[..., Path]) -> None:
    encrypted(b"correct horse: [", {"kvtier": "keyring"})
    with pytest.raises(ConfigError, match="not strict YAML") as caught:
        keyring()
    assert "horse" not in str(caught.value)


def test_mistakes_name_the_variable_and_the_remedy(
    encrypted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"KVTIER_KMS_FILE=.*No such file"):
        keyring()
    (tmp_path / "keys.kms").write_bytes(bytes(7000))
    with pytest.raises(ConfigError, match="more than 6144 bytes"):
        keyring()
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://127.0.0.1:9")
    monkeypatch.setattr(aws_kms, "ATTEMPTS", 1)
    (tmp_path / "keys.kms").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match=r"cannot be asked: .*127\.0\.0\.1:9"):
        keyring()
    monkeypatch.delenv("KVTIER_KMS_FILE")
    with pytest.raises(ConfigError, match="aws needs KVTIER_KMS_FILE"):
        keyring()
