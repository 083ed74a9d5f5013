"""Damage of every kind: right bytes or a miss, and a store that opens."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, CorruptError, FormatError
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN
from kvtier.testing import VirtualClock, chain_of, payload_of, sample_namespace, verification_off
from kvtier.tiers.disk.records import BLOCKS, Entry
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Miss, Stored
from tests.tiers.disk.support.store import BLOCK, get, opened, put, slabs

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 8)
GOLDEN = (
    "000000c00dcecd410000000065cdcd4107000000000000000100000002000000001000000000000003000000090000000000"
    "0000000102030405060708090a0b0c0d0e0f0000000065cdcd41010000000065cdcd41805101000000000004000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000ed1500af0d"
    "a22a3c"
)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file, past the page cache of whoever reads it directly."""
    fd = os.open(path, os.O_RDWR)
    byte = os.pread(fd, 1, offset)[0]
    os.pwrite(fd, bytes([byte ^ (1 << bit)]), offset)
    os.fsync(fd)
    os.close(fd)


async def _flip_bytes(path: Path, offsets: range) -> None:
    rng = random.Random(1)
    async with opened(path, 16) as tier:
        await put(tier, CHAIN[:1])
        for offset in offsets:
            (slab,) = slabs(path)
            place = slab.read_bytes().index(payload_of(CHAIN[0], BLOCK))
            flip(slab, place + offset, rng.randrange(8))
            assert await get(tier, CHAIN[:1]) == [Miss.CORRUPT], f"a flipped bit in byte {offset} was not noticed"
            assert await get(tier, CHAIN[:1]) == [Miss.ABSENT], "a damaged block must go"
            assert await put(tier, CHAIN[:1]) == [Stored.STORED], "and must be replaceable"
            assert await get(tier, CHAIN[:1]) == [True]


async def test_a_flipped_bit_of_a_block_is_noticed(tmp_path: Path) -> None:
    await _flip_bytes(tmp_path / "g3", range(0, BLOCK, 16))


@pytest.mark.long
async def test_a_flipped_bit_in_every_byte_of_a_block_is_noticed(tmp_path: Path) -> None:
    await _flip_bytes(tmp_path / "g3", range(BLOCK))


async def test_without_verification_the_flipped_bit_would_be_served(tmp_path: Path) -> None:
    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN[:1])
        (slab,) = slabs(path)
        flip(slab, slab.read_bytes().index(payload_of(CHAIN[0], BLOCK)) + 100)
        with verification_off():
            assert await get(tier, CHAIN[:1], check=False) == [False]


def test_every_flipped_bit_of_an_index_entry_and_its_name_is_noticed() -> None:
    name = NAMESPACE.digest + CHAIN[0]
    entry = Entry(7, 1, 2, BLOCK, 3, 9, bytes(range(16)), Lifetime.of(BUILTIN["24h"], 1e9))
    raw = entry.encode(name)
    assert Entry.decode(name, raw) == entry
    for position in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptError):
            Entry.decode(name, bytes(damaged))
    for position in range(8 * len(name)):
        other = bytearray(name)
        other[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptError):
            Entry.decode(bytes(other), raw)


def test_an_entry_has_its_golden_bytes() -> None:
    entry = Entry(7, 1, 2, BLOCK, 3, 9, bytes(range(16)), Lifetime.of(BUILTIN["24h"], 1e9))
    assert entry.encode(bytes(range(80))).hex() == GOLDEN


async def test_a_damaged_or_swapped_index_entry_is_a_miss_and_loses_no_slot(tmp_path: Path) -> None:
    import lmdb

    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN)
    names = [BLOCKS + NAMESPACE.digest + key for key in CHAIN]
    data = path / "index"
    with lmdb.open(str(data), map_size=(data / "data.mdb").stat().st_size) as env, env.begin(write=True) as txn:
        raw = bytearray(txn.get(names[0]))
        raw[40] ^= 4
        txn.put(names[0], bytes(raw))
        first, second = txn.get(names[2]), txn.get(names[3])
        txn.put(names[2], second)
        txn.put(names[3], first)
    async with opened(path) as tier:
        wrong = Miss.CORRUPT
        assert await get(tier, CHAIN) == [wrong, True, wrong, wrong, True, True, True, True]
        tier.check()
        assert await put(tier, CHAIN) == [Stored.STORED, Stored.PRESENT, *[Stored.STORED] * 2, *[Stored.PRESENT] * 4]
        assert await get(tier, CHAIN) == [True] * 8


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _zero(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(min(size, 1 << 20)))


def _garbage(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(random.Random(2).randbytes(min(size, 1 << 20)))


def _delete(path: Path) -> None:
    path.unlink()


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere" / "else")


DAMAGES = [_truncate, _empty, _zero, _garbage, _delete]
REPLACEMENTS = [_directory, _fifo, _dangling]


@pytest.mark.parametrize("damage", DAMAGES + REPLACEMENTS)
async def test_a_damaged_slab_file_gives_misses(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN)
    damage(slabs(path)[0])
    async with opened(path) as tier:
        found = await get(tier, CHAIN)
        assert True not in found or damage is _truncate
        if damage in REPLACEMENTS:
            assert set(await put(tier, CHAIN)) <= {Stored.FAILED, Stored.PRESENT}
            return
        assert {Miss.CORRUPT, True} >= set(found)
        assert {Stored.STORED, Stored.PRESENT} >= set(await put(tier, CHAIN))
        assert await get(tier, CHAIN) == [True] * 8


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_slab_file_damaged_while_open_gives_misses(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN)
        damage(slabs(path)[0])
        found = await get(tier, CHAIN)
        assert {Miss.CORRUPT, True} >= set(found)
        await tier.evict(None)
        assert await put(tier, CHAIN) == [Stored.STORED] * 8
        assert await get(tier, CHAIN) == [True] * 8


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


async def test_two_slab_files_swapped_give_misses(tmp_path: Path) -> None:
    namespace = sample_namespace(1 << 20)
    chain = chain_of(namespace, 100)
    path = tmp_path / "g3"
    async with opened(path, 128, block_bytes=1 << 20, namespace=namespace) as tier:
        await put(tier, chain)
    first, second = slabs(path)[:2]
    first.rename(path / "aside")
    second.rename(first)
    (path / "aside").rename(second)
    async with opened(path, 128, block_bytes=1 << 20, namespace=namespace) as tier:
        assert set(await get(tier, chain)) == {Miss.CORRUPT}


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
        (path / what).write_text(json.dumps({**marker, "format": 2}))
    else:
        size = (path / "index" / "data.mdb").stat().st_size
        with lmdb.open(str(path / "index"), map_size=size) as env, env.begin(write=True) as txn:
            txn.put(b"mformat", (2).to_bytes(4, "little"))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.name in ("data.mdb", "STORE.json")}
    with pytest.raises(FormatError, match="format 2"):
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


_READ_ALL = """
import asyncio, pathlib, sys
sys.path.insert(0, {root!r})
from tests.tiers.disk.test_damage import CHAIN
from tests.tiers.disk.support.store import get, put, opened

async def main():
    async with opened(pathlib.Path({path!r})) as tier:
        print(sorted(str(one) for one in await get(tier, CHAIN)))
        await put(tier, CHAIN)
        await tier.evict(None)
        await put(tier, CHAIN)
        await get(tier, CHAIN)

asyncio.run(main())
"""


async def _flip_index(tmp_path: Path, seeds: range) -> None:
    """Flips anywhere in the index file; every case in a process of its own, which must not die of a signal."""
    pristine = tmp_path / "pristine"
    async with opened(pristine) as tier:
        await put(tier, CHAIN)
    used = (pristine / "index" / "data.mdb").read_bytes().rstrip(b"\0")
    root = str(Path(__file__).parents[3])
    for seed in seeds:
        rng = random.Random(seed)
        path = tmp_path / "g3"
        shutil.rmtree(path, ignore_errors=True)
        await asyncio.to_thread(subprocess.run, ["cp", "-r", "--sparse=always", pristine, path], check=True)
        offset, bit = rng.randrange(len(used)), rng.randrange(8)
        flip(path / "index" / "data.mdb", offset, bit)
        script = _READ_ALL.format(root=root, path=str(path))
        words = [sys.executable, "-c", script]
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=60)
        assert done.returncode >= 0, f"bit {bit} of byte {offset}: killed by signal {-done.returncode}"
        assert "wrong bytes" not in done.stderr, f"bit {bit} of byte {offset}: {done.stderr}"


async def test_a_flipped_bit_of_the_index_file_never_serves_wrong_bytes(tmp_path: Path) -> None:
    await _flip_index(tmp_path, range(12))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(100, 500, 50))
async def test_many_flipped_bits_of_the_index_file_never_serve_wrong_bytes(tmp_path: Path, first: int) -> None:
    await _flip_index(tmp_path, range(first, first + 50))
