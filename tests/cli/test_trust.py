"""What the doctor says of keys, versions and lifecycle rules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.cli import g4_checks
from kvtier.cli.g4 import RULE, backstop, findings
from kvtier.config import Config
from kvtier.tiers.objects.bucket.conformance import ConformanceReport, Trait

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


def test_what_is_missing_for_keys_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(g4_checks.trust_findings(Config.parse({}))) == [], "there is no bucket"
    monkeypatch.setattr(g4_checks, "_asker", lambda g4, bucket: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rows = [(level, detail) for _, level, detail, _ in g4_checks.trust_findings(config(**KEY))]
    assert rows[1:] == [("fail", "the cryptography package is missing")], "and the bucket is not asked"


def test_the_keys_of_a_disk_alone_are_looked_at_too(tmp_path: Path) -> None:
    """Without a bucket a key file that others can read, with which no cache opens, was no finding."""
    key_file, data_keys = tmp_path / "keys", tmp_path / "data-keys"
    key = {"id": "a1" * 8, "secret": "b2" * 32, "state": "active"}
    key_file.write_text(json.dumps({"version": 1, "name_key": "c0" * 32, "keys": [key]}))
    key_file.chmod(0o644)
    told = Config.parse({"security": {"key_file": str(key_file), "data_keys": str(data_keys)}})

    def levels() -> dict[str, str]:
        return {subject: level for subject, level, _, _ in g4_checks.trust_findings(told)}

    assert levels() == {"keys": "fail"}
    key_file.chmod(0o600)
    assert levels() == {"keys": "ok", "data keys": "ok"} and not data_keys.exists()
    data_keys.mkdir(mode=0o755)
    assert levels() == {"keys": "ok", "data keys": "fail"}
    told = Config.parse({"security": {"key_file": str(key_file), "data_keys": "/absent/data-keys"}})
    assert levels()["data keys"] == "fail"


def test_a_bucket_that_may_not_be_asked_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(g4_checks, "_asker", lambda g4, bucket: lambda verb: None)
    assert [subject for subject, *_ in g4_checks.trust_findings(config(**KEY))] == ["keys"]


def test_verbs_are_asked_by_s3fs_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    g4 = config().tiers.g4
    assert g4 is not None

    class FileSystem:
        def __init__(self, **options: Any) -> None: ...

        def call_s3(self, verb: str, **named: str) -> dict[str, str]:
            if verb == "forbidden":
                raise PermissionError
            return {"verb": verb, **named}

    monkeypatch.setitem(sys.modules, "s3fs", SimpleNamespace(S3FileSystem=FileSystem))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    ask = g4_checks._asker(g4, "bucket")
    assert ask is not None and ask("get_x") == {"verb": "get_x", "Bucket": "bucket"} and ask("forbidden") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert g4_checks._asker(g4, "bucket") is None


RULES = [{"ID": "theirs"}, {"ID": f"{RULE}-units", "Expiration": {"Days": 1}}]


class Bucket:
    """A bucket's lifecycle rules, behind s3fs."""

    def __init__(self, rules: list[dict[str, Any]] | None = None, refusal: str = "") -> None:
        self.rules, self.refusal = rules, refusal

    def __call__(self, **options: Any) -> Bucket:
        return self

    def call_s3(self, verb: str, **named: Any) -> dict[str, Any]:
        if verb.startswith("get") and self.rules is None:
            error = OSError("no rules")
            error.response = {"Error": {"Code": self.refusal}}  # type: ignore[attr-defined]
            raise error
        if verb.startswith("put"):
            self.rules = named["LifecycleConfiguration"]["Rules"]
        return {"Rules": self.rules or []}


@pytest.mark.parametrize("rules", [None, RULES])
def test_rules_are_printed_or_put_beside_those_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Callable[..., Any], rules: list[dict[str, Any]] | None
) -> None:
    (file := tmp_path / "kvtier.yaml").write_text("tiers: {g4: {url: 's3://bucket/p'}}\n")
    bucket = Bucket(rules, "NoSuchLifecycleConfiguration")
    monkeypatch.setitem(sys.modules, "s3fs", SimpleNamespace(S3FileSystem=bucket))
    printed = run("g4", "lifecycle", file)
    assert printed.status == 0 and f'"{RULE}-units"' in printed.out and "not applied" in printed.out
    assert bucket.rules == rules
    applied = run("g4", "lifecycle", file, "--apply", "--json").json()
    assert applied["applied"] and applied["Rules"] == backstop(Config.load(file))
    assert bucket.rules == [*(RULES[:1] if rules else []), *applied["Rules"]]


def test_rules_that_cannot_be_read_are_not_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Callable[..., Any]
) -> None:
    (file := tmp_path / "kvtier.yaml").write_text("tiers: {g4: {url: 's3://bucket/p'}}\n")
    bucket = Bucket(None, "AccessDenied")
    monkeypatch.setitem(sys.modules, "s3fs", SimpleNamespace(S3FileSystem=bucket))
    failed = run("g4", "lifecycle", file, "--apply")
    assert failed.status not in (0, 2) and "lifecycle" in failed.err and bucket.rules is None


def test_a_server_that_cannot_renew_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    report = ConformanceReport((Trait("renewal in place", False, "a copy onto itself fails", needed=False),))
    monkeypatch.setattr("kvtier.cli.g4.probe_bucket", lambda g4: report)
    g4 = config().tiers.g4
    assert g4 is not None
    ((subject, level, _, advice),) = findings(g4)
    assert (subject, level) == ("g4 renewal in place", "warn") and "first ttl only" in advice
