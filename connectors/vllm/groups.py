"""The KV groups of a vLLM engine: which are served, and what they need at a boundary.

Served: one group of full attention, and beside it groups of sliding windows and of recurrent states that lie in the
same pages. A block of the pool is of one group at a time, so blocks of all groups have the same bytes, and one arena
holds them. Bytes of a block that none of its group's layers uses are stored as zeros. Raises IdentityError for every
other set of groups; the engine does not start.

A state's block is one value: what its layers have made of all tokens up to the one where a step ended. vLLM's mode
"align" ends a step of prefill with a block, so such a block holds the state of a boundary. Some kernels (Mamba 2) leave
the state of the prompt's last whole block in the middle of a step besides: a *checkpoint*. A step that verifies drafts
leaves a state after each of them, in blocks that the engine moves about: only those that prefill leaves are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.connectors.configuration import digest16
from kvtier.connectors.vllm.compat import contexts_of, stages_of
from kvtier.connectors.vllm.configuration import NO_DRAFTER
from kvtier.errors import IdentityError
from kvtier.identity.groups import Group, Kind

FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOW = "SlidingWindowSpec"
_DRAFTERS = (*NO_DRAFTER, "draft_model", "eagle", "eagle3", "mtp")
"""Methods of speculation that are served beside windows. Layers of a drafter lie in groups as all others do."""
_STATE = "MambaSpec"


@dataclass(frozen=True, slots=True)
class Beside:
    """A group beside that of full attention: its number in the engine, its layers, and of states the form of one."""

    number: int
    group: Group
    layers: tuple[str, ...]
    form: str = ""


@dataclass(frozen=True, slots=True)
class Groups:
    """The engine's number of the group of full attention, and those beside it: windows before states, and each in an
    order that does not depend on the engine's, by their layers. Of a pipeline stage, which has a part of each group's
    layers, or none, in the engine's order, which all stages have in common."""

    block_tokens: int
    full: int = 0
    beside: tuple[Beside, ...] = ()
    checkpoints: bool = False  # whether a step may leave states at a boundary in its middle, too
    drafts: int = 0  # tokens of a step at most that may be refused
    drops: bool = False  # whether the engine's own hits leave out the last block that its pool has

    @property
    def states(self) -> bool:
        """Whether some group keeps states: they exist only where a step has ended."""
        return any(one.group.kind is Kind.STATE for one in self.beside)

    @property
    def name(self) -> str:
        """For the namespace; "" for one group."""
        if not self.beside:
            return ""
        windows = [[one.group.window, list(one.layers)] for one in self.beside if one.group.kind is Kind.WINDOW]
        states = [[one.form, list(one.layers)] for one in self.beside if one.group.kind is Kind.STATE]
        named = (("window", windows), ("state", states))
        return "+".join(["full", *(f"{len(ones)}*{kind}:{digest16(ones)}" for kind, ones in named if ones)])

    def needed(self, boundary: int) -> list[range]:
        """Depths of the blocks that each group beside the full one needs after `boundary` tokens."""
        return [one.group.needed(boundary) for one in self.beside]

    def counts(self, boundary: int) -> list[int]:
        return [len(depths) for depths in self.needed(boundary)]


def groups_of(kv_cache_config: Any, stages: int = 1, drafts: int = 0, drops: bool = False) -> Groups:
    """Of an engine with so many pipeline stages, and so many draft tokens of a request and step at most; `drops`: see
    `Groups`. Raises IdentityError for groups that are not served."""
    groups: Sequence[Any] = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        return Groups(int(groups[0].kv_cache_spec.block_size), drafts=drafts)
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    full = [number for number, kind in enumerate(kinds) if kind in FULL]
    where = " on a stage of the pipeline" if stages > 1 else ""
    said = f"this model keeps {len(groups)} groups of KV cache{where} ({', '.join(sorted(set(kinds)))})"
    advice = "start this engine without the connector"
    if len(full) != 1 or any(kind not in (*FULL, _WINDOW, _STATE) for kind in kinds):
        raise IdentityError(
            f"{said}; kvtier serves one group of full attention, alone or beside sliding windows and states, so "
            f"{advice}"
        )
    for group, kind in zip(groups, kinds, strict=True):
        if kind == _STATE:
            _refuse_states(group.kv_cache_spec, said, drafts)
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
    if getattr(groups[full[0]].kv_cache_spec, "page_size_padded", None) is not None:
        raise IdentityError(
            f"{said}, and pages of full attention are padded to fit: they would be stored with what other requests "
            f"left there, so {advice}"
        )
    beside = [
        _beside(number, group.kv_cache_spec, tuple(group.layer_names))
        for number, group in enumerate(groups)
        if number != full[0]
    ]
    ordered = sorted(beside, key=lambda one: (one.group.kind is Kind.STATE, () if stages > 1 else one.layers))
    specs = [group.kv_cache_spec for group, kind in zip(groups, kinds, strict=True) if kind == _STATE]
    checkpoints = any(getattr(spec, "num_prefill_checkpoint_blocks", 0) for spec in specs)
    return Groups(next(iter(sizes)), full[0], tuple(ordered), checkpoints, drafts, drops)


def _beside(number: int, spec: Any, layers: tuple[str, ...]) -> Beside:
    size = int(spec.block_size)
    if type(spec).__name__ == _WINDOW:
        return Beside(number, Group(Kind.WINDOW, size, int(spec.sliding_window)), layers)
    kind = str(getattr(spec.mamba_type, "name", spec.mamba_type))
    shapes = [
        [str(dtype).removeprefix("torch."), *shape] for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    return Beside(number, Group(Kind.STATE, size), layers, f"{kind}:{shapes}:{int(spec.page_size_bytes)}")


def _refuse_states(spec: Any, said: str, drafts: int) -> None:
    """Raises IdentityError where a block does not hold the state of its last token, or not surely."""
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode != "align":
        raise IdentityError(
            f'{said}, and keeps states in mode "{mode}"; start it with --enable-prefix-caching --mamba-cache-mode '
            "align, or without the connector"
        )
    if getattr(spec, "num_speculative_blocks", 0) and getattr(spec, "num_prefill_checkpoint_blocks", 0):
        raise IdentityError(
            f"{said}, and its kernels leave states in the middle of a step, which was not proved with speculative "
            "decoding; start it without that, or without the connector"
        )
    if drafts >= int(spec.block_size):
        raise IdentityError(
            f"{said}, and {drafts} drafts of a step go beyond a block of {spec.block_size}; fewer are needed, so start "
            "this engine without the connector"
        )
    alignment = getattr(spec, "prefill_checkpoint_alignment", None) or 1
    if getattr(spec, "num_prefill_checkpoint_blocks", 0) and int(spec.block_size) % alignment:
        raise IdentityError(
            f"{said}, and its kernels leave states in the middle of a step at multiples of {alignment} tokens, which "
            f"blocks of {spec.block_size} are not; choose a --block-size that is, or start this engine without the "
            "connector"
        )


def refuse_unproven(vllm_config: Any, groups: Groups) -> None:
    """Raises IdentityError for set-ups that were not proved, most of them with several groups alone."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.v1.core.block_pool import BlockPool

    drafter = getattr(getattr(vllm_config, "speculative_config", None), "method", None)
    drafts, several = drafter is not None, bool(groups.beside)
    divided, ranks = contexts_of(vllm_config) > 1, vllm_config.parallel_config.tensor_parallel_size > 1
    reasons = {
        f"decode context parallelism and speculative decoding ({drafter})": divided and drafts,
        "decode context parallelism": several and divided,
        f"speculative decoding ({drafter})": several and drafts and drafter not in _DRAFTERS,
        "speculative decoding over pipeline stages": several and drafts and stages_of(vllm_config) > 1,
        f"speculative decoding ({drafter}) on several ranks": (
            several and drafts and ranks and (groups.states or drafter not in NO_DRAFTER)
        ),
        "ReplaySSM, which keeps a part of a state outside its block": (
            several and getattr(vllm_config.cache_config, "use_replayssm", False)
        ),
        "prefix caching off": several and not vllm_config.cache_config.enable_prefix_caching,
        "a vLLM that cannot report a failed load of several groups": (
            several and not hasattr(base, "KVConnectorTransferResults")
        ),
        "a vLLM that cannot say when a block is handed out again": several and not hasattr(BlockPool, "unpin_blocks"),
    }
    for reason, holds in reasons.items():
        if holds:
            count = f"{1 + len(groups.beside)} groups of KV cache" if several else "a group of KV cache"
            raise IdentityError(
                f"kvtier does not serve {count} with {reason}; change that, or start this engine without the connector"
            )
