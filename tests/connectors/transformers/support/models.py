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


def gpt2(seed: int = 0) -> Any:
    """Learned positions, and embeddings of `token_type_ids` that are added to those of the tokens."""
    config = transformers.GPT2Config(
        vocab_size=512, n_positions=2048, n_embd=128, n_layer=4, n_head=4, initializer_range=0.2,
        attn_implementation="sdpa", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _small("GPT2LMHeadModel", config, seed)


def gemma3(seed: int = 0, **options: Any) -> Any:
    """Two layers with a window of 40 tokens, two of full attention; RoPE of two kinds."""
    base: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 40, "max_position_embeddings": 2048,
        "initializer_range": 0.2, "pad_token_id": 0, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    return _small("Gemma3ForCausalLM", transformers.Gemma3TextConfig(**{**base, **options}), seed)


def qwen3_next(seed: int = 0, **options: Any) -> Any:
    """Two layers with a recurrent state and one of a convolution, two of full attention, in bfloat16."""
    base: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2,
        "pad_token_id": 0, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
    }  # fmt: skip
    return _small("Qwen3NextForCausalLM", transformers.Qwen3NextConfig(**{**base, **options}), seed).to(torch.bfloat16)


def _small(kind: str, config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(config).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


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


def held(cache: Any) -> list[tuple[Any, ...]]:
    """All that a cache object holds, layer by layer, read independently of the connector."""
    return [
        tuple(_bytes(getattr(layer, name, None)) for name in ("keys", "values", "conv_states", "recurrent_states"))
        + (getattr(layer, "cumulative_length", None), str(getattr(layer, "has_previous_state", None)))
        for layer in cache.layers
    ]


def _bytes(value: Any) -> Any:
    if isinstance(value, dict):
        return {place: _bytes(state) for place, state in value.items()}
    if value is None:
        return None
    return str(value.dtype), tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes()


def computed(model: Any, ids: Any, ends: list[int]) -> Any:
    """What the model itself has after passes over the tokens up to each of `ends`, without kvtier."""
    cache, begin = transformers.DynamicCache(config=model.config), 0
    for end in ends:
        with torch.no_grad():
            model(ids[:, begin:end], attention_mask=torch.ones((1, end), dtype=torch.long), past_key_values=cache)
        begin = end
    return cache
