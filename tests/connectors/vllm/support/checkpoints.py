"""Small random models whose greedy tokens depend on all of the prompt.

The wide initialiser matters: with the default one greedy decoding runs into a short cycle whatever the KV holds, and a
test that loads wrong bytes would pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

WORDS = 1024
IMAGE_TOKENS = 8
"""What an image takes in a prompt of `image`."""

_TOKENS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_TOKENS, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "initializer_range": 0.15,
}  # fmt: skip


def write_llama(path: Path, seed: int = 0, **changed: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**{**_LLAMA, **changed})).float().eval().save_pretrained(path)


def write_longrope(path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16,
            "original_max_position_embeddings": 1024}  # fmt: skip
    write_llama(path, rope_parameters=rope)


def write_mla(path: Path) -> None:
    """As DeepSeek has it."""
    from transformers import DeepseekV3Config

    _write_causal(path, DeepseekV3Config(
        **_TOKENS, hidden_size=256, intermediate_size=512, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, n_group=1,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=3, q_lora_rank=None, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=4096,
        tie_word_embeddings=False, initializer_range=0.15,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ))  # fmt: skip


def write_prefix_lm(path: Path) -> None:
    """Tokens of a prompt attend to later ones, too."""
    from transformers import HrmTextConfig

    _write_causal(path, HrmTextConfig(
        **_TOKENS, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
        max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=0.15, H_cycles=1, L_cycles=1,
        L_bp_cycles=[1], embedding_scale=1.0,
    ))  # fmt: skip


def write_sliding(path: Path, heads: int = 2) -> None:
    """Every other layer has a window. `heads`: of keys and values."""
    from transformers import Gemma3TextConfig

    _write_causal(path, Gemma3TextConfig(
        **_TOKENS, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=heads, head_dim=32, max_position_embeddings=4096, sliding_window=64, initializer_range=0.15,
        layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0, tie_word_embeddings=False,
    ))  # fmt: skip


def write_gptoss(path: Path) -> None:
    """Every other layer has a window; attention sinks, and experts."""
    from transformers import GptOssConfig

    _write_causal(path, GptOssConfig(
        **_TOKENS, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, sliding_window=64, initializer_range=0.15,
        layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0, num_local_experts=4,
        num_experts_per_tok=2, tie_word_embeddings=False,
    ))  # fmt: skip


def write_many_windows(path: Path) -> None:
    """Two groups of windows to one of full attention."""
    from transformers import Gemma3TextConfig

    _write_causal(path, Gemma3TextConfig(
        **_TOKENS, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, sliding_window=80, initializer_range=0.15,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, pad_token_id=0,
        tie_word_embeddings=False,
    ))  # fmt: skip


def write_filled_up(path: Path) -> None:
    """A group of windows has fewer layers than the group of full attention."""
    from transformers import Gemma3TextConfig

    _write_causal(path, Gemma3TextConfig(
        **_TOKENS, hidden_size=256, intermediate_size=512, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, sliding_window=64, initializer_range=0.15,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        pad_token_id=0, tie_word_embeddings=False,
    ))  # fmt: skip


def write_drafted(path: Path, kinds: str, drafter: bool = False) -> None:
    """A model of which only the first layer does something, and that layer as its drafter: all drafts are right.
    `kinds` of the layers: f has full attention, and w a window. vLLM deals the drafter's layer to those of its kind."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    types = [{"w": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
    config = {
        **_TOKENS, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 4096, "sliding_window": 64, "initializer_range": 0.15,
        "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    model = Gemma3ForCausalLM(Gemma3TextConfig(**config, num_hidden_layers=len(types), layer_types=types)).float()
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    if drafter:
        first = Gemma3ForCausalLM(Gemma3TextConfig(**config, num_hidden_layers=1, layer_types=types[:1])).float()
        first.load_state_dict(model.state_dict(), strict=False)
        model = first
    model.eval().save_pretrained(path)


def write_state(path: Path, heads: int = 1) -> None:
    """Two layers in three keep a state, which fits into a page of 32 tokens, also in the four bytes a number that vLLM
    keeps on CPUs with instructions for bfloat16. It forgets slowly: as made, it would forget a token within the next
    one, and nobody would notice a wrong state. `heads`: of its keys, which ranks divide among them."""
    from transformers import Qwen3NextConfig

    _write_causal(path, Qwen3NextConfig(
        **_TOKENS, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=4096, pad_token_id=0, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64, decoder_sparse_step=1,
        mlp_only_layers=[], linear_num_value_heads=2, linear_num_key_heads=heads, linear_key_head_dim=64,
        linear_value_head_dim=64, linear_conv_kernel_dim=4, initializer_range=0.15,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
    ), A_log=-6.0)  # fmt: skip


def write_mamba2(path: Path) -> None:
    """As Granite 4 has it: two layers in three are of Mamba 2. It forgets slowly, as `write_state`'s."""
    from transformers import GraniteMoeHybridConfig

    _write_causal(path, GraniteMoeHybridConfig(
        **_TOKENS, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=4096, pad_token_id=0, initializer_range=0.15,
        num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=512, position_embedding_type="nope",
        tie_word_embeddings=False, attention_multiplier=0.177, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=16,
        mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=32,
        layer_types=["mamba", "mamba", "attention"] * 2,
    ), A_log=-6.0)  # fmt: skip


def write_eagle(path: Path) -> None:
    """An EAGLE head for the small Llama: one layer over its embeddings and last hidden states."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(**{**_LLAMA, "num_hidden_layers": 1})
    config.architectures = ["LlamaForCausalLM"]
    layers = LlamaForCausalLM(config).float().state_dict()
    kept = {
        name.removeprefix("model."): one
        for name, one in layers.items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    kept["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) * 0.05
    config.save_pretrained(path)
    save_file({name: one.contiguous() for name, one in kept.items()}, path / "model.safetensors")


def write_image(path: Path) -> None:
    """A model that sees, as BLIP-2: an image is IMAGE_TOKENS in front of the prompt."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        BlipImageProcessorPil,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    words = {str(number): number for number in range(WORDS - 2)} | {"<image>": WORDS - 2, "<pad>": WORDS - 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), unk_token="0", pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    side = {"height": 56, "width": 56}
    Blip2Processor(BlipImageProcessorPil(size=side), tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(path)
    wide = {"intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2, "initializer_range": 0.15}
    config = Blip2Config(
        vision_config={**wide, "hidden_size": 64, "image_size": 56, "patch_size": 14},
        qformer_config={**wide, "hidden_size": 64, "encoder_hidden_size": 64, "vocab_size": 8},
        text_config={
            **_TOKENS, "model_type": "opt", "hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 256,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 2048, "init_std": 0.15,
        },
        num_query_tokens=IMAGE_TOKENS, image_token_index=WORDS - 2,
    )  # fmt: skip
    model = Blip2ForConditionalGeneration(config).float().eval()
    torch.nn.init.normal_(model.query_tokens)
    model.save_pretrained(path)


def _write_causal(path: Path, config: Any, **filled: float) -> None:
    """`filled`: values of all parameters of these names."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if (value := filled.get(name.rpartition(".")[2])) is not None:
            torch.nn.init.constant_(parameter, value)
    model.save_pretrained(path)


OTHERS: dict[str, Callable[[Path], None]] = {
    "mla": write_mla,
    "sliding": write_sliding,
    "one_head": partial(write_sliding, heads=1),
    "gptoss": write_gptoss,
    "many_windows": write_many_windows,
    "filled_up": write_filled_up,
    "drafted_fwwwf": partial(write_drafted, kinds="fwwwf"),
    "drafter_fwwwf": partial(write_drafted, kinds="fwwwf", drafter=True),
    "state": write_state,
    "state_of_two": partial(write_state, heads=2),
    "mamba2": write_mamba2,
    "prefix_lm": write_prefix_lm,
    "longrope": write_longrope,
    "eagle": write_eagle,
    "image": write_image,
}
"""By kind: the models that are not the small Llama."""
