"""vLLM's KV connector."""

from typing import TYPE_CHECKING

from kvtier.connectors.lazy import names_of

if TYPE_CHECKING:
    from kvtier.connectors.vllm.connector import KVTierConnector as KVTierConnector

__all__ = ["KVTierConnector"]

__getattr__, __dir__ = names_of(__name__, {"KVTierConnector": "connector"})
