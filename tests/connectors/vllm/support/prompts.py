"""Prompts that differ from their first block on, small tiers, and what an idle engine holds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

BLOCK = 32
IDLE = {"requests": 0, "loading": 0, "storing": 0, "dirty": 0, "pinned": 0, "quarantined": 0, "blocks_used": 0,
        "forgotten": 0}  # fmt: skip
"""What `engine.check()` says of an engine that has ended everything."""


def prompt(seed: int, length: int = 300) -> list[int]:
    return [(i * 7919 + seed * 104729 + (i * seed) % 17) % 1000 + 3 for i in range(length)]


def tokens(outs: list[dict[str, Any]]) -> list[list[int]]:
    return [out["tokens"] for out in outs]


def tiers(tmp_path: Path, **g3: Any) -> dict[str, Any]:
    """A configuration with tiers in a folder; further settings are those of G3."""
    return {"tiers": {"g2": {"capacity": "32MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "1GiB", **g3}}}


def keeps_accounts() -> bool:
    """Older releases do not say where cached tokens came from, and outside of a server they drop what steps without
    output report."""
    return importlib.util.find_spec("vllm.v1.metrics.cache_hit_source") is not None
