"""Damage of every kind: right bytes or a miss, and a store that opens."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.testing import chain_of, payload_of, sample_namespace, verification_off
from kvtier.tiers.disk import slab as slab_files
from kvtier.tiers.disk.layout import Layout
from kvtier.tiers.disk.records import SHORT_FORMAT
from kvtier.tiers.disk.slab import Slab, SystemCalls
from kvtier.tiers.protocol import Miss, Stored
from tests.tiers.disk.support.damage import DAMAGES, REPLACEMENTS, flip, truncate
from tests.tiers.disk.support.store import BLOCK, get, opened, put, slabs

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 8)


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


async def test_a_damaged_or_swapped_index_entry_is_a_miss_and_loses_no_slot(tmp_path: Path) -> None:
    import lmdb

    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN)
    names = [Layout(SHORT_FORMAT).key(NAMESPACE.digest + key) for key in CHAIN]
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


@pytest.mark.parametrize("damage", DAMAGES + REPLACEMENTS)
async def test_a_damaged_slab_file_gives_misses(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN)
    damage(slabs(path)[0])
    async with opened(path) as tier:
        found = await get(tier, CHAIN)
        assert True not in found or damage is truncate
        assert {Miss.CORRUPT, True} >= set(found)
        assert {Stored.STORED, Stored.PRESENT} >= set(await put(tier, CHAIN))
        assert await get(tier, CHAIN) == [True] * 8


@pytest.mark.parametrize("damage", DAMAGES + REPLACEMENTS)
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


_READ_ALL = """
import asyncio, pathlib, sys
sys.path.insert(0, {root!r})
from tests.tiers.disk.test_damage import CHAIN
from tests.tiers.disk.support.damage import DAMAGES, REPLACEMENTS, flip, truncate
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


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
def test_the_name_of_a_slab_file_that_is_made_anew_is_durable(
    is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for that of the file before, which a store that shrank had removed: a loss of power took the new one
    with all its blocks."""
    (tmp_path / "slab").mkdir()
    synced = list[Path]()
    monkeypatch.setattr(slab_files, "sync_directory", synced.append)
    monkeypatch.setattr(slab_files, "OPEN_FILES_MAX", 2 if is_open else 1)
    slab, block = Slab([tmp_path], lambda segment: BLOCK, SystemCalls()), memoryview(bytes(BLOCK))
    for segment in (0, 1, 0):
        slab.write(segment, 0, [block])
    assert len(synced) == 2, "each name once"
    slab.write(1, 0, [block])
    slab.path_of(0).unlink()
    slab.write(0, 0, [block])
    slab.close()
    assert len(synced) == 3


async def test_a_slab_file_that_is_removed_under_a_running_process_is_made_anew(tmp_path: Path) -> None:
    """Else what is stored from then on is lost with the process."""
    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN)
        slabs(path)[0].unlink()
        assert set(await get(tier, CHAIN)) == {Miss.CORRUPT}
        assert await put(tier, CHAIN) == [Stored.STORED] * 8
    async with opened(path) as tier:
        assert await get(tier, CHAIN) == [True] * 8, "they were written to a file without a name"
