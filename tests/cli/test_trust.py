"""What the doctor says of keys, versions and lifecycle rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvtier.cli import g4_checks
from kvtier.cli.g4 import backstop
from kvtier.config import Config

KEY = {"security": {"key": "5f" * 32}}


def config(url: str = "s3://bucket/p", **more: Any) -> Config:
    return Config.parse({"tiers": {"g4": {"url": url}}, **more})


def found(
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    versioning: str = "",
    rules: list[dict[str, Any]] | None = None,
    lock: dict[str, Any] | None = None,
) -> dict[str, str]:
    """Level by subject, of a bucket that answers so."""
    answers: Mapping[str, Mapping[str, Any]] = {
        "get_bucket_versioning": {"Status": versioning} if versioning else {},
        "get_bucket_lifecycle_configuration": {"Rules": rules or []},
    }
    if lock is not None:
        answers = {**answers, "get_object_lock_configuration": {"ObjectLockConfiguration": lock}}
    monkeypatch.setattr(g4_checks, "_asker", lambda g4, bucket: answers.get)
    return {subject: level for subject, level, _, _ in g4_checks.trust_findings(config)}


def test_local_trust_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, config()) == {"keys": "warn"}
    assert found(monkeypatch, config("file:///g4")) == {"keys": "ok"}
    assert found(monkeypatch, config(**KEY)) == {"keys": "ok", "g4 Object Lock": "ok"}
    assert found(monkeypatch, config(security={"key_file": "/nowhere/keys"})) == {"keys": "fail"}


def test_versions_without_a_key_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, config(), "Enabled")["g4 versions"] == "fail"
    assert found(monkeypatch, config(**KEY), "Enabled")["g4 versions"] == "warn"
    assert "g4 versions" not in found(monkeypatch, config(), "Suspended")


def test_an_object_lock_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = {"ObjectLockEnabled": "Enabled"}
    kept = {**enabled, "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 30}}}
    assert found(monkeypatch, config(), lock=enabled)["g4 Object Lock"] == "ok"
    assert found(monkeypatch, config(**KEY), lock=kept)["g4 Object Lock"] == "warn"
    (row,) = g4_checks._lock_findings({"ObjectLockConfiguration": kept}, True)
    assert "kept for 30 days" in row[2]
    assert "g4 Object Lock" not in found(monkeypatch, config())


def test_a_url_without_a_prefix_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, config("s3://bucket"))["g4 prefix"] == "fail"


@pytest.mark.parametrize(
    ("prefix", "level"),
    [
        ("", "fail"),
        ("p", "fail"),
        ("p/", "fail"),
        ("p/ctl/", "fail"),
        ("p/ctl/ab", "fail"),
        ("p/units/", ""),
        ("q", ""),
    ],
)
def test_a_rule_over_control_objects_fails(monkeypatch: pytest.MonkeyPatch, prefix: str, level: str) -> None:
    rule = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": prefix}, "Expiration": {"Days": 3}}
    assert found(monkeypatch, config(**KEY), rules=[rule]).get("g4 lifecycle", "") == level
    assert "g4 lifecycle" not in found(monkeypatch, config(**KEY), rules=[{**rule, "Status": "Disabled"}])


def test_the_printed_rules_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "g4 lifecycle" not in found(monkeypatch, config(**KEY), rules=backstop(config(**KEY)))
