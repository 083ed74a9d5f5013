"""`kvtier namespace` gives `purge` and `pin` the file they want."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.config import Config
from kvtier.testing import chain_of, payloads_of, sample_namespace

Run = Callable[..., Any]
NS = sample_namespace(4096)
OTHER = replace(NS, model="other/model")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier.yaml"
    path.write_text(f"tiers: {{g2: {{capacity: 1MiB}}, g3: {{path: {tmp_path}/g3, capacity: 64MiB}}}}\n")
    return path


def used(file: Path, *namespaces: kvtier.Namespace) -> None:
    for namespace in namespaces:
        with kvtier.open(Config.load(file), namespace):
            pass


def test_a_directory_and_the_file_that_names_it_give_the_same(run: Run, file: Path, tmp_path: Path) -> None:
    used(file, NS)
    for source in (file, tmp_path / "g3"):
        assert json.loads(run("namespace", source).out) == NS.fields()
        assert run("namespace", source, "--save", tmp_path / "ns.json").status == 0
        assert json.loads((tmp_path / "ns.json").read_text()) == NS.fields()
    (tmp_path / "notes").write_text("mine")
    assert run("namespace", file, "--save", tmp_path / "notes").status == 2
    assert (tmp_path / "notes").read_text() == "mine"
    (only,) = run("namespace", tmp_path / "ns.json", "--json").json()["namespaces"]
    assert only == {"digest": NS.digest.hex(), "fields": NS.fields()}
    done = run("purge", file, "--namespace", tmp_path / "ns.json", "--without-salt", "--yes", "--json")
    assert done.json() == {"purged_blocks": 0}


def test_of_a_running_cache(run: Run, file: Path) -> None:
    with kvtier.open(Config.load(file), NS) as cache:
        keys = chain_of(NS, 2)
        cache.put(keys, payloads_of(keys, 4096))  # the first block brings the namespace
        cache.flush()
        assert json.loads(run("namespace", file).out) == NS.fields()


def test_several_are_listed_and_one_is_named_by_its_digest(run: Run, file: Path, tmp_path: Path) -> None:
    used(file, NS, OTHER)
    shown = run("namespace", file)
    assert shown.status == 0 and NS.digest.hex()[:16] in shown.out and OTHER.digest.hex()[:16] in shown.out
    wrong = run("namespace", file, "--save", tmp_path / "ns.json")
    assert wrong.status == 2 and "--digest" in wrong.err and not (tmp_path / "ns.json").exists()
    wrong = run(
        "namespace", file, "--save", tmp_path / "ns.json", "--json"
    )  # printed the namespaces, and then the error
    assert wrong.json()["error"]["status"] == 2
    assert json.loads(run("namespace", file, "--digest", OTHER.digest.hex()[:8]).out) == OTHER.fields()
    assert run("namespace", file, "--digest", "zz").status == 2


def test_what_holds_none_says_so_and_creates_nothing(run: Run, file: Path, tmp_path: Path) -> None:
    assert run("namespace", file).status == 2 and not (tmp_path / "g3").exists()
    assert run("namespace", tmp_path).status == 2
    absent = run("namespace", tmp_path / "absent")
    assert (
        absent.status == 2
        and absent.err == f"kvtier: {tmp_path / 'absent'} cannot be read: No such file or directory\n"
    )
    file.write_text("tiers: {g2: {capacity: 1MiB}}\n")
    assert "tiers.g3 is not set" in run("namespace", file).err


def test_a_cache_without_g3_tells_it_at_its_trace_socket(run: Run, tmp_path: Path) -> None:
    file, path = tmp_path / "kvtier.yaml", tmp_path / "trace.sock"
    file.write_text(f"tiers: {{g2: {{capacity: 1MiB}}}}\ntrace: {{socket: {path}}}\n")
    with kvtier.open(file, NS):
        end = time.monotonic() + 30
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.005)
        for source in (file, path):
            assert json.loads(run("namespace", source).out) == NS.fields()
    done = run("namespace", file)
    assert done.status == 3 and "no cache listens there" in done.err
    file.write_text("tiers: {g2: {capacity: 1MiB}}\n")
    done = run("namespace", file)
    assert done.status == 2 and "tiers.g3 is not set, nor trace.socket" in done.err
