"""Which fields of SGLang's configuration do not change the KV: all others are part of a namespace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.connectors.configuration import CHECKPOINT_NEUTRAL, described

_SERVER = (
    # addresses, interfaces, logs, metrics
    "host", "port", "*_port", "fastapi_root_path", "grpc_*", "http2_*", "enable_http*", "ssl_*", "enable_ssl_*",
    "smg_*", "sidecar*", "uvicorn_*", "*api_key", "log_*", "*metrics*", "*_buckets", "bucket_*", "otlp_*",
    "enable_trace", "trace_modules", "crash_dump_folder", "decode_log_interval", "show_time_cost", "stat_loggers",
    "enable_cache_report", "enable_request_time_stats_logging", "enable_layerwise_nvtx_marker", "kv_events_config",
    "load_publish_endpoint", "load_snapshot_*", "extra_metric_labels", "decoupled_spec_*_endpoint*", "spec_trace_dir",
    "expert_distribution_recorder_*", "ple_offload_dir", "modelopt_export_path", "modelopt_checkpoint_save_path",
    "watchdog_timeout", "soft_watchdog_timeout", "gc_*", "warmups",
    "skip_server_warmup", "launch_command", "custom_sigquit_handler", "file_storage_path", "weight_version",
    "served_model_name", "model_path", "revision", "trust_remote_code", "debug_*", "msprobe_*", "kv_canary*",
    # text, sampling, answers
    "tokenizer_*", "detokenizer_worker_num", "*chat_template*", "completion_template", "reasoning_parser", "tool_*",
    "skip_tokenizer_init", "disable_tokenizer_batch_decode", "enable_tokenizer_batch_encode", "dynamic_batch_*",
    "enable_dynamic_batch_tokenizer", "grammar_backend", "constrained_json_*", "disable_outlines_disk_cache",
    "sampling_*", "preferred_sampling_params", "enable_custom_logit_processor", "watermark_*", "enable_watermark",
    "stream_*", "incremental_streaming_output", "batch_notify_size", "return_*", "enable_return_*",
    "enable_response_store", "enable_strict_thinking", "strip_thinking_cache", "asr_*", "random_seed",
    # scheduling, sizes, places
    "schedule_*", "scheduler_recv_interval", "*priority*", "abort_*", "max_running_requests", "max_queued_requests",
    "max_total_tokens", "max_prefill_tokens", "chunked_prefill_size", "enable_mixed_chunk", "prefill_max_requests",
    "prefill_delayer_*", "enable_prefill_delayer", "prefill_decode_interval*", "num_continuous_decode_steps",
    "num_reserved_decode_tokens", "optimistic_prefill_attempts", "min_free_slots_delay", "retraction_policy",
    "load_balance_method", "mem_fraction_static", "swa_full_tokens_ratio", "disable_overlap_schedule",
    "disable_radix_cache", "radix_*", "hicache_*", "enable_hierarchical_cache", "*unified_cache_external_linker*",
    "enable_lmcache", "lmcache_*", "enable_flexkv", "flexkv_*", "disaggregation_*", "sleep_on_idle",
    "enable_streaming_session", "enable_session_radix_cache", "allow_auto_truncate", "context_length",
    "base_gpu_id", "gpu_id_step", "numa_node", "nnodes", "node_rank", "dist_*", "dp_size", "tp_size", "pp_*",
    "page_size", "use_ray", "elastic_ep_*", "mooncake_ib_device", "enable_nccl_nvls", "pre_warm_nccl",
    "enable_p2p_check", "enable_symm_mem", "disable_custom_all_reduce", "enable_memory_saver",
    "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup", "engine_info_*", "encoder_*url*",
    "*cuda_graph*", "enable_cudagraph_gc", "enable_torch_compile*", "torch_compile_max_bs",
    "disable_flashinfer_autotune",
    # files, whose content is in the model's configuration, the weights or the scales
    "download_dir", "delete_ckpt_after_loading", "weight_loader_*", "weight_cache_*", "remote_instance_*",
    "checkpoint_engine_*", "startup_weight_load_mode", "decrypted_*config_file", "quantization_param_path",
    # adapters, which are in the scope of a request
    "lora_paths", "lora_drain_wait_threshold", "lora_eviction_policy", "lora_strict_loading", "max_loaded_loras",
    "max_loras_per_batch", "max_lora_chunk_size", "max_lora_rank", "enable_lora_overlap_loading",
    # multimodal input: sizes and workers
    "mm_io_worker_num", "mm_processor_worker_num", "mm_preprocess_cache_size_mb", "media_url_max_file_size_mb",
    "allowed_media_domains", "limit_mm_data_per_request", "mm_feature_transport",
)  # fmt: skip
"""Of the server. The shape of the parallel run, pages and the rotation have fields of their own in a namespace."""

_MODEL = ("model_path", "revision", "context_len", "hf_generation_config", "*eos_token_id", "*think_*",
          "sampling_defaults", "is_*cuda_graph_*")  # fmt: skip

NEUTRAL = (
    *(f"server.{name}" for name in _SERVER),
    *(f"model.{name}" for name in _MODEL),
    *(f"model.hf_*{name}" for name in CHECKPOINT_NEUTRAL),
)


def configuration_of(server: Any, model_config: Any) -> str:
    """The configuration of an SGLang engine for a namespace: `server` are its ServerArgs. Pure."""
    resolved = getattr(server, "resolved_dict", None)
    arguments: Mapping[str, Any] = resolved() if callable(resolved) else vars(server)
    return described({"server": arguments, "model": vars(model_config)}, NEUTRAL)
