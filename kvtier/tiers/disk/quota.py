"""Bytes of a G3 store per scope, counted in LMDB write transactions.

    meta key, after the "m"     value
    "shares"                    empty: scopes are counted in this store
    "shares" ‖ scope (16)       u64: slot bytes that the scope's blocks occupy, in all namespaces

Counting begins when a process first bounds scopes; from then on every process that uses the store counts.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

from kvtier.identity.keys import KEY_BYTES, SCOPE_BYTES
from kvtier.tiers.disk.records import META, ORDER, SLOT_ALIGN, order_parts, rows

SHARES_KEY = META + b"shares"
_BYTES = struct.Struct("<Q")


def scope_in(name: bytes) -> bytes:
    """The scope in a block's name, full or as written. Pure."""
    return name[-KEY_BYTES : SCOPE_BYTES - KEY_BYTES]


class Shares:
    """Bytes per scope, as this transaction leaves them. `save` must be called before the commit."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn
        self._counted = txn.get(SHARES_KEY) is not None
        self._bytes: Counter[bytes] = Counter()  # of the scopes looked at

    def begin(self) -> None:
        """Count the blocks there are, unless that was done: reads all of `order`, once in a store's life."""
        if self._counted:
            return
        for key, name in rows(self._txn, ORDER):
            self._bytes[scope_in(name)] += order_parts(key)[0] * SLOT_ALIGN
        self._counted = True

    def of(self, scope: bytes) -> int:
        """Bytes that the scope's blocks occupy."""
        if scope not in self._bytes:
            raw = self._txn.get(SHARES_KEY + scope)
            self._bytes[scope] = 0 if raw is None else _BYTES.unpack(raw)[0]
        return self._bytes[scope]

    def change(self, name: bytes, size: int) -> None:
        """A block of so many slot bytes was stored or, with a negative size, removed."""
        if self._counted:
            scope = scope_in(name)
            self._bytes[scope] = max(0, self.of(scope) + size)

    def save(self) -> None:
        """Write the counts."""
        if self._counted and self._bytes:
            self._txn.put(SHARES_KEY, b"")
        for scope, size in self._bytes.items():
            if size:
                self._txn.put(SHARES_KEY + scope, _BYTES.pack(size))
            else:
                self._txn.delete(SHARES_KEY + scope)


def shares_of(txn: Any) -> dict[bytes, int] | None:
    """Bytes by scope as counted; None if they are not counted."""
    if txn.get(SHARES_KEY) is None:
        return None
    return {key[len(SHARES_KEY) :]: _BYTES.unpack(raw)[0] for key, raw in rows(txn, SHARES_KEY) if key != SHARES_KEY}
