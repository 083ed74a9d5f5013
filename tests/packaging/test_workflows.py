"""GitHub's workflows run only what a commit's hash names: a tag can be moved."""

from __future__ import annotations

import re
from pathlib import Path

PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+(\.\d+)*")


def test_actions_are_named_by_a_commit_and_its_release(root: Path) -> None:
    files = sorted((root / ".github" / "workflows").glob("*.yml"))
    used = [
        line.split("uses:", 1)[1].strip() for file in files for line in file.read_text().splitlines() if "uses:" in line
    ]
    assert len(used) >= 8
    assert [one for one in used if not PINNED.fullmatch(one)] == []
