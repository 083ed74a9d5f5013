"""kvtier: a tiered KV-cache offload block manager for LLM inference."""
