"""Wheel and sdist as `make dist` builds them, and the wheel in an environment that has nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

PROGRAM = """
import kvtier
namespace = kvtier.Namespace(model="m", weights="w", dtype="d", layout="l", block_tokens=16, block_bytes=4096)
with kvtier.open("kvtier.yaml", namespace) as cache:
    keys = cache.chain_hashes(range(64))
    cache.put(keys, [bytes([number]) * 4096 for number in range(4)])
    cache.flush()
    cache.evict("g2")
    with cache.get(keys) as hit:
        assert [block[0] for block in hit.blocks] == [0, 1, 2, 3] and hit.tiers == ["g3"] * 4
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_wheel_works_where_nothing_else_is_installed(root: Path, tree: list[str], tmp_path: Path) -> None:
    source, out, home = tmp_path / "source", tmp_path / "dist", tmp_path / "home"
    for name in tree:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= held
    assert sum(name.endswith(".py") for name in zipfile.ZipFile(wheel).namelist()) <= sum(
        name.endswith(".py") for name in held
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=300)
    python = home / "bin" / "python"
    installing = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", str(wheel)]
    subprocess.run([*installing, "-c", str(root / "constraints.txt")], check=True, timeout=500)
    work = tmp_path / "work"
    work.mkdir()
    (work / "kvtier.yaml").write_text(f"tiers: {{g2: {{capacity: 1MiB}}, g3: {{path: {work}/g3, capacity: 4MiB}}}}\n")
    for words in (["--version"], ["config", "check", "kvtier.yaml"], ["init", "new.yaml", "--preset", "laptop"]):
        done = subprocess.run([str(home / "bin" / "kvtier"), *words], cwd=work, timeout=120, check=False)
        assert done.returncode in (0, 1), words
    subprocess.run([str(python), "-c", PROGRAM], cwd=work, check=True, timeout=120)
