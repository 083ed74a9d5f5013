"""What a process remembers of a G3 store from one transaction to the next. On the writer thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.tiers.disk.demand import Demand
from kvtier.tiers.disk.eviction import SearchFloors
from kvtier.tiers.disk.ghosts import Ghosts


@dataclass(frozen=True, slots=True)
class TxnMemory:
    """Hints: transactions are right without them."""

    floors: SearchFloors = field(default_factory=SearchFloors)
    ghosts: Ghosts = field(default_factory=Ghosts)
    demand: Demand = field(default_factory=Demand)
