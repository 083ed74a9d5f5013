"""`kvtier config …` and `kvtier doctor`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvtier
from kvtier.config import Config
from kvtier.config.explain import known_keys
from kvtier.testing import chain_of, payloads_of, sample_namespace

Run = Callable[..., Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier.yaml"
    path.write_text(
        f"tiers: {{g2: {{capacity: 1MiB}}, g3: {{path: {tmp_path}/g3, capacity: 1MiB, write_rate: 1MiB/s}}}}\n"
    )
    return path


def test_check_says_that_a_file_is_right(run: Run, file: Path) -> None:
    assert "right" in run("config", "check", file).out
    checked = run("config", "check", file, "--json").json()
    assert checked["valid"] is True
    assert checked["tiers"]["g2"] == "1MiB"
    assert checked["hints"] == []


def test_check_hints_at_what_is_probably_not_meant(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text("tiers: {g4: {url: 's3://bucket/prefix'}}")
    (hint,) = run("config", "check", file, "--json").json()["hints"]
    assert "scope_secret" in hint


def test_check_names_what_is_wrong_in_one_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text("tiers: {g2: {capacty: 1GiB}}")
    ran = run("config", "check", file)
    assert ran.status == 2
    assert ran.err == f"kvtier: {file}:1: tiers.g2.capacty: unknown key; did you mean tiers.g2.capacity?\n"
    assert run("config", "check", file, "--json").json()["error"]["kind"] == "ConfigError"


def test_show_prints_what_reads_back_as_the_same(run: Run, file: Path) -> None:
    config = Config.load(file)
    assert Config.parse(yaml.safe_load(run("config", "show", file).out)) == config
    assert Config.parse(run("config", "show", file, "--json").json()) == config


def test_schema_describes_every_key(run: Run) -> None:
    text = run("config", "schema").out
    assert all(f"{key}: " in text for key in known_keys(Config))
    assert "tiers.g2.capacity: such as 64GiB (default 256MiB)" in text
    assert run("config", "schema", "--json").json()["properties"]["tiers"]


def test_doctor_finds_nothing_wrong_here(run: Run, file: Path) -> None:
    ran = run("doctor", file, "--json")
    assert ran.status == 0
    assert ran.json()["healthy"] is True
    assert "g3" in run("doctor", file).out


def test_doctor_tells_what_cannot_work(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text(f"tiers: {{g2: {{capacity: 512PiB}}, g3: {{path: {tmp_path}/absent/g3, capacity: 1MiB}}}}")
    ran = run("doctor", file, "--json")
    assert ran.status == 1
    failed = {finding["subject"] for finding in ran.json()["findings"] if finding["level"] == "fail"}
    assert failed == {"memory", f"g3 {tmp_path}/absent/g3"}
    assert not list(tmp_path.glob(".kvtier-doctor-*"))


def test_doctor_explains_what_keeps_two_namespaces_apart(run: Run, tmp_path: Path) -> None:
    left = sample_namespace()
    fields = left.fields() | {"dtype": "float16", "block_tokens": 32}
    (tmp_path / "a.json").write_text(json.dumps(left.fields()))
    (tmp_path / "b.json").write_text(json.dumps(fields))
    ran = run("doctor", "--explain-namespace", tmp_path / "a.json", tmp_path / "b.json", "--json")
    assert ran.status == 1
    assert [difference["field"] for difference in ran.json()["differences"]] == ["dtype", "block_tokens"]
    assert "'float16'" in run("doctor", "--explain-namespace", tmp_path / "a.json", tmp_path / "b.json").out


def test_doctor_says_when_two_namespaces_are_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(sample_namespace().fields()))
    ran = run("doctor", "--explain-namespace", tmp_path / "a.json", tmp_path / "a.json", "--json")
    assert ran.status == 0
    assert ran.json()["same"] is True


def test_doctor_explains_what_keeps_a_namespace_from_a_directory(run: Run, tmp_path: Path) -> None:
    held = sample_namespace()
    tiers = {"g2": {"capacity": "1MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "1MiB"}}
    for namespace in (held, sample_namespace(model="other/model", weights="other:1", dtype="float16")):
        with kvtier.open(kvtier.Config.parse({"tiers": tiers}), namespace) as cache:
            keys = chain_of(namespace, 1)
            cache.put(keys, payloads_of(keys, namespace.block_bytes))
    (tmp_path / "same.json").write_text(json.dumps(held.fields()))
    (tmp_path / "near.json").write_text(json.dumps(held.fields() | {"rope": "theta=1e6"}))
    assert (
        run("doctor", "--explain-namespace", tmp_path / "g3", tmp_path / "same.json", "--json").json()["same"] is True
    )
    near = run("doctor", "--explain-namespace", tmp_path / "near.json", tmp_path / "g3", "--json")
    assert [difference["field"] for difference in near.json()["differences"]] == ["rope"]
    assert near.status == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": "m"}', "[" * 100_000, '{"models": 1}'])
def test_a_file_that_is_no_namespace_is_named(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    ran = run("doctor", "--explain-namespace", tmp_path / "a.json", tmp_path / "a.json")
    assert ran.status == 2
    assert "a.json" in ran.err and ran.err.count("\n") == 1


def test_check_shows_its_hints_to_a_reader(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text("tiers: {g2: {capacity: 1MiB}}")
    assert "hint: neither g3 nor g4 is set" in run("config", "check", file).told
    file.write_text(f"tiers: {{g2: {{capacity: 8MiB}}, g3: {{path: {tmp_path}/g3, capacity: 4MiB}}}}")
    smaller, unbounded = run("config", "check", file, "--json").json()["hints"]
    assert "cannot hold what RAM holds" in smaller and "write_rate" in unbounded


def test_doctor_says_it_in_words_when_two_namespaces_are_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(sample_namespace().fields()))
    ran = run("doctor", "--explain-namespace", tmp_path / "a.json", tmp_path / "a.json")
    assert ran.status == 0 and "these two share blocks" in ran.out
