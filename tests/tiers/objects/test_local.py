"""A bucket in a local directory: how it is listed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import TierError
from kvtier.identity.keys import scope_of
from kvtier.testing import chain_of
from kvtier.tiers.objects.bucket.local import LocalFiles
from kvtier.tiers.objects.bucket.protocol import first_page
from kvtier.tiers.objects.bucket.threaded import Threaded
from kvtier.tiers.protocol import Miss
from kvtier.times import Wall
from tests.tiers.objects.support.replicas import NS, S, Site

NAMES = sorted(["a/b/1", "a/b/2", "a/b-/1", "a/b0/c/9", "a/b", "ab/1", "a-/1", "b", "c/d/e/f", "a/é"])


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders that are read, by their names."""
    scandir, folders = os.scandir, list[str]()

    def scan(path: Any) -> Any:
        folders.append(Path(path).name)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    return folders


def fill(root: Path, names: list[str]) -> None:
    for name in names:
        path = root / (f"{name}.file" if name == "a/b" else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "a/b/", "a/b/2", "c/d/", "z"])
def test_names_come_in_order_whatever_the_listing_begins_with(tmp_path: Path, prefix: str) -> None:
    fill(tmp_path, NAMES)
    (tmp_path / "a" / ".tmp-1").write_bytes(b"x")
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    names = sorted("a/b.file" if name == "a/b" else name for name in NAMES)
    for after in ["", *names, "a/b/1x", "a/b/", "b0", "z"]:
        listed = [stat.name for stat in LocalFiles(tmp_path).list(prefix, after)]
        assert listed == [name for name in names if name.startswith(prefix) and name > after], after


async def test_a_page_reads_the_folders_of_its_names_only(tmp_path: Path, scanned: list[str]) -> None:
    fill(tmp_path, [f"units/{folder:02x}/{number:03}" for folder in range(64) for number in range(100)])
    bucket = Threaded(LocalFiles(tmp_path))
    page = await first_page(bucket, "units/", "units/20/050")
    assert (len(page), page[0].name, page[-1].name) == (1000, "units/20/051", "units/2a/050")
    assert scanned == ["units", *(f"{folder:02x}" for folder in range(0x20, 0x2B))]
    await bucket.close()


async def test_a_large_bucket_is_started_without_a_walk_over_it(tmp_path: Path, scanned: list[str]) -> None:
    """On a network file system the walk took longer than a start may: the bucket never got ready."""
    fill(tmp_path, [f"units/{folder:02x}/1" for folder in range(64)])
    bucket = Threaded(LocalFiles(tmp_path))
    await bucket.start()
    assert scanned == [tmp_path.name]
    await bucket.close()


async def test_what_a_dead_writer_left_goes_when_a_listing_comes_by(tmp_path: Path) -> None:
    fill(tmp_path, ["units/00/1", "units/01/1", "units/01/.tmp-left"])
    files = LocalFiles(tmp_path)
    left, named = tmp_path / "units/01/.tmp-left", ["units/00/1", "units/01/1"]
    assert [stat.name for stat in files.list("", "")] == named and left.exists(), "its age is not known yet"
    files.start()
    assert [stat.name for stat in files.list("", "")] == named and left.exists(), "its writer may be alive"
    files._volume_s += 3700
    assert [stat.name for stat in files.list("units/", "units/01/")] == named[1:] and not left.exists()


async def test_a_purge_log_that_cannot_be_listed_is_not_an_empty_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, chain = await site.replica(), chain_of(NS, S, scope=scope_of("a"))
    await site.store(one, chain)
    monkeypatch.setattr(one._remover._store, "delete_named", kept)
    await one.purge(scope_of("a"), Wall("inf"))
    scandir = os.scandir

    def scan(path: Any) -> Iterator[Any]:
        if Path(path).name == "log":
            raise OSError(errno.EIO, "bad sector")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    new = await site.replica(attempts=1)
    with pytest.raises(TierError):
        await site.read(new, chain)
    monkeypatch.setattr(os, "scandir", scandir)
    site.clock.advance(10)
    assert await site.read(new, chain) == [Miss.PURGED] * S


async def kept(names: list[str]) -> None:
    """Deletes nothing."""
