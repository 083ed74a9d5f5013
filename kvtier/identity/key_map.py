"""Values by block key, for as many blocks as there are: a dictionary in 256 parts, by the last byte of the key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from kvtier.identity.keys import KEY_PARTS, BlockKey

V = TypeVar("V")


class KeyMap(MutableMapping[BlockKey, V]):
    """None of its parts is large when it grows: a dictionary of 100,000 stops every thread for 3 ms then. Takes 16 KB
    when it is empty. `list` of it is one step, as of a dictionary: no other thread runs in between."""

    __slots__ = ("_count", "_parts")

    def __init__(self) -> None:
        self._parts: list[dict[BlockKey, V]] = [{} for _ in range(KEY_PARTS)]
        self._count = 0

    def __getitem__(self, key: BlockKey) -> V:
        return self._parts[key[-1]][key]

    def __setitem__(self, key: BlockKey, value: V) -> None:
        part = self._parts[key[-1]]
        self._count -= len(part)
        part[key] = value
        self._count += len(part)

    def __delitem__(self, key: BlockKey) -> None:
        del self._parts[key[-1]][key]
        self._count -= 1

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self._parts[key[-1]]

    def __iter__(self) -> Iterator[BlockKey]:
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        return self._count

    def take(self, most: int) -> dict[BlockKey, V]:
        """Take out so many blocks, whichever these are, or all."""
        taken: dict[BlockKey, V] = {}
        for part in self._parts:
            while part and len(taken) < most:
                key, value = part.popitem()
                taken[key] = value
        self._count -= len(taken)
        return taken

    def set_all(self, keys: Iterable[BlockKey], value: V) -> None:
        """One value for several."""
        parts, added = self._parts, 0
        for key in keys:
            part = parts[key[-1]]
            added -= len(part)
            part[key] = value
            added += len(part)
        self._count += added

    def drop_all(self, keys: Iterable[BlockKey]) -> None:
        """Without these, as far as they are here."""
        for key in keys:
            if key in self:
                del self[key]

    if not TYPE_CHECKING:  # what the mixin does goes through an exception

        def get(self, key, default=None):
            return self._parts[key[-1]].get(key, default)

        def pop(self, key, *default):
            part = self._parts[key[-1]]
            self._count -= key in part
            return part.pop(key, *default)
