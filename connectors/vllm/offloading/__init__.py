"""G3 and G4 as a secondary tier of vLLM's own offloading."""

from typing import TYPE_CHECKING

from kvtier.connectors.lazy import names_of

if TYPE_CHECKING:
    from kvtier.connectors.vllm.offloading.connector import KVTierOffloadingConnector as KVTierOffloadingConnector
    from kvtier.connectors.vllm.offloading.tier import KVTierSecondaryTier as KVTierSecondaryTier

__all__ = ["KVTierOffloadingConnector", "KVTierSecondaryTier"]

__getattr__, __dir__ = names_of(__name__, {"KVTierOffloadingConnector": "connector", "KVTierSecondaryTier": "tier"})
