"""Which block leaves when another wants in.

A policy orders resident blocks of one tier and may refuse a newcomer. It knows keys, depths and times; it
never touches bytes. All verbs are called under the owner's lock, must be O(1) amortised and never block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.block import BlockKey


class Policy(Protocol):
    """The order in which blocks leave a tier.

    The owner tells it of every reference, insertion and removal; the policy answers with victims.
    Residents must stay prefix-closed as far as the owner lets it: children leave before their parents.
    """

    def reference(self, chain: Sequence[BlockKey], resident: int, now: float) -> None:
        """A request named `chain` at monotonic time `now`, and its first `resident` blocks are here.

        Renews those, last block coldest, so that a leaf leaves before its parent.
        """

    def insert(self, key: BlockKey) -> None:
        """`key` has become resident, coldest of what was inserted in this step."""

    def remove(self, key: BlockKey) -> None:
        """`key` is no longer resident. Unknown keys are ignored."""

    def victim(self, newcomer: BlockKey, movable: Callable[[BlockKey], bool]) -> BlockKey | None:
        """The resident to evict for `newcomer`, among those that are `movable`; None: keep all, refuse it.

        Changes nothing: the owner calls `remove` if it does evict.
        """

    def check(self, resident: set[BlockKey]) -> None:
        """Assert that the policy orders exactly these blocks."""


class LRU:
    """Least recently used, tail of a chain first: leaf-first without a tree.

    One ordered dict, coldest first. A reference moves a chain's blocks to the warm end from its tail to its
    head, so a parent is always warmer than its children.
    """

    def __init__(self) -> None:
        from collections import OrderedDict

        self._order: OrderedDict[BlockKey, None] = OrderedDict()

    def reference(self, chain: Sequence[BlockKey], resident: int, now: float) -> None:
        order, move = self._order, self._order.move_to_end
        for key in reversed(chain[:resident]):
            if key in order:
                move(key)

    def insert(self, key: BlockKey) -> None:
        self._order[key] = None

    def remove(self, key: BlockKey) -> None:
        self._order.pop(key, None)

    def victim(self, newcomer: BlockKey, movable: Callable[[BlockKey], bool]) -> BlockKey | None:
        for key in self._order:
            if movable(key):
                return key
        return None

    def check(self, resident: set[BlockKey]) -> None:
        assert set(self._order) == resident, "policy and tier disagree about what is resident"
