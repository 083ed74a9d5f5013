"""The line that says at an engine's start what kvtier does there."""

from __future__ import annotations

from collections.abc import Sequence

import kvtier
from kvtier.cache import Cache
from kvtier.identity.namespace import Namespace
from kvtier.units import format_size


def start_line(cache: Cache | None, namespace: Namespace, limits: Sequence[str] = ()) -> str:
    """ "kvtier 0.2: g2 64GiB, g3 2TiB (1200000 blocks warm), namespace 765b…", and what is limited and why."""
    tiers = [] if cache is None else _tiers(cache)
    parts = [*tiers, f"namespace {namespace.digest.hex()[:16]} of {namespace.model}"]
    return "; ".join([f"kvtier {kvtier.__version__}: {', '.join(parts)}", *limits])


def _tiers(cache: Cache) -> list[str]:
    found = []
    for name, stats in cache.stats().items():
        if name not in ("g2", "g3", "g4") or not isinstance(stats, dict):
            continue
        size = stats.get("capacity_bytes")
        warm = stats.get("blocks")
        text = f"{name} {format_size(int(size))}" if size else name
        found.append(text + (f" ({warm} blocks warm)" if name == "g3" and warm is not None else ""))
    return found
