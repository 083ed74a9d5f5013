"""Chains of blocks over all four tiers, as bytes: read from wherever they are, kept in G1 for the tiers below."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier.cache import Cache
from kvtier.connectors.transformers.traffic import Traffic
from kvtier.hit import Hit
from kvtier.identity.keys import BlockKey
from kvtier.manager.accounts import Account
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Depth, Terms
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.tiers.device.torch_pool import DevicePool
from kvtier.tiers.protocol import Miss
from kvtier.times import Mono

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_GRACE_S = 1.0
"""How late a busy event loop may answer."""


class Chains:
    """See the module. One owner thread, the pool's."""

    def __init__(self, pool: DevicePool, cache: Cache, traffic: Traffic, clock: TrustedClock) -> None:
        self._pool, self._cache, self._traffic, self._clock = pool, cache, traffic, clock

    @property
    def proven(self) -> bool:
        """Whether blocks may be served: not under `security.purge: strict`, while it is not known what was purged."""
        return not self._cache.manager.hierarchy.unproven

    def read(
        self, chain: Sequence[BlockKey], timeout: float | None, *, counted: bool = True
    ) -> tuple[torch.Tensor, list[str]]:
        """The leading blocks of `chain` that some tier has: their bytes, a copy [blocks, block_bytes] on the device,
        and where each was. Waits for lower tiers up to `timeout` seconds (deadlines.get). `counted`: as a request in
        the cache's accounts."""
        import torch

        now, limit_s = self._clock.read(), self._cache.config.deadlines.get if timeout is None else timeout
        deadline = Mono(self._clock.monotonic() + limit_s)
        slots = self._pool.pin(chain, now.serve, now.stamp) if self.proven else []
        tiers = ["g1"] * len(slots)
        parts: list[list[int] | torch.Tensor] = [list(slots)]  # slots, or rows that G1 has no slot for; in order
        try:
            while True:
                with self._get(chain, len(tiers), deadline, counted) as hit:
                    onboarded = self._traffic.onboard(chain, len(tiers), hit)
                    slots += onboarded
                    parts += [onboarded, *map(self._from_host, hit.blocks[len(onboarded) :])]
                    tiers += hit.tiers
                if not len(hit) or hit.miss is not Miss.NO_ROOM:
                    break  # else the prefix is longer than G2, which has space again now
            rows = [self._pool.rows[part] if isinstance(part, list) else part for part in _joined(parts)]
            return (rows[0] if len(rows) == 1 else torch.cat(rows)), tiers
        finally:
            self._pool.free(slots)

    def _get(self, chain: Sequence[BlockKey], start: int, deadline: Mono, counted: bool) -> Hit:
        if counted:
            return self._cache.get(chain, max(0.0, deadline - self._clock.monotonic()), start=start)
        manager = self._cache.manager
        lease = manager.pin(chain, start)
        if len(lease) < len(chain) - start and manager.lower:
            lease.release()
            promoted = self.ask(manager.promote(chain, deadline, start, referenced=True), deadline, None)
            lease = manager.pin(chain, start) if promoted is None else promoted
        return Hit(lease, Account())

    def _from_host(self, block: memoryview) -> torch.Tensor:
        """One block that G1 has no slot for, straight onto the device: a row."""
        import torch

        return torch.frombuffer(bytearray(block), dtype=torch.uint8).to(self._pool.rows.device)[None]

    def ask(self, work: Coroutine[Any, Any, T], deadline: Mono, late: T) -> T:
        """The answer of the manager's event loop; `late` where there is none soon after the deadline."""
        asked = self._cache.submit(work)
        wait([asked], max(0.0, deadline - self._clock.monotonic()) + _GRACE_S)
        if asked.done():
            return asked.result()
        asked.cancel()
        return late

    def keep(
        self,
        chain: Sequence[BlockKey],
        terms: Terms,
        deadline: Mono,
        write: Callable[[Sequence[int], int], None],
        below: int = 0,
    ) -> tuple[int, int]:
        """Confirm the blocks of `chain` in G1: those that it lacks after `write(slots, depth of the first)`, which is
        called without gradients. Blocks before `below` are in a lower tier. Where no slot can be had without a loss,
        waits for the tiers below until `deadline`. Returns the depth of the first new block, and that behind the last.
        """
        import torch

        now = self._clock.read()
        life = Lifetime.of(terms, now.stamp)
        dirty_since = self._clock.monotonic() if terms.ceiling > Depth.G1 else None
        known = self._pool.pin(chain, now.serve, now.stamp)
        try:
            self._pool.confirm(known, chain, life, dirty_since=dirty_since)
        finally:
            self._pool.free(known)
        first = start = max(len(known), below)
        while start < len(chain) and (count := self._traffic.make_space(len(chain) - start, deadline)):
            slots = self._pool.allocate(count)
            try:
                with torch.no_grad():  # the pool would keep what the passes computed for them
                    write(slots, start)
                self._pool.confirm(slots, chain, life, first=start, dirty_since=dirty_since)
            finally:
                self._pool.free(slots)
            start += len(slots)
        return first, start


def _joined(parts: Iterable[list[int] | torch.Tensor]) -> list[list[int] | torch.Tensor]:
    """Neighbouring runs of slots as one; at least one part."""
    out: list[list[int] | torch.Tensor] = [[]]
    for part in parts:
        last = out[-1]
        if isinstance(part, list) and isinstance(last, list):
            last += part
        elif not isinstance(part, list) or part:
            out.append(part)
    return out
