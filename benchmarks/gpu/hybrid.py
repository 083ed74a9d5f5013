"""Models with sliding windows or recurrent states over the tiers, in transformers. A part of `make gpu-check`.

A random model of Gemma 3's or Qwen3-Next's shape. The first request computes a prompt and keeps its boundaries; later
ones, once the GPU's pool was emptied and overwritten, have them from G2 and then from G3. All that the cache holds
then (keys, values, windows, states of every layer) must be the bytes that the model itself made, and the answer the
same tokens; a control, one layer's values turned by one place, must be seen.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu.rows import Rows, Skip

BLOCK_TOKENS = 16
ANSWER_TOKENS = 16
REST_TOKENS = 9
"""Behind the last block: what every request computes."""
_COMMON = {"initializer_range": 0.05, "pad_token_id": 0, "tie_word_embeddings": False}
_TINY = {
    "vocab_size": 512, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip
GEMMA = {
    "vocab_size": 32768, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "head_dim": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 1024,
}  # fmt: skip
QWEN = {
    "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "head_dim": 256,
    "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def measure(device: str, rows: Rows, *, tiny: bool) -> None:
    with tempfile.TemporaryDirectory(dir=rows.folder) as folder:
        for kind in ("windows", "states"):
            rows.run(f"{kind}, transformers", partial(_row, kind, device, Path(folder) / kind, tiny))


def _row(kind: str, device: str, folder: Path, tiny: bool) -> Mapping[str, Any]:
    """One model: seconds to the first token, computed, from G2 and from G3. Raises AssertionError for a wrong byte."""
    tokens = (192 if tiny else 8192) + REST_TOKENS
    model = _model(kind, device, tiny, tokens + ANSWER_TOKENS)
    ids = torch.randint(1, int(model.config.vocab_size), (1, tokens), generator=torch.Generator().manual_seed(7))
    ids = ids.to(device)
    prefixes = _open(model, tokens, folder)
    try:
        return _compared(prefixes, model, ids, kind)
    finally:
        prefixes.close()
        shutil.rmtree(folder, ignore_errors=True)


def _compared(prefixes: Any, model: Any, ids: Any, kind: str) -> Mapping[str, Any]:
    _first(model, ids[:, : 4 * BLOCK_TOKENS], None)  # warms up
    computed_s, _ = _timed(partial(_first, model, ids, None))
    cache, hit = prefixes.fetch(ids)
    assert hit == 0, f"{hit} tokens of a prompt that nobody has seen"
    boundary, own = cache.get_seq_length(), _held(cache)
    answer = _answer(model, ids, cache)
    prefixes.store(answer, cache, attention_mask=torch.ones_like(answer))
    flushed = prefixes.flush()
    assert not flushed.pending, f"not all was written: {flushed}"
    figures: dict[str, Any] = {"tokens": boundary, "computed_s": computed_s}
    for tier, emptied in {"g2": ("g1",), "g3": ("g1", "g2")}.items():
        for name in emptied:
            prefixes.pool.evict() if name == "g1" else prefixes.cache.evict(name)
        prefixes.pool.rows.fill_(0xEE)
        before = prefixes.served[tier]
        figures[f"{tier}_s"], (cache, hit) = _timed(partial(_resumed, prefixes, model, ids))
        assert hit == boundary == prefixes.served[tier] - before, f"{hit} tokens, served {dict(prefixes.served)}"
        cache, hit = prefixes.fetch(ids)
        assert hit == boundary and torch.equal(_held(cache), own), f"other bytes from {tier} than were computed"
        again = _answer(model, ids, cache)
        assert torch.equal(again, answer), f"other tokens from {tier}: {again[0, -ANSWER_TOKENS:].tolist()}"
    cache, _ = prefixes.fetch(ids)
    _damage(cache, kind)
    assert not torch.equal(_held(cache), own), "the control was not seen"
    return figures | {"g2_speedup": computed_s / figures["g2_s"]}


def _resumed(prefixes: Any, model: Any, ids: Any) -> tuple[Any, int]:
    cache, hit = prefixes.fetch(ids)
    _first(model, ids[:, cache.get_seq_length() :], cache)
    return cache, hit


def _first(model: Any, ids: Any, cache: Any) -> int:
    with torch.inference_mode():
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return int(out.logits[0, -1].argmax())  # waits for the device


def _answer(model: Any, ids: Any, cache: Any) -> Any:
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=ANSWER_TOKENS, do_sample=False
    )


def _model(kind: str, device: str, tiny: bool, longest: int) -> Any:
    try:
        from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3NextConfig
    except ImportError as error:
        raise Skip(f"transformers is not here: {error}") from None
    config: Any
    if kind == "windows":
        sizes = {**_TINY, "sliding_window": 40} if tiny else GEMMA
        config = Gemma3TextConfig(**{**_COMMON, **sizes, "max_position_embeddings": longest, "layer_types": None})
        config.layer_types = _pattern("sliding_attention", config.num_hidden_layers, 6 if not tiny else 2)
    else:
        small = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                 "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}  # fmt: skip
        sizes = {**_TINY, **small} if tiny else QWEN
        layers = int(sizes["num_hidden_layers"])
        config = Qwen3NextConfig(
            **{**_COMMON, **sizes}, max_position_embeddings=longest, mlp_only_layers=list(range(layers)),
            num_experts=0, layer_types=_pattern("linear_attention", layers, 4 if not tiny else 2),
        )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _pattern(other: str, layers: int, every: int) -> list[str]:
    return ["full_attention" if layer % every == every - 1 else other for layer in range(layers)]


def _open(model: Any, tokens: int, folder: Path) -> Any:
    try:
        from kvtier.config import Config
        from kvtier.connectors.transformers import PrefixCache
    except ImportError as error:
        raise Skip(f"{error}: `make gpu-wheels` brings what kvtier needs") from None
    blocks = 6 * (tokens // BLOCK_TOKENS)  # boundaries beside the prompt's own blocks
    tiers = {
        "g1": {"blocks": blocks},
        "g2": {"capacity": "6GiB" if tokens > 1024 else "64MiB"},
        "g3": {"path": str(folder), "capacity": "8GiB" if tokens > 1024 else "256MiB"},
    }
    deadlines = dict.fromkeys(("get", "put", "flush"), "60s")
    config = Config.parse({"tiers": tiers, "deadlines": deadlines, "policy": "lru"})
    return PrefixCache(config, model, name="random", weights="seed-0")


def _tensors(cache: Any) -> list[Any]:
    """All that a cache holds, layer by layer."""
    found: list[Any] = []
    for layer in cache.layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            value = getattr(layer, name, None)
            found += list(value.values()) if isinstance(value, dict) else [] if value is None else [value]
    return found


def _held(cache: Any) -> Any:
    """Two sums per tensor, one of them weighted by position: enough to see a byte lost or moved."""
    sums = []
    for tensor in _tensors(cache):
        words = tensor.contiguous().view(torch.uint8).flatten().to(torch.int64)
        sums.append(torch.stack([words.sum(), (words * torch.arange(1, words.numel() + 1, device=words.device)).sum()]))
    return torch.stack(sums)


def _damage(cache: Any, kind: str) -> None:
    wanted = "recurrent_states" if kind == "states" else "keys"
    layer = next(layer for layer in cache.layers if getattr(layer, wanted, None) is not None)
    value = getattr(layer, wanted)
    tensor = next(iter(value.values())) if isinstance(value, dict) else value
    tensor.copy_(tensor.roll(1, dims=-1))


def _timed(work: Any) -> tuple[float, Any]:
    """Seconds that `work` takes once the device is idle, and its result."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result
