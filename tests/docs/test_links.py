"""Links of the documents lead to files and headings that are there."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "check_links.py"))


@pytest.mark.parametrize("page", SCRIPT["pages"](), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(SCRIPT["broken"](page))


def test_headings_have_the_names_that_links_use() -> None:
    text = "# One two\n## What's *new*: `a_b`?\n## One two\n```\n# no heading\n```\n### [Link](x.md) – end\n"
    assert SCRIPT["anchors"](text) == {"one-two", "whats-new-a_b", "one-two-1", "link--end"}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[a](gone.md)", "no such file"),
        ("[a](page.md#gone)", "no such heading"),
        ("[a](#gone)", "no such heading"),
        ("[a](#here), [b](page.md#here), [c](https://example.org/x#y)\n```\n[d](gone.md)\n```", ""),
    ],
)
def test_what_leads_nowhere_is_found(tmp_path: Path, text: str, fault: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n{text}\n")
    broken = SCRIPT["broken"]
    broken.__globals__["ROOT"] = tmp_path
    try:
        found = list(broken(page))
    finally:
        broken.__globals__["ROOT"] = Path(__file__).parents[2]
    assert [fault in one for one in found] == [True] * bool(fault)
