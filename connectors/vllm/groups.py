"""The KV groups of a vLLM engine: which are served, and what they need at a boundary.

Served: one group of full attention, and groups of sliding windows that lie in the same pages. A block of the pool is of
one group at a time, so blocks of all groups have the same bytes, and one arena holds them. A group of fewer layers than
the full one leaves pages of its blocks unused: they are stored as zeros. Raises IdentityError for
every other set of groups; the engine does not start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.connectors.configuration import digest16
from kvtier.errors import IdentityError
from kvtier.identity.groups import Group, Kind

FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOW = "SlidingWindowSpec"


@dataclass(frozen=True, slots=True)
class Window:
    """A group of sliding windows: its number in the engine, and its layers."""

    number: int
    group: Group
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """The engine's number of the group of full attention, and the windows in an order that does not depend on the
    engine's: by their layers."""

    block_tokens: int
    full: int = 0
    windows: tuple[Window, ...] = ()

    @property
    def name(self) -> str:
        """For the namespace; "" for one group."""
        if not self.windows:
            return ""
        windows = [[one.group.window, list(one.layers)] for one in self.windows]
        return f"full+{len(windows)}*window:{digest16(windows)}"

    def needed(self, boundary: int) -> list[range]:
        """Depths of the blocks that each window needs after `boundary` tokens."""
        return [one.group.needed(boundary) for one in self.windows]

    def counts(self, boundary: int) -> list[int]:
        return [len(depths) for depths in self.needed(boundary)]


def groups_of(kv_cache_config: Any) -> Groups:
    """Raises IdentityError for groups that are not served."""
    groups: Sequence[Any] = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        return Groups(int(groups[0].kv_cache_spec.block_size))
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    full = [number for number, kind in enumerate(kinds) if kind in FULL]
    said = f"this model keeps {len(groups)} groups of KV cache ({', '.join(sorted(set(kinds)))})"
    advice = "start this engine without the connector"
    if len(full) != 1 or any(kind not in (*FULL, _WINDOW) for kind in kinds):
        raise IdentityError(
            f"{said}; kvtier serves one group of full attention, alone or beside sliding windows, so {advice}"
        )
    sizes = {int(group.kv_cache_spec.block_size) for group in groups}
    if len(sizes) != 1 or getattr(kv_cache_config, "hash_block_size", None) not in (None, *sizes):
        raise IdentityError(f"{said} in blocks of {sorted(sizes)} tokens; equal blocks are needed, so {advice}")
    pages = {int(group.kv_cache_spec.page_size_bytes) for group in groups}
    layers = [len(group.layer_names) for group in groups]
    if len(pages) != 1 or max(layers) > layers[full[0]]:
        raise IdentityError(
            f"{said} of {layers} layers, with pages of {sorted(pages)} bytes; equal pages are needed, and no more "
            f"layers than the group of full attention has, so {advice}"
        )
    if any(getattr(group.kv_cache_spec, "extra_retained_tokens", 0) for group in groups):
        raise IdentityError(f"{said} and retains tokens outside of its windows, which kvtier does not, so {advice}")
    windows = [
        Window(
            number,
            Group(Kind.WINDOW, next(iter(sizes)), int(group.kv_cache_spec.sliding_window)),
            tuple(group.layer_names),
        )
        for number, group in enumerate(groups)
        if number != full[0]
    ]
    ordered = tuple(sorted(windows, key=lambda one: one.layers))
    return Groups(next(iter(sizes)), full[0], ordered)


def refuse_unproven(vllm_config: Any, groups: Groups) -> None:
    """Raises IdentityError for set-ups in which several groups were not proved."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.v1.core.block_pool import BlockPool

    if not groups.windows:
        return
    reasons = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "prefix caching off": not vllm_config.cache_config.enable_prefix_caching,
        "tensor parallelism": vllm_config.parallel_config.tensor_parallel_size > 1,
        "a vLLM that cannot report a failed load of several groups": not hasattr(base, "KVConnectorTransferResults"),
        "a vLLM that cannot say when a block is handed out again": not hasattr(BlockPool, "unpin_blocks"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise IdentityError(
                f"kvtier does not serve {1 + len(groups.windows)} groups of KV cache with {reason}; change that, or "
                "start this engine without the connector"
            )
