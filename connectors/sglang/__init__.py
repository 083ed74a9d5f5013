"""SGLang's external linker, and its HiCache storage."""

from typing import TYPE_CHECKING

from kvtier.connectors.lazy import names_of

if TYPE_CHECKING:
    from kvtier.connectors.sglang.linker import KVTierLinker as KVTierLinker

__all__ = ["KVTierLinker"]

__getattr__, __dir__ = names_of(__name__, {"KVTierLinker": "linker"})
