"""Numbers by block key, for a million blocks: one mapping in 256 parts, by the last byte of the key."""

from __future__ import annotations

from kvtier.identity.keys import KEY_PARTS, BlockKey


class KeyParts:
    """`dicts[key[-1]]` has a key's number. The garbage collector does not enter a dictionary of bytes and numbers, and
    none of these is large when it grows: one of a million entries stops its owner for 30 ms, a part of it for 0.1.

    A dictionary whose entries come and go takes the place of three times as many. So whoever adds says so, and the
    parts are made anew in turn: 37 bytes per key in place of 75. Of a million keys one call in a thousand keys takes
    half a millisecond for that, since it touches 4,000 keys all over the memory; the next one drops the old part, which
    takes as long again.
    """

    __slots__ = ("_added", "_enough", "_old", "_turn", "dicts")

    def __init__(self) -> None:
        self.dicts: list[dict[BlockKey, int]] = [{} for _ in range(KEY_PARTS)]
        self._turn = self._added = 0
        self._enough = 16
        self._old: dict[BlockKey, int] | None = None

    def added(self, keys: int) -> None:
        """So many keys were added. Replaces a part now and then."""
        self._added += keys
        if self._old is not None:
            self._old = None
        elif self._added >= self._enough:
            self._old = self.dicts[self._turn]
            part = self.dicts[self._turn] = dict(self._old)
            self._turn, self._added = (self._turn + 1) % KEY_PARTS, 0
            self._enough = max(16, len(part) // 4)
