"""Rules that the source keeps everywhere, read from its syntax tree: bytes are data, the environment is an argument."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PRODUCT = ("kvtier/", "connectors/", "kernels/")
MODULES = frozenset({"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
CALLS = frozenset(
    {
        "torch.load",
        "yaml.load",
        "yaml.load_all",
        "yaml.full_load",
        "yaml.full_load_all",
        "yaml.unsafe_load",
        "yaml.unsafe_load_all",
        "os.system",
        "os.popen",
    }
)
ENVIRONMENT = frozenset({"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"})

MAY_READ_ENVIRONMENT = {
    "kvtier/config/schema.py",  # the one that reads it for kvtier
    "kvtier/testing/servers.py",  # passes it on to the servers that it starts
}


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute, else the empty string."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            head = dotted(value)
            return f"{head}.{attr}" if head else ""
        case _:
            return ""


def faults(tree: ast.AST, *, reads_environment: bool) -> Iterator[str]:
    """One line per forbidden thing, `LINE: what`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = {alias.name.split(".")[0] for alias in names} & MODULES
            case ast.ImportFrom(module=module, names=names):
                full = {f"{module}.{alias.name}" for alias in names}
                found = ({(module or "").split(".")[0]} & MODULES) | (full & CALLS)
                found |= set() if reads_environment else full & ENVIRONMENT
            case ast.Call(func=func, keywords=keywords):
                found = {dotted(func)} & (BUILTINS | CALLS)
                found |= {"allow_pickle" for k in keywords if k.arg == "allow_pickle" and not is_false(k.value)}
                found |= {"shell" for k in keywords if k.arg == "shell" and not is_false(k.value)}
            case ast.Attribute():
                found = set() if reads_environment else {dotted(node)} & ENVIRONMENT
            case _:
                continue
        for what in sorted(found):
            yield f"{getattr(node, 'lineno', 0)}: {what}"


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_the_source_neither_runs_bytes_nor_reads_the_environment(root: Path, tree: list[str]) -> None:
    sources = [name for name in tree if name.startswith(PRODUCT) and name.endswith(".py")]
    assert len(sources) > 10
    found = []
    for name in sources:
        parsed = ast.parse((root / name).read_text(), name)
        found += [f"{name}:{fault}" for fault in faults(parsed, reads_environment=name in MAY_READ_ENVIRONMENT)]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "x = eval('1')",
        "exec('x = 1')",
        "import torch\ntorch.load(path)",
        "from torch import load",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "numpy.load(path, allow_pickle=True)",
        "import os\nos.environ['HOME']",
        "from os import environ",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_each_rule_can_fail(code: str) -> None:
    assert list(faults(ast.parse(code), reads_environment=False))


@pytest.mark.parametrize(
    "code",
    ["import json", "model.eval()", "re.compile('x')", "numpy.load(path, allow_pickle=False)", "yaml.safe_load(t)"],
)
def test_what_resembles_them_is_allowed(code: str) -> None:
    assert not list(faults(ast.parse(code), reads_environment=False))
