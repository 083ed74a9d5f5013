"""`kvtier init` writes a configuration that is right on this machine, and explains every key."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.cli import machine
from kvtier.cli.init import STARTS, Measured, rendered
from kvtier.config import Config
from kvtier.config.explain import known_keys

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]
LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> machine.Mount:
    """A disk of 100 GiB, at `tmp_path`."""
    mount = machine.Mount(tmp_path, "/dev/nvme0n1", "ext4", False, 100 << 30, False, 250 << 30)
    monkeypatch.setattr(machine, "mounts", lambda: iter([mount]))
    monkeypatch.setattr("kvtier.cli.init.available_bytes", lambda: 50 << 30)
    return mount


def test_it_measures_and_writes_what_the_doctor_takes(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    done = run("init", file, "--json")
    told = done.json()
    config = Config.load(file, {})
    assert told["file"] == str(file) and {each["subject"] for each in told["findings"]} >= {"memory", "descriptors"}
    assert config.tiers.g2.capacity == told["measured"]["g2_bytes"] == 20 << 30
    assert config.tiers.g3 is not None and config.tiers.g3.capacity == 50 << 30
    assert config.tiers.g3.path == (tmp_path / "kvtier",)
    assert config.tiers.g3.write_budget == 5, "the whole disk a day: a share of it is allowed little at first"
    assert not (tmp_path / "kvtier").exists()


def test_a_file_that_is_there_is_kept(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text("mine")
    assert run("init", file).status == 2 and file.read_text() == "mine"
    run("init", file, "--force")
    assert Config.load(file, {}).version == 1


def test_every_key_is_in_it_and_each_line_may_be_uncommented(tmp_path: Path) -> None:
    found = Measured(50 << 30, 20 << 30, str(tmp_path), 50 << 30, "a disk", 0)
    text = rendered(found, None)
    keys = [
        line
        for line in text.splitlines()
        if not line.startswith("# ") or line.lstrip("# ").split(":")[0].isidentifier()
    ]
    whole = yaml.safe_load("\n".join(line.removeprefix("# ") for line in keys if "Measured" not in line))

    def dotted(value: Any, above: str = "") -> set[str]:
        if not isinstance(value, dict) or above in ("tiers.g4.options", "tiers.g4.prices"):
            return {above}
        return {key for name, inner in value.items() for key in dotted(inner, f"{above}.{name}".lstrip("."))}

    assert dotted(whole) == {key.replace("*", "NAME") for key in known_keys(Config)}
    for key in ("key", "kms"):  # keys come from one place
        del whole["security"][key]
    whole["tiers"]["g4"]["client"] = "auto"
    secret = {"KVTIER_SECRET": "0123456789abcdef"}
    assert Config.parse(whole, secret).tiers.g2.capacity == 20 << 30


def test_the_lines_for_transformers_import_what_they_use() -> None:
    tree = ast.parse(STARTS["transformers"].format(file="kvtier.yaml"))
    imported = {
        name.name for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom) for name in each.names
    }
    names = [each for each in ast.walk(tree) if isinstance(each, ast.Name)]
    assert {each.id for each in names if isinstance(each.ctx, ast.Load)} - imported == {"model"}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_it_says_how_the_engine_is_started(run: Run, tmp_path: Path, engine: str) -> None:
    shown = run("init", tmp_path / "kv.yaml", "--engine", engine).out
    assert (
        str(tmp_path / "kv.yaml") in shown and {"vllm": "vllm serve", "sglang": "KVTierLinker"}.get(engine, "") in shown
    )


def test_a_checkpoint_says_how_many_tokens_fit(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(LLAMA))
    told = run("init", tmp_path / "kv.yaml", "--model", tmp_path / "my-model", "--json").json()
    assert told["measured"]["kv_bytes_per_token"] == 131072
    assert "# my-model: 131,072 bytes of KV per token; G2 163,840 tokens" in (tmp_path / "kv.yaml").read_text()


def test_without_a_disk_there_is_no_g3(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "mounts", lambda: iter(()))
    assert "no disk for g3" in run("init", tmp_path / "kv.yaml").out
    assert Config.load(tmp_path / "kv.yaml", {}).tiers.g3 is None


def test_presets_are_the_files_of_configs(run: Run, tmp_path: Path) -> None:
    names = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    wrong = run("init", tmp_path / "x.yaml", "--preset", "huge")
    assert wrong.status == 2 and all(name in wrong.err for name in names) and not (tmp_path / "x.yaml").exists()
    run("init", tmp_path / "x.yaml", "--preset", "laptop")
    assert (tmp_path / "x.yaml").read_text() == (ROOT / "configs" / "laptop.yaml").read_text()


def test_the_sizes_that_are_told_are_those_of_the_file(run: Run, tmp_path: Path) -> None:
    """A preset was announced with the sizes that it would have had without one."""
    told = run("init", tmp_path / "x.yaml", "--preset", "laptop").told
    assert "g2 1GiB of 50.0 GiB free" in told and "g3 16GiB in /var/tmp/kvtier" in told
    for other in ("--path", "--model"):
        done = run("init", tmp_path / "y.yaml", "--preset", "laptop", other, tmp_path)
        assert done.status == 2 and "--preset" in done.err and not (tmp_path / "y.yaml").exists()


def test_a_preset_that_lacks_a_secret_names_the_file_and_the_variable(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVTIER_SECRET", raising=False)
    done = run("init", tmp_path / "x.yaml", "--preset", "shared-s3")
    assert done.status == 2 and "KVTIER_SECRET is not set" in done.err and ".new" not in done.err


def test_a_directory_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    done = run("init", tmp_path / "absent" / "x.yaml")
    assert done.status == 2 and f"there is no directory {tmp_path / 'absent'}; make it first" in done.err


def test_a_path_on_no_local_disk_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without G3 was written, though a path was asked for."""
    monkeypatch.setattr(machine, "mounts", lambda: iter(()))
    done = run("init", tmp_path / "x.yaml", "--path", tmp_path / "kv")
    assert done.status == 2 and f"--path {tmp_path / 'kv'} is on no local disk" in done.err
    assert not (tmp_path / "x.yaml").exists()
    small = machine.Mount(tmp_path, "/dev/nvme0n1", "ext4", False, 1 << 30, False, 250 << 30)
    monkeypatch.setattr(machine, "mounts", lambda: iter([small]))
    done = run("init", tmp_path / "x.yaml", "--path", tmp_path / "kv")
    assert done.status == 2 and "1.0 GiB are free there" in done.err


def test_a_path_is_on_the_deepest_mount_above_it(tmp_path: Path, disk: machine.Mount) -> None:
    assert machine.mount_of(tmp_path / "not" / "yet") == disk
    assert machine.place_for_cache() == (tmp_path / "kvtier", disk)


def test_ssds_come_before_larger_hard_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disks = [
        machine.Mount(tmp_path, "/dev/sda1", "ext4", False, 900 << 30, True),
        machine.Mount(tmp_path, "/dev/nvme0n1", "xfs", False, 100 << 30, False),
        machine.Mount(tmp_path, "/dev/nvme1n1", "xfs", True, 800 << 30, False),
    ]
    monkeypatch.setattr(machine, "mounts", lambda: iter(disks))
    assert machine.place_for_cache() == (tmp_path / "kvtier", disks[1])


@pytest.mark.parametrize("path", ["line\nbreak", "bell\a", "${NO_SUCH_VARIABLE_93}"])
def test_what_kvtier_would_not_read_is_not_written(run: Run, tmp_path: Path, path: str) -> None:
    """`--force` replaced a good file by one that `config check` refuses."""
    file = tmp_path / "kv.yaml"
    run("init", file)
    before = file.read_bytes()
    told = run("init", file, "--force", "--path", tmp_path / path)
    assert told.status == 2 and "nothing was written" in told.err
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_a_path_of_the_user_holds_in_other_directories(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`1e3` was read as a number."""
    monkeypatch.chdir(tmp_path)
    run("init", "kv.yaml", "--path", "1e3")
    config = Config.load(tmp_path / "kv.yaml")
    assert config.tiers.g3 is not None and config.tiers.g3.path == (tmp_path / "1e3",)


def test_a_machine_that_cannot_hold_it_is_told_and_fails(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cli.doctor_checks.available_bytes", lambda: 1 << 20)
    done = run("init", tmp_path / "kvtier.yaml")
    assert done.status == 1 and "g2 wants" in done.told and (tmp_path / "kvtier.yaml").exists()
