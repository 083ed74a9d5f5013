"""`kvtier doctor` describes the machine, also for a configuration whose secrets are elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.cli import doctor_checks, machine, machine_checks
from kvtier.cli.machine_checks import engine_findings, gpu_findings, store_findings
from kvtier.config import Config
from kvtier.kernels.memory import HugePages
from kvtier.testing import sample_namespace
from kvtier.tiers.disk.directory import users_of
from kvtier.tiers.disk.owner import Owner

Run = Callable[..., Any]
NS = sample_namespace(4096)


def levels(rows: Any) -> dict[str, str]:
    return {subject: level for subject, level, _, _ in rows}


def test_it_works_without_the_value_of_a_secret(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_SECRET", raising=False)
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        f"tiers: {{g4: {{url: 'file://{tmp_path}/g4', options: {{token: '${{KVTIER_TOKEN}}'}}}}}}\n"
        "security: {scope_secret: '${KVTIER_SECRET}', key: '${KVTIER_KEY}'}\n"
    )
    done = run("doctor", file, "--json")
    found = {each["subject"]: each for each in done.json()["findings"]}
    for key, name in (
        ("security.scope_secret", "SECRET"),
        ("security.key", "KEY"),
        ("tiers.g4.options.token", "TOKEN"),
    ):
        assert found[key]["level"] == "warn" and f"KVTIER_{name} is not set" in found[key]["detail"]
    assert done.status == 0 and not (tmp_path / "g4").exists(), "the bucket is not asked with stand-ins"
    assert run("config", "check", file).status == 2, "an engine would not start"


def test_a_directory_that_cannot_be_looked_into_is_a_finding(run: Run, tmp_path: Path) -> None:
    """One that only another user may enter ended the doctor before it had told anything."""
    file = tmp_path / "kvtier.yaml"
    file.write_text(f"tiers: {{g3: {{path: {tmp_path / ('n' * 300)}, capacity: 1GiB}}}}\n")
    done = run("doctor", file, "--json")
    (found,) = [each for each in done.json()["findings"] if each["subject"].startswith("g3 ")]
    assert done.status == 1 and found["level"] == "fail" and "File name too long" in found["detail"]


def test_a_disk_that_is_not_there_is_said_once(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text(f"tiers: {{g3: {{path: {tmp_path / 'no' / 'kv'}, capacity: 1GiB}}}}\n")
    found = [each for each in run("doctor", file, "--json").json()["findings"] if each["subject"].startswith("g3 ")]
    assert [each["level"] for each in found] == ["fail"], "not the kind of another disk"


def test_a_missing_path_variable_is_still_a_mistake(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text("tiers: {g3: {path: '${NOWHERE_SET}/kv', capacity: 1GiB}}\n")
    assert run("doctor", file).status == 2


def test_versions_are_listed_and_an_untested_engine_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for release, level in (("0.33.1", ""), ("0.27.0+cpu", ""), ("0.99.0", "warn"), ("1.0.0", "warn")):
        monkeypatch.setattr(machine_checks, "_installed", lambda release=release: iter([("vllm", release)]))
        rows = list(engine_findings())
        assert f"kvtier {kvtier.__version__}; vllm {release}" in rows[0][2]
        assert levels(rows).get("vllm", "") == level, release


def test_a_gpu_is_described_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, tool = tmp_path / "version", tmp_path / "nvidia-smi"
    assert "no NVIDIA driver" in next(gpu_findings(driver))[2]
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  595.71\nGCC version:\n")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert next(gpu_findings(driver))[2] == "NVIDIA UNIX Open Kernel Module 595.71"
    monkeypatch.setattr("shutil.which", lambda name: str(tool))
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 595.71, 81559 MiB'\n")
    tool.chmod(0o700)
    assert next(gpu_findings(driver))[1:3] == ("ok", "NVIDIA H100, 595.71, 81559 MiB")
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert next(gpu_findings(driver))[1] == "warn"


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "g3").mkdir()
    (speed,) = (row for row in store_findings(tmp_path / "g3") if row[0].endswith("speed"))
    assert "MB/s, a sync takes" in speed[2] and list((tmp_path / "g3").iterdir()) == []
    read_only = list(store_findings(tmp_path / "absent" / "g3"))
    assert not [row for row in read_only if row[0].endswith("speed")]


@pytest.mark.parametrize(
    ("kind", "spins", "level"), [("ext4", False, "ok"), ("ext4", True, "warn"), ("overlay", None, "warn")]
)
def test_the_mount_below_the_store_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, spins: bool | None, level: str
) -> None:
    mount = machine.Mount(tmp_path, "/dev/x", kind, False, 1 << 40, spins)
    monkeypatch.setattr(machine_checks, "mount_of", lambda path: mount)
    row = next(store_findings(tmp_path))
    assert row[0].endswith("mount") and row[1] == level and f"{kind} on /dev/x" in row[2]


def test_users_of_another_pid_namespace_are_seen(tmp_path: Path) -> None:
    config = Config.parse(
        {"tiers": {"g2": {"capacity": "1MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "1MiB"}}}
    )
    assert users_of(tmp_path / "g3") is None
    with kvtier.open(config, NS):
        assert users_of(tmp_path / "g3") == Owner.current().pid_namespace
        assert not [row for row in store_findings(tmp_path / "g3") if row[0].endswith("users")]
        lock = tmp_path / "g3" / "LOCK"
        boot, _, rest = lock.read_bytes().partition(b" ")
        with lock.open("r+b") as file:  # as a process of another container signs it
            file.write(boot + b" 12345\n")
            file.truncate()
        (row,) = (row for row in store_findings(tmp_path / "g3") if row[0].endswith("users"))
        assert row[1] == "fail" and "12345" in row[2] and "hostPID" in row[3]
        with lock.open("r+b") as file:
            file.write(boot + b" " + rest)
            file.truncate()
    assert users_of(tmp_path / "g3") is None, "nobody uses it"


def test_process_limits_are_shown(tmp_path: Path) -> None:
    shmem = tmp_path / "shmem_enabled"
    for mode, advised in (("always [advise] never", False), ("always advise [never]", True)):
        shmem.write_text(mode)
        (row,) = (row for row in machine_checks.process_findings(shmem) if row[0] == "huge pages")
        assert row[1] == "ok" and bool(row[3]) is (advised and "none reserved" in row[2])
    rows = {subject: detail for subject, _, detail, _ in machine_checks.process_findings()}
    assert str(Path("/proc/self/ns/pid").readlink()) in rows["pid namespace"] and rows["memlock"]


def checked(check: Callable[[Config], Any], config: Config) -> dict[str, tuple[str, str]]:
    return {row.subject: (row.level.name.lower(), row.detail) for row in check(config)}


def test_a_machine_that_kvtier_is_not_made_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.parse({})
    monkeypatch.setattr("platform.release", lambda: "5.4.0-azure")
    level, release = checked(doctor_checks._kernel, config)["kernel"]
    assert level == "warn" and release == "5.4.0-azure"
    monkeypatch.delattr("os.memfd_create")
    level, found = checked(doctor_checks._kernel, config)["kernel"]
    assert level == "fail" and "no memfd" in found
    monkeypatch.setattr("sys.implementation", type("Other", (), {"name": "pypy"}))
    level, found = checked(doctor_checks._python, config)["python"]
    assert level == "warn" and found.startswith("pypy ")


def test_a_disk_that_cannot_hold_the_store_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def level(capacity: str = "1MiB") -> str:
        g3 = {"path": str(tmp_path / "g3"), "capacity": capacity, "write_rate": "1MiB/s"}
        return checked(doctor_checks._disk, Config.parse({"tiers": {"g3": g3}}))[f"g3 {tmp_path}/g3"][0]

    assert level() == "ok"
    assert level("512PiB") == "fail", "more than is free"
    monkeypatch.setattr(doctor_checks, "_takes_direct_io", lambda path: False)
    assert level() == "warn"
    for kind, expected in (("nfs4", "fail"), ("ext4", "warn")):
        monkeypatch.setattr(doctor_checks, "file_system_of", lambda path, kind=kind: kind)
        assert level() == expected, kind


@pytest.mark.parametrize(
    ("url", "installed", "level", "says"),
    [
        ("file:///nowhere/g4", True, "ok", "file:// through fsspec"),
        ("s3://bucket/p", True, "ok", "s3:// with client obstore"),
        ("s3://bucket/p", False, "fail", "no client for s3:// is installed"),
    ],
)
def test_the_client_of_the_bucket_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, installed: bool, level: str, says: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(doctor_checks, "findings", lambda g4: [("g4 asked", "ok", g4.url, "")])
    monkeypatch.setattr(doctor_checks, "trust_findings", lambda config: [])
    client = "obstore" if url.startswith("s3") else "auto"
    found = checked(doctor_checks._objects, Config.parse({"tiers": {"g4": {"url": url, "client": client}}}))
    assert found["g4"] == (level, says) and found["g4 asked"] == ("ok", url)
    assert ("g4 scopes" in found) is url.startswith("s3"), "a secret is missing, and the store is shared"


def test_reserved_huge_pages_are_told(tmp_path: Path) -> None:
    row = machine_checks._huge_page_finding(HugePages(page_bytes=2 << 20, free=4), tmp_path)
    assert row[1:3] == ("ok", "8MiB free; G2 takes them where it fits whole")
