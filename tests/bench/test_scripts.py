"""Scripts in benchmarks/ find what they import, inside of functions too; nothing else tells that a module has moved."""

from __future__ import annotations

import ast
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ELSEWHERE = {"cupy", "dynamo", "lmcache", "mooncake", "nixl", "pyfuse3", "sglang", "trio"}
"""Packages that have environments of their own."""


@pytest.mark.parametrize("script", sorted(BENCHMARKS.rglob("*.py")), ids=lambda script: script.stem)
def test_every_import_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        named += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in named:
            top, *inner = name.split(".")
            places = [str(script.parent), str(script.parent.parent), str(BENCHMARKS), str(ROOT)]
            found = top in ELSEWHERE or PathFinder.find_spec(top, places) or find_spec(name if top == "kvtier" else top)
            assert found, f"{script.name} imports {name}"
            if top == "tests":
                assert (ROOT / Path(top, *inner)).with_suffix(".py").exists(), f"{script.name} imports {name}"
