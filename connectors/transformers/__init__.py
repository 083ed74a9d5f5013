"""The transformers library's generate, with a prefix cache.

Its names are loaded at their first use: an engine imports parts of this package before it is set up.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.connectors.transformers.prefix_cache import PrefixCache as PrefixCache

_HOMES = {"PrefixCache": "prefix_cache"}

__all__ = ["PrefixCache"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
