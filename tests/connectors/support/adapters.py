"""LoRA adapters for small Llamas, as PEFT writes them."""

from __future__ import annotations

import json
from pathlib import Path


def write_adapter(folder: Path, seed: int, *, layers: int, width: int) -> Path:
    """An adapter of q_proj and v_proj for `layers` layers of `width` channels, with KV heads of 64 in all."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name, out in (("q_proj", width), ("v_proj", 64)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, width, generator=generator) * 0.2
            weights[f"{place}.lora_B.weight"] = torch.randn(out, 8, generator=generator) * 0.2
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none",
                    "base_model_name_or_path": "tiny", "target_modules": ["q_proj", "v_proj"]})
    )  # fmt: skip
    return folder
