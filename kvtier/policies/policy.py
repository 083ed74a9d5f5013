"""Which block is evicted when another needs its place.

A policy orders resident blocks of one tier and may refuse a newcomer. It knows keys, depths and times; it
never touches bytes. All verbs are called under the owner's lock, must be O(1) amortised and never block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from kvtier.errors import ConfigError
from kvtier.identity.keys import BlockKey
from kvtier.policies.gapduel import GapDuel
from kvtier.policies.lru import LRU
from kvtier.times import Mono


class Policy(Protocol):
    """The order in which blocks leave a tier.

    The owner reports every reference, insertion and removal; the policy chooses victims. A chain is referenced
    first and its missing blocks are inserted afterwards, head first, at once or while other requests go on: a block
    enters at the rank of its last reference, not at that of its arrival. Residents stay prefix-closed as far as the
    owner lets them: children leave before their parents. Blocks that must stay for long (guarantees, named pins) are
    better removed from the policy meanwhile than declared not movable.
    """

    def reference(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None:
        """A request named `chain` at `mono_s`, and its first `resident` blocks are here.

        Renews those, last block coldest, so that a leaf leaves before its parent. A chain names each block once.
        """

    def chain_stored(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None:
        """All of `chain` that is coming has been inserted. Counts as a reference only if it was not named before:
        a request that looks its chain up and stores it afterwards has referenced it once, not twice.
        """

    def insert(self, key: BlockKey) -> None:
        """`key` has become resident. One never referenced counts as referenced now, alone."""

    def remove(self, key: BlockKey) -> None:
        """`key` is no longer resident. Unknown keys are ignored."""

    def victim(self, newcomer: BlockKey | None, movable: Callable[[BlockKey], bool]) -> BlockKey | None:
        """The resident to evict for `newcomer`, among those that are `movable`; None: keep all, refuse it.

        After a refusal its descendants are to be refused too. `newcomer` None: a place is needed in any case,
        and the coldest is chosen. The owner calls `remove` if it does evict.
        """

    def train(self) -> None:
        """Do the work that no request has to wait for. Called now and then, after requests were answered."""

    def check(self, resident: set[BlockKey]) -> None:
        """Assert that the policy orders exactly these blocks."""


POLICIES: Mapping[str, Callable[[int], Policy]] = MappingProxyType({"auto": GapDuel, "gapduel": GapDuel, "lru": LRU})
"""By the name in the configuration; each is made for a capacity in blocks."""


def make_policy(
    name: str, capacity: int, *, refuses: bool = False, among: Mapping[str, Callable[[int], Policy]] = POLICIES
) -> Policy:
    """The policy called `name` for a tier of `capacity` blocks. Raises ConfigError that lists what exists.

    Without `refuses`, GapDuel admits at the eviction end the blocks that it would refuse, so that they pass through
    the tier to deeper ones; the hits are the same, the writes are not. Other policies refuse only requests that are
    longer than the tier.
    """
    if name not in among:
        raise ConfigError(f"policy {name!r} is not one of {', '.join(sorted(among))}")
    return GapDuel(capacity, refuses=refuses) if among[name] is GapDuel else among[name](capacity)
