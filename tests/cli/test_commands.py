"""Every command that the table names exists, helps and speaks JSON."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.cli import COMMANDS, GROUPS, RENAMED, _load
from kvtier.cli.output import write_table
from kvtier.testing import sample_namespace

NAMES = [command.words for command in COMMANDS]


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_each_command_exists_and_takes_json(command: Any) -> None:
    function = _load(command.target)
    assert "json" in inspect.signature(function).parameters
    assert function.__doc__ and command.help.endswith(".")


@pytest.mark.parametrize("words", NAMES)
def test_each_command_has_help(run: Callable[..., Any], words: str) -> None:
    shown = run(*words.split(), "--help")
    assert shown.status == 0
    assert "--json" in shown.out


def test_the_help_of_a_command_is_the_whole_of_its_docstring(run: Callable[..., Any]) -> None:
    """`sim --mode` pointed to an explanation that was not shown."""
    shown = run("sim", "--help")
    assert all(f"{mode}:" in shown.told for mode in ("safety", "liveness", "engines"))
    assert "Simulate fleets over virtual time" in run("--help").told, "the list has a line of each"


def test_figures_have_no_noise_of_binary_fractions(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(["name", "µs"], [["match", (0.4191 + 0.5436) / 2], ["pool", 1234567.25], ["blocks", 12_345]])
    shown = capsys.readouterr().out
    assert "0.48135 " in shown and "1,234,567.25" in shown and "12,345" in shown


@pytest.mark.parametrize("columns", ["30", None])
def test_no_cell_of_a_table_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    write_table(["digest", "bytes", "slot_bytes"], [["0123456789abcdef" * 2, 67_108_864, "a" * 40]])
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert columns is not None or ("0123456789abcdef" * 2 in shown and "67,108,864" in shown), "pipes have wide lines"


def test_groups_are_described() -> None:
    named = [words.split() for words in NAMES]
    assert {" ".join(words[:depth]) for words in named for depth in range(1, len(words))} == set(GROUPS)


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_runs_and_says_the_new_one(run: Callable[..., Any], old: str) -> None:
    now, target = RENAMED[old]
    assert now.partition(",")[0] in NAMES and old not in NAMES
    assert inspect.signature(_load(target)).parameters["json"]
    ran = run(*old.split(), "--no-such-option")
    assert ran.status == 2 and f"`kvtier {old}` is now `kvtier {now}`" in ran.err.splitlines()[0]
    shown = run(*old.split()[:-1], "--help")
    assert (shown.status == 0 and f" {old.split()[-1]}  " not in shown.out) or old in GROUPS


def test_an_old_name_gives_what_the_new_one_gives(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "kvtier.yaml").write_text(f"tiers: {{g3: {{path: {tmp_path}/g3, capacity: 1MiB}}}}\n")
    with kvtier.open(kvtier.Config.load(tmp_path / "kvtier.yaml"), sample_namespace(4096)):
        pass
    for words in (["inspect"], ["verify"], ["scrub", "--rate", "1GiB/s"], ["gc"]):
        old, new = (run(*group, *words, tmp_path / "g3", "--json") for group in ((), ("g3",)))
        assert old.status == new.status == 0
        assert old.json() | {"seconds": 0} == new.json() | {"seconds": 0}
        assert old.err == f"kvtier: `kvtier {words[0]}` is now `kvtier g3 {words[0]}`\n" and not new.err


def test_help_lists_every_command(run: Callable[..., Any]) -> None:
    shown = run("--help").out
    assert all(words.split()[0] in shown for words in NAMES)


def test_a_misspelt_command_is_corrected(run: Callable[..., Any]) -> None:
    ran = run("confg")
    assert ran.status == 2
    assert "config" in ran.err


def test_help_imports_no_command() -> None:
    code = "import sys; from kvtier.cli import build; build(['--help']); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "kvtier.cli" in modules
    heavy = {"torch", "numpy", "lmdb", "fsspec", "transformers", "pydantic"}
    assert not heavy & set(modules)
    assert not [name for name in modules if name.startswith("kvtier.cli.")]


def test_the_package_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "kvtier", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.strip()[0].isdigit()
