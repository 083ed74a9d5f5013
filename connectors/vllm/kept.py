"""Blocks of ended requests that the engine keeps until they are copied.

Without names in the pool (prefix caching off), blocks are only known as long as their request holds them. So a request
that has ended keeps them until its copies are over, at most a quarter of the pool, and not for long.

Called on the engine's one scheduler thread; nothing here waits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.connectors.vllm import compat
from kvtier.connectors.vllm.compat import EnginePool
from kvtier.connectors.vllm.confirm import Confirmer, Track
from kvtier.connectors.vllm.loads import Loads
from kvtier.connectors.vllm.stores import Stores
from kvtier.times import Mono


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    track: Track
    step: int  # the last one that may have computed it
    until_s: Mono


class KeptBlocks:
    """See the module. `counters` are the half's."""

    def __init__(self, stores: Stores, loads: Loads, clock: Clock, counters: Counter[str]) -> None:
        self._stores, self._loads = stores, loads
        self._clock = clock
        self._counters = counters
        self._of: dict[str, _Kept] = {}
        self._pool: EnginePool | None = None
        self._confirmer: Confirmer | None = None

    def bind(self, pool: EnginePool, confirmer: Confirmer) -> None:
        self._pool, self._confirmer = pool, confirmer

    def __len__(self) -> int:
        """Requests whose blocks are kept."""
        return len(self._of)

    def keep(self, track: Track, step: int) -> bool:
        """A request has ended; steps up to `step` were planned. True: its blocks are kept until `free` names it. Those
        of a request that waits for a load, of ours or of another connector, are the load's: the engine keeps them until
        that has ended, and there is nothing else in them. So with those that it has taken back between two steps."""
        pool, confirmer = self._pool, self._confirmer
        if pool is None or confirmer is None or pool.caching:
            return False
        held = compat.holds_blocks(track.request) and not self._loads.waits(track.name)
        wanted = track.storable and track.table and track.computed and held and not self._stores.stopped
        count = sum(len(kept.track.table) for kept in self._of.values())
        if wanted and 4 * (count + len(track.table)) <= pool.blocks:
            until_s = self._clock.monotonic() + self._stores.limits.flush_timeout_s
            self._of[track.name] = _Kept(track, step, Mono(until_s))
            return True
        self._counters["spill_lost"] += len(track.table) if wanted else 0
        confirmer.displace(track)
        return False

    def free(self, names: list[str]) -> None:
        """Append the requests whose blocks are copied, or were kept for too long: the engine gets these back."""
        confirmer = self._confirmer
        if not self._of or confirmer is None:
            return
        now, busy = self._clock.monotonic(), self._stores.busy()
        for name, kept in list(self._of.items()):
            done = not confirmer.under_way(kept.step) and id(kept.track.chain.terms) not in busy
            if done or now >= kept.until_s:
                confirmer.displace(kept.track)
                names.append(name)
                del self._of[name]
