"""What `stats()` tells of a manager: counters since start, gauges of now. docs/operations.md has each figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.tiers.guard import Metered
from kvtier.tiers.protocol import Miss

if TYPE_CHECKING:
    from kvtier.manager.manager import Manager


def stats_of(manager: Manager) -> dict[str, Any]:
    """Takes the manager's lock; waits for no tier."""
    with manager.lock:
        accounts, host = manager.accounts, manager.host
        pinned = sum(slot.pins > 0 for slot in host.index.values())
        missed = accounts.misses.copy()  # G2 lacks what a lower tier served, too
        missed[Miss.ABSENT] += sum(n for name, n in accounts.hits.items() if name != host.name)
        out: dict[str, Any] = {
            "requests": {
                **accounts.stats(),
                "dropped": manager.demoter.dropped,
                "promises": manager.protection.stats(),
            },
            host.name: {
                "blocks": len(host.index),
                "bytes": len(host.index) * host.block_bytes,
                "capacity_bytes": host.capacity_bytes,
                "hits": accounts.hits[host.name],
                "misses": {str(miss): n for miss, n in missed.items() if n},
                "evictions": host.evictions,
                "latency": {},
                "pinned": pinned,
                "quarantined": host.quarantined + manager.promoter.overdue,
                "late": manager.promoter.late,
                "refused": {"quota": host.quota.refused},
            },
        }
        for name, tier in manager.lower.items():
            out[name] = _tier_stats(manager, name, tier)
    return out


def _tier_stats(manager: Manager, name: str, tier: Metered) -> dict[str, Any]:
    usage, queue = tier.usage(), manager.demoter.queues[name]
    return {
        "blocks": usage.blocks,
        "bytes": usage.bytes,
        "capacity_bytes": usage.capacity_bytes,
        "hits": manager.accounts.hits[name],
        "misses": {str(miss): n for miss, n in tier.misses.items()},
        "evictions": usage.evictions,
        "latency": {
            "read_p50_ms": tier.read_latency.quantile_ms(0.5),
            "read_p99_ms": tier.read_latency.quantile_ms(0.99),
            "write_p50_ms": tier.write_latency.quantile_ms(0.5),
            "write_p99_ms": tier.write_latency.quantile_ms(0.99),
        },
        "loaded": tier.loaded,
        "stored": {str(stored): n for stored, n in tier.stored.items()},
        "refused": dict(queue.refused),
        "pending": queue.pending(),
        "read_bytes": tier.read_bytes,
        "written_bytes": tier.written_bytes,
        "health": tier.inner.breaker.health.value,
    }
