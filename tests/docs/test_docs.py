"""The documents say what is so: their code runs, their commands exist, their configurations are right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli import COMMANDS, GROUPS, renamed
from kvtier.config import Config
from kvtier.config.strict_yaml import read_document

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def fences(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def test_the_readme_s_code_runs(tmp_path: Path) -> None:
    blocks = fences(ROOT / "README.md", "python")
    assert blocks
    for block in blocks:
        if "import kvtier\n" in block:
            subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configurations_are_right(page: Path) -> None:
    # Other YAML, of Kubernetes say, names no version of ours.
    for text in (text for text in fences(page, "yaml") if re.search("^(version|tiers):", text, re.M)):
        assert Config.parse(read_document(text), {"KVTIER_SECRET": "0123456789abcdef"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_commands_exist(page: Path) -> None:
    known = {command.words for command in COMMANDS}
    text = page.read_text()
    used = re.findall(r"^kvtier ([a-z][^\n]*)|`kvtier ([a-z][^`\n]*)", text, re.M)
    for words in (first or second for first, second in used):
        named = words.split()
        assert renamed(named) is None, f"kvtier {words}: an old name"
        depth = 1
        while " ".join(named[:depth]) in GROUPS and depth < len(named):
            depth += 1
        wanted = " ".join(named[:depth])
        assert wanted in known or wanted in GROUPS, f"kvtier {wanted}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_make_target_named_exists() -> None:
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", page.read_text(), re.M))
        assert {first or second for first, second in named} <= made
