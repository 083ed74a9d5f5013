"""The namespace of a vLLM engine, read from its configuration, and the fingerprints of its adapters.

Engines whose blocks no namespace can tell apart are refused at start.
"""

from __future__ import annotations

import platform
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.connectors.adapters import adapter_name, signature_of
from kvtier.connectors.configuration import digest16
from kvtier.connectors.identity import model_name, random_weights, rope_of, weights_of
from kvtier.connectors.settings import Settings
from kvtier.connectors.vllm.compat import context_of, contexts_of, hash_problem, stages_of, tells_stages_apart
from kvtier.connectors.vllm.configuration import configuration_of
from kvtier.connectors.vllm.groups import FULL, groups_of, refuse_unproven
from kvtier.connectors.vllm.messages import Handshake
from kvtier.connectors.vllm.tensors import CacheLayout
from kvtier.errors import IdentityError
from kvtier.identity.namespace import Namespace

HASH_VERSION = "vllm-1"
"""vLLM's hash chain H((parent, tokens, extra keys)): one form in all supported releases."""

_ADAPTERS_MAX = 4096


def cache_layout_of(vllm_config: Any, kv_cache_config: Any) -> CacheLayout:
    """Layers and bytes of a block. Raises IdentityError for models and set-ups that are not served."""
    parallel = vllm_config.parallel_config
    _refuse_shapes(vllm_config, kv_cache_config)
    groups = groups_of(kv_cache_config, stages_of(vllm_config))
    refuse_unproven(vllm_config, groups)
    group = kv_cache_config.kv_cache_groups[groups.full]
    spec = group.kv_cache_spec
    if not group.layer_names:
        raise IdentityError("a stage of the pipeline has no layer with a KV cache; every stage needs one")
    specs = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
    for name, layer in specs.items():
        _refuse_layer(name, layer)
    for other in kv_cache_config.kv_cache_groups:
        _refuse_scales(next(iter(other.layer_names), ""), other.kv_cache_spec)
    unit, size = getattr(kv_cache_config, "hash_block_size", None), block_tokens_of(vllm_config, kv_cache_config)
    if unit not in (None, size):
        raise IdentityError(
            f"the engine names runs of {unit} tokens but its blocks hold {size}; equal sizes are needed"
        )
    width, stages = parallel.tensor_parallel_size, stages_of(vllm_config)
    context = context_of(vllm_config, spec)
    replicated = width > 1 and context == 1 and getattr(kv_cache_config, "kv_tp_replicas", 1) == width
    return CacheLayout(
        layers=tuple(group.layer_names),
        page_bytes=tuple(specs[name].page_size_bytes for name in group.layer_names),
        blocks=kv_cache_config.num_blocks,
        layout=str(
            getattr(kv_cache_config, "kv_cache_layout", None)
            or getattr(vllm_config.cache_config, "kv_cache_layout", None)
            or "strided"
        ),
        ranks=width * stages,
        rank=parallel.rank % (width * stages),
        replicated=replicated,
        overlays=tuple(one.layers for one in groups.beside),
        groups=groups.name,
        stages=stages,
        context=context,
        interleave=int(getattr(parallel, "cp_kv_cache_interleave_size", 1)),
    )


def _refuse_shapes(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel = vllm_config.parallel_config
    if (size := getattr(parallel, "prefill_context_parallel_size", 1)) > 1:
        raise IdentityError(f"prefill_context_parallel_size is {size}; kvtier serves 1")
    told = all(hasattr(group.kv_cache_spec, "dcp_sharded") for group in kv_cache_config.kv_cache_groups)
    if (size := contexts_of(vllm_config)) > 1 and not told:
        raise IdentityError(
            f"decode_context_parallel_size is {size}, and this vLLM does not tell whether a group's tokens are divided "
            "among ranks; kvtier serves 1 there"
        )
    stages = getattr(parallel, "pipeline_parallel_size", 1)
    if stages > 1 and not tells_stages_apart():
        raise IdentityError(
            f"pipeline_parallel_size is {stages}, and this vLLM does not tell its connectors which stage a worker is "
            "of; kvtier serves 1 there"
        )


def _refuse_layer(name: str, spec: Any) -> None:
    kind = type(spec).__name__
    if kind not in FULL:
        raise IdentityError(f"layer {name} keeps its KV as {kind}; kvtier serves full attention and MLA")
    _refuse_scales(name, spec)


def _refuse_scales(name: str, spec: Any) -> None:
    mode = getattr(spec, "kv_quant_mode", None)
    if mode is not None and "TOKEN" in str(getattr(mode, "name", mode)).upper():
        raise IdentityError(f"layer {name} keeps scales computed at run time ({mode}); use a static or no scale")


UNREAD = "unread:"
"""Begins the name of weights of which nothing is known."""
_READ_FILES = frozenset(
    {
        "auto", "hf", "safetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes", "fastsafetensors",
        "instanttensor", "runai_streamer", "runai_streamer_sharded", "sharded_state",
    }
)  # fmt: skip
"""Loaders that read the files of the model's path. Others have the weights from a server, another process or a file of
another name, and plug-ins add more."""


def block_tokens_of(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens of a block on all ranks together, which may divide them among them."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return int(spec.block_size) * context_of(vllm_config, spec)


def namespace_of(
    vllm_config: Any, settings: Settings, cache_layout: CacheLayout, ranks: Mapping[int, Handshake]
) -> Namespace:
    """The identity of this engine's blocks. `ranks`: stage after stage. Reads the checkpoint. Raises IdentityError."""
    shakes = [ranks[rank] for rank in sorted(ranks)]
    read = {shake.weights for shake in shakes}
    fields = engine_fields(
        vllm_config, settings, randomised=bool(sys.flags.hash_randomization), read=read.pop() if len(read) == 1 else ""
    )
    stages = _stages_of(cache_layout, shakes)
    layers = [list(stage.layers) for stage in stages]
    return Namespace(
        model=model_name(vllm_config.model_config.model, settings.model),
        dtype=fields["quantization"] or shakes[0].dtype,
        layout=f"vllm:{cache_layout.layout}:{digest16(layers if len(layers) > 1 else layers[0])}:"
        + "|".join(stage.layout for stage in stages),
        block_tokens=int(vllm_config.cache_config.block_size) * cache_layout.context,
        block_bytes=max(stage.piece_bytes for stage in stages) * cache_layout.pieces,
        layers=f"0:{sum(len(names) for names in layers)}",
        ranks_served=cache_layout.pieces,
        tp=cache_layout.width,
        pp=cache_layout.stages,
        cp=cache_layout.context,
        **{**fields, "group": _groups_of_all(cache_layout, stages) or fields["group"]},
    )


def _groups_of_all(cache_layout: CacheLayout, stages: Sequence[Handshake]) -> str:
    """Name of the sets of groups of all stages; "" for one group."""
    return "|".join(stage.groups for stage in stages) if cache_layout.groups and stages[1:] else cache_layout.groups


def _stages_of(cache_layout: CacheLayout, shakes: Sequence[Handshake]) -> list[Handshake]:
    """What each pipeline stage's ranks have in common. Stages may have pieces of different sizes: smaller ones lie at
    the beginning of a piece of the largest's size, and the rest of that stays zero. Raises IdentityError."""
    parts = {
        (rank // cache_layout.width, shake.layout, shake.dtype, shake.piece_bytes, shake.layers, shake.groups)
        for rank, shake in enumerate(shakes)
    }
    alike = len(parts) == cache_layout.stages and len({shake.dtype for shake in shakes}) == 1
    if len(shakes) != cache_layout.ranks or not alike:
        raise IdentityError(f"{cache_layout.ranks} ranks with equal tensors per stage are needed, got {shakes}")
    stages = list(shakes[:: cache_layout.width])
    if {shake.replicated for shake in shakes} != {cache_layout.replicated}:
        raise IdentityError(
            "on some stages of the pipeline the ranks hold the same bytes, on others parts of them: which piece of a "
            "block is whose is not the same on all; divide the layers otherwise, or start without pipeline stages"
        )
    names = [name for stage in stages for name in stage.layers]
    if len(set(names)) != len(names):
        raise IdentityError("stages of the pipeline name some of their layers alike; each layer is to be of one stage")
    return stages


def engine_fields(vllm_config: Any, settings: Settings, *, randomised: bool, read: str = "") -> dict[str, Any]:
    """The fields of a namespace that say what the engine computes, whatever the shape of its blocks. `randomised`: the
    interpreter's hashes are. `read` names the weights as they were read; without it the checkpoint's files are. Raises
    IdentityError for what cannot be named."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if problem := hash_problem(cache.prefix_caching_hash_algo, randomised):
        raise IdentityError(problem)
    kind = str(cache.cache_dtype)
    if getattr(cache, "calculate_kv_scales", False) or "per_token" in kind:
        raise IdentityError(
            f"KV scales computed at run time (calculate_kv_scales, cache dtype {kind}) are not stored; use static ones"
        )
    return {
        "weights": (read if not settings.weights else "") or _weights(vllm_config, settings),
        "group": "mla" if getattr(model, "use_mla", False) else "full",
        "quantization": "" if kind == "auto" else kind,
        "scales": "checkpoint" if kind.startswith("fp8") else "",
        "rope": rope_of("vllm", model),
        "engine": configuration_of(vllm_config),
        "hash_algorithm": _algorithm(cache.prefix_caching_hash_algo),
        "hash_version": HASH_VERSION,
    }


def _weights(vllm_config: Any, settings: Settings) -> str:
    """Fingerprint of the checkpoint, and of a draft model's; of what is known of random weights. Where a loader takes
    them from elsewhere, nothing of the files says what was loaded: the name is of this process alone."""
    model, loader = vllm_config.model_config, _loader(vllm_config)
    if loader == "dummy" and not settings.weights:
        return random_weights(model.seed, quantized=model.quantization is not None)
    if loader not in _READ_FILES and not settings.weights:
        return f"{UNREAD}{secrets.token_hex(8)}"
    downloads = getattr(getattr(vllm_config, "load_config", None), "download_dir", None)
    own = weights_of(settings, model.model, model.revision, downloads)
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is None or settings.weights or draft.model == model.model:
        return own
    return f"{own}+draft:{weights_of(settings, draft.model, draft.revision, downloads)}"


def _loader(vllm_config: Any) -> str:
    """`--load-format`; of older releases the name of an enumeration's member."""
    load = getattr(vllm_config, "load_config", None)
    return str(getattr(load, "load_format", "auto")).rpartition(".")[2].lower()


def _algorithm(name: str) -> str:
    """Plain sha256 hashes a pickle, whose bytes belong to a version of Python."""
    return name if "cbor" in name else f"{name}/python{'.'.join(platform.python_version_tuple()[:2])}"


class Adapters:
    """Names of LoRA adapters by the id under which the engine loaded them.

    The engine loads an adapter's files once per id, so an id keeps the name of its files at its first request. If the
    worker loaded others (`told`), or the files change afterwards, the id is not cached any more: which version the
    engine holds tomorrow is unknown, since it drops and reloads adapters (load the new weights under a new id). Reads
    files on the caller's thread, a few KiB per tensor the first time and one `stat` per file afterwards.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[tuple[Any, ...], str]] = {}
        self._told: dict[int, str] = {}

    def of(self, request: Any | None) -> bytes | None:
        """b"" without adapter; None where nothing names its weights."""
        if request is None:
            return b""
        name = self._of_files(request.lora_int_id, getattr(request, "lora_path", "") or "")
        agreed = self._told.get(request.lora_int_id, name) == name
        return name.encode("ascii") or None if agreed else None

    def _of_files(self, number: int, path: str) -> str:
        signature = signature_of(Path(path))
        known = self._known.get((number, path))
        if known is None:
            if len(self._known) >= _ADAPTERS_MAX:
                return ""
            known = self._known[number, path] = (signature, adapter_name(Path(path)) if signature else "")
        elif known[0] != signature:
            known = self._known[number, path] = ((), "")
        return known[1]

    def loaded(self, number: int) -> bool:
        """Whether the workers have told what they loaded under this id."""
        return number in self._told

    def told(self, adapters: Mapping[int, str]) -> set[int]:
        """The workers have loaded these, by id; "" for one of no certain content. Returns the ids that were taken for
        others until now."""
        taken = {number: name for (number, _), (_, name) in self._known.items()} | self._told
        self._told.update(adapters)
        return {number for number, name in adapters.items() if taken.get(number, name) != name}
