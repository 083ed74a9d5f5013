"""Opening a store: a damaged index is made anew, a lost marker written again, and nothing foreign touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, FormatError
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Miss, Stored
from tests.tiers.disk.support.damage import DAMAGES, REPLACEMENTS
from tests.tiers.disk.support.store import BLOCK, get, opened, put

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 8)


@pytest.mark.parametrize(
    ("name", "damage"),
    [("data.mdb", damage) for damage in [*DAMAGES, *REPLACEMENTS]] + [("lock.mdb", damage) for damage in DAMAGES],
)
async def test_a_damaged_index_is_made_anew(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN)
    damage(path / "index" / name)
    async with opened(path) as tier:
        found = await get(tier, CHAIN)
        assert found == ([True] * 8 if name == "lock.mdb" else [Miss.ABSENT] * 8)
        assert set(await put(tier, CHAIN)) <= {Stored.STORED, Stored.PRESENT}
        assert await get(tier, CHAIN) == [True] * 8
    assert (path / "index.damaged").exists() == (name == "data.mdb")


async def test_an_older_index_gives_old_blocks_or_misses(tmp_path: Path) -> None:
    """The index of yesterday over the slab of today, as from a partial backup."""
    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN)
    shutil.copytree(path / "index", tmp_path / "old")
    other = chain_of(NAMESPACE, 14, seed=5)
    async with opened(path) as tier:
        await put(tier, other)
    shutil.rmtree(path / "index")
    (tmp_path / "old").rename(path / "index")
    async with opened(path) as tier:
        found = await get(tier, CHAIN)
        assert set(found) == {True, Miss.CORRUPT}
        assert await get(tier, other) == [Miss.ABSENT] * 14


@pytest.mark.parametrize("what", ["STORE.json", "index"])
async def test_a_foreign_format_is_refused_and_left_alone(tmp_path: Path, what: str) -> None:
    import lmdb

    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN)
    if what == "STORE.json":
        marker = json.loads((path / what).read_text())
        (path / what).write_text(json.dumps({**marker, "format": 9}))
    else:
        size = (path / "index" / "data.mdb").stat().st_size
        with lmdb.open(str(path / "index"), map_size=size) as env, env.begin(write=True) as txn:
            txn.put(b"mformat", (9).to_bytes(4, "little"))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.name in ("data.mdb", "STORE.json")}
    with pytest.raises(FormatError, match="format 9"):
        await DiskTier([path], 16 * BLOCK, NAMESPACE, clock=VirtualClock()).open()
    assert before == {file: file.read_bytes() for file in before}


async def test_an_index_of_another_store_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        async with opened(tmp_path / name) as tier:
            await put(tier, CHAIN)
    shutil.rmtree(tmp_path / "a" / "index")
    shutil.copytree(tmp_path / "b" / "index", tmp_path / "a" / "index")
    with pytest.raises(FormatError, match="belongs to the store"):
        await DiskTier([tmp_path / "a"], 16 * BLOCK, NAMESPACE, clock=VirtualClock()).open()
    shutil.copy(tmp_path / "b" / "STORE.json", tmp_path / "a" / "STORE.json")
    async with opened(tmp_path / "a") as tier:
        assert set(await get(tier, CHAIN)) == {True}, "the control: with its own marker that index is the store's"


@pytest.mark.parametrize("text", ["", "garbage", "[]", "{}", '{"kind": "kvtier-g3", "format": 1}'])
async def test_a_lost_marker_is_written_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN)
    marker = (path / "STORE.json").read_text()
    (path / "STORE.json").write_text(text)
    async with opened(path) as tier:
        assert await get(tier, CHAIN) == [True] * 8
    assert (path / "STORE.json").read_text() == marker


async def test_parts_of_different_stores_are_refused(tmp_path: Path) -> None:
    async with opened([tmp_path / "a", tmp_path / "b"]):
        pass
    async with opened([tmp_path / "c", tmp_path / "d"]):
        pass
    with pytest.raises(FormatError):
        await DiskTier([tmp_path / "a", tmp_path / "d"], 1 << 20, NAMESPACE, clock=VirtualClock()).open()
    with pytest.raises(ConfigError):
        await DiskTier([tmp_path / "b", tmp_path / "a"], 1 << 20, NAMESPACE, clock=VirtualClock()).open()


@pytest.mark.parametrize("other", ["b/../a", "link"])
async def test_one_directory_by_two_names_is_refused(tmp_path: Path, other: str) -> None:
    """It cannot be both parts: the next start would not know the store."""
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match="the same directory as"):
        await DiskTier([tmp_path / "a", tmp_path / other], 1 << 20, NAMESPACE, clock=VirtualClock()).open()
    assert not (tmp_path / "a" / "STORE.json").exists()
