"""What the benchmarks' tests compare with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def root_commit() -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
