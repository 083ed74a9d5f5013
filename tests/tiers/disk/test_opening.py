"""Faults of the machine while a store is opened: the tier is out with that reason, the store stays, warm."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, TierError, TierUnavailable
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk.environment import LOCK_BYTES
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Stored
from tests.tiers.disk.support.store import BLOCK, get, opened, put

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 8)
CAPACITY = 16

SHORTAGES = [
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO, errno.EDQUOT,
]  # fmt: skip
_CALLS: list[tuple[Any, str]] = [
    *((os, name) for name in (
        "fstat", "fsync", "ftruncate", "lstat", "mkdir", "open", "pread", "pwrite", "rename", "scandir", "stat",
        "truncate", "unlink",
    )),
    (fcntl, "fcntl"),
    (io, "open"),
]  # fmt: skip


class Failing:
    """Makes the `nth` call (from 1 on; 0: none) of one function on the store's files fail, and counts its calls."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, nth: int) -> None:
        self.count = 0
        real: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == nth:
                raise OSError(number, os.strerror(number))
            return real(*arguments, **named)

        patch.setattr(owner, name, call)


def _names(path: Path) -> dict[Path, int]:
    """The files of a store that must survive, with their inodes."""
    files = [*path.glob("**/*.slab"), path / "index" / "data.mdb", path / "STORE.json"]
    return {file: file.stat().st_ino for file in files}


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def _is_out_and_warm_later(path: Path, fails: Callable[[pytest.MonkeyPatch], Failing]) -> bool:
    """Whether the fault struck."""
    before, files = _names(path), _open_files()
    tier = DiskTier([path], CAPACITY * BLOCK, NAMESPACE, clock=VirtualClock())
    with pytest.MonkeyPatch.context() as patch:
        fault = fails(patch)
        try:
            await tier.open()
        except TierError as error:
            out: TierError | None = error
        else:
            out = None
        struck = fault.count
    if out is None:
        await tier.close(tier._clock.monotonic() + 60)
    else:
        assert isinstance(out, TierUnavailable), f"not a fault of the machine: {out!r}"
    assert _names(path) == before, f"files were removed or made anew after {out}"
    assert not (path / "index.damaged").exists()
    assert _open_files() == files, f"descriptors are left open after {out}"
    if out is not None:
        await tier.open()
        assert await get(tier, CHAIN) == [True] * 8, f"not warm after {out}"
        await tier.close(tier._clock.monotonic() + 60)
    return struck > 0


@pytest.mark.parametrize("number", SHORTAGES, ids=[errno.errorcode[one] for one in SHORTAGES])
async def test_any_call_of_an_open_may_fail_without_harm(tmp_path: Path, number: int) -> None:
    path = tmp_path / "g3"
    async with opened(path, CAPACITY) as tier:
        await put(tier, CHAIN)
    struck = 0
    for owner, name in _CALLS:
        with pytest.MonkeyPatch.context() as patch:
            counted = Failing(patch, owner, name, number, 0)
            async with opened(path, CAPACITY):
                pass
        for nth in range(1, counted.count + 1):
            struck += await _is_out_and_warm_later(path, lambda patch: Failing(patch, owner, name, number, nth))  # noqa: B023
    assert struck > 20, "the faults never struck"


@pytest.mark.parametrize(
    "kind", ["Error", "MemoryError", "DiskError", "ReadonlyError", "LockError", "ReadersFullError"]
)
async def test_a_fault_within_lmdb_is_no_damage(tmp_path: Path, kind: str) -> None:
    import lmdb

    path = tmp_path / "g3"
    async with opened(path, CAPACITY) as tier:
        await put(tier, CHAIN)
    error = getattr(lmdb, kind)("data.mdb: Too many open files")

    class Fault(Failing):
        def __init__(self, patch: pytest.MonkeyPatch) -> None:
            self.count = 1

            def fail(*_arguments: object, **_named: object) -> None:
                raise error

            patch.setattr(lmdb, "open", fail)

    assert await _is_out_and_warm_later(path, Fault)


async def test_a_fault_while_slots_are_taken_back_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "g3"
    async with opened(path, CAPACITY) as tier:
        await put(tier, CHAIN)

    class Fault(Failing):
        def __init__(self, patch: pytest.MonkeyPatch) -> None:
            self.count = 1

            def fail(_txn: object) -> int:
                raise OSError(errno.EMFILE, "Too many open files")

            patch.setattr(WriteTxn, "reclaim", fail)

    assert await _is_out_and_warm_later(path, Fault)


# Volumes.


async def test_a_path_below_a_missing_mount_leaves_the_tier_out(tmp_path: Path) -> None:
    tier = DiskTier([tmp_path / "mnt" / "g3"], CAPACITY * BLOCK, NAMESPACE, clock=VirtualClock())
    with pytest.raises(TierUnavailable, match="mnt"):
        await tier.open()
    (tmp_path / "mnt").mkdir()
    await tier.open()
    assert set(await put(tier, CHAIN)) == {Stored.STORED}
    await tier.close(tier._clock.monotonic() + 60)


@pytest.mark.parametrize("missing", [0, 1])
async def test_a_volume_that_is_not_mounted_does_not_empty_the_others(tmp_path: Path, missing: int) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    namespace = sample_namespace(1 << 20)
    chain = chain_of(namespace, 100)
    async with opened(paths, 128, block_bytes=1 << 20, namespace=namespace) as tier:
        await put(tier, chain)
    paths[missing].rename(tmp_path / "away")
    paths[missing].mkdir(mode=0o700)
    tier = DiskTier(paths, 128 << 20, namespace, clock=VirtualClock())
    with pytest.raises(TierUnavailable, match="mount"):
        await tier.open()
    shutil.rmtree(paths[missing])
    (tmp_path / "away").rename(paths[missing])
    async with opened(paths, 128, block_bytes=1 << 20, namespace=namespace) as tier:
        assert await get(tier, chain) == [True] * 100


async def test_a_crash_between_two_first_markers_is_no_missing_volume(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    async with opened(paths, CAPACITY):
        pass
    shutil.rmtree(paths[0] / "index")
    (paths[1] / "STORE.json").unlink()
    async with opened(paths, CAPACITY) as tier:
        await put(tier, CHAIN)
        assert await get(tier, CHAIN) == [True] * 8


async def test_a_file_in_place_of_the_directory_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "g3").write_bytes(b"mine")
    tier = DiskTier([tmp_path / "g3"], CAPACITY * BLOCK, NAMESPACE, clock=VirtualClock())
    with pytest.raises(ConfigError, match=r"tiers\.g3\.path .*g3: "):
        await tier.open()


async def test_a_full_volume_below_the_lock_lets_it_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "g3"
    async with opened(path, CAPACITY) as tier:
        await put(tier, CHAIN)
    (path / "LOCK").write_text("another boot 1\n")
    real = os.pwrite
    tier = DiskTier([path], CAPACITY * BLOCK, NAMESPACE, clock=VirtualClock())
    with monkeypatch.context() as patch:
        Failing(patch, os, "pwrite", errno.ENOSPC, 1)
        with pytest.raises(TierUnavailable, match="No space"):
            await tier.open()
    assert os.pwrite is real
    await tier.open()
    assert await get(tier, CHAIN) == [True] * 8
    await tier.close(tier._clock.monotonic() + 60)


async def test_a_full_volume_below_the_table_of_readers_is_no_bus_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB writes to that file through its map: it must be on the volume as a whole before LMDB opens it."""
    path = tmp_path / "g3"
    async with opened(path, CAPACITY) as tier:
        await put(tier, CHAIN)
        table = (path / "index" / "lock.mdb").stat()
        assert table.st_size == LOCK_BYTES and table.st_blocks * 512 >= LOCK_BYTES
    tier = DiskTier([path], CAPACITY * BLOCK, NAMESPACE, clock=VirtualClock())
    with monkeypatch.context() as patch:
        Failing(patch, os, "posix_fallocate", errno.ENOSPC, 1)
        with pytest.raises(TierUnavailable, match="No space"):
            await tier.open()
    await tier.open()
    assert await get(tier, CHAIN) == [True] * 8
    await tier.close(tier._clock.monotonic() + 60)


@pytest.mark.parametrize(("mode", "whom"), [(0o777, "others"), (0o770, "group"), (0o755, None), (0o700, None)])
async def test_a_directory_that_others_may_write_to_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, whom: str | None
) -> None:
    path = tmp_path / "g3"
    path.mkdir()
    path.chmod(mode)
    async with opened(path, CAPACITY):
        assert stat.S_IMODE(path.stat().st_mode) == mode, "its mode is its owner's"
    lines = [line for line in caplog.messages if "can be written to by" in line]
    assert len(lines) == (whom is not None)
    if whom is not None:
        assert whom in lines[0] and f"chmod 700 {path}" in lines[0]
