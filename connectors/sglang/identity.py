"""The namespace of one SGLang rank, read from the engine's configuration."""

from __future__ import annotations

import hashlib
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.connectors.identity import model_name, random_weights, rope_of, weights_of
from kvtier.connectors.settings import Settings
from kvtier.connectors.sglang.configuration import configuration_of
from kvtier.connectors.sglang.pool import KVPools
from kvtier.errors import IdentityError
from kvtier.identity.namespace import Namespace

log = logging.getLogger(__name__)

HASH_ALGORITHM = "sglang-sha256"
HASH_VERSION = "1"
"""Of SGLang's page chain: sha256(parent ‖ tokens as u32), seeded with "sglang-cache-namespace-v1" for salts."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's place in the parallel run: attention tensor parallelism and the pipeline."""

    tp_rank: int = 0
    tp: int = 1
    pp: int = 1

    def fields(self, replicated: bool) -> dict[str, Any]:
        """Fields of a namespace. `replicated` pools are equal on all tensor-parallel ranks, so theirs is rank 0 of 1
        and they share the tiers below G2."""
        rank, ranks = (0, 1) if replicated else (self.tp_rank, self.tp)
        return {"rank": rank, "ranks": ranks, "tp": ranks, "pp": self.pp}


def replica_and_rank() -> tuple[int, int]:
    """This process's replica of data parallelism, and its rank there."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.dp_rank or 0), int(parallel.tp_rank)


def process_number() -> int:
    """Number of this process among the engine's."""
    from sglang.srt.runtime_context import get_parallel

    replica, rank = replica_and_rank()
    return int(replica * get_parallel().tp_size + rank)


def namespace_of_rank(server: Any, settings: Settings, pool: KVPools) -> Namespace:
    """The identity of the blocks of this process's rank. Raises IdentityError for ranks that do not have whole pages of
    a prompt from its first on."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    ranks = Ranks(parallel.attn_tp_rank, parallel.attn_tp_size, parallel.pp_size)
    if ranks.pp > 1:
        raise IdentityError("pipeline parallelism: SGLang's linker cannot make its stages agree on a prefix; use pp 1")
    for name in ("attn_cp_size", "attn_dcp_size"):
        if getattr(parallel, name, 1) > 1:
            raise IdentityError(f"{name} is {getattr(parallel, name)}: pages are spread over ranks; kvtier serves 1")
    return namespace_of(server, ModelConfig.from_server_args(server), settings, pool, ranks)


def namespace_of(server: Any, model_config: Any, settings: Settings, pool: KVPools, ranks: Ranks) -> Namespace:
    """The identity of one rank's blocks. Reads the checkpoint. Raises IdentityError."""
    replicated = pool.replicated
    return Namespace(
        layout=f"sglang:{'L' if pool.kind == 'mla' else 'L2'}NHD",
        block_tokens=pool.page,
        block_bytes=pool.block_bytes,
        layers=f"{pool.layers[0]}:{pool.layers[1]}",
        kv_heads=pool.shape.heads,
        head_size=pool.shape.channels,
        group=pool.group,
        **ranks.fields(replicated),
        **engine_fields(server, model_config, settings, pool.dtype),
    )


def engine_fields(server: Any, model_config: Any, settings: Settings, dtype: str) -> dict[str, Any]:
    """The fields of a namespace that say what the engine computes, whatever the shape of its pools. Reads the
    checkpoint. Raises IdentityError for what cannot be named."""
    if algorithm := getattr(server, "speculative_algorithm", None):
        raise IdentityError(
            f"speculative decoding ({algorithm}): the KV of a draft model is not kept, and drafts without one (NGRAM) "
            "are not proved, since SGLang runs them on GPUs alone; start without it, or without kvtier"
        )
    if algorithm := getattr(server, "dllm_algorithm", None):
        raise IdentityError(
            f"a diffusion language model ({algorithm}) computes the KV of a block of tokens anew until all of them are "
            "decided: not proved, and SGLang has HiCache off for such models; start it without kvtier"
        )
    quantized = dtype.startswith("float8")
    return {
        "model": model_name(server.model_path, settings.model),
        "weights": _weights(server, settings),
        "dtype": dtype,
        "quantization": dtype if quantized else "",
        "scales": _scales(server) if quantized else "",
        "rope": rope_of("sglang", model_config),
        "engine": configuration_of(server, model_config),
        "hash_algorithm": HASH_ALGORITHM,
        "hash_version": HASH_VERSION,
    }


_READ_FILES = frozenset(
    {
        "auto", "pt", "safetensors", "instanttensor", "fastsafetensors", "mistral", "gguf", "bitsandbytes", "layered",
        "sharded_state", "runai_streamer",
    }
)  # fmt: skip
"""Loaders that read the files of the model's path, and nothing that was made of them before."""


def _weights(server: Any, settings: Settings) -> str:
    """Fingerprint of the checkpoint; of what is known of random weights. Where they come from elsewhere (another
    instance, a daemon that holds them, copies that were made once), nothing of the files says what was loaded: the name
    is of this process alone."""
    loader = str(server.load_format).rpartition(".")[2].lower()
    if loader == "dummy" and not settings.weights:
        return random_weights(getattr(server, "random_seed", 0), quantized=server.quantization is not None)
    held = (getattr(server, "weight_cache_mode", None) or "off") != "off"
    restored = bool(getattr(server, "modelopt_checkpoint_restore_path", None))
    if (loader not in _READ_FILES or held or restored) and not settings.weights:
        log.warning(
            "the weights come from elsewhere than the model's files (load format %s%s): blocks are of this process "
            "alone; set the connector argument weights to an id that changes with them, and replicas share",
            loader,
            ", from a weight cache" if held else "",
        )
        return f"unread:{secrets.token_hex(8)}"
    return weights_of(settings, server.model_path, server.revision, getattr(server, "download_dir", None))


def _scales(server: Any) -> str:
    """fp8 KV has static scales: from a file of their own, else from the checkpoint (or 1), which `weights` covers."""
    path = getattr(server, "quantization_param_path", None)
    return "checkpoint" if not path else hashlib.sha256(Path(path).read_bytes()).hexdigest()
