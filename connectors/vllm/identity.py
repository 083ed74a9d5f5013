"""The namespace of a vLLM engine, read from its configuration; what cannot be named is refused at start.

Also the fingerprints of its adapters.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.connectors.common import Settings, adapter_of, model_name, weights_of
from kvtier.connectors.vllm.compat import hash_problem
from kvtier.connectors.vllm.messages import Handshake
from kvtier.connectors.vllm.worker import CacheLayout
from kvtier.errors import IdentityError
from kvtier.identity.namespace import Namespace

HASH_VERSION = "vllm-1"
"""vLLM's hash chain H((parent, tokens, extra keys)): one form in all supported releases."""

_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_ADAPTERS_MAX = 4096


def pages_of(vllm_config: Any, kv_cache_config: Any) -> CacheLayout:
    """What the engine keeps per block. Raises IdentityError for models and set-ups that are not served."""
    _refuse_shapes(vllm_config.parallel_config)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise IdentityError(
            f"this model keeps {len(groups)} groups of KV cache ({kinds}); kvtier serves models with one group of full "
            "attention, so start this engine without the connector"
        )
    (group,) = groups
    spec = group.kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
    for name, layer in specs.items():
        _refuse_layer(name, layer)
    unit = getattr(kv_cache_config, "hash_block_size", None)
    if unit not in (None, spec.block_size):
        raise IdentityError(
            f"the engine names runs of {unit} tokens but its blocks hold {spec.block_size}; equal sizes are needed"
        )
    parallel = vllm_config.parallel_config
    replicas = getattr(kv_cache_config, "kv_tp_replicas", 1)
    replicated = parallel.tensor_parallel_size > 1 and replicas == parallel.tensor_parallel_size
    return CacheLayout(
        layers=tuple(group.layer_names),
        page_bytes=tuple(specs[name].page_size_bytes for name in group.layer_names),
        blocks=kv_cache_config.num_blocks,
        layout=str(
            getattr(kv_cache_config, "kv_cache_layout", None)
            or getattr(vllm_config.cache_config, "kv_cache_layout", None)
            or "strided"
        ),
        ranks=parallel.tensor_parallel_size,
        rank=parallel.rank % parallel.tensor_parallel_size,
        replicated=replicated,
    )


def _refuse_shapes(parallel: Any) -> None:
    for label in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, label, 1) > 1:
            raise IdentityError(f"{label} is {getattr(parallel, label)}; kvtier serves 1")


def _refuse_layer(name: str, spec: Any) -> None:
    kind = type(spec).__name__
    if kind not in _FULL:
        raise IdentityError(f"layer {name} keeps its KV as {kind}; kvtier serves full attention and MLA")
    mode = getattr(spec, "kv_quant_mode", None)
    if mode is not None and "TOKEN" in str(getattr(mode, "name", mode)).upper():
        raise IdentityError(f"layer {name} keeps scales computed at run time ({mode}); use a static or no scale")


def block_tokens_of(kv_cache_config: Any) -> int:
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def namespace_of(vllm_config: Any, settings: Settings, pages: CacheLayout, ranks: Mapping[int, Handshake]) -> Namespace:
    """The identity of this engine's blocks. Reads the checkpoint. Raises IdentityError."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if problem := hash_problem(cache.prefix_caching_hash_algo, bool(sys.flags.hash_randomization)):
        raise IdentityError(problem)
    if getattr(cache, "calculate_kv_scales", False):
        raise IdentityError("calculate_kv_scales: scales computed at run time are not stored; use static ones")
    shakes = [ranks[rank] for rank in sorted(ranks)]
    if len(shakes) != pages.ranks or len({(s.layout, s.dtype, s.piece_bytes) for s in shakes}) != 1:
        raise IdentityError(f"{pages.ranks} ranks with equal tensors are needed, got {shakes}")
    pieces = 1 if pages.replicated else pages.ranks
    return Namespace(
        model=model_name(model.model, settings.model),
        weights=engine_weights(vllm_config, settings),
        dtype=shakes[0].dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        layout=f"vllm:{pages.layout}:{short(list(pages.layers))}:{shakes[0].layout}",
        block_tokens=int(cache.block_size),
        block_bytes=shakes[0].piece_bytes * pieces,
        layers=f"0:{len(pages.layers)}",
        ranks_served=pieces,
        tp=pages.ranks,
        group="mla" if getattr(model, "use_mla", False) else "full",
        quantization="" if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        scales="checkpoint" if str(cache.cache_dtype).startswith("fp8") else "",
        rope=rope_of(model),
        hash_algorithm=algorithm_of(cache.prefix_caching_hash_algo),
        hash_version=HASH_VERSION,
    )


def engine_weights(vllm_config: Any, settings: Settings) -> str:
    """The checkpoint, and what the engine makes of it before it computes with it."""
    model = vllm_config.model_config
    made = {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "overrides": str(getattr(model, "hf_overrides", None) or ""),
        "draft": str(getattr(vllm_config.speculative_config, "model", "") or ""),
    }
    return f"{weights_of(settings, model.model, model.revision)}+{short(made)}"


def rope_of(model_config: Any) -> str:
    """The parameters of the positions, which are in the keys."""
    text = getattr(model_config, "hf_text_config", None) or model_config.hf_config
    return _canonical({name: getattr(text, name, None) for name in ("rope_theta", "rope_scaling", "rope_parameters")})


def algorithm_of(name: str) -> str:
    """Plain sha256 hashes a pickle, whose bytes belong to a version of Python."""
    return name if "cbor" in name else f"{name}/python{'.'.join(platform.python_version_tuple()[:2])}"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def short(value: Any) -> str:
    """A digest of plain data for a name."""
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:16]


class Adapters:
    """Fingerprints of LoRA adapters by the id under which the engine loaded them.

    The engine loads an adapter's files once per id, so an id keeps the fingerprint of its first sight. If the files
    change afterwards nobody can tell which version an engine holds that also drops and reloads adapters: such an id
    is not cached any more (load the new weights under a new id). Reads files on the caller's thread, a few KiB per
    tensor at the first sight and one `stat` per file afterwards.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[tuple[Any, ...], bytes | None]] = {}

    def of(self, request: Any | None) -> bytes | None:
        """b"" without adapter; None where its weights cannot be named."""
        if request is None:
            return b""
        path = getattr(request, "lora_path", "") or ""
        key = (request.lora_int_id, path)
        signature = _signature(Path(path))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _ADAPTERS_MAX:
                return None
            known = self._known[key] = (signature, _fingerprint(path) if signature else None)
        elif known[0] != signature:
            known = self._known[key] = ((), None)
        return known[1]


def _fingerprint(path: str) -> bytes | None:
    try:
        return adapter_of(path)
    except (IdentityError, OSError):
        return None


def _signature(folder: Path) -> tuple[Any, ...]:
    """Names, sizes, inodes and times of an adapter's files; () where it is no local directory."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        stats = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_ino, stat.st_mtime_ns) for name, stat in stats)
