"""What `kvtier doctor` says of a bucket, and the lifecycle rule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.g4 import RULE, _put_rules, backstop, findings, probe_bucket
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.identity.keys import Scope
from kvtier.keyring import Keyring
from kvtier.testing.faults_s3 import FaultyS3, S3Fault, S3Rule
from kvtier.testing.servers import S3Server
from kvtier.tiers.objects.names import ObjectNames

NAME = "ab" * 32


def config(url: str, options: Mapping[str, object] | None = None, **more: Any) -> Config:
    return Config.parse({"tiers": {"g4": {"url": url, "options": dict(options or {}), **more.pop("g4", {})}}, **more})


def levels(found: Config) -> dict[str, str]:
    assert found.tiers.g4 is not None
    return {subject: level for subject, level, _, _ in findings(found.tiers.g4)}


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_a_good_server_is_found_good(seaweedfs: S3Server, client: str) -> None:
    good = config(f"{seaweedfs.new_bucket()}/p", seaweedfs.options, g4={"client": client})
    assert good.tiers.g4 is not None
    report = probe_bucket(good.tiers.g4)
    assert not [trait for trait in report.traits if trait.ok is False]
    assert report.skew_s is not None and abs(report.skew_s) < 30
    assert report.read_bytes_per_s and report.write_bytes_per_s
    assert levels(good) == {"g4": "ok", "g4 clock": "ok", "g4 break-even": "ok"}


@pytest.mark.long
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_ceph_is_found_good(ceph: S3Server, client: str) -> None:
    good = config(f"{ceph.new_bucket()}/p", ceph.options, g4={"client": client})
    assert set(levels(good).values()) == {"ok"}, levels(good)


def test_a_directory_is_found_good(tmp_path: Path) -> None:
    assert set(levels(config(f"file://{tmp_path}/g4")).values()) == {"ok"}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing stays"


def test_a_server_that_ignores_conditions_is_refused_for_sharing(rclone: S3Server) -> None:
    bad = config(f"{rclone.new_bucket()}/p", rclone.options, g4={"client": "s3fs"})
    found = levels(bad)
    assert found["g4 create-only writes (If-None-Match)"] == "fail"
    assert "g4" not in found


def test_an_unreachable_server_is_said_so_without_secrets() -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "topsecret"}
    bad = config("s3://bucket/p", options, g4={"client": "s3fs"})
    assert bad.tiers.g4 is not None
    (found,) = findings(bad.tiers.g4)
    assert found[1] == "fail" and "topsecret" not in "".join(found)


@pytest.mark.parametrize("fault", [S3Fault.STATUS_403, S3Fault.STATUS_503, S3Fault.RESET, S3Fault.GARBAGE])
def test_a_sick_server_is_a_finding_not_a_crash(fault: S3Fault) -> None:
    with FaultyS3().running() as server:
        server.rules = [S3Rule("*", fault)]
        assert "fail" in levels(config("s3://bucket/p", server.options)).values()


def test_what_is_not_granted_is_named() -> None:
    with FaultyS3().running() as server:
        for verb, named in (("head", "reachable"), ("put", "writes"), ("get", "ranged reads"), ("list", "lists")):
            server.rules = [S3Rule(verb, S3Fault.STATUS_403)]
            found = levels(config("s3://bucket/p", server.options, g4={"client": "s3fs"}))
            assert [subject for subject, level in found.items() if level == "fail"] == [f"g4 {named}"]


def test_the_backstop_outlives_every_class() -> None:
    uploads, *rules = backstop(config("s3://bucket/some/prefix", retention={"classes": {"week": {"ttl": "7d"}}}))
    assert uploads["Filter"] == {"Prefix": "some/prefix/"} and "Expiration" not in uploads
    assert {rule["Filter"]["Prefix"] for rule in rules} == {"some/prefix/units/"}
    days = {rule["Expiration"]["Days"] for rule in rules}
    assert days == {12}, "a week, half of it for uses not yet recorded, and a day"
    with pytest.raises(ConfigError, match=r"retention\.classes\.ever"):
        backstop(config("s3://bucket/p", retention={"classes": {"ever": {"priority": 9}}}))
    with pytest.raises(ConfigError, match=r"tiers\.g4\.url"):
        backstop(config("file:///tmp/g4"))


def test_the_backstop_covers_units_and_no_control_object() -> None:
    rules = backstop(config("s3://bucket/p", retention={"classes": {"week": {"ttl": "7d"}}}))
    names = ObjectNames("p", bytes.fromhex(NAME), Keyring.public())
    expiring = tuple(rule["Filter"]["Prefix"] for rule in rules if "Expiration" in rule)
    for byte in range(256):
        assert names.scope(Scope(bytes([byte]) * 16)).startswith(expiring)
    assert not any(name.startswith(expiring) for name in (names.deltas, names.merged, names.log, names.pins))


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/"])
def test_no_rule_covers_a_whole_bucket(url: str) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.g4\.url has no prefix"):
        backstop(config(url, retention={"classes": {"week": {"ttl": "7d"}}}))


def test_the_rule_is_put_beside_others(seaweedfs: S3Server) -> None:
    import s3fs

    url = seaweedfs.new_bucket()
    there = config(f"{url}/p", seaweedfs.options)
    assert there.tiers.g4 is not None
    bucket, fs = url.removeprefix("s3://"), s3fs.S3FileSystem(skip_instance_cache=True, **seaweedfs.options)
    other = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 3}}
    fs.call_s3("put_bucket_lifecycle_configuration", Bucket=bucket, LifecycleConfiguration={"Rules": [other]})
    for _ in range(2):
        _put_rules(there.tiers.g4, backstop(there))
    rules = fs.call_s3("get_bucket_lifecycle_configuration", Bucket=bucket)["Rules"]
    names = [rule["ID"] for rule in rules]
    assert names.count(RULE) == 1 and names.count("theirs") == 1 and len(names) == 3
