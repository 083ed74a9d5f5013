"""Index entries: golden bytes, and every flipped bit is noticed."""

from __future__ import annotations

import pytest

from kvtier.errors import CorruptError
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.disk.records import Entry
from tests.tiers.disk.support.store import BLOCK

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 1)
GOLDEN = (
    "000000c00dcecd410000000065cdcd4107000000000000000100000002000000001000000000000003000000090000000000"
    "0000000102030405060708090a0b0c0d0e0f0000000065cdcd41010000000065cdcd41805101000000000004000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000ed1500af0d"
    "a22a3c"
)


SHORT = GOLDEN[: 2 * 76] + "81" + GOLDEN[2 * 77 : 2 * 94]
"""Without stamps that are not there, and without the check."""


@pytest.mark.parametrize("short", [False, True])
def test_every_flipped_bit_of_an_index_entry_and_its_name_is_noticed(short: bool) -> None:
    name = NAMESPACE.digest + CHAIN[0]
    entry = Entry(7, 1, 2, BLOCK, 3, 9, bytes(range(16)), Lifetime.of(BUILTIN["24h"], 1e9))
    raw = entry.encode(name, short=short)
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
    assert entry.encode(bytes(range(80)), short=False).hex() == GOLDEN
    assert entry.encode(bytes(range(80)), short=True).hex()[:-16] == SHORT
