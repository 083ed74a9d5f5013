"""The map of the index has space for any blocks; a reader that stands still fills neither it nor the volume."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.errors import TierFull
from kvtier.identity.keys import scope_of
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import index as index_module
from kvtier.tiers.disk.records import BLOCKS
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Miss, Stored
from kvtier.times import Wall
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put
from tests.tiers.disk.support.subprocesses import ROOT, environment

MIB = 1 << 20
READER = """
import lmdb, os, signal, sys
env = lmdb.open(sys.argv[1], readonly=False, map_size=os.stat(sys.argv[1] + "/data.mdb").st_size)
with env.begin() as txn:
    print("reading", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


async def fill_index(tier: object, records: int) -> None:
    """So many records of the size of a block's two, as small blocks would make them."""
    index = tier._store.index  # type: ignore[attr-defined]

    def write(txn: WriteTxn, start: int) -> None:
        for number in range(start, min(start + 4096, records)):
            txn._txn.put(b"z" + number.to_bytes(80, "big"), b"\0" * 330)

    for start in range(0, records, 4096):
        index.transact(lambda txn, start=start: write(txn, start))


async def test_a_store_opened_with_large_blocks_takes_its_capacity_of_small_ones(tmp_path: Path) -> None:
    """Without 262,144 puts: as many records as those would make are written into the index itself."""
    clock = VirtualClock()
    large = sample_namespace(2 * MIB)
    async with (
        opened(tmp_path / "g3", 512, block_bytes=2 * MIB, clock=clock, namespace=large),
        opened(tmp_path / "g3", 1 << 18, clock=clock) as tier,
    ):
        await fill_index(tier, 1 << 18)
        chain = chain_of(sample_namespace(BLOCK), 4)
        assert await put(tier, chain) == [Stored.STORED] * 4
        assert await tier.purge(scope_of("tenant"), Wall(clock.wall())) == 0


def reader_that_stands_still(path: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", READER, str(path / "index")]
    reader = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "reading\n"
    return reader


async def test_a_reader_that_stands_still_stops_puts_with_its_name_and_no_purge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "UNUSED_BYTES_MIN", MIB)
    clock, path = VirtualClock(), tmp_path / "g3"
    namespace = sample_namespace(BLOCK)
    tenant = chain_of(namespace, 4, scope=scope_of("tenant"))
    async with opened(path, 64, clock=clock) as tier:
        await put(tier, tenant)
        before = tier._store.index.disk_bytes()
        reader = reader_that_stands_still(path)
        try:
            results: list[Stored] = []
            for seed in range(1000):
                results += await put(tier, chain_of(namespace, 1, seed))
                if results[-1] is Stored.FULL:
                    break
            assert results[-1] is Stored.FULL
            assert tier._store.index.disk_bytes() - before < 4 * MIB, "a stopped reader made the index grow on"
            with pytest.raises(TierFull, match=f"process {reader.pid} stands still"):
                await tier.flush(clock.monotonic() + FAR_S)
            for _ in range(300):
                clock.advance(1.0)
                await tier.purge(scope_of("tenant"), clock.wall())
            assert await get(tier, tenant) == [Miss.PURGED] * 4 or await get(tier, tenant) == [Miss.ABSENT] * 4
        finally:
            reader.send_signal(signal.SIGCONT)
            reader.wait(10)
        assert await put(tier, chain_of(namespace, 4, 2000)) == [Stored.STORED] * 4


async def test_a_data_file_cut_behind_its_last_page_is_not_damaged(tmp_path: Path) -> None:
    path, chain = tmp_path / "g3", chain_of(sample_namespace(BLOCK), 8)
    async with opened(path) as tier:
        await put(tier, chain)
        last = tier._store.index._env.info()["last_pgno"]
    data = path / "index" / "data.mdb"
    with data.open("r+b") as file:
        file.truncate((last + 1) * 4096)
    async with opened(path) as tier:
        assert await get(tier, chain) == [True] * 8
    with data.open("r+b") as file:
        file.truncate(last * 4096)
    async with opened(path) as tier:
        assert await get(tier, chain) == [Miss.ABSENT] * 8


async def test_an_audit_holds_no_read_transaction_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its slices others write, and what they change is no error."""
    monkeypatch.setattr(index_module, "ROWS_PER_SLICE", 4)
    namespace = sample_namespace(BLOCK)
    async with opened(tmp_path / "g3", 32) as tier:
        await put(tier, chain_of(namespace, 32))
        index = tier._store.index
        oldest: list[int] = []
        slices, written = index.slices, [0]

        def write_between(prefix: bytes, look: object) -> set[int]:
            def then_write(txn: object, some: list[tuple[bytes, bytes]]) -> None:
                look(txn, some)  # type: ignore[operator]
                oldest.append(len(some))

            found = slices(prefix, then_write)
            if prefix == BLOCKS and written[0] < 6:
                written[0] += 1
                with index.reading() as txn:
                    name, _raw = next(index.layout.entries(txn))
                index.transact(lambda txn: txn.drop(name))
            return found

        monkeypatch.setattr(index, "slices", write_between)
        index.check()
        assert max(oldest) == 4


async def test_an_audit_finds_a_lost_slot_while_others_write(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3", 8) as tier:
        await put(tier, chain_of(sample_namespace(BLOCK), 4))
        index = tier._store.index
        (key, _), *_ = index.rows(b"o")
        with index._env.begin(write=True) as txn:
            row = txn.get(key)
            txn.delete(key)
        with pytest.raises(AssertionError, match="no row in the order"):
            index.check()
        with index._env.begin(write=True) as txn:
            txn.put(key, row)
