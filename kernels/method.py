"""The fastest way to copy, by fragment size and count: a table, measured once per device.

dma     the copy engine, one descriptor per run: no SM taken; cost per descriptor, so best for long runs
direct  a kernel of few CTAs that reads or writes pinned host memory itself
staged  one DMA of whole slots to or from device memory, and a kernel between that and the engine's layout
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from pathlib import Path

from kvtier.errors import ConfigError

KIB = 1 << 10

FRAGMENTS_BYTES = (512, 2 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB)
COUNTS = (16, 64, 256, 1024)
"""Measured by calibration: fragment sizes, and fragments per launch."""

_VERSION = 3

_TOLERANCE = 1.25
"""A method that leaves more of the device to the model may take so much longer. On an H200 or H100 that copies all the
time, a product of matrices loses 3 to 4 % beside `dma`, 2 to 4 % beside `staged` and 15 to 28 % beside `direct`
(benchmarks/results/gpu-check.json, gpu-check-before.json and gpu-check-h100.json)."""


class Method(StrEnum):
    """In order of what a copy takes from the model that computes beside it, least first."""

    DMA = "dma"
    STAGED = "staged"
    DIRECT = "direct"


Cell = tuple[bool, int, int]
"""store or load, fragment bytes, count."""


@dataclass(frozen=True, slots=True)
class Table:
    """The best method per measured cell; empty: a rule of thumb. `device`: where it was measured, and with what;
    `whole`: nothing that could be measured is missing."""

    device: str
    best: Mapping[Cell, Method]
    whole: bool = field(default=False, compare=False)

    def choose(self, store: bool, fragment_bytes: int, count: int) -> Method:
        """The method of the nearest measured cell not above in either direction; the smallest cell below that."""
        cell = (store, _floor(FRAGMENTS_BYTES, fragment_bytes), _floor(COUNTS, count))
        return self.best.get(cell) or rule(fragment_bytes, count)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        rows = [[store, fragment, count, method.value] for (store, fragment, count), method in self.best.items()]
        text = json.dumps({"version": _VERSION, "device": self.device, "best": sorted(rows)}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.draft")  # several ranks may measure at once
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)


def rule(fragment_bytes: int, count: int) -> Method:
    """Without a measurement. On an H200 the copy engine comes within a tenth of the kernels from 64 KiB on
    (benchmarks/results/gpu-check.json)."""
    return Method.DMA if fragment_bytes >= 64 * KIB or count < 16 else Method.STAGED


def table_path(folder: Path, device: str) -> Path:
    """The device's own file in a folder. Pure."""
    return folder / f"copy-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def load_table(path: Path, device: str) -> Table | None:
    """The table saved for this device; None if there is none, or it is another device's or cannot be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["version"] != _VERSION or document["device"] != device:
            return None
        best = {(bool(store), int(size), int(count)): Method(name) for store, size, count, name in document["best"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    return Table(device, best, whole=True)


Measure = Callable[[Method, int], Mapping[tuple[bool, int], float]]
"""Seconds by (store, count) of one method at one fragment size, without the cells that it cannot copy."""


def calibrate(
    device: str,
    measure: Measure,
    now: Callable[[], float],
    *,
    first: int,
    budget_s: float = 5.0,
    wanted: Callable[[int, int], bool] = lambda fragment, count: True,
) -> Table:
    """Measure fragment sizes, nearest to `first` (bytes) first, until the budget is used up. The rest stay unknown, and
    the table is not whole; nor is it where a method left out a (fragment bytes, count) that is `wanted`."""
    deadline = now() + budget_s
    best: dict[Cell, Method] = {}
    whole = True
    for fragment in sorted(FRAGMENTS_BYTES, key=lambda size: max(size, first) / min(size, first)):
        seconds: dict[Method, Mapping[tuple[bool, int], float]] = {}
        for method in Method:
            if now() >= deadline:
                return Table(device, best)
            seconds[method] = measure(method, fragment)
        for store, count in product((False, True), COUNTS):
            known = {method: cells[store, count] for method, cells in seconds.items() if (store, count) in cells}
            whole &= len(known) == len(Method) or not wanted(fragment, count)
            if known:
                enough = min(known.values()) * _TOLERANCE
                best[store, fragment, count] = next(m for m in Method if m in known and known[m] <= enough)
    return Table(device, best, whole)


def parse(text: str) -> Method | None:
    """The configured method: "auto" is None. Raises ConfigError with the choices."""
    if text == "auto":
        return None
    try:
        return Method(text)
    except ValueError:
        choices = ", ".join(["auto", *Method])
        raise ConfigError(f"transfer method: expected one of {choices}, got {text!r}") from None


def _floor(steps: Sequence[int], value: int) -> int:
    return max((step for step in steps if step <= value), default=steps[0])
