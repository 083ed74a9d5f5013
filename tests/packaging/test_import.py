"""`import kvtier` is light, and shows what it says it shows."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

HEAVY = ("cupy", "fsspec", "lmdb", "numpy", "obstore", "s3fs", "torch", "transformers", "typer")
SECONDS_MAX = 0.15
RUNS_MAX = 12

IMPORT = """
import json, sys, time
begin = time.perf_counter()
import kvtier
print(json.dumps({"seconds": time.perf_counter() - begin, "modules": sorted(sys.modules)}))
"""


def imported() -> dict[str, object]:
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=60)
    report: dict[str, object] = json.loads(run.stdout)
    return report


def test_import_loads_nothing_heavy() -> None:
    modules = imported()["modules"]
    assert isinstance(modules, list)
    assert "kvtier" in modules
    assert not set(HEAVY) & set(modules)


def test_import_is_quick() -> None:
    """The best of several runs: what the import costs, not what else the machine does."""
    best = float("inf")
    for _ in range(RUNS_MAX):
        seconds = imported()["seconds"]
        assert isinstance(seconds, float)
        best = min(best, seconds)
        if best < SECONDS_MAX:
            return
    pytest.fail(f"import kvtier took {best:.3f} s at best of {RUNS_MAX} runs; at most {SECONDS_MAX} s is promised")


def public_modules() -> list[str]:
    return [
        "kvtier",
        *(f"kvtier.{name}" for name in ("testing",) if (Path(__file__).parents[2] / "kvtier" / name).exists()),
    ]


@pytest.mark.parametrize("name", public_modules())
def test_all_names_what_is_public(name: str) -> None:
    module = importlib.import_module(name)
    declared = list(getattr(module, "__all__", []))
    assert declared == sorted(set(declared)), "__all__ is sorted and names nothing twice"
    missing = [public for public in declared if not hasattr(module, public)]
    assert not missing
    found = {public for public, value in vars(module).items() if not public.startswith("_") and is_own(public, value)}
    assert found <= set(declared)


def is_own(name: str, value: object) -> bool:
    """Whether a name is the module's own word: not a module, and not one of typing's."""
    return not isinstance(value, types.ModuleType) and name not in ("Any", "TYPE_CHECKING", "annotations")


def test_the_promised_surface_is_there() -> None:
    surface = {"Config", "Namespace", "aopen", "chain_hashes", "open"}
    assert surface <= set(importlib.import_module("kvtier").__all__)
