"""`stats()` of a manager: counters since start, gauges of now. docs/operations.md has each figure."""

from __future__ import annotations

from typing import Any

from kvtier.manager.accounts import Accounts
from kvtier.manager.demote import Demoter
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.promote import Promoter
from kvtier.manager.protection import Protection
from kvtier.manager.write_behind import WriteBehind
from kvtier.tiers.breaker import Health
from kvtier.tiers.meter import Metered
from kvtier.tiers.protocol import Miss


def stats_of(
    hierarchy: Hierarchy, accounts: Accounts, demoter: Demoter, promoter: Promoter, protection: Protection
) -> dict[str, Any]:
    """Takes the hierarchy's lock; waits for no tier."""
    breakers = {"g2": hierarchy.service, **{name: tier.breaker for name, tier in hierarchy.lower.items()}}
    restarts = hierarchy.supervisor.restarts.copy()
    for tier in hierarchy.lower.values():
        restarts.update(tier.restarts())
    with hierarchy.lock:
        host = hierarchy.host
        missed = accounts.misses.copy()  # G2 lacks what a lower tier served, too
        missed[Miss.ABSENT] += sum(n for name, n in accounts.hits.items() if name != host.name)
        out: dict[str, Any] = {
            "requests": {**accounts.stats(), "dropped": demoter.dropped, "promises": protection.stats()},
            host.name: {
                "blocks": len(host.index),
                "bytes": len(host.index) * host.block_bytes,
                "capacity_bytes": host.capacity_bytes,
                "hits": accounts.hits[host.name],
                "misses": {str(miss): n for miss, n in missed.items() if n},
                "evictions": host.evictions,
                "latency": {},
                "pinned": host.pinned,
                "quarantined": host.quarantined + promoter.overdue,
                "late": promoter.given_up.late,
                "refused": {"quota": host.quota.refused},
                "health": hierarchy.service.health.value,
            },
            "tasks": {
                "restarts": dict(restarts),
                "abandoned": hierarchy.supervisor.abandoned,
                "out": {
                    **{name: breaker.why_out() for name, breaker in breakers.items() if breaker.reason},
                    **hierarchy.lower.why_out(),
                    **{
                        name: f"{tier.overdue} blocks of G2 are held by reads that do not end"
                        for name, tier in hierarchy.lower.items()
                        if hierarchy.is_clogged(tier)
                    },
                },
                "full": {name: why for name, tier in hierarchy.lower.items() if (why := tier.usage().why_full)},
            },
        }
        for name in hierarchy.lower.out:
            out[name] = {"health": Health.OUT.value}
        for name, tier in hierarchy.lower.items():
            out[name] = _tier_stats(tier, demoter.queues[name], accounts.hits[name])
            if hierarchy.is_clogged(tier):
                out[name]["health"] = Health.OUT.value
    return out


def _tier_stats(tier: Metered, queue: WriteBehind, hits: int) -> dict[str, Any]:
    """Its counters are copied at once, in C: the loop goes on counting on its thread meanwhile."""
    usage = tier.usage()
    return {
        "blocks": usage.blocks,
        "bytes": usage.bytes,
        "capacity_bytes": usage.capacity_bytes,
        "hits": hits,
        "misses": {str(miss): n for miss, n in tier.misses.copy().items()},
        "evictions": usage.evictions,
        "device_written_bytes": usage.written_bytes,
        "write_budget_bytes": usage.budget_bytes,
        "write_amplification": round(usage.written_bytes / usage.stored_bytes, 3) if usage.stored_bytes else 0.0,
        "latency": {
            "read_p50_ms": tier.read_latency.quantile_ms(0.5),
            "read_p99_ms": tier.read_latency.quantile_ms(0.99),
            "write_p50_ms": tier.write_latency.quantile_ms(0.5),
            "write_p99_ms": tier.write_latency.quantile_ms(0.99),
        },
        "seconds": {"read": tier.read_latency.buckets(), "write": tier.write_latency.buckets()},
        "loaded": tier.loaded,
        "stored": {str(stored): n for stored, n in tier.stored.copy().items()},
        "refused": dict(queue.refused),
        "pending": queue.pending(),
        "read_bytes": tier.read_bytes,
        "written_bytes": tier.written_bytes,
        "counters": dict(tier.counters()),
        "unanswered": dict(tier.unanswered),
        "health": (Health.FULL if tier.healthy() and usage.why_full else tier.health).value,
    }
