"""The right to start reading found blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

from kvtier.tiers.host.pins import Hold, Holds
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.protocol import Miss


@dataclass(frozen=True, slots=True)
class Promotion:
    """Consecutive blocks of a chain, pinned in G2 for the caller, who owes each of `holds` one unpin.

    `found[i]`: the tier where block i of them was; `miss`: why the chain is not served further, None if all of it is.
    """

    holds: Sequence[Hold]
    found: Sequence[str]
    miss: Miss | None


class Lease:
    """The leading blocks of a chain, pinned in G2. Owner: the caller, until `release` (or the end of its `with`).

    `slots[i]` holds block i of those asked for; `tiers[i]` is where it was found ("g2", or below it).
    `miss` says why the chain is not served further; None if all of it is. While the lease lasts the bytes neither
    move nor change. Releasing twice does nothing; a lease that is forgotten is released some time after its
    last reference.
    """

    def __init__(
        self,
        holds: Sequence[Hold],
        tiers: Sequence[str],
        miss: Miss | None,
        release: Callable[[Sequence[Hold]], None],
        forget: Callable[[Sequence[Hold]], None] | None = None,
    ) -> None:
        """`forget` takes the pins of a lease that the garbage collector found: it must not lock, since that may
        happen in the middle of anything."""
        self.tiers = list(tiers)
        self.miss = miss
        self._held = self._holds = holds
        self._release = release
        self._forget = forget or release

    @cached_property
    def slots(self) -> list[Slot]:
        """The slots. O(n) when it is first asked for: a long lease is made on an event loop."""
        return [slot for slot, _ in self._held]

    def places(self, count: int) -> tuple[Sequence[int], Sequence[int]]:
        """The numbers and generations of the first so many slots: makes no object per slot."""
        held = self._held[:count]
        if isinstance(held, Holds):
            return held.columns()
        return [slot.number for slot, _ in held], [generation for _, generation in held]

    def __len__(self) -> int:
        return len(self.tiers)

    def release(self) -> None:
        """Let the blocks be evicted again. Does not block."""
        holds, self._holds = self._holds, ()
        if holds:
            self._release(holds)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __del__(self) -> None:
        if self._holds:
            self._forget(self._holds)
