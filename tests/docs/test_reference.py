"""The generated references are what the code says."""

from __future__ import annotations

import ast
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.config import Config
from kvtier.config.explain import known_keys
from kvtier.metrics import REQUESTS, TASKS, TIERS

DOCS = Path(__file__).parents[2] / "docs"
PAGES: dict[str, Callable[[], str]] = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `make reference`"


def test_a_promise_names_tests_that_exist() -> None:
    told = tomllib.loads((DOCS / "proof.toml").read_text())
    for letter, rows in (("P", told["promises"]), ("R", told["failures"])):
        assert [row["id"] for row in rows] == [f"{letter}{number}" for number in range(1, 16)]
        assert all(row["tests"] for row in rows)
    for path, _, name in (test.partition("::") for row in told["promises"] + told["failures"] for test in row["tests"]):
        tree = ast.parse((DOCS.parent / path).read_text())
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        assert name in {function.name for function in functions}, f"{path} has no {name}"


def test_the_pages_name_everything() -> None:
    for family in (*REQUESTS.values(), *TASKS.values(), *TIERS.values()):
        assert f"| `{family.name}" in PAGES["metrics.md"]()
    for key in known_keys(Config):
        assert f"| `{key}` |" in PAGES["configuration.md"]()
