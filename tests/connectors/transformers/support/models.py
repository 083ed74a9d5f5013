"""A small Llama with random weights, wide enough that its output depends on every token, and what to ask of it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BLOCK_BYTES = 32768
"""Of 16 tokens of `llama()`."""


def llama(dtype: Any = None, attention: str = "sdpa", seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    base: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
        "initializer_range": 0.2, "attn_implementation": attention,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**base, **options})).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model if dtype is None else model.to(dtype)


def prompt(length: int, seed: int = 7) -> Any:
    return torch.randint(1, 512, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: Any, cache: Any, new: int = 24) -> Any:
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, do_sample=False)


def blocks_of(cache: Any, count: int, size: int = 16) -> list[bytes]:
    """Bytes of the first blocks of a cache, cut independently of the connector."""
    out = []
    for block in range(count):
        cut = slice(block * size, (block + 1) * size)
        layers = [torch.stack([layer.keys[0, :, cut], layer.values[0, :, cut]]) for layer in cache.layers]
        out.append(torch.stack(layers).contiguous().view(torch.uint8).numpy().tobytes())
    return out
