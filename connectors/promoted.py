"""A promotion for one request: where its blocks were found, and why it ended there."""

from __future__ import annotations

from concurrent.futures import Future, wait

from kvtier.manager.lease import Lease
from kvtier.tiers.protocol import Miss


class Promoted:
    """Blocks `start` … of a request's chain, on their way into G2 or there. Only `wait` waits. `future` is None where
    nothing had to be promoted: then nothing is under way, and all blocks are G2's. `matched` are leading blocks of the
    chain that were seen in some tier, though not all of them may be promoted."""

    __slots__ = ("future", "matched", "start")

    def __init__(self, future: Future[Lease] | None = None, start: int = 0) -> None:
        """`future` is the promotion, from `Cache.submit`; its lease belongs to this object until `abandon`."""
        self.future = future
        self.start = start
        self.matched = 0

    @property
    def done(self) -> bool:
        """Whether nothing is under way, however it ended."""
        return self.future is None or self.future.done()

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, however, at most so long."""
        if self.future is not None:
            wait([self.future], timeout_s)

    def lease(self) -> Lease | None:
        """The blocks that are up; None while it is under way, and where it failed."""
        future = self.future
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result()

    def tiers(self, start: int, count: int) -> list[str]:
        """Where `count` blocks from depth `start` on were found: G2, unless they were promoted for this request."""
        lease = self.lease()
        known = {} if lease is None else dict(enumerate(lease.tiers, self.start))
        return [known.get(depth, "g2") for depth in range(start, start + count)]

    def miss(self, depth: int | None = None) -> Miss | None:
        """Why it ended, if that was at `depth` (None: wherever that was); LATE while it is under way."""
        if not self.done:
            return Miss.LATE
        lease = self.lease()
        return lease.miss if lease is not None and depth in (None, self.start + len(lease)) else None

    def abandon(self, *, cancel: bool = True) -> None:
        """Release its lease, now or when it ends, and stop it unless `cancel` is false. Blocks that are up stay
        in G2, where they may be evicted. Idempotent."""
        if self.future is not None and not (cancel and self.future.cancel()):
            self.future.add_done_callback(_release)


def _release(future: Future[Lease]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()
