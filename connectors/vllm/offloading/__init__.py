"""G3 and G4 as a secondary tier of vLLM's own offloading.

Its names are loaded at their first use: an engine imports parts of this package before it is set up.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.connectors.vllm.offloading.tier import KVTierOffloadingConnector as KVTierOffloadingConnector
    from kvtier.connectors.vllm.offloading.tier import KVTierSecondaryTier as KVTierSecondaryTier

_HOMES = {"KVTierOffloadingConnector": "tier", "KVTierSecondaryTier": "tier"}

__all__ = ["KVTierOffloadingConnector", "KVTierSecondaryTier"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
