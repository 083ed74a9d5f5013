"""Every command line that the documents show can be typed: its commands, options and arguments are taken."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvtier.cli import build

ROOT = Path(__file__).parents[2]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.M | re.S)
QUOTE = re.compile(r"`([^`\n]+)`")
OPERATORS = {"|", "&&", ">", ";"}
WRONG_USAGE: type[Exception] = typer.BadParameter.__mro__[1]
"""The base of all such errors, whichever Click typer brings."""


def lines_of(page: Path) -> tuple[list[str], list[str]]:
    """Command lines in blocks of code, whole, and those in the text, which may leave out what is needed."""
    text = page.read_text()
    blocks = [line for body in FENCE.findall(text) for line in re.sub(r"\\\n\s*", "", body).splitlines()]
    return blocks, QUOTE.findall(FENCE.sub("", text))


def words_of(line: str, program: str) -> Iterator[list[str]]:
    """The words after `program` at the beginning of the line, without a comment; brackets are of the documents."""
    if not line.startswith(f"{program} "):
        return
    line = re.sub(r"\[([^\[\]]*--[^\[\]]*)\]", lambda found: found.group(1).replace(" | ", " "), line)
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "…"]
    end = next((place for place, word in enumerate(words) if word in OPERATORS), len(words))
    yield words[:end]


def take(words: list[str], *, whole: bool) -> None:
    """Have typer read the line as `kvtier` does; unless it is `whole`, arguments may be missing. Raises its errors."""
    command: Any = typer.main.get_command(build(words))
    context = command.make_context("kvtier", list(words), resilient_parsing=True)
    rest = words
    while hasattr(command, "commands"):
        if not rest or rest[0].startswith("-"):
            return  # a group, or `kvtier --version`
        command, rest = command.commands[rest[0]], rest[1:]
    if whole:
        command.make_context(command.name, list(rest), parent=context)
    else:
        command.make_parser(context).parse_args(list(rest))


CASES = [
    pytest.param(words, whole, id=f"{page.name}: {' '.join(words)}"[:90])
    for page in PAGES
    for lines, whole in zip(lines_of(page), (True, False), strict=True)
    for line in lines
    for words in words_of(line, "kvtier")
]


@pytest.mark.parametrize(("words", "whole"), CASES)
def test_kvtier_takes_the_line(words: list[str], whole: bool) -> None:
    take(words, whole=whole)


@pytest.mark.parametrize(
    "line",
    ["kvtier top --wab", "kvtier g3 gc PATH --resize", "kvtier sim --seeds 0-9   all of them", "kvtier pin list a b"],
)
def test_a_line_that_is_not_taken_is_noticed(line: str) -> None:
    (words,) = words_of(line, "kvtier")
    with pytest.raises(WRONG_USAGE):
        take(words, whole=True)


def test_scripts_and_their_options_exist() -> None:
    """`python FILE --option …`: each option stands in the file."""
    for page in PAGES:
        for line in (line for lines in lines_of(page) for line in lines):
            for words in words_of(line, "python") if re.match(r"python \S+\.py\b", line) else ():
                source = (ROOT / words[0]).read_text()
                assert all(f'"{word}"' in source for word in words if word.startswith("--")), (page.name, line)


def test_make_is_given_variables_that_it_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for line in (line for lines in lines_of(page) for line in lines):
            for words in words_of(line.strip(), "make"):
                for name in (word.partition("=")[0] for word in words if "=" in word):
                    assert f"$({name})" in makefile or re.search(rf"^{name} [?:]?=", makefile, re.M), (page.name, line)


def test_extras_that_pip_is_given_exist() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    for page in PAGES:
        for given in re.findall(r"pip install [^\n`]*?'(?:\.|kvtier)\[([\w,]+)\]'", page.read_text()):
            assert set(given.split(",")) <= known, (page.name, given)


@pytest.mark.parametrize(
    ("program", "package", "parsers"),
    [
        ("vllm serve", "vllm", ["engine/arg_utils.py", "entrypoints/**/cli_args.py"]),
        ("python -m sglang.launch_server", "sglang", ["srt/server_args.py", "srt/arg_groups/fields/*.py"]),
    ],
)
def test_engines_know_the_options_that_they_are_given(program: str, package: str, parsers: list[str]) -> None:
    """Looked up in the engine's source: its parser takes seconds to make."""
    spec = importlib.util.find_spec(package)
    homes = [] if spec is None else [Path(home) for home in spec.submodule_search_locations or ()]
    homes += ROOT.glob(f".venv-{package}/lib/*/site-packages/{package}")
    if not homes:
        pytest.skip(f"{package} is not installed here")
    source = "".join(file.read_text() for parser in parsers for file in homes[0].glob(parser))
    for page in PAGES:
        for body in FENCE.findall(page.read_text()):
            if program not in body:
                continue
            for option in re.findall(r"(?:^|\s)--([a-z][\w-]+)", body.partition(program)[2]):
                name = option.replace("-", "_")
                assert f'"--{option}"' in source or re.search(rf"^\s+{name}\b.*[:=]", source, re.M), (page.name, option)
