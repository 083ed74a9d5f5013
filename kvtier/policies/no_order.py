"""The policy of a tier that has closed: calls that were under way meet no block of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.terms import PRIORITY_MAX
from kvtier.times import Mono


class NoOrder:
    """A `Policy` that keeps nothing and offers no victim."""

    def attach(self, priority_of: Callable[[BlockKey], int], *, scoped: bool) -> None: ...

    def reference(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None: ...

    def reference_steps(
        self, chain: Sequence[BlockKey], resident: int, mono_s: Mono, *, stored: bool = False
    ) -> Iterator[None]:
        return iter(())

    def chain_stored(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None: ...

    def insert(self, key: BlockKey, depth: int = 0) -> None: ...

    def insert_all(self, keys: Sequence[BlockKey], depths: Sequence[int]) -> None: ...

    def remove(self, key: BlockKey, depth: int = 0, *, returns: bool = False) -> None: ...

    def regrade(self, key: BlockKey) -> None: ...

    def suspend(self, key: BlockKey) -> None: ...

    def resume(self, key: BlockKey) -> None: ...

    def victim(
        self,
        newcomer: BlockKey | None,
        movable: Callable[[BlockKey], bool],
        *,
        depth: int = 0,
        scope: Scope | None = None,
        priority_max: int = PRIORITY_MAX,
    ) -> BlockKey | None:
        return None

    def evict(
        self,
        newcomers: Sequence[BlockKey | None],
        movable: Callable[[BlockKey], bool],
        *,
        depth: int = 0,
        scope: Scope | None = None,
        priority_max: int = PRIORITY_MAX,
    ) -> list[BlockKey]:
        return []

    def resize(self, capacity: int) -> None: ...

    def train(self) -> None: ...

    def train_steps(self) -> Iterator[None]:
        return iter(())

    def check(self, resident: set[BlockKey]) -> None:
        assert not resident, "a closed tier holds blocks"
