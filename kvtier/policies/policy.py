"""Which block is evicted when another needs its place.

A policy orders resident blocks of one tier and may refuse a newcomer. It knows keys, depths and times; it
never touches bytes. All verbs are called under the owner's lock, must be O(1) amortised and never block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from kvtier.errors import ConfigError
from kvtier.identity.keys import BlockKey, Scope
from kvtier.policies.gapduel import GapDuel
from kvtier.policies.lru import LRU
from kvtier.retention.terms import PRIORITY_MAX
from kvtier.times import Mono


class Policy(Protocol):
    """The order in which blocks leave a tier.

    The owner reports every reference, insertion and removal; the policy chooses victims. A chain is referenced
    first and its missing blocks are inserted afterwards, head first, at once or while other requests go on: a block
    enters at the rank of its last reference, not at that of its arrival. Residents stay prefix-closed as far as the
    owner lets them: children leave before their parents. Blocks that must stay for long (guarantees, named pins) are
    better removed from the policy meanwhile than declared not movable.
    """

    def attach(self, priority_of: Callable[[BlockKey], int], *, scoped: bool) -> None:
        """The owner's, before any other verb: the priority of a resident block, PRIORITY unless `regrade` was called;
        and whether it will ask for victims of one scope."""

    def reference(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None:
        """A request named `chain` at `mono_s`, and its first `resident` blocks are here.

        Renews those, last block coldest, so that a leaf leaves before its parent. A chain names each block once.
        """

    def reference_steps(
        self, chain: Sequence[BlockKey], resident: int, mono_s: Mono, *, stored: bool = False
    ) -> Iterator[None]:
        """`reference`, or with `stored` `chain_stored`, in steps of a millisecond at most, however long the chain is.
        Between two of them the owner may give its lock to others, and any verb may be called."""

    def chain_stored(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None:
        """All of `chain` that is coming has been inserted. Counts as a reference only if it was not named before:
        a request that looks its chain up and stores it afterwards has referenced it once, not twice.
        """

    def insert(self, key: BlockKey, depth: int = 0) -> None:
        """`key` has become resident. One never referenced counts as referenced now, alone. `depth`: of the block in its
        chain; a wrong one costs a search."""

    def insert_all(self, keys: Sequence[BlockKey], depths: Sequence[int]) -> None:
        """`insert` for several, in this order."""

    def remove(self, key: BlockKey, depth: int = 0, *, returns: bool = False) -> None:
        """`key` is no longer resident. Unknown keys are ignored. `depth`: as for `insert`. With `returns` it is out of
        the order for a while: its name is kept, and `insert` brings it back to its rank."""

    def regrade(self, key: BlockKey) -> None:
        """The priority of `key` is not PRIORITY, or not any more what it was."""

    def suspend(self, key: BlockKey) -> None:
        """`key`, which `movable` has refused, will be refused until `resume`: it need not be asked for again."""

    def resume(self, key: BlockKey) -> None:
        """Undo `suspend`. Idempotent; unknown keys are ignored."""

    def victim(
        self,
        newcomer: BlockKey | None,
        movable: Callable[[BlockKey], bool],
        *,
        depth: int = 0,
        scope: Scope | None = None,
        priority_max: int = PRIORITY_MAX,
    ) -> BlockKey | None:
        """The resident to evict for `newcomer`, among those that are `movable`; None: keep all, refuse it.

        After a refusal its descendants are to be refused too. `newcomer` None: a place is needed in any case,
        and the coldest is chosen. The owner calls `remove` if it does evict. `depth`: the newcomer's in its chain.
        `movable` refuses blocks of other scopes than `scope` and, mostly, those above `priority_max`: a policy that
        keeps an order for each finds a victim whatever lies before it.
        """

    def evict(
        self,
        newcomers: Sequence[BlockKey | None],
        movable: Callable[[BlockKey], bool],
        *,
        depth: int = 0,
        scope: Scope | None = None,
        priority_max: int = PRIORITY_MAX,
    ) -> list[BlockKey]:
        """`victim` and `remove` for each of the leading `newcomers`, which lie at `depth` and below in one chain, up to
        the first that is refused; or for fewer of them, at least one. `movable` has allowed each that it returns."""

    def resize(self, capacity: int) -> None:
        """The owner holds so many blocks at most from now on, no more than the policy was made for: what it learns is
        for these. `train` does the work."""

    def train(self) -> None:
        """Do the work that no request has to wait for. Called now and then, after requests were answered."""

    def train_steps(self) -> Iterator[None]:
        """`train` in steps of a millisecond at most, as `reference_steps`. What was not done the next call does."""

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
