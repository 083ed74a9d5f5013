"""Confirmed blocks that no lower tier has yet: one list, in order of confirmation.

Like the flush list of a database: a step first cleans the *eviction horizon*, the slots handed out next, then the
blocks that have been dirty for too long.

A tier below holds a block only together with its ancestors. So a block is never picked without its dirty ancestors,
and they come first: a byte budget that runs out cuts tails off, not heads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvtier.identity.keys import BlockKey
from kvtier.times import Mono


class Dirty(NamedTuple):
    """A confirmed block in `slot`, at `depth` of its `chain`, waiting since `since`.

    `chain` is the sequence given at confirmation, not a copy: the identity of the object `key` says later whether the
    slot still holds this block. `token` says so for an owner with names of its own.
    """

    slot: int
    chain: Sequence[BlockKey]
    depth: int
    since: Mono
    token: object = None

    @property
    def key(self) -> BlockKey:
        """The block's name."""
        return self.chain[self.depth]


class DirtyList:
    """The dirty blocks of one pool. Pure state, not thread-safe, never blocks.

    A block is named by its key and by its slot; both are unique. Times must not decrease
    from one `add` to the next.
    """

    __slots__ = ("_by_key", "_by_slot")

    def __init__(self) -> None:
        self._by_key: OrderedDict[BlockKey, Dirty] = OrderedDict()
        self._by_slot: dict[int, BlockKey] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Dirty]:
        return iter(self._by_key.values())

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def at(self, slot: int) -> bool:
        """Whether the block in `slot` is dirty."""
        return slot in self._by_slot

    def get(self, key: BlockKey) -> Dirty | None:
        """The entry of a dirty block."""
        return self._by_key.get(key)

    def add(self, slot: int, chain: Sequence[BlockKey], depth: int, mono_s: Mono, token: object = None) -> None:
        """Append a block; one that is dirty already keeps its place and its age."""
        key = chain[depth]
        if key not in self._by_key:
            self._by_key[key] = Dirty(slot, chain, depth, mono_s, token)
            self._by_slot[slot] = key

    def discard(self, slots: Iterable[int]) -> list[BlockKey]:
        """Forget the blocks in `slots`, which were handed out or emptied. Returns those that were dirty."""
        gone = self._by_slot.keys() & slots
        keys = [self._by_slot.pop(slot) for slot in gone]
        for key in keys:
            del self._by_key[key]
        return keys

    def pick(self, horizon: Iterable[int], limit: int, aged_before: Mono) -> list[Dirty]:
        """Take up to `limit` blocks off the list: those in `horizon` in its order, then those dirty since
        `aged_before` or earlier, each preceded by its dirty ancestors. The caller owns them from now on and
        gives back with `add` what could not be copied."""
        picked: list[Dirty] = []
        by_slot = self._by_slot
        for slot in horizon:
            if len(picked) == limit or not by_slot:
                return picked
            if slot in by_slot:
                self._take(self._by_key[by_slot[slot]], limit, picked)
        while len(picked) < limit and self._by_key:
            oldest = next(iter(self._by_key.values()))
            if oldest.since > aged_before:
                break
            self._take(oldest, limit, picked)
        return picked

    def _take(self, leaf: Dirty, limit: int, picked: list[Dirty]) -> None:
        """Move `leaf` and the unbroken run of dirty ancestors above it to `picked`, head first."""
        by_key, chain, head = self._by_key, leaf.chain, leaf.depth
        while head and chain[head - 1] in by_key:
            head -= 1
        for depth in range(head, min(leaf.depth + 1, head + limit - len(picked))):
            dirty = by_key.pop(chain[depth])
            del self._by_slot[dirty.slot]
            picked.append(dirty)

    def check(self) -> None:
        """Assert that both names lead to the same blocks."""
        assert len(self._by_key) == len(self._by_slot)
        for key, dirty in self._by_key.items():
            assert dirty.key == key and self._by_slot[dirty.slot] == key, "the dirty list names a block twice"
