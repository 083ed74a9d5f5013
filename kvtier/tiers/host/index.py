"""Which slot has which block: one mapping in 256 parts, so that no part is large when it grows."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from itertools import chain
from typing import TYPE_CHECKING

from kvtier.identity.keys import KEY_PARTS, BlockKey
from kvtier.tiers.host.slot import Slot


class SlotIndex(MutableMapping[BlockKey, Slot]):
    """Slots by key. A dictionary of a million entries stops its owner for 30 ms when it grows, a part of it for 0.1.

    `parts[key[-1]]` has a key. For loops over many keys; else use the verbs.
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[dict[BlockKey, Slot]] = [{} for _ in range(KEY_PARTS)]

    def __getitem__(self, key: BlockKey) -> Slot:
        return self.parts[key[-1]][key]

    def __setitem__(self, key: BlockKey, slot: Slot) -> None:
        self.parts[key[-1]][key] = slot

    def __delitem__(self, key: BlockKey) -> None:
        del self.parts[key[-1]][key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self.parts[key[-1]]

    def __iter__(self) -> Iterator[BlockKey]:
        return chain.from_iterable(self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    if not TYPE_CHECKING:  # what the mixin does goes through an exception

        def get(self, key, default=None):
            return self.parts[key[-1]].get(key, default)

        def pop(self, key, default=None):
            return self.parts[key[-1]].pop(key, default)
