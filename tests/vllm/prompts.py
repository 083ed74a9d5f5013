"""Prompts that differ from their first block on, and what an idle engine holds."""

from __future__ import annotations

from typing import Any

BLOCK = 32
IDLE = {"visits": 0, "loading": 0, "storing": 0, "dirty": 0, "pinned": 0, "quarantined": 0, "blocks_used": 0,
        "forgotten": 0}  # fmt: skip
"""What `engine.check()` says of an engine that has ended everything."""


def prompt(seed: int, length: int = 300) -> list[int]:
    return [(i * 7919 + seed * 104729 + (i * seed) % 17) % 1000 + 3 for i in range(length)]


def tokens(outs: list[dict[str, Any]]) -> list[list[int]]:
    return [out["tokens"] for out in outs]
