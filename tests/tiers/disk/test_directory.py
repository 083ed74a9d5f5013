"""The directories of a store: where one may not lie, and processes that may not share it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.testing import VirtualClock, sample_namespace
from kvtier.tiers.disk import directory
from kvtier.tiers.disk.tier import DiskTier
from tests.tiers.disk.support.concurrent_writer import CAPACITY, CHAINS
from tests.tiers.disk.support.store import BLOCK, get, opened, put
from tests.tiers.disk.support.subprocesses import need, program, run, works

NAMESPACE = sample_namespace(BLOCK)


async def test_another_pid_namespace_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "g3"
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    need(works(*unshare, "true"), "the right to make a pid namespace")
    words = [*unshare, *program("concurrent_writer", path, 0.2, 1)]
    async with opened(path, CAPACITY) as tier:
        await put(tier, CHAINS[0])
        done = run(words, timeout=60)
        assert done.returncode == 1
        assert "pid namespace" in done.stderr and "hostPID" in done.stderr
        assert await get(tier, CHAINS[0]) == [True] * 6
    done = run(words, timeout=60)
    assert done.returncode == 0, "the control: once nobody else uses it, it may"


async def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert directory.file_system_of(tmp_path) not in directory.NETWORK_FILE_SYSTEMS | {""}
    monkeypatch.setattr(directory, "file_system_of", lambda path: "nfs4")
    with pytest.raises(ConfigError, match="nfs4"):
        await DiskTier([tmp_path / "g3"], 1 << 20, NAMESPACE, clock=VirtualClock()).open()
