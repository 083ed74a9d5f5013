"""The shape of the source: small modules and functions, one class per public name, packages listed, no import cycle."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

MODULE_LINES_MAX = 450
SHORTER = {"kvtier.manager.manager": 400}  # the one that all verbs pass: its work is its parts'
FUNCTION_LINES_MAX = 60
PLACES = {
    "kvtier/": "kvtier.",
    "connectors/": "kvtier.connectors.",
    "kernels/": "kvtier.kernels.",
    "configs/": "kvtier.presets.",
}


@pytest.fixture(scope="module")
def sources(root: Path, tree: list[str]) -> dict[str, str]:
    """Every module of the product by the name under which it is imported; a package by its own name."""
    found = {}
    for path in tree:
        for folder, package in PLACES.items():
            if path.startswith(folder) and path.endswith(".py"):
                name = package + path.removeprefix(folder).removesuffix(".py").replace("/", ".")
                found[name.removesuffix(".__init__")] = (root / path).read_text()
    assert len(found) > 100
    return found


def long_modules(sources: Mapping[str, str]) -> Iterator[str]:
    for name, text in sources.items():
        if (lines := len(text.splitlines())) > SHORTER.get(name, MODULE_LINES_MAX):
            yield f"{name}: {lines} lines"


def long_functions(sources: Mapping[str, str]) -> Iterator[str]:
    for name, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    yield f"{name}.{node.name}: {lines} lines"


def repeated_classes(sources: Mapping[str, str]) -> Iterator[str]:
    homes = defaultdict(list)
    for name, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    yield from (f"{name}: {', '.join(places)}" for name, places in homes.items() if len(places) > 1)


def imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Per module the modules of the product that it names in an import, wherever the import stands."""
    graph: dict[str, set[str]] = {name: set() for name in sources}
    for name, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Import(names=names):
                    graph[name] |= {alias.name for alias in names} & sources.keys()
                case ast.ImportFrom(module=str(module), names=names):
                    full = {alias.name: f"{module}.{alias.name}" for alias in names}
                    graph[name] |= {each if each in sources else module for each in full.values()} & sources.keys()
    return graph


def test_modules_are_small(sources: dict[str, str]) -> None:
    assert not list(long_modules(sources))


def test_functions_are_small(sources: dict[str, str]) -> None:
    assert not list(long_functions(sources))


def test_a_public_class_name_is_defined_once(sources: dict[str, str]) -> None:
    assert not list(repeated_classes(sources))


def test_every_package_is_listed(root: Path, tree: list[str]) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        (package + path.removeprefix(folder).removesuffix("__init__.py").replace("/", ".")).rstrip(".")
        for path in tree
        for folder, package in PLACES.items()
        if path.startswith(folder) and path.endswith("/__init__.py")
    }
    assert set(settings["packages"]) == found


def test_no_module_imports_itself_by_way_of_others(sources: dict[str, str]) -> None:
    try:
        TopologicalSorter(imports(sources)).prepare()
    except CycleError as wrong:
        pytest.fail(" → ".join(wrong.args[1]))


def test_each_rule_can_fail() -> None:
    long = "def f():\n" + "    x = 1\n" * 60
    assert list(long_functions({"m": long})) == ["m.f: 61 lines"] and not list(long_functions({"m": long[:-10]}))
    assert list(long_modules({"m": "x = 1\n" * 451})) and not list(long_modules({"m": "x = 1\n" * 450}))
    assert list(repeated_classes({"a": "class C: ...", "b": "class C: ..."})) == ["C: a, b"]
    assert not list(repeated_classes({"a": "class _C: ...", "b": "class _C: ..."}))
    circle = {"p.a": "def f():\n    from p import b", "p.b": "from p.a import f", "p": "import json"}
    assert imports(circle) == {"p.a": {"p.b"}, "p.b": {"p.a"}, "p": set()}
    with pytest.raises(CycleError):
        TopologicalSorter(imports(circle)).prepare()
