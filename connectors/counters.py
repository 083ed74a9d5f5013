"""The two counters that connectors show in their engine's metrics, and their growth since the last report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from kvtier.metrics import ENGINE

TOKENS_READ, EVENTS = ENGINE["tokens_read"], ENGINE["events"]
"""Name, help text and label of `kvtier_tokens_read` and `kvtier_events`."""

Name = TypeVar("Name", bound=Hashable)


def tokens_by_tier(tiers: Iterable[str], block_tokens: int) -> Counter[str]:
    """Tokens by the tier in which their blocks were found; `tiers` names one per block."""
    return Counter({tier: blocks * block_tokens for tier, blocks in Counter(tiers).items()})


class Growth(Generic[Name]):
    """The growth of counters between two reports. One thread reports; other threads may count meanwhile."""

    def __init__(self) -> None:
        self._reported: Counter[Name] = Counter()

    def since_last(self, totals: Mapping[Name, int]) -> dict[Name, int]:
        """Counters of `totals` that grew since the last call, and by how much."""
        reported = self._reported
        grown = {name: total - reported[name] for name, total in dict(totals).items() if total > reported[name]}
        reported.update(grown)
        return grown
