"""Values from the environment: `${NAME}` in secrets and paths, KVTIER_… over the file; and where a mistake is."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtier
from kvtier.config import Config
from kvtier.connectors.settings import Settings
from kvtier.errors import ConfigError
from kvtier.testing import sample_namespace

FILE = """\
version: 1
tiers:
  g2: {capacity: 1GiB}
  g3:
    path: ${SCRATCH}/kvtier
    capacity: 1TiB
retention: {default: 1h}
"""
ENVIRON = {"SCRATCH": "/nvme/user"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier.yaml"
    path.write_text(FILE)
    return path


def wrong(file: Path, text: str, **environ: str) -> str:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load(file, ENVIRON | environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_paths_take_variables(file: Path) -> None:
    config = Config.load(file, ENVIRON)
    assert config.tiers.g3 is not None and config.tiers.g3.path == (Path("/nvme/user/kvtier"),)
    tiers = {
        "g3": {"path": ["${A}/1", "${B}2"], "capacity": "1GiB"},
        "g4": {"url": "s3://${BUCKET}/${PREFIX}"},
    }
    keys = {"key_file": "${A}/keys.yaml", "data_keys": "${A}/data"}
    environ = {"A": "/a", "B": "/b", "BUCKET": "bucket", "PREFIX": "p"}
    config = Config.parse({"tiers": tiers, "security": keys}, environ)
    assert config.tiers.g3 is not None and config.tiers.g4 is not None
    assert config.tiers.g3.path == (Path("/a/1"), Path("/b2")) and config.tiers.g4.url == "s3://bucket/p"
    assert (config.security.key_file, config.security.data_keys) == (Path("/a/keys.yaml"), Path("/a/data"))


def test_a_variable_that_is_not_set_is_named_with_its_line(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(file, {})
    assert str(caught.value) == f"{file}:5: tiers.g3.path: the environment variable SCRATCH is not set"


def test_variables_replace_single_keys(file: Path) -> None:
    environ = ENVIRON | {
        "KVTIER_TIERS__G2__CAPACITY": "8GiB",
        "KVTIER_TIERS__G3__PATH": "[/nvme0, /nvme1]",
        "KVTIER_TIERS__G4__URL": "s3://bucket/prefix",
        "KVTIER_RETENTION__CLASSES": "{long: {ttl: 7d}}",
        "KVTIER_RETENTION__CLASSES__SHORT__TTL": "1m",
        "KVTIER_POLICY": "lru",
        "KVTIER_SECURITY__SCOPE_SECRET": "1234567890123456",
        "KVTIER_CONFIG": "not ours",
        "KVTIER_PORT_9400_TCP": "not ours",
        "KVTIER_VERSION": "0.1.0",
    }
    config = Config.load(file, environ)
    tiers = config.tiers
    assert tiers.g3 is not None and tiers.g4 is not None
    assert tiers.g2.capacity == 8 << 30 and config.policy == "lru" and tiers.g4.url == "s3://bucket/prefix"
    assert tiers.g3.path == (Path("/nvme0"), Path("/nvme1")) and tiers.g3.capacity == 1 << 40
    assert {name: given.ttl for name, given in config.retention.classes.items()} == {"long": 604800, "short": 60}
    assert config.scope_secret == b"1234567890123456" and config.retention.default == "1h"
    off = Config.load(file, {"KVTIER_TIERS__G3": "null"})
    assert off.tiers.g3 is None


def test_without_a_file_they_change_the_defaults() -> None:
    assert Config.from_environment({}) == Config.parse({})
    assert Config.from_environment({"KVTIER_TIERS__G2__CAPACITY": "2GiB"}).tiers.g2.capacity == 2 << 30


def test_a_connector_without_a_configuration_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)
    monkeypatch.setenv("KVTIER_TIERS__G2__CAPACITY", "3GiB")
    assert Settings.parse({}).config.tiers.g2.capacity == 3 << 30
    assert Settings.parse({"kvtier_config": {}}).config == Config.parse({}), "a mapping is taken as it is"


def test_plain_values_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TIERS__G2__CAPACITY", "3GiB")
    assert Config.parse({}).tiers.g2.capacity != 3 << 30


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("KVTIER_TIERS__G2__CAPACTIY", "1GiB", "tiers.g2.capactiy: unknown key; did you mean tiers.g2.capacity?"),
        ("KVTIER_TIERS__G2__CAPACITY", "many", "tiers.g2.capacity: 'many' is not a size"),
        ("KVTIER_TEIRS__G2__CAPACITY", "1GiB", "names no section of the configuration; they begin with KVTIER_TIERS__"),
        ("KVTIER_TIERS__G2__CAPACITY__MORE", "1", "tiers.g2.capacity is no section: '1GiB'"),
        ("KVTIER_TIERS__G4", "{url: [}", "not YAML"),
        ("KVTIER_POLICY", "mru", "policy: "),
    ],
)
def test_a_wrong_variable_is_named(file: Path, name: str, text: str, says: str) -> None:
    message = wrong(file, FILE, **{name: text})
    assert message.startswith(f"${name}: {says}"), message


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (
            FILE.replace("path: ${SCRATCH}", "paht: /nvme"),
            5,
            "tiers.g3.paht: unknown key; did you mean tiers.g3.path?; {file}:4: tiers.g3.path",
        ),
        (FILE.replace("1TiB", "1 truck"), 6, "tiers.g3.capacity: '1 truck' is not a size"),
        (FILE.replace("1TiB", "10"), 6, "tiers.g3.capacity: 10 bytes is less than 4KiB"),
        (FILE.replace("1h", "forever"), 7, "retention.default: 'forever' is not a class"),
        (FILE.replace("path: ${SCRATCH}/kvtier", "path: [/a, ~/b]"), 5, "tiers.g3.path: '/a': ~ is not expanded"),
        (FILE.replace("1GiB}", "1GiB"), 4, "not YAML: "),
        (FILE + "tiers: {}\n", 8, "tiers: the key is given twice"),
        (FILE + "policy: &x lru\n", 8, "policy: anchors"),
        ("\n\n- tiers\n", 0, "a configuration is a mapping of keys, found list"),
        ("", 0, "is empty"),
        ("# nothing yet\n", 0, "is empty"),
        ("{}\n", 0, "is empty"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(file: Path, text: str, line: int, says: str) -> None:
    message = wrong(file, text)
    begin = f"{file}:{line}: " if line else f"{file}: "
    assert message.startswith(begin + says.format(file=file)), message


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^tiers\.g4\.url: 's4://b/p': s4:// is no protocol .*; did you mean s3://\?$"
    ):
        Config.parse({"tiers": {"g4": {"url": "s4://b/p"}}})


def test_open_takes_the_path_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("tiers: {g2: {capacity: 1MiB}}\n")
    for path in (file, str(file)):
        with kvtier.open(path, sample_namespace(4096)) as cache:
            assert cache.config.tiers.g2.capacity == 1 << 20
    with pytest.raises(ConfigError, match=r"Config\.parse"):
        kvtier.open({"tiers": {}}, sample_namespace(4096))  # type: ignore[arg-type]
