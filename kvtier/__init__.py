"""kvtier: a tiered KV-cache offload block manager for LLM inference.

    import kvtier
    config = kvtier.Config.load("kvtier.yaml")
    namespace = kvtier.Namespace(model=…, weights=…, dtype=…, layout=…, block_tokens=16, block_bytes=…)
    keys = kvtier.chain_hashes(tokens, namespace)
    with kvtier.open(config, namespace) as cache:
        cache.put(keys, buffers)
        with cache.get(keys) as hit: …

Importing this package loads no heavy library; names are resolved when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.cache import AsyncCache, Cache, aopen, chain_hashes, open, reload_on_sighup
    from kvtier.config import Config
    from kvtier.errors import (
        CapacityError,
        ClosedError,
        ConfigError,
        FormatError,
        IdentityError,
        InvalidRequest,
        KVTierError,
    )
    from kvtier.hit import Hit
    from kvtier.identity.namespace import Namespace
    from kvtier.manager.closing import Flushed
    from kvtier.retention.terms import Terms

__version__ = "0.1.0"

_HOMES = {
    "AsyncCache": "cache", "Cache": "cache", "Hit": "hit", "aopen": "cache", "chain_hashes": "cache", "open": "cache",
    "reload_on_sighup": "cache",
    "CapacityError": "errors", "ClosedError": "errors", "ConfigError": "errors", "FormatError": "errors",
    "IdentityError": "errors", "InvalidRequest": "errors", "KVTierError": "errors",
    "Config": "config", "Flushed": "manager.closing", "Namespace": "identity.namespace", "Terms": "retention.terms",
}  # fmt: skip

__all__ = [
    "AsyncCache",
    "Cache",
    "CapacityError",
    "ClosedError",
    "Config",
    "ConfigError",
    "Flushed",
    "FormatError",
    "Hit",
    "IdentityError",
    "InvalidRequest",
    "KVTierError",
    "Namespace",
    "Terms",
    "aopen",
    "chain_hashes",
    "open",
    "reload_on_sighup",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kvtier.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
