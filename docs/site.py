"""Stages the documents for mkdocs: `make docs`. Writes build/docs: the pages of docs/, and those at the top of the tree
beside them; README.md is the start. Links are turned to the new places; those to source files become text."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "docs"
TOP = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
       "SECURITY.md": "security.md"}  # fmt: skip
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)[^\n]*$)", re.M | re.S)


def places() -> dict[Path, Path]:
    """Every staged file of the tree, and its place below OUT."""
    docs = ROOT / "docs"
    kept = [*docs.glob("*.md"), *docs.glob("*.png"), *(docs / "pictures").glob("*.svg")]
    return {each: each.relative_to(docs) for each in kept} | {ROOT / name: Path(place) for name, place in TOP.items()}


def staged(page: Path, known: dict[Path, Path]) -> str:
    """A page with its links as they are below OUT. Pure but for looking at what exists."""

    def link(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        name, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not name:
            return found[0]
        there = (page.parent / name).resolve()
        if there not in known:
            return text
        return f"{mark}[{text}]({known[there].as_posix()}{f'#{anchor}' if anchor else ''})"

    parts = FENCED.split(page.read_text())
    return "".join(part if number % 2 else LINK.sub(link, part) for number, part in enumerate(parts))


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    known = places()
    for source, place in known.items():
        target = OUT / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(staged(source, known))
        else:
            shutil.copyfile(source, target)


if __name__ == "__main__":
    main()
