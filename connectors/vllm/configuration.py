"""Which fields of vLLM's configuration do not change the KV: all others are part of a namespace."""

from __future__ import annotations

from copy import copy
from typing import Any

from kvtier.connectors.configuration import CHECKPOINT_NEUTRAL, described

_PLACES = (
    "parallel_config", "scheduler_config", "device_config", "offload_config", "aux_output_config", "watermark_config",
    "structured_outputs_config", "observability_config", "logging_config", "compilation_config", "profiler_config",
    "kv_transfer_config", "kv_events_config", "ec_transfer_config", "ec_manager_config", "reasoning_config",
    "instance_id", "optimization_level", "performance_mode", "weight_transfer_config", "shutdown_timeout",
    "enable_flashinfer_autotune",
)  # fmt: skip
"""Where and how the engine runs and reports. The parallel run's shape has fields of its own in a namespace. Which
kernels compute the same function is neutral by convention, as is compilation."""

_KERNELS = (
    "kernel_config.ir_op_priority", "kernel_config.enable_*", "quant_config",
    "mamba_config.backend", "attention_config.flash_attn_max_num_splits*",
    "attention_config.flex_attn_*", "attention_config.tq_max_kv_splits*",
    "attention_config.tokenspeed_mla_min_split_kv", "attention_config.sparse_mla_prefill_workspace_factor",
)  # fmt: skip
"""`quant_config` is derived from the model's fields, and completed only where the model is loaded. Backends of linear
layers and experts count: of the same checkpoint some compute with quantised activations, and some do not."""

_MODEL = (
    "model", "model_weights", "tokenizer", "tokenizer_mode", "tokenizer_revision", "trust_remote_code", "seed",
    "revision", "served_model_name", "max_model_len", "spec_target_max_model_len", "max_logprobs", "logprobs_mode",
    "return_sampling_mask", "use_fp64_gumbel", "enable_trace_replay", "skip_tokenizer_init", "enable_prompt_embeds",
    "hf_token", "hf_config_path", "config_format", "generation_config", "override_generation_config",
    "enable_sleep_mode", "sleep_*", "enable_nccl_comm_suspend", "enable_cumem_allocator", "logits_processors",
    "io_processor_plugin", "renderer_num_workers", "allowed_local_media_path", "allowed_media_domains", "enforce_eager",
    "disable_cascade_attn", "allow_deprecated_quantization", "model_arch_config",
)  # fmt: skip
"""Of a model. Names and paths of its files are not what they hold: that is in `hf_config` and the fingerprint of the
weights. `max_model_len` is in the rotation where it matters, `seed` in the weights' name where they are random."""

_CACHE = (
    "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks*", "num_cpu_blocks", "enable_prefix_caching",
    "prefix_cache_retention_interval", "prefix_match_unit", "kv_offloading_*", "user_specified_block_size",
    "_block_size_resolved", "effective_attention_block_size", "kv_cache_size_tokens", "kv_cache_max_concurrency",
    "hash_block_size", "cache_hit_alignment_tokens", "swap_space*", "cpu_kvcache_space_bytes", "kv_cache_layout",
    "prefix_caching_hash_algo", "block_size",
)  # fmt: skip
"""Of the cache: sizes of pools, and what has a field of its own in a namespace (layout, hashes, block size)."""

_LOAD = ("download_dir", "safetensors_*", "use_tqdm_on_load", "pt_load_map_location")
_LORA = ("max_lora_rank", "max_loras", "max_cpu_loras", "fully_sharded_loras", "specialize_active_lora")
_MULTIMODAL = (
    "limit_per_prompt", "mm_processor_cache_*", "mm_shm_cache_*", "mm_encoder_tp_mode", "skip_mm_profiling",
    "mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "mm_encoder_fp8_scale_save_*",
)  # fmt: skip
_SPECULATION = (
    "model", "target_*", "draft_parallel_config", "*tensor_parallel_size", "prompt_lookup_*", "suffix_decoding_*",
    "rejection_sample_method", "synthetic_acceptance_*", "draft_sample_method", "disable_padded_drafter_batch",
    "use_local_argmax_reduction", "enforce_eager", "revision",
)  # fmt: skip

NEUTRAL = (
    *_PLACES,
    *_KERNELS,
    *(f"*model_config.{name}" for name in _MODEL),
    *(f"*model_config.*{name}" for name in CHECKPOINT_NEUTRAL),
    *(f"cache_config.{name}" for name in _CACHE),
    *(f"*load_config.{name}" for name in _LOAD),
    *(f"lora_config.{name}" for name in _LORA),
    *(f"*multimodal_config.{name}" for name in _MULTIMODAL),
    *(f"speculative_config.{name}" for name in _SPECULATION),
)


NO_DRAFTER = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculation that keep no KV of their own."""


_PADDED = "mamba_page_size_padded"
"""Bytes of a state's page. Derived, and in some of an engine's processes only; the name of its group has it."""


def configuration_of(vllm_config: Any) -> str:
    """The configuration of a vLLM engine for a namespace. Pure."""
    sections = dict(vars(vllm_config))
    if getattr(sections.get("speculative_config"), "method", None) in NO_DRAFTER:
        sections["speculative_config"] = None
    if getattr(sections.get("cache_config"), _PADDED, None) is not None:
        sections["cache_config"] = copy(sections["cache_config"])
        setattr(sections["cache_config"], _PADDED, None)
    return described(sections, NEUTRAL)
