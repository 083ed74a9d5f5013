"""What depends on the format of an index: how names of blocks and entries are written, and where what each commit
changes lies.

Since SHORT_FORMAT a name is written with the first 6 bytes of its namespace's digest; the digest is found in the
namespace's record, which the first commit of a block makes. An entry has no bytes for stamps that are not there. So a
page holds more rows, and the tree is a level lower: a put changes fewer pages. Indexes of earlier formats have whole
names and padded entries, and stay as they are.

The two records that every commit changes lie between the end of `order`, where a put adds a row, and `reserved`: most
often in a page that the put changes anyway. In earlier formats they are with the other records of `meta`.

Full names sort as written ones do. Two namespaces with the same 6 bytes are one in 2^48: the second one's blocks are
refused. Should one be looked for, the entry's check, which covers the full name, fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtier.errors import CorruptError
from kvtier.identity.keys import NAMESPACE_BYTES
from kvtier.tiers.disk.records import BLOCKS, META, NAMESPACE_KEY, ORDER, PULSE, SHORT_FORMAT, Entry, number_key, rows

SHORT_BYTES = 6


class Layout:
    """Of one index. Thread-safe."""

    def __init__(self, index_format: int) -> None:
        self._short = index_format >= SHORT_FORMAT
        table = PULSE if self._short else META
        self.counters_key, self.budget_key = table + b"counters", table + b"budget"
        self._digests: dict[bytes, bytes] = {}  # by their first bytes; their records are never deleted

    def written(self, name: bytes) -> bytes:
        """A name, or a beginning of names from the namespace on, as it is written."""
        return name[:SHORT_BYTES] + name[NAMESPACE_BYTES:] if self._short else name

    def key(self, name: bytes) -> bytes:
        """Key of the block's entry; of a beginning of names, that of their keys."""
        return BLOCKS + self.written(name)

    def encode(self, name: bytes, entry: Entry) -> bytes:
        """The block's entry, for `Entry.decode`."""
        return entry.encode(name, short=self._short)

    def full(self, txn: Any, written: bytes) -> bytes:
        """The inverse of `written`, for a whole name. Raises CorruptError where the namespace has no record."""
        if not self._short:
            return written
        short = written[:SHORT_BYTES]
        if short not in self._digests:
            digest = _digest_in(txn, short)
            if digest is None:
                raise CorruptError(f"a block of the namespace {short.hex()}…, which has no record")
            self._digests[short] = digest
        return self._digests[short] + written[SHORT_BYTES:]

    def admit(self, txn: Any, namespace: bytes) -> bool:
        """See to it, in a write transaction, that names of the namespace can be read. Whether they can be told from
        another one's."""
        if not self._short:
            return True
        known = _digest_in(txn, namespace[:SHORT_BYTES])
        if known is None:
            txn.put(NAMESPACE_KEY + namespace, b"")
        return known is None or known == namespace

    def entries(self, txn: Any, prefix: bytes = b"", start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """(name, raw entry) of blocks whose names begin with `prefix`, from the name `start` on."""
        for key, raw in rows(txn, self.key(prefix), self.key(start)):
            yield self.full(txn, key[len(BLOCKS) :]), raw

    def ordered(self, txn: Any, slot_cls: int | None = None, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """(key, name) of the rows in `order`, of one class or of all, from the key `start` on."""
        prefix = ORDER if slot_cls is None else number_key(ORDER, slot_cls)
        for key, written in rows(txn, prefix, start):
            yield key, self.full(txn, written)


def _digest_in(txn: Any, short: bytes) -> bytes | None:
    key = next((key for key, _ in rows(txn, NAMESPACE_KEY + short)), None)
    return None if key is None else key[len(NAMESPACE_KEY) :]
