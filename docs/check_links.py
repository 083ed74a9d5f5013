"""Says which links of the documents lead nowhere: files and headings that are not there. Part of `make check`; it asks
no network. Exit status 1 if there are any."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.M)


def pages() -> list[Path]:
    """Every document: at the top of the tree, and below docs/."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # a link's text
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = 0
        while (numbered := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(numbered)
    return found


def broken(page: Path) -> Iterator[str]:
    """One line per link that leads nowhere."""
    text = page.read_text()
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue  # another site
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        if not there.exists():
            yield f"{page.relative_to(ROOT)}: {target}: no such file"
        elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text()):
            yield f"{page.relative_to(ROOT)}: {target}: no such heading"


if __name__ == "__main__":
    faults = [fault for page in pages() for fault in broken(page)]
    print("\n".join(faults), end="\n" if faults else "")
    sys.exit(bool(faults))
