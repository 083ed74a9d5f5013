"""Bytes of a G3 store per scope, counted in LMDB write transactions.

    meta key, after the "m"     value
    "shares"                    empty: scopes are counted in this store
    "shares" ‖ scope (16)       u64: slot bytes that the scope's blocks occupy, in all namespaces
    "sharing"                   while counting goes on: the key in `order` before which the blocks are counted

Counting begins when a process first bounds scopes, and goes over the blocks there are in slices; from then on every
process that uses the store counts.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

from kvtier.identity.keys import KEY_BYTES, SCOPE_BYTES
from kvtier.tiers.disk.records import META, ORDER, SLOT_ALIGN, order_parts, rows

SHARES_KEY, SHARING_KEY = META + b"shares", META + b"sharing"
ROWS_PER_TXN, SCOPES_PER_TXN = 8192, 2048
"""Blocks, and scopes, that are counted in one transaction."""
_BYTES = struct.Struct("<Q")


def scope_in(name: bytes) -> bytes:
    """The scope in a block's name, full or as written. Pure."""
    return name[-KEY_BYTES : SCOPE_BYTES - KEY_BYTES]


class Shares:
    """Bytes per scope, as this transaction leaves them. `save` must be called before the commit."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn
        self.counted = txn.get(SHARES_KEY) is not None
        """Whether the counts are of all blocks."""
        self._until: bytes = b"\xff" if self.counted else txn.get(SHARING_KEY, default=b"")
        self._looked = False
        self._bytes: Counter[bytes] = Counter()  # of the scopes looked at

    def count_on(self) -> bool:
        """Count some more of the blocks there are, once in a transaction. Whether all are counted."""
        if self.counted or self._looked:
            return self.counted
        self._looked = self.counted = True
        for seen, (key, name) in enumerate(rows(self._txn, ORDER, self._until)):
            if seen == ROWS_PER_TXN or len(self._bytes) >= SCOPES_PER_TXN:
                self._until, self.counted = key, False
                return False
            scope = scope_in(name)
            self._bytes[scope] = self.of(scope) + order_parts(key)[0] * SLOT_ALIGN
        self._until = b"\xff"
        return True

    def of(self, scope: bytes) -> int:
        """Bytes that the scope's blocks occupy."""
        if scope not in self._bytes:
            raw = self._txn.get(SHARES_KEY + scope)
            self._bytes[scope] = 0 if raw is None else _BYTES.unpack(raw)[0]
        return self._bytes[scope]

    def placed(self, name: bytes, key: bytes) -> None:
        """The block has this key in `order` now."""
        self._change(name, key, 1)

    def removed(self, name: bytes, key: bytes) -> None:
        """The block has this key no more."""
        self._change(name, key, -1)

    def _change(self, name: bytes, key: bytes, sign: int) -> None:
        if key < self._until:
            scope = scope_in(name)
            self._bytes[scope] = max(0, self.of(scope) + sign * order_parts(key)[0] * SLOT_ALIGN)

    def save(self) -> None:
        """Write the counts."""
        if self._looked:
            self._txn.delete(SHARING_KEY)
            self._txn.put(*((SHARES_KEY, b"") if self.counted else (SHARING_KEY, self._until)))
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
