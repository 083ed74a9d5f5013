"""Test programs in processes of their own, and what some of them need of the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]


def need(there: bool, what: str) -> None:
    """Skip the test on a machine that lacks something; fail it in CI, which must have it."""
    if not there:
        assert not os.environ.get("CI"), f"CI must have {what}"
        pytest.skip(f"needs {what}")


def works(*words: str) -> bool:
    """Whether a command is there and ends well."""
    return shutil.which(words[0]) is not None and subprocess.run(words, capture_output=True).returncode == 0


def need_strace() -> None:
    """For a test that records or changes system calls."""
    need(works("strace", "-qq", "-o", os.devnull, "true"), "strace and the right to trace")


def program(module: str, *words: object) -> list[str]:
    """The words that run `module` of this folder, from ROOT and in `environment`."""
    return [sys.executable, "-m", f"tests.tiers.disk.support.{module}", *map(str, words)]


def environment() -> dict[str, str]:
    """In which a child finds this tree."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {"PYTHONPATH": str(ROOT)}


def run(words: list[str], timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Wait for a child."""
    return subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)


def result(words: list[str]) -> dict[str, Any]:
    """The output, one JSON object, of a child that must end well."""
    done = run(words)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def must_notice(words: list[str]) -> None:
    """Run a control: a child that must find blocks damaged."""
    done = run(words)
    assert done.returncode == 1
    assert "corrupt" in done.stderr
