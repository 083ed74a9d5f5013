"""Every command that the table names exists, helps and speaks JSON."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.cli import COMMANDS, GROUPS, _load

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


def test_groups_are_described() -> None:
    assert {words.split()[0] for words in NAMES if " " in words} == set(GROUPS)


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
