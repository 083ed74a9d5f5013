"""What depends on the format of an index: how names of blocks and entries are written, and where what each commit
changes lies.

Since SHORT_FORMAT a name is written with the first 6 bytes of its namespace's digest; the digest is found in the
namespace's record, which the first commit of a block makes. An entry has no bytes for stamps that are not there. So a
page holds more rows, and the tree is a level lower: a put changes fewer pages. Indexes of earlier formats have whole
names and padded entries, and stay as they are.

The two records that every commit changes lie between the end of `order`, where a put adds a row, and `reserved`: most
often in a page that the put changes anyway. In earlier formats they are with the other records of `meta`.

Full names sort as written ones do. Two namespaces with the same 6 bytes are one in 2^48: while blocks of one are here,
the other's are refused, and looking for one of those changes nothing: the entry's check, which covers the full name,
tells whose it is. A record that no entry's check agrees with, since it is damaged or its blocks are gone, gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from kvtier.errors import CorruptError
from kvtier.identity.keys import NAMESPACE_BYTES
from kvtier.tiers.disk.records import BLOCKS, META, NAMESPACE_KEY, ORDER, PULSE, SHORT_FORMAT, Entry, number_key, rows

SHORT_BYTES = 6
VOUCHERS_MAX = 64
"""Entries that are looked at for one of a record's namespace."""


class Layout:
    """Of one index. Thread-safe."""

    def __init__(self, index_format: int) -> None:
        self._short = index_format >= SHORT_FORMAT
        table = PULSE if self._short else META
        self.counters_key, self.budget_key = table + b"counters", table + b"budget"
        self._digests: dict[bytes, bytes] = {}  # by their first bytes, as last read

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
        digest = self._digest(txn, written[:SHORT_BYTES])
        if digest is None:
            raise CorruptError(f"a block of the namespace {written[:SHORT_BYTES].hex()}…, which has no record")
        return digest + written[SHORT_BYTES:]

    def admit(self, txn: Any, namespace: bytes) -> bool:
        """See to it, in a write transaction, that names of the namespace can be read. Whether they can be told from
        another one's."""
        if not self._short:
            return True
        while (known := _digest_in(txn, namespace[:SHORT_BYTES])) not in (None, namespace):
            if self._has_blocks(txn, known):
                return False
            txn.delete(NAMESPACE_KEY + known)
        if known is None:
            txn.put(NAMESPACE_KEY + namespace, b"")
        return True

    def is_anothers(self, txn: Any, name: bytes, raw: bytes) -> bool:
        """Whether the entry that lies at the name's place is whole, and of a block of another namespace."""
        digest = self._digest(txn, name[:SHORT_BYTES]) if self._short else None
        if digest is None or digest == name[:NAMESPACE_BYTES]:
            return False
        return _agrees(digest + name[NAMESPACE_BYTES:], raw)

    def entries(self, txn: Any, prefix: bytes = b"", start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """(name, raw entry) of blocks whose names begin with `prefix`, from the name `start` on; names as in
        `ordered`."""
        full = self.names(txn)
        for key, raw in rows(txn, self.key(prefix), self.key(start)):
            name = full(key[len(BLOCKS) :])
            if not name.startswith(prefix):  # all of these are another namespace's
                return
            yield name, raw

    def ordered(self, txn: Any, slot_cls: int | None = None, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """(key, name) of the rows in `order`, of one class or of all, from the key `start` on.

        Where a namespace has no record, zeros stand for the rest of its digest: such a name leads to the entry, whose
        check does not agree with it.
        """
        full = self.names(txn)
        prefix = ORDER if slot_cls is None else number_key(ORDER, slot_cls)
        for key, written in rows(txn, prefix, start):
            yield key, full(written)

    def names(self, txn: Any) -> Callable[[bytes], bytes]:
        """`full` for many names of one transaction, with zeros where that raises."""
        if not self._short:
            return lambda written: written
        known: dict[bytes, bytes] = {}

        def full(written: bytes) -> bytes:
            short = written[:SHORT_BYTES]
            if short not in known:
                known[short] = self._digest(txn, short) or short.ljust(NAMESPACE_BYTES, b"\0")
            return known[short] + written[SHORT_BYTES:]

        return full

    def _digest(self, txn: Any, short: bytes) -> bytes | None:
        """The namespace that begins so, by its record. One that is known still needs its record: it may have given way
        in another process, or have been of a transaction that failed."""
        digest = self._digests.get(short)
        if digest is None or txn.get(NAMESPACE_KEY + digest) is None:
            digest = _digest_in(txn, short)
            if digest is not None:
                self._digests[short] = digest
        return digest

    def _has_blocks(self, txn: Any, namespace: bytes) -> bool:
        """Whether a block of the namespace is among the first that are written as its blocks are."""
        some = islice(rows(txn, self.key(namespace)), VOUCHERS_MAX)
        return any(_agrees(namespace + key[len(BLOCKS) + SHORT_BYTES :], raw) for key, raw in some)


def _digest_in(txn: Any, short: bytes) -> bytes | None:
    digests = (key[len(NAMESPACE_KEY) :] for key, _ in rows(txn, NAMESPACE_KEY + short))
    return next((digest for digest in digests if len(digest) == NAMESPACE_BYTES), None)


def _agrees(name: bytes, raw: bytes) -> bool:
    """Whether the entry is of the block of this name."""
    try:
        Entry.decode(name, raw)
    except CorruptError:
        return False
    return True
