"""The meta pages of an LMDB data file, read before LMDB maps it: a page that the file lacks would be SIGBUS."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

from kvtier.tiers.disk.faults import Unusable

_PAGE_HEADER_BYTES = 16
_META = struct.Struct("<IIQQ48s48sQQ")
_META_MAGIC = 0xBEEFC0DE
_META_VERSION = 1


def check_length(data: Path) -> None:
    """Raise Unusable unless the file has all pages that its meta pages speak of. Whatever lies behind them is unused.

    The layout of LMDB's meta pages (mdb.c, MDB_meta, format version 1): after a page header of 16 bytes, magic,
    version, address, map size, two database records of 48 bytes whose first field is the page size, last page
    number, transaction id. The younger of the two pages counts.
    """
    try:
        if not stat.S_ISREG(data.stat().st_mode):
            raise Unusable("its data file is not a regular file")
        with data.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            head = file.read(_PAGE_HEADER_BYTES + _META.size)
            first = _parse_meta(head)
            file.seek(first[1])
            second = _parse_meta(file.read(_PAGE_HEADER_BYTES + _META.size))
    except (FileNotFoundError, NotADirectoryError):
        raise Unusable("it has no data file") from None
    _txn, page_bytes, last_page = max(first, second)
    needed = (last_page + 1) * page_bytes
    if length < needed:
        raise Unusable(f"its data file has {length} bytes where {needed} were written")


def _parse_meta(raw: bytes) -> tuple[int, int, int]:
    if len(raw) < _PAGE_HEADER_BYTES + _META.size:
        raise Unusable("its data file is shorter than its meta pages")
    magic, version, _address, _map, free, _main, last_page, txn = _META.unpack_from(raw, _PAGE_HEADER_BYTES)
    page_bytes = int.from_bytes(free[:4], "little")
    if magic != _META_MAGIC or version & 0xFFFF != _META_VERSION:
        raise Unusable("its data file is not an LMDB file of version 1")
    if page_bytes not in (4096, 8192, 16384, 32768, 65536):
        raise Unusable(f"its meta page claims pages of {page_bytes} bytes")
    return txn, page_bytes, last_page
