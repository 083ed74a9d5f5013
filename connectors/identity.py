"""Identity that all engines share: model, weights and adapters by content, the rotation in the keys, block keys."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.config import Config
from kvtier.connectors.configuration import canonical
from kvtier.connectors.settings import Settings
from kvtier.errors import IdentityError
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import BlockKey, Scope, make_keys
from kvtier.identity.namespace import Namespace
from kvtier.identity.stream import STREAM
from kvtier.identity.weights import fingerprint

_PROMPT_LENGTH, _MODEL_LENGTH = "the length of the whole prompt", "max_model_len"

ROPE_TYPES: Mapping[str, Mapping[str, str]] = {
    **{
        kind: {} for kind in ("default", "linear", "yarn", "llama3", "mrope", "deepseek_yarn", "deepseek_llama_scaling")
    },
    "dynamic": {"sglang": _PROMPT_LENGTH, "transformers": _PROMPT_LENGTH, "vllm": _MODEL_LENGTH},
    "longrope": {"sglang": _PROMPT_LENGTH, "transformers": _PROMPT_LENGTH, "vllm": _MODEL_LENGTH},
}
"""By type of RoPE and engine, what the rotation of a key depends on beside its position and the model's configuration;
nothing where the engine is not named. Of types that are not named, the model's length."""


def rope_of(engine: str, model_config: Any) -> str:
    """The parameters of the rotation, which is in the keys, for a namespace. `model_config` is vLLM's or SGLang's.
    Raises IdentityError where `rope_problem` names one."""
    text = getattr(model_config, "hf_text_config", None) or model_config.hf_config
    length: Any = getattr(model_config, "max_model_len", None) or getattr(model_config, "context_len", 0)
    rope = {name: getattr(text, name, None) for name in ("rope_theta", "rope_scaling", "rope_parameters")}
    if problem := rope_problem(engine, rope):
        raise IdentityError(problem)
    if _MODEL_LENGTH in _rope_dependences(engine, rope).values():
        rope[_MODEL_LENGTH] = int(length)
    return canonical(rope)


def rope_problem(engine: str, rope: Any) -> str:
    """Why keys with these RoPE parameters (a mapping, or None) cannot be cached; "" if they can."""
    kinds = sorted(kind for kind, on in _rope_dependences(engine, rope).items() if on == _PROMPT_LENGTH)
    if not kinds:
        return ""
    return (
        f"RoPE of type {', '.join(kinds)} rotates keys by {_PROMPT_LENGTH}: a block's bytes depend on the tokens after "
        "it; run this model without kvtier"
    )


def _rope_dependences(engine: str, rope: Any) -> dict[str, str]:
    found = {kind: ROPE_TYPES.get(kind, {engine: _MODEL_LENGTH}).get(engine, "") for kind in _rope_types(rope)}
    return {kind: on for kind, on in found.items() if on}


def _rope_types(parameters: Any) -> set[str]:
    """Every type in RoPE parameters, which may be nested by layer type."""
    if not isinstance(parameters, Mapping):
        return set()
    own = {str(parameters[name]) for name in ("rope_type", "type") if name in parameters}
    return own.union(*(_rope_types(value) for value in parameters.values()))


def model_name(model: str, given: str = "") -> str:
    """A logical name: `given`, else a hub id as it is, else the last part of a path. Pure.

    Two replicas that keep one checkpoint at different paths share; the weights' fingerprint tells two checkpoints of
    one name apart.
    """
    if given:
        return given
    looks_like_path = model.startswith(("/", "./", "../", "~")) or Path(model).exists()
    return (Path(model).name or "model") if looks_like_path else model


def weights_of(settings: Settings, model: str, revision: str | None = None, downloads: str | None = None) -> str:
    """Fingerprint of the weights that the engine loaded: the operator's id, else of the local directory or of the
    hub snapshot, which it has in the directory `downloads` (None: in the hub's own). Reads a few MiB of the files (all
    of them with `weights: full`). Raises IdentityError."""
    if settings.weights:
        return f"id:{settings.weights}"
    where = Path(model)
    if not where.exists():
        where = _downloaded(model, revision, downloads) or _snapshot(model, revision)
    return fingerprint(where, settings.config.weights)


def random_weights(seed: object, *, quantized: bool) -> str:
    """The name of weights that the engine drew at random: of this process alone where it leaves some of them as the
    memory was, which it does with quantised ones."""
    import torch

    return f"dummy:{secrets.token_hex(8)}" if quantized else f"dummy:{seed}:torch{torch.__version__}"


def _downloaded(repo: str, revision: str | None, downloads: str | None) -> Path | None:
    """Directory of a hub model's weights in a directory of the engine's own, which may have no configuration beside
    them; None where there is none."""
    if not downloads:
        return None
    folder, ref = Path(downloads) / f"models--{repo.replace('/', '--')}", revision or "main"
    try:
        commit = (folder / "refs" / ref).read_text("utf-8").strip()
    except (OSError, ValueError):
        commit = ref
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def _snapshot(repo: str, revision: str | None) -> Path:
    """Directory of a hub model that is in the local cache. Never goes to the network."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repo, "config.json", revision=revision)
    except Exception as error:  # a foreign library's errors are not part of its contract
        raise IdentityError(f"the weights of {repo!r} cannot be found: {error}; set the argument weights") from error
    if not isinstance(found, str):
        raise IdentityError(
            f"the weights of {repo!r} are neither a directory nor in the hub's local cache; "
            "set the connector argument weights to an id that changes with them"
        )
    return Path(found).parent


def namespace_of_weights(namespace: Namespace, weights: str) -> Namespace:
    """The namespace after weights changed in place to what `weights` names as it was read; "": nothing does, and the
    namespace is of this process alone. An engine that starts with the same weights has the same name, if it reads them
    in the same way."""
    if weights and namespace.weights.startswith(STREAM):
        return replace(namespace, weights=weights, epoch="")
    return namespace.rotated(weights or secrets.token_hex(8))


def epoch_after_reset(config: Config, namespace: Namespace) -> Namespace:
    """The namespace after the engine announced new weights in place: a random epoch that no other process shares,
    or, with `keep_on_reset`, the same one."""
    return namespace if config.keep_on_reset else namespace.rotated(secrets.token_hex(8))


def engine_keys(scope: Scope, hashes: Sequence[bytes]) -> list[BlockKey]:
    """An engine's own chain hashes under our scope. Pure. Raises IdentityError unless they have 32 bytes."""
    for digest in hashes:
        if len(digest) != HASH_BYTES:
            raise IdentityError(
                f"the engine's block hashes have {len(digest)} bytes, {HASH_BYTES} are needed: "
                "choose a cryptographic one (sha256_cbor)"
            )
    return make_keys(scope, hashes)
