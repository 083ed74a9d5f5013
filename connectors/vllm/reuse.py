"""Whether KV of this engine may be used again at all.

An engine that runs with prefix caching vouches for it. One that runs without may do so to be right: masks that look
ahead, pooling over all tokens, inputs that have no name, kernels of prefill that read nothing of what lies before a
prompt's new tokens, or read it wrongly. Then nothing is cached. Only where the engine has no reason of
its own is prefix caching off because its user said so, and kvtier is its only prefix cache.
"""

from __future__ import annotations

from typing import Any

from kvtier.connectors.vllm import compat


def why_off(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why nothing is cached; "" where KV may be used again."""
    if any(_looks_ahead(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups):
        return "tokens of a prompt attend to later ones, so their KV depends on what follows them"
    if getattr(vllm_config.cache_config, "enable_prefix_caching", False):
        return ""
    model = vllm_config.model_config
    if getattr(model, "runner_type", "generate") != "generate":
        return "this pooling model runs without prefix caching"
    if getattr(model, "is_multimodal_model", False):
        return "a multimodal model that runs without prefix caching does not name its images"
    if getattr(model, "enable_prompt_embeds", False):
        return "prompt embeddings are served without prefix caching, and have no names"
    if not getattr(model, "is_prefix_caching_supported", True):
        return "the engine supports no prefix caching for this model"
    if not compat.chunks_prefill(vllm_config):
        return "prompts are computed in one piece: no part of one is known to go on right behind KV that is there"
    if compat.batch_invariant():
        return "batch-invariant kernels run without prefix caching"
    return ""


def _looks_ahead(spec: Any) -> bool:
    every = [spec, *(getattr(spec, "kv_cache_specs", None) or {}).values()]
    return any(getattr(one, "non_causal", False) for one in every)
