"""The part of `kvtier bench tiers` that measures G3."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.bench.tiers.disk import TARGETS, measure, measure_restart
from kvtier.cli.output import console, write_table
from kvtier.errors import ConfigError
from kvtier.units import parse_size

RESTART_BLOCKS = 1_000_000


def disk_results(path: Path, size: str, blocks: Sequence[str], rounds: int, restart: bool) -> dict[str, Any]:
    """Figures for each block size, and for a restart. Writes many times `size` below `path`, and cleans up."""
    total = parse_size(size)
    results: dict[str, Any] = {"load_average_before": os.getloadavg(), "total_bytes": total, "targets": TARGETS}
    results["blocks"] = {}
    for text in blocks:
        with _folder(path) as folder:
            results["blocks"][text] = measure(folder, parse_size(text), total, rounds)
    if restart:
        with _folder(path) as folder:
            results["restart"] = measure_restart(folder, RESTART_BLOCKS)
    return results


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=path))
    except OSError as error:
        raise ConfigError(f"--path {path}: {error.strerror}; give a directory on the disk to measure") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def show_disk(results: dict[str, Any]) -> None:
    """Tables on standard output."""
    rows = []
    for label, figures in results["blocks"].items():
        for name in ("raw_write", "synced_write", "put", "raw_read", "get"):
            speed, cpu = figures[name]["gb_per_s"], figures[name]["cpu_s_per_gb"]
            rows.append(
                [label, name, round(speed["median"], 2), round(speed["min"], 2), round(speed["max"], 2),
                 round(cpu["median"], 3)]
            )  # fmt: skip
    write_table(["block", "", "GB/s", "min", "max", "CPU s/GB"], rows, title="G3 beside the raw disk")
    rows = [
        [label, name, round(value, 3), TARGETS.get(name, "")]
        for label, figures in results["blocks"].items()
        for name, value in figures["ratios"].items()
    ]
    write_table(["block", "", "measured", "target"], rows)
    for label, figures in results["blocks"].items():
        beside = figures["written_beside_gets_gb_per_s"]["median"]
        console().print(
            f"{label}: {beside:.2f} GB/s were written beside the gets; the digest alone takes "
            f"{figures['digest_cpu_s_per_gb']:.3f} CPU s/GB"
        )
    if "restart" in results:
        restart = results["restart"]
        console().print(
            f"restart with {restart['blocks']:,} blocks: open in {restart['open_s']:.2f} s, "
            f"first block {1000 * restart['first_hit_after_open_s']:.1f} ms later"
        )
