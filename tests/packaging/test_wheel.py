"""What is in the tree is in the wheel, and the wheel works without the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PLACES = {
    "kvtier/": "kvtier/",
    "connectors/": "kvtier/connectors/",
    "kernels/": "kvtier/kernels/",
    "configs/": "kvtier/presets/",
}


def installed_name(path: str) -> str | None:
    """Where a file of the tree lands in the wheel; None if it does not belong there."""
    for folder, place in PLACES.items():
        if path.startswith(folder) and not path.endswith(".md"):
            return place + path.removeprefix(folder)
    return None


@pytest.fixture(scope="module")
def wheel(root: Path, tree: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing left over from an earlier build can slip in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tree:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(out), str(source)], check=True, timeout=110)
    (built,) = out.glob("kvtier-*.whl")
    return built


def test_the_wheel_holds_the_tree_and_nothing_else(tree: list[str], wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {place for name in tree if (place := installed_name(name))}


def test_the_wheel_carries_licence_and_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    entries = {name.split(".dist-info/")[1]: name for name in archive.namelist() if ".dist-info/" in name}
    assert "Apache License" in archive.read(entries["licenses/LICENSE"]).decode()
    assert "kvtier = kvtier.cli:main" in archive.read(entries["entry_points.txt"]).decode()


IMPORT_ALL = """
import importlib, pathlib, sys
import kvtier
home = pathlib.Path(kvtier.__file__).parent
assert home == pathlib.Path(sys.argv[1]) / "kvtier", home
for path in sorted(home.rglob("*.py")):
    name = ".".join(("kvtier", *path.relative_to(home).with_suffix("").parts)).removesuffix(".__init__")
    if name.endswith("__main__"):
        continue
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as gone:
        # An engine or a GPU library that is not installed, never a part of kvtier.
        optional = name.startswith(("kvtier.connectors.", "kvtier.kernels."))
        if not optional or (gone.name or "").startswith("kvtier"):
            raise
        continue
    assert pathlib.Path(module.__file__).is_relative_to(home), module.__file__
print("ok")
"""


def test_the_wheel_imports_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", IMPORT_ALL, str(site)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ok"
