"""Stacks of vLLM's tiering manager for all tests of kvtier below it."""

from __future__ import annotations

from tests.connectors.vllm.support.tier_stack import make

__all__ = ["make"]
