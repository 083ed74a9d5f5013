"""How an index writes names and entries: short, each namespace told from every other; whole in earlier formats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvtier.encryption import EncryptionHeader
from kvtier.errors import CorruptError
from kvtier.retention.lifetime import Lifetime, Stamp
from kvtier.retention.terms import Depth
from kvtier.tiers.disk.allocator import Geometry
from kvtier.tiers.disk.layout import Layout
from kvtier.tiers.disk.records import (
    BLOCKS,
    ENCRYPTED_FORMAT,
    FIRST_FORMAT,
    NAMESPACE_KEY,
    SHORT_FORMAT,
    SLOT_ALIGN,
    Counters,
    Entry,
    NewBlock,
    is_encrypted,
    key_id_in,
)
from kvtier.tiers.protocol import Stored
from kvtier.times import Wall
from tests.tiers.disk.support.classes import LIFE, NOW, ClassStore

NAMESPACE = bytes(range(32))
NAME = NAMESPACE + bytes(range(100, 116)) + bytes(range(200, 232))


def test_a_new_index_writes_a_few_bytes_of_the_namespace() -> None:
    assert Layout(SHORT_FORMAT).key(NAME) == BLOCKS + NAME[:6] + NAME[32:]
    assert Layout(SHORT_FORMAT).key(NAME[:40]) == BLOCKS + NAME[:6] + NAME[32:40]
    for known in (FIRST_FORMAT, ENCRYPTED_FORMAT):
        assert Layout(known).key(NAME) == BLOCKS + NAME


def test_earlier_releases_get_as_far_as_the_format(tmp_path: Path) -> None:
    """They take an index without these records for damaged, and make a new one in its place."""
    with _store(tmp_path, 8) as store, store.index.reading() as txn:
        assert int.from_bytes(txn.get(b"mformat"), "little") == SHORT_FORMAT
        assert len(txn.get(b"muuid")) == 16
        assert Counters.decode(txn.get(b"mcounters")) == Counters()
        assert Geometry.decode(txn.get(b"mgeometry")).capacity == 8 * SLOT_ALIGN


def test_stamps_that_are_not_there_take_no_bytes() -> None:
    """In a new index; earlier releases read padded ones, and so does this one."""
    stamps = tuple(Stamp(Wall(NOW + number), 60.0 + number, None, Depth.G3) for number in range(4))
    for count in range(1, 5):
        entry = Entry(7, 1, 2, SLOT_ALIGN, 3, 9, bytes(range(16)), Lifetime(NOW, stamps[:count]))
        short, padded = (Layout(known).encode(NAME, entry) for known in (SHORT_FORMAT, FIRST_FORMAT))
        assert Entry.decode(NAME, short) == Entry.decode(NAME, padded) == entry
        assert (len(short), len(padded)) == (85 + 17 * count, 153)
        assert not is_encrypted(short) and not is_encrypted(padded) and not is_encrypted(short[:20])
        header = EncryptionHeader(b"k" * 8, b"c" * 16, b"s" * 16, (b"t" * 16, b"u" * 16))
        for known in (SHORT_FORMAT, FIRST_FORMAT):
            raw = Layout(known).encode(NAME, replace(entry, encryption=header))
            assert is_encrypted(raw) and key_id_in(raw) == b"k" * 8
            assert Entry.decode(NAME, raw).encryption == header


def test_names_come_back_whole_and_in_their_order(tmp_path: Path) -> None:
    rng = Random(1)
    names = [rng.randbytes(32) + bytes(8) + rng.randbytes(40) for _ in range(4)]
    names += [name[:32] + rng.randbytes(48) for name in names for _ in range(4)]
    with _store(tmp_path, 32) as store:
        store.transact(lambda txn: [put(txn, name) for name in names])
        with store.index.reading() as txn:
            found = store.index.layout
            assert [name for name, _ in found.entries(txn)] == sorted(names)
            assert {name for _, name in found.ordered(txn)} == set(names)
            for prefix in (names[0][:32], names[1][:40]):
                assert [name for name, _ in found.entries(txn, prefix)] == sorted(
                    name for name in names if name.startswith(prefix)
                )
            third = sorted(names)[2]
            assert next(found.entries(txn, start=third))[0] == third
        store.index.check()


def test_a_namespace_that_cannot_be_told_from_another_is_refused(tmp_path: Path) -> None:
    """One in 2^48. Its blocks are misses, and the other's stay."""
    twin = NAME[:6] + bytes(26) + NAME[32:]
    with _store(tmp_path, 8) as store:
        assert store.transact(lambda txn: put(txn, NAME)) is Stored.STORED
        store.transact(lambda txn: txn.register(twin[:32], b"{}"))
        assert store.transact(lambda txn: put(txn, twin[:-1] + b"x")) is Stored.REFUSED
        assert store.transact(lambda txn: put(txn, NAME[:-1] + b"y")) is Stored.STORED
        store.index.layout = Layout(SHORT_FORMAT)  # of a process that comes later
        store.index.check()
        with store.index.reading() as txn:
            assert {name for _, name in store.index.layout.ordered(txn)} == {NAME, NAME[:-1] + b"y"}
        assert store.index.usage()[0] == 2


def test_a_block_without_its_namespaces_record_is_damage(tmp_path: Path) -> None:
    with _store(tmp_path, 8) as store:
        store.transact(lambda txn: put(txn, NAME))
        store.transact(lambda txn: txn._txn.delete(NAMESPACE_KEY + NAMESPACE))
        index = store.index
        index.layout = Layout(SHORT_FORMAT)
        with index.reading() as txn, pytest.raises(CorruptError, match="has no record"):
            list(index.layout.ordered(txn))
        with pytest.raises(AssertionError, match="has no record"):
            index.check()


def test_an_index_takes_no_more_of_the_disk_than_documented_once_its_blocks_were_replaced(tmp_path: Path) -> None:
    """550 bytes per block in used pages: names are digests, so that entries come in no order."""
    blocks, rng = 1000, Random(2)
    with _store(tmp_path, blocks) as store:
        for _ in range(3 * blocks // 100):
            names = [NAMESPACE + bytes(16) + rng.randbytes(32) for _ in range(100)]
            assert store.transact(lambda txn, names=names: {put(txn, name) for name in names}) == {Stored.STORED}
        assert store.index.usage()[0] == blocks
        assert store.index.used_bytes() / blocks < 550


@contextmanager
def _store(path: Path, blocks: int) -> Iterator[ClassStore]:
    store = ClassStore(path / "index", 1, blocks * SLOT_ALIGN)
    yield store
    store.index.close()


def put(txn: object, name: bytes) -> Stored:
    block = NewBlock(name, SLOT_ALIGN, LIFE, digest=bytes(16))
    reservation = txn.reserve(block, NOW)  # type: ignore[attr-defined]
    return txn.publish(reservation, block, NOW)  # type: ignore[attr-defined,no-any-return]
