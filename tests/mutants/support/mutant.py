"""A planted bug: one text in one file of the product, replaced by another that breaks a promise.

The lists are `tests/mutants/*.toml`, one per area: `tests`, the files or folders that are to find its mutants, in the
order in which they are tried; per mutant its `name`, the `promise` that it breaks, the `file`, `old` and `new`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
LISTS = ROOT / "tests" / "mutants"


@dataclass(frozen=True)
class Mutant:
    """`tests` of its own are tried before those of its area."""

    area: str
    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def source(self) -> str:
        """The mutated file. Raises ValueError unless `old` is in exactly one place of it."""
        text = (ROOT / self.file).read_text()
        if (places := text.count(self.old)) != 1:
            raise ValueError(f"{self.area}.toml, {self.name}: `old` is in {places} places of {self.file}; adapt it")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """All of them, area by area."""
    found = []
    for path in sorted(LISTS.glob("*.toml")):
        raw = tomllib.loads(path.read_text())
        for row in raw["mutants"]:
            tests = dict.fromkeys([*row.pop("tests", ()), *raw["tests"]])
            found.append(Mutant(area=path.stem, tests=tuple(tests), **row))
    return found
