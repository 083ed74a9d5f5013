"""The transformers library's generate, with a prefix cache."""

from typing import TYPE_CHECKING

from kvtier.connectors.lazy import names_of

if TYPE_CHECKING:
    from kvtier.connectors.transformers.prefix_cache import PrefixCache as PrefixCache

__all__ = ["PrefixCache"]

__getattr__, __dir__ = names_of(__name__, {"PrefixCache": "prefix_cache"})
