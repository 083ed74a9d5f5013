"""The documents are true: their code runs; their commands, files and modules exist; their configurations are valid."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvtier.cli import COMMANDS, GROUPS, renamed
from kvtier.config import Config
from kvtier.config.strict_yaml import read_document

ROOT = Path(__file__).parents[2]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
MODULE = re.compile(r"(?<![\w./])kvtier(?:\.[A-Za-z_]\w*)+")
FOLDERS = "kvtier|connectors|kernels|tests|docs|benchmarks|configs"
FILE = re.compile(rf"(?<![\w./])(?:{FOLDERS})/[\w./*-]*\.(?:py|yaml|md|svg)\b")


def fences(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def commands(page: Path, program: str) -> list[str]:
    """What follows `program`: in code between backticks, and at the beginning of a line of a block of code."""
    text = page.read_text()
    quoted = re.findall(rf"`{program} ([a-z][^`]*)`", text)
    return quoted + [line for _, body in FENCE.findall(text) for line in re.findall(rf"^{program} (.*)", body, re.M)]


def test_the_readme_s_code_runs(tmp_path: Path) -> None:
    blocks = fences(ROOT / "README.md", "python")
    assert blocks
    for block in blocks:
        if "import kvtier\n" in block:
            subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configurations_are_right(page: Path) -> None:
    # Other YAML, of Kubernetes say, names no version of ours.
    values = {"KVTIER_SECRET": "0123456789abcdef", "KVTIER_S3_KEY": "key", "KVTIER_S3_SECRET": "secret"}
    for text in (text for text in fences(page, "yaml") if re.search("^(version|tiers):", text, re.M)):
        assert Config.parse(read_document(text), values)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_commands_exist(page: Path) -> None:
    known = {command.words for command in COMMANDS}
    for used in commands(page, "kvtier"):
        named = used.split()
        assert renamed(named) is None, f"kvtier {used}: an old name"
        depth = 1
        while " ".join(named[:depth]) in GROUPS and depth < len(named):
            depth += 1
        wanted = " ".join(named[:depth])
        assert wanted in known or wanted in GROUPS, f"kvtier {wanted}"


def test_every_make_target_named_exists() -> None:
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        assert {used.split()[0] for used in commands(page, "make")} <= made, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_and_names_named_exist(page: Path) -> None:
    text = page.read_text()
    if page.name == "moved.md":  # its first column names what is gone
        text = "\n".join(line.split(" | ")[-1] for line in text.splitlines())
    for name in set(MODULE.findall(text)) - {"kvtier.yaml", "kvtier.kms"}:  # a file, a group of entry points
        assert exists(name.split(".")), name


@pytest.mark.parametrize("name", ["kvtier.expiry", "kvtier.manager.keeper", "kvtier.tiers.guard.Keeper", "kvtier.keep"])
def test_a_module_or_name_that_is_gone_is_noticed(name: str) -> None:
    assert not exists(name.split("."))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_exist(page: Path) -> None:
    for name in set(FILE.findall(page.read_text())):
        assert list(ROOT.glob(name)), name


def test_where_is_names_a_file_for_each_behaviour() -> None:
    rows = tables((ROOT / "docs" / "design.md").read_text().partition("## Where is …?")[2])[0]
    assert len(rows) >= 24
    for behaviour, files in rows:
        assert FILE.findall(files), behaviour


@pytest.mark.parametrize(
    ("page", "heading", "column", "container"),
    [
        ("docs/design.md", "## Packages", 0, "kvtier"),
        ("docs/design.md", "## The manager", 0, "kvtier.manager"),
        ("CONTRIBUTING.md", "## Layers", 1, "kvtier"),
    ],
)
def test_tables_of_layers_equal_the_contracts(page: str, heading: str, column: int, container: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == [container])
    wanted = [{f"{container}.{name}" for name in re.split(r" [:|] ", layer)} for layer in layers if layer != "__main__"]
    rows = tables((ROOT / page).read_text().partition(heading + "\n")[2])[0]
    assert [set(re.findall(r"`([^`]+)`", row[column])) for row in rows] == wanted


def tables(text: str) -> list[list[list[str]]]:
    """The rows below the head of every table, as cells."""
    found = re.findall(r"^\|.*\n\|[-|]+\|\n((?:\|.*\n?)+)", text, re.M)
    return [[[cell.strip() for cell in row.strip("| ").split(" | ")] for row in table.splitlines()] for table in found]


def exists(parts: list[str]) -> bool:
    """Whether `kvtier.…` is a package, a module, or a name that is defined at the top of one (or in a class there)."""
    folder, rest = ROOT / "kvtier", parts[1:]
    places = {"connectors": "connectors", "kernels": "kernels", "presets": "configs"}
    if rest and rest[0] in places:
        folder, rest = ROOT / places[rest[0]], rest[1:]
    while rest and (folder / rest[0]).is_dir():
        folder, rest = folder / rest[0], rest[1:]
    module = folder / "__init__.py"
    if rest and (folder / f"{rest[0]}.py").is_file():
        module, rest = folder / f"{rest[0]}.py", rest[1:]
    scope: list[ast.stmt] = ast.parse(module.read_text()).body
    for name in rest:
        found = next((node for node in scope if name in defined(node)), None)
        if not isinstance(found, ast.ClassDef):
            return found is not None  # of an imported class, its home is not looked up
        scope = found.body
    return True


def defined(node: ast.stmt) -> set[str]:
    """The names that a statement defines, those of a lazy package's `__all__` included."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.AnnAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    if not isinstance(node, ast.Assign):
        return set()
    names = {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set(ast.literal_eval(node.value)) if names == {"__all__"} else names
