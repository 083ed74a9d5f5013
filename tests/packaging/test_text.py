"""Tracked files name no machine: no path of whoever wrote them, no host that packages come from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# In pieces, so that this file does not name what it looks for.
HOMES = ("work", "root", "home", "Users", "farm")
HOSTS = ("py" + r"pi\.org", "python" + r"hosted\.org", r"download\." + r"pytorch\.org", "index" + "-url")
LEAK = re.compile(rf"(?<![\w.$)}}-])/(?:{'|'.join(HOMES)})/[\w.]|{'|'.join(HOSTS)}")


def test_tracked_files_name_no_machine(root: Path, tree: list[str]) -> None:
    found = []
    for name in tree:
        try:
            text = (root / name).read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{name}:{i}: {line.strip()}" for i, line in enumerate(text.splitlines(), 1) if LEAK.search(line)]
    assert not found


def test_no_merge_is_left_unfinished(root: Path, tree: list[str]) -> None:
    """`make docs` failed on one: no other test read its YAML."""
    left = re.compile(rb"^(<{7}|>{7}|\|{7}) ", re.M)
    assert not [name for name in tree if left.search((root / name).read_bytes())]


@pytest.mark.parametrize("head", HOMES)
def test_a_path_of_a_machine_is_found(head: str) -> None:
    assert LEAK.search(f'open("/{head}/someone/kvtier.yaml")')
    assert not LEAK.search(f"docs/{head}/page.md")


def test_a_registry_is_found() -> None:
    assert LEAK.search("pip install --index" + "-url x")
    assert LEAK.search("https://py" + "pi.org/simple")
