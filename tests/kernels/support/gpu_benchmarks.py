"""`benchmarks/` of the checkout, and the rows that a part of `make gpu-check` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """By name. `gpu_benchmarks` must be in use."""
    from gpu import rows as gpu_rows

    return gpu_rows.read(path)
