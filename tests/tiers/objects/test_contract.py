"""G4 passes the contract of a tier on a directory and in memory; test_s3.py has the servers."""

from __future__ import annotations

import errno
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import fsspec
import pytest

from kvtier.errors import ConfigError, InvalidRequest, TierError, TierFull
from kvtier.testing import VirtualClock, chain_of, check_tier, payload_of, sample_namespace, seal
from kvtier.tiers.objects.bucket import local
from kvtier.tiers.objects.bucket.fsspec import AnyFiles, MemoryFiles
from kvtier.tiers.objects.bucket.local import LocalFiles
from kvtier.tiers.objects.bucket.obstore import translated as obstore_options
from kvtier.tiers.objects.bucket.open import BucketLimits, open_bucket
from kvtier.tiers.objects.bucket.protocol import Transient
from kvtier.tiers.objects.bucket.threaded import Files, Threaded
from kvtier.tiers.objects.compression import codes
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target
from kvtier.times import Wall


@pytest.mark.parametrize("stride", [1, 4])
async def test_a_directory_passes_the_contract(tmp_path: Path, stride: int) -> None:
    clock = VirtualClock()
    await check_tier(lambda ns: ObjectTier(f"file://{tmp_path}/g4", ns, clock=clock, stride=stride), clock)


@pytest.mark.parametrize("stride", [1, 4])
async def test_memory_passes_the_contract(stride: int) -> None:
    clock, place = VirtualClock(), uuid4().hex
    await check_tier(lambda ns: ObjectTier(f"memory://{place}/g4", ns, clock=clock, stride=stride), clock)


async def test_any_other_fsspec_file_system_serves(tmp_path: Path) -> None:
    """Best effort, since its writes may be neither exclusive nor atomic: what was stored comes back, after a restart
    too, and what was evicted does not."""
    clock, ns = VirtualClock(), sample_namespace(4096)
    chain = chain_of(ns, 6)
    for attempt in range(2):
        tier = ObjectTier(f"local://{tmp_path}/g4", ns, clock=clock, stride=4, options={"auto_mkdir": True})
        await tier.open()
        deadline = clock.monotonic() + 30
        written = await tier.write(seal(chain, range(6), 4096, clock.wall()), deadline)
        assert written == [Stored.PRESENT if attempt else Stored.STORED] * 6
        buffers = [bytearray(4096) for _ in chain]
        targets = [Target(i, (memoryview(b),)) for i, b in enumerate(buffers)]
        assert all(isinstance(r, Loaded) for r in await tier.read(chain, targets, deadline))
        assert [bytes(b) for b in buffers] == [payload_of(key, 4096) for key in chain]
        clock.advance(50_000)
        tier.touch(chain, clock.wall())
        await tier.flush(clock.monotonic() + 30)
        if attempt:
            assert await tier.evict(None) == 6
            assert await tier.read(chain, targets, clock.monotonic() + 30) == [Miss.ABSENT] * 6
        await tier.close(clock.monotonic() + 30)


def stores(folder: Path) -> dict[str, Files]:
    memory, local = fsspec.filesystem("memory"), fsspec.filesystem("file")
    return {
        "directory": LocalFiles(folder / "own"), "memory": MemoryFiles(memory, f"/{uuid4().hex}"),
        "fsspec": AnyFiles(local, str(folder / "any")),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["directory", "memory", "fsspec"])
def test_a_version_that_is_there_no_more_is_neither_replaced_nor_deleted(tmp_path: Path, kind: str) -> None:
    """Another replica was faster."""
    files, used = stores(tmp_path)[kind], Wall(1000.0)
    files.start()
    for gone in (None, "another version"):
        assert files.replace("ab/cd", bytearray(b"new"), used, "another version") is None
        assert not files.delete("ab/cd", gone), "it was never there"
    first = files.create("ab/cd", bytearray(b"first"), used)
    assert first is not None and files.create("ab/cd", bytearray(b"other"), used) is None
    assert files.replace("ab/cd", bytearray(b"new"), used, "another version") is None
    assert not files.delete("ab/cd", "another version")
    found = files.read("ab/cd", 0, 16)
    assert found is not None and bytes(found[1]) == b"first"
    assert files.replace("ab/cd", bytearray(b"second"), used, first.etag) is not None
    assert files.delete("ab/cd", None) and files.head("ab/cd") is None


def test_a_directory_without_hard_links_keeps_the_first_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, used, number = LocalFiles(tmp_path), Wall(1000.0), errno.EPERM

    def link(*_: object) -> None:
        raise OSError(number, "no links")

    monkeypatch.setattr("os.link", link)
    assert files.create("ab/cd", bytearray(b"first"), used) is not None
    assert files.create("ab/cd", bytearray(b"other"), used) is None
    assert (tmp_path / "ab" / "cd").read_bytes() == b"first"
    assert files.renew("ab/cd", "another version", used) is None and files.renew("no", "such", used) is None
    number = errno.ENOSPC
    with pytest.raises(OSError, match="no links"):
        files.create("ab/ef", bytearray(b"new"), used)
    assert [file.name for file in (tmp_path / "ab").iterdir()] == ["cd"], "nothing is left"


def test_a_directory_is_swept_of_dead_writers_files_and_must_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / f"{local._TEMPORARY}dead"
    left.write_bytes(b"half")
    LocalFiles(tmp_path).start()
    assert left.exists(), "its writer may live"
    monkeypatch.setattr(local, "_STALE_S", -1.0)
    LocalFiles(tmp_path).start()
    assert not left.exists()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="not writable"):
        LocalFiles(tmp_path).start()


async def test_a_full_disk_is_told_apart_from_a_sick_one(tmp_path: Path) -> None:
    bucket = Threaded(LocalFiles(tmp_path))
    for number, kind in ((errno.ENOSPC, TierFull), (errno.EIO, Transient), (errno.EACCES, TierError)):
        with mock.patch("os.fsync", side_effect=OSError(number, "planted")), pytest.raises(kind) as raised:
            await bucket.create("ab/cd", bytearray(b"x"), Wall(1000.0))
        assert type(raised.value) is kind and errno.errorcode[number] in str(raised.value)
    await bucket.close()


async def test_what_breaks_the_contract_is_refused(tmp_path: Path) -> None:
    clock, ns = VirtualClock(), sample_namespace(4096)
    tier = ObjectTier(f"file://{tmp_path}/g4", ns, clock=clock, stride=2)
    await tier.open()
    await tier.open()  # once more does nothing
    chain, deadline = chain_of(ns, 2), clock.monotonic() + 30
    target = Target(0, (memoryview(bytearray(4096)),))
    with pytest.raises(InvalidRequest, match="two targets for one block"):
        await tier.read(chain, [target, target], deadline)
    short = [replace(block, pieces=(block.pieces[0][:100],)) for block in seal(chain, range(2), 4096, clock.wall())]
    with pytest.raises(InvalidRequest, match="does not have 4096 bytes"):
        await tier.write(short, deadline)
    await tier.close(deadline)


@pytest.mark.parametrize(
    ("url", "client", "options", "absent", "says"),
    [
        ("s3://b/p", "obstore", {}, "obstore", "which is not installed"),
        ("s3://b/p", "obstore", {"cache_regions": True}, "", "some that only s3fs knows"),
        ("az://c/p", "obstore", {"connection_string": "x"}, "", "write its options alone"),
        ("az:///p", "auto", {}, "", "names no container"),
    ],
)
def test_a_client_that_cannot_be_had_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, client: Any, options: dict[str, Any], absent: str, says: str
) -> None:
    pytest.importorskip("obstore")
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == absent else found(name))
    with pytest.raises(ConfigError, match=says):
        open_bucket(url, options, client, VirtualClock(), BucketLimits())


def test_what_only_s3fs_knows_is_left_to_it() -> None:
    both = {"client_kwargs": {"endpoint_url": "http://e", "region_name": "r"}}
    assert obstore_options(both) == {"region": "r", "endpoint": "http://e"}
    assert obstore_options({"client_kwargs": {"endpoint_url": "http://e"}}) == {"endpoint": "http://e"}
    assert obstore_options({"client_kwargs": {"verify": False}}) is None and obstore_options({"other": 1}) is None
    with pytest.raises(ConfigError, match="must be none or lossless"):
        codes("zip", "float16")
