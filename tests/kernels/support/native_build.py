"""Building the C++ sources of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def build(source: Path, target: Path, *options: str) -> Path:
    """Compile a C++ source of this folder, without a warning."""
    compiler = shutil.which("g++")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("g++ is needed to build the kernels as plain C++")
        pytest.skip("no g++ on this machine: the kernels cannot be built as plain C++")
    kernels = HERE.parents[2] / "kernels" / "copy.cu"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command += [f'-DKERNEL_SOURCE="{kernels}"', *options, str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return target
