"""`make test` runs its tests in parts: every file of tests is in one of them, and in no second."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path


def test_every_file_is_in_one_part(root: Path) -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", "-C", root, "test-tiers", "test-engines"],
        capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "MAKEFLAGS": "", "MAKELEVEL": "0"},
    )  # fmt: skip
    lines = shown.stdout.replace("\\\n", " ").splitlines()
    parts = [shlex.split(line.partition(" -m pytest")[2].partition("||")[0]) for line in lines if " -m pytest" in line]
    assert len(parts) == 7
    for file in sorted((root / "tests").rglob("test_*.py")):
        name = str(file.relative_to(root))
        assert sum(runs(words, name) for words in parts) == 1, name


def test_modules_are_compiled_once_whatever_the_environment_says(root: Path) -> None:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "MAKEFLAGS": "", "MAKELEVEL": "0"}
    words = ["make", "-C", root, "--no-print-directory", "--eval=show:; @env", "show"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, env=environment).stdout
    assert "PYTHONSAFEPATH=1" in shown and "PYTHONDONTWRITEBYTECODE" not in shown


def runs(words: list[str], name: str) -> bool:
    """Whether pytest with these arguments collects the file."""
    given = [f"{word}/" for word in words if not word.startswith("-")] or ["tests/"]
    left_out = [f"{word.partition('=')[2]}/" for word in words if word.startswith("--ignore=")]
    return name.startswith(tuple(given)) and not name.startswith(tuple(left_out))
