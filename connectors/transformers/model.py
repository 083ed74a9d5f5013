"""A transformers model as a cache of its KV sees it: shapes, identity, and models that are refused.

Identity is taken from the live model, not from the path it was loaded from: merging, quantisation and training since
then change the bytes too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kvtier.connectors.configuration import CHECKPOINT_NEUTRAL, canonical, described
from kvtier.connectors.identity import rope_problem
from kvtier.connectors.transformers.groups import LayerGroups, groups_of
from kvtier.connectors.transformers.settled import ModelAdapters
from kvtier.errors import IdentityError, InvalidRequest
from kvtier.identity.namespace import Namespace

if TYPE_CHECKING:
    import torch

LAYOUT = "L2HND"
"""Order of a block's bytes: layer, keys before values, head, token, dimension."""

_WHOLE_MODEL_BYTES = 256 << 20  # up to here every byte of every parameter is hashed
_SAMPLE_BYTES = 64 << 10  # beyond, this much of each, at an offset drawn from its name
_PROBED_TOKENS = 8  # more than the kernel of a convolution is wide, so that its state has its full length
_MEDIA = re.compile(r"(image|video|audio)_token_(id|index)")
_NEUTRAL = tuple(f"model.*{name}" for name in (*CHECKPOINT_NEUTRAL, "dtype", "architectures"))


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of one token in the layers of full attention, and the groups beside them: found by running the model, not
    read from its configuration. `device` has all of it."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    groups: LayerGroups = field(default_factory=LayerGroups)
    device: torch.device | None = None

    def block(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of a block of `tokens` tokens in the order of LAYOUT."""
        return self.layers, 2, self.kv_heads, tokens, self.head_size

    def block_bytes(self, tokens: int) -> int:
        """Bytes of a block of `tokens` tokens."""
        return int(self.layers * 2 * self.kv_heads * tokens * self.head_size * self.dtype.itemsize)


def probe(model: Any) -> KVShape:
    """The shape of the model's KV, from a few tokens run through it. Raises InvalidRequest for models that are
    refused."""
    import torch
    from transformers import DynamicCache

    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise InvalidRequest("an encoder-decoder model's KV depends on the encoder's input; only decoders are cached")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise InvalidRequest("use_bidirectional_attention: tokens attend to later ones, so no prefix is final")
    if problem := rope_problem("transformers", getattr(config, "rope_parameters", None)):
        raise InvalidRequest(problem)
    cache = DynamicCache(config=model.config)
    ids = torch.zeros((1, _PROBED_TOKENS), dtype=torch.long, device=model.device)
    seen: list[Any] = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda _module, _args, named: seen.append(named.get("past_key_values")), with_kwargs=True
    )
    try:
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
    finally:
        hook.remove()
    if not any(one is cache for one in seen):
        raise InvalidRequest(
            "the model does not call its get_decoder() with past_key_values: passes cannot be followed"
        )
    groups = groups_of(cache)
    full = [cache.layers[index] for index in groups.full]
    found = {(tuple(t.shape), t.dtype) for layer in full for t in (layer.keys, layer.values)}
    if len(found) != 1:
        raise InvalidRequest(f"layers differ in the shape of their keys and values: {sorted(map(str, found))}")
    ((shape, dtype),) = found
    tensors = [t for layer in full for t in (layer.keys, layer.values)]
    tensors += [t for group in groups.take(cache, _PROBED_TOKENS) or () for t in group]
    if len(devices := {t.device for t in tensors}) != 1:
        raise InvalidRequest(
            f"the layers of this model lie on several devices ({', '.join(sorted(map(str, devices)))}), and its KV is "
            "kept on one; put the model on one device, or run it without kvtier"
        )
    return KVShape(len(full), shape[1], shape[3], dtype, groups, *devices)


def media_ids(model: Any) -> dict[int, str]:
    """Token ids that stand for an image, a video or sound, by the name that the configuration gives them."""
    named = model.config.to_dict().items()
    return {value: name for name, value in named if _MEDIA.fullmatch(name) and isinstance(value, int)}


def namespace_of(
    model: Any,
    shape: KVShape,
    block_tokens: int,
    *,
    name: str | None = None,
    weights: str | None = None,
    mode: Literal["auto", "full"] = "auto",
) -> Namespace:
    """The identity of the model's KV. Reads the weights (all below 256 MiB or with mode "full", else samples).

    `name` and `weights` override the model's logical name and the digest of its live weights. Raises IdentityError
    for what cannot be determined.
    """
    config = model.config.get_text_config(decoder=True)
    attention = getattr(config, "_attn_implementation", None)
    if not attention:
        raise IdentityError("the model does not say which attention implementation it uses; set attn_implementation")
    rope = {
        "parameters": getattr(config, "rope_parameters", None),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
    }
    return Namespace(
        model=name or f"{config.model_type}/{type(model).__name__}",
        weights=weights or weights_of(model, mode),
        dtype=str(shape.dtype).removeprefix("torch."),
        layout=LAYOUT,
        block_tokens=block_tokens,
        block_bytes=shape.block_bytes(block_tokens),
        layers=f"0:{shape.layers}" if not shape.groups.beside else ",".join(map(str, shape.groups.full)),
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        group=f"full:{attention}{shape.groups.name}",
        rope=canonical(rope),
        engine=described({"model": model.config}, _NEUTRAL),
    )


def weights_of(model: Any, mode: Literal["auto", "full"] = "auto") -> str:
    """Name the live weights: "live:" + SHA-256 over every parameter's name, type and bytes.

    Above 256 MiB of parameters, "live-s1:" and 64 KiB of each at an offset drawn from its name, which sees any
    training, since that moves every parameter; mode "full" reads all. Adapters that are attached count, and what
    they do now.
    """
    state = sorted(model.state_dict().items())
    whole = mode == "full" or sum(t.numel() * t.element_size() for _, t in state) <= _WHOLE_MODEL_BYTES
    digest = hashlib.sha256(b"kvtier-live-weights-1")
    for part in _parts(canonical(ModelAdapters(model).now()).encode(), state, whole):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return ("live:" if whole else "live-s1:") + digest.hexdigest()


def _parts(about: bytes, state: list[tuple[str, torch.Tensor]], whole: bool) -> Iterator[bytes | memoryview]:
    import torch

    yield about
    for name, tensor in state:
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        if not whole and flat.numel() > _SAMPLE_BYTES:
            drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
            start = drawn % (flat.numel() - _SAMPLE_BYTES)
            flat = flat[start : start + _SAMPLE_BYTES]
        yield memoryview(flat.cpu().numpy())
