"""The configuration of a history's caches."""

from __future__ import annotations

from functools import lru_cache

from kvtier.config import Config
from kvtier.sim.history import History
from kvtier.sim.prompts import CLASSES

BOUND_S = 60.0
"""security.purge_bound."""
CLOSE_S = 5.0


def config_of(history: History) -> Config:
    """Of all of its machines. Pure."""
    return _parsed(history.tiers, history.slots, history.stride, history.purge, history.policy, history.quota)


@lru_cache(maxsize=512)
def _parsed(tiers: tuple[str, ...], slots: int, stride: int, purge: str, policy: str, quota: float) -> Config:
    below: dict[str, object] = {"g2": {"capacity": slots * 4096}}
    if "g3" in tiers:
        below["g3"] = {"path": "/simulated", "capacity": 1 << 20}
    if "g4" in tiers:
        below["g4"] = {"url": "memory://none/sim", "stride": stride}
    retention: dict[str, object] = {"classes": {name: dict(terms) for name, terms in CLASSES.items()}}
    return Config.parse(
        {
            "tiers": below,
            "policy": policy,
            "retention": retention | ({"quota": quota} if quota else {}),
            "deadlines": {"close": f"{CLOSE_S:g}s", "get": "2s", "put": "2s", "lookup": "100ms", "flush": "20s"},
            "security": {"purge": purge, "purge_bound": f"{BOUND_S:g}s"},
        }
    )
