"""The result of `get`: the longest prefix of the chain that was found, readable until it is released."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any

from kvtier.manager.accounts import Account
from kvtier.manager.lease import Lease
from kvtier.manager.slices import aside
from kvtier.retention.lifetime import Lifetime
from kvtier.tiers.host.slot import Slot, copy_out
from kvtier.tiers.protocol import Miss


class Hit:
    """A prefix of the chain. A context manager: its blocks are valid inside the `with` and not after it.

    `blocks[i]` is a read-only view of block i's bytes, which lie in `slots[i]`; `tiers[i]` names the tier it was in,
    `lives[i]` its terms; `miss` says why the prefix is not longer (None: all keys were served). `account` is the
    request's, in tokens.
    """

    def __init__(self, lease: Lease, account: Account) -> None:
        self._lease = lease
        self.account = account
        self.tiers: list[str] = lease.tiers
        self.slots: list[Slot] = lease.slots
        self.lives: list[Lifetime] = [slot.life for slot in lease.slots]
        self.miss: Miss | None = lease.miss
        self.blocks: list[memoryview] = [_view(slot) for slot in lease.slots]

    def __len__(self) -> int:
        return len(self.tiers)

    def __enter__(self) -> Hit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """End the validity of `blocks`. Idempotent."""
        for view in self.blocks:
            try:
                view.release()
            except BufferError:
                pass  # the caller still exports it, to NumPy for example: those bytes may change from now on
        self.blocks = []
        self._lease.release()


class Getting:
    """`await cache.get(…)` gives a Hit; `async with cache.get(…) as hit` releases it too."""

    def __init__(self, work: Coroutine[Any, Any, Hit]) -> None:
        self._work = work
        self._hit: Hit | None = None

    def __await__(self) -> Generator[Any, None, Hit]:
        return self._work.__await__()

    async def __aenter__(self) -> Hit:
        self._hit = await self._work
        return self._hit

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._hit is not None:
            await aside(len(self._hit), self._hit.release)


def _view(slot: Slot) -> memoryview:
    pieces = slot.pieces
    if len(pieces) == 1:
        return pieces[0].toreadonly()
    whole = memoryview(bytearray(sum(piece.nbytes for piece in pieces)))  # several ranks: gathered into a copy
    copy_out(pieces, whole)
    return whole.toreadonly()
