"""Secrets come from the environment and are shown nowhere."""

from __future__ import annotations

import json

import pytest

from kvtier.config import Config
from kvtier.errors import ConfigError

SECRET = "correct horse battery"
KEY = "AKIAHUSHHUSH"
RAW = {
    "security": {"scope_secret": "${KVTIER_SECRET}"},
    "tiers": {
        "g4": {
            "url": "s3://bucket/prefix",
            "options": {
                "key": "${ACCESS_KEY}",
                "client_kwargs": {"endpoint_url": "http://127.0.0.1:1", "aws_session_token": "${ACCESS_KEY}"},
                "headers": ["${ACCESS_KEY}"],
            },
        }
    },
}
ENVIRON = {"KVTIER_SECRET": SECRET, "ACCESS_KEY": KEY}


def test_secrets_come_from_the_environment() -> None:
    config = Config.parse(RAW, ENVIRON)
    assert config.scope_secret == SECRET.encode()
    assert config.tiers.g4 is not None
    assert config.tiers.g4.options["key"] == KEY
    assert config.tiers.g4.options["client_kwargs"]["aws_session_token"] == KEY


def test_no_secret_is_shown() -> None:
    config = Config.parse(RAW, ENVIRON)
    shown = [repr(config), str(config), str(config.model_dump()), json.dumps(config.model_dump(mode="json"))]
    assert all(SECRET not in text and KEY not in text for text in shown)
    assert all("http://127.0.0.1:1" in text for text in shown[2:])


def test_an_endpoint_with_credentials_is_hidden() -> None:
    options = {"endpoint_url": "http://user:hushhush@127.0.0.1:1"}
    config = Config.parse({"tiers": {"g4": {"url": "s3://bucket/prefix", "options": options}}})
    assert "hushhush" not in json.dumps(config.model_dump(mode="json"))


def test_an_unset_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"security\.scope_secret: the environment variable KVTIER_SECRET is not set"):
        Config.parse(RAW, {})


@pytest.mark.parametrize("value", ["prefix-${KVTIER_SECRET}", "${KVTIER_SECRET", "${9}", "${A}${B}"])
def test_a_variable_stands_alone(value: str) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.g4\.options\.key: write \$\{NAME\} and nothing else"):
        Config.parse({"tiers": {"g4": {"url": "s3://b/p", "options": {"key": value}}}}, ENVIRON)


@pytest.mark.parametrize("value", ["hush", "hush" * 17, "⁂" * 30])
def test_a_wrong_secret_is_not_shown(value: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.scope_secret: .* such as") as caught:
        Config.parse({"security": {"scope_secret": value}})
    assert value not in str(caught.value)


def test_no_secret_is_an_empty_key() -> None:
    assert Config.parse({}).scope_secret == b""
