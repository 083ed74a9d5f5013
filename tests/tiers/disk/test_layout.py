"""How an index writes names and entries: short, each namespace told from every other; whole in earlier formats."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest
import xxhash

from kvtier.bench.tiers.class_store import LIFE, NOW, ClassStore
from kvtier.encryption import EncryptionHeader
from kvtier.errors import CorruptError
from kvtier.retention.lifetime import Lifetime, Stamp
from kvtier.retention.terms import Depth
from kvtier.tiers.disk import entries
from kvtier.tiers.disk.faults import Unusable
from kvtier.tiers.disk.geometry import Geometry
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.layout import Layout
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.disk.records import (
    BLOCKS,
    ENCRYPTED_FORMAT,
    FIRST_FORMAT,
    FORMAT_KEY,
    NAMESPACE_KEY,
    SHORT_FORMAT,
    SLOT_ALIGN,
    Counters,
    Entry,
    NewBlock,
    is_encrypted,
    key_id_in,
    order_key_in,
)
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Stored
from kvtier.times import Wall

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
            raw = Layout(known).encode(NAME, entry._replace(encryption=header))
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


def test_what_cannot_be_told_from_another_namespaces_block_leaves_that_alone(tmp_path: Path) -> None:
    """The same prompt in both: they differ in the digest alone, and in nothing that is written."""
    twin = NAME[:6] + bytes(26) + NAME[32:]
    with _store(tmp_path, 8) as store:
        store.transact(lambda txn: put(txn, NAME))
        ((raw, _),) = store.index.find([twin])
        assert raw is not None
        assert store.transact(lambda txn: put(txn, twin)) is Stored.REFUSED
        assert not store.transact(lambda txn: txn.delete_corrupt(twin, raw))
        assert not store.transact(lambda txn: txn.drop(twin))
        assert store.transact(lambda txn: txn.retain([twin], Wall(NOW + 9), None, NOW)) == [False]
        assert store.transact(lambda txn: txn.drop_range(b"", twin[:48], 8, lambda *_: True)) == (0, None)
        store.transact(lambda txn: txn.renew(twin, [NOW], 1))
        assert store.transact(lambda txn: txn.find(NAME)) is not None
        store.index.check()


def test_a_namespace_without_blocks_gives_way_to_one_that_is_written_alike(tmp_path: Path) -> None:
    """In every process that uses the store, whatever it has read before."""
    twin = NAME[:6] + bytes(26) + NAME[32:]
    with _store(tmp_path, 8) as store:
        store.transact(lambda txn: put(txn, NAME))
        with store.index.reading() as txn:
            assert [name for name, _ in store.index.layout.entries(txn)] == [NAME]
        other, store.index.layout = store.index.layout, Layout(SHORT_FORMAT)
        store.transact(lambda txn: txn.drop(NAME))
        assert store.transact(lambda txn: put(txn, twin)) is Stored.STORED
        assert store.transact(lambda txn: put(txn, NAME)) is Stored.REFUSED
        store.index.layout = other
        with store.index.reading() as txn:
            assert [name for name, _ in other.entries(txn)] == [name for _, name in other.ordered(txn)] == [twin]
        store.index.check()


@pytest.mark.parametrize("known", ["as read before", "not yet"])
def test_a_namespace_of_a_transaction_that_failed_is_not_remembered(tmp_path: Path, known: str) -> None:
    twin = NAME[:6] + bytes(26) + NAME[32:]

    def fail(txn: WriteTxn) -> None:
        put(txn, NAME)
        assert [name for _, name in store.index.layout.ordered(txn._txn)] == [NAME]
        raise RuntimeError

    with _store(tmp_path, 8) as store:
        with pytest.raises(RuntimeError):
            store.transact(fail)
        if known == "not yet":
            store.index.layout = Layout(SHORT_FORMAT)
        assert store.transact(lambda txn: put(txn, twin)) is Stored.STORED
        with store.index.reading() as txn:
            assert [name for _, name in store.index.layout.ordered(txn)] == [twin]


@pytest.mark.parametrize("at", [*range(0, 41, 5)])
def test_a_namespace_whose_record_is_damaged_gets_it_back(tmp_path: Path, at: int) -> None:
    """When the next engine opens the store: it has its blocks, and stores more."""
    key = NAMESPACE_KEY + NAMESPACE
    flipped = key[:at] + bytes([key[at] ^ 4]) + key[at + 1 :]
    with _store(tmp_path, 8) as store:
        store.transact(lambda txn: put(txn, NAME))
        store.transact(lambda txn: (txn._txn.delete(key), txn._txn.put(flipped, b"{}")))
        store.index.layout = Layout(SHORT_FORMAT)
        store.transact(lambda txn: txn.register(NAMESPACE, b"{}"))
        assert store.transact(lambda txn: txn.find(NAME)) is not None
        with store.index.reading() as txn:
            assert [name for name, _ in store.index.layout.entries(txn)] == [NAME]
            assert txn.get(key) == b"{}"
        assert store.transact(lambda txn: put(txn, NAME[:-1] + b"y")) is Stored.STORED
        store.index.check()


def test_a_block_without_its_namespaces_record_is_damage(tmp_path: Path) -> None:
    with _store(tmp_path, 8) as store:
        store.transact(lambda txn: put(txn, NAME))
        store.transact(lambda txn: txn._txn.delete(NAMESPACE_KEY + NAMESPACE))
        index = store.index
        index.layout = Layout(SHORT_FORMAT)
        with index.reading() as txn, pytest.raises(CorruptError, match="has no record"):
            index.layout.full(txn, index.layout.written(NAME))
        with pytest.raises(AssertionError, match="has no record"):
            index.check()


@pytest.mark.parametrize("damage", ["no record", "foreign record"])
def test_blocks_that_cannot_be_named_leave_like_others(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other namespaces stay, and every slot is used again. None costs a scan of the order."""
    monkeypatch.setattr(entries, "rows", None)
    other = bytes(80)
    with _store(tmp_path, 8) as store:
        store.transact(lambda txn: [put(txn, NAME[:-1] + bytes([number])) for number in range(6)])
        store.transact(lambda txn: [put(txn, other[:-1] + bytes([number])) for number in range(2)])
        store.transact(lambda txn: txn._txn.delete(NAMESPACE_KEY + NAMESPACE))
        if damage == "foreign record":
            store.transact(lambda txn: txn._txn.put(NAMESPACE_KEY + NAMESPACE[:31] + b"?", b""))
        store.index.layout = Layout(SHORT_FORMAT)
        later = store.transact(lambda txn: [put(txn, other[:-2] + bytes([1, number])) for number in range(3)])
        assert later == [Stored.STORED] * 3
        assert store.index.usage()[0] == 8

        def remove_rest(txn: WriteTxn) -> object:
            return txn.drop_range(b"", b"", 99, lambda _name, _entry: False)

        assert store.transact(remove_rest) == (3, None)
        assert store.index.usage()[0] == 5
        store.index.check()
        with store.index.reading() as txn:
            assert {name[:32] for _, name in store.index.layout.ordered(txn)} == {bytes(32)}


@pytest.mark.parametrize("at", [1, 7, 30, 54])
def test_an_entry_whose_name_is_damaged_leaves_with_its_slot(tmp_path: Path, at: int) -> None:
    with _store(tmp_path, 8) as store:
        store.transact(lambda txn: [put(txn, NAME[:-1] + bytes([number])) for number in range(3)])
        key = store.index.layout.key(NAME[:-1] + b"\1")
        flipped = key[:at] + bytes([key[at] ^ 16]) + key[at + 1 :]
        store.transact(lambda txn: (txn._txn.put(flipped, txn._txn.get(key)), txn._txn.delete(key)))
        with pytest.raises(AssertionError):
            store.index.check()
        assert store.transact(lambda txn: txn.drop_range(b"", b"", 9, lambda *_: False)) == (1, None)
        assert store.index.usage() == (2, 2 * SLOT_ALIGN)
        store.index.check()


def test_a_purge_looks_at_no_blocks_of_a_namespace_that_is_written_alike(tmp_path: Path) -> None:
    """Below the write lock: there may be a million."""
    looked = []
    with _store(tmp_path, 8) as store:
        store.transact(lambda txn: [put(txn, NAME[:-1] + bytes([number])) for number in range(4)])
        twin = NAME[:6] + bytes(26) + NAME[32:40]

        def purge(txn: WriteTxn) -> tuple[int, bytes | None]:
            full, names = store.index.layout.names(txn._txn), store.index.layout
            names.names = lambda _: lambda written: looked.append(written) or full(written)  # type: ignore[assignment,func-returns-value,method-assign]
            return txn.drop_range(twin, twin, 8, lambda *_: True)

        assert store.transact(purge) == (0, None)
        assert len(looked) == 1


def test_namespaces_that_are_written_alike_take_turns_in_one_transaction(tmp_path: Path) -> None:
    twin = NAME[:6] + bytes(26) + NAME[32:]

    def turns(txn: WriteTxn) -> list[Stored]:
        first = put(txn, NAME)
        txn.drop(NAME)
        return [first, put(txn, twin), put(txn, NAME)]

    with _store(tmp_path, 8) as store:
        assert store.transact(turns) == [Stored.STORED, Stored.STORED, Stored.REFUSED]
        store.index.check()


def test_a_format_record_that_contradicts_the_others_is_damage(tmp_path: Path) -> None:
    """One flipped bit makes 2 or 1 of 3: the blocks would lie where nobody looks, their slots would be used twice."""
    for said in (FIRST_FORMAT, ENCRYPTED_FORMAT):
        path = tmp_path / str(said)
        path.mkdir()
        with _store(path, 8) as store:
            store.transact(lambda txn: put(txn, NAME))
            store.transact(lambda txn, said=said: txn._txn.put(FORMAT_KEY, said.to_bytes(4, "little")))
        with pytest.raises(Unusable, match="format record"):
            Index.attach(path / "index", Owner.current(), alone=True)


def test_an_entry_whose_check_agrees_and_whose_fields_lie_is_damage_and_nothing_else() -> None:
    """Cut short, or made longer, with a count of stamps that is not theirs: the only error is CorruptError."""
    rng = Random(3)
    stamps = tuple(Stamp(Wall(NOW + number), 60.0, 90.0, Depth.G3) for number in range(2))
    header = EncryptionHeader(b"k" * 8, b"c" * 16, b"s" * 16, (b"t" * 16,))
    entry = Entry(7, 1, 2, SLOT_ALIGN, 3, 9, bytes(range(16)), Lifetime(NOW, stamps), header)
    decoded = 0
    for known in (SHORT_FORMAT, FIRST_FORMAT):
        raw = Layout(known).encode(NAME, entry)
        for _ in range(3000):
            body = bytearray(raw[:-8])
            if rng.random() < 0.1:  # the mark, and what ends
                struct.pack_into("<dd", body, 0, NOW, rng.choice([float("inf"), float("nan"), -1.0, 2.0**60, 2.0**42]))
            for _ in range(rng.randrange(1, 4)):
                body[rng.randrange(len(body))] = rng.choice([0, 1, 4, 5, 0x7F, 0x80, 0x81, 0x84, 0xFF])
            del body[rng.randrange(60, len(body) + 60) :]
            body += rng.randbytes(rng.choice([0, 0, 1, 16, 17]))
            lying = bytes(body) + xxhash.xxh3_64_intdigest(NAME + body).to_bytes(8, "little")
            is_encrypted(lying)
            order_key_in(lying)
            with suppress(CorruptError):
                Entry.decode(NAME, lying).order_key()
                decoded += 1
    assert decoded > 100


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
    if isinstance(reservation, Stored):
        return reservation
    return txn.publish(reservation, block, NOW)  # type: ignore[attr-defined,no-any-return]
