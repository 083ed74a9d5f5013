"""A measurement as JSON, with its command, commit and machine, so that others can judge and repeat it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """CPU, cores, RAM, kernel and Python of this machine, without its name. Reads /proc."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The source's commit, `+` appended where the tree differs from it; "unknown" outside a checkout. Runs git."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(where: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(where), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def interleaved(rounds: int, subjects: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Run every subject once per round, in turn, so that a slow minute of the machine hits all alike.

    A subject returns its own figure (seconds, bytes per second, …). Blocks for rounds × all subjects.
    """
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            figures[name].append(subject())
    return figures


def summary(figures: Sequence[float]) -> dict[str, float]:
    """Median, extremes and count of one subject's figures. Pure."""
    return {"median": statistics.median(figures), "min": min(figures), "max": max(figures), "rounds": len(figures)}


def record(name: str, command: Sequence[str], results: Mapping[str, Any]) -> dict[str, Any]:
    """`results` with command, commit, date and machine."""
    return {
        "benchmark": name,
        "command": shlex.join(_elsewhere(word) for word in command),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "results": dict(results),
    }


def _elsewhere(word: str) -> str:
    """An absolute path as its last name: the rest means nothing on another machine."""
    return Path(word).name if word.startswith("/") else word


def save(entry: Mapping[str, Any], folder: Path) -> Path:
    """Write a record to `folder`/NAME.json, replacing an earlier one; returns the path. Blocks on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{entry['benchmark']}.json"
    path.write_text(json.dumps(entry, indent=2) + "\n")
    return path
