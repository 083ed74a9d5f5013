"""The lists of planted bugs stay true: each still applies, is a program, and names tests that exist."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.mutants.support.mutant import ROOT, Mutant, mutants

MUTANTS = mutants()
PROMISES = {f"P{number}" for number in range(1, 16)}


def faults(mutant: Mutant) -> Iterator[str]:
    try:
        ast.parse(mutant.source())
    except (ValueError, SyntaxError) as error:
        yield str(error)
    if mutant.old == mutant.new or mutant.promise not in PROMISES:
        yield f"{mutant.area}.toml, {mutant.name}: changes nothing, or breaks no promise of {sorted(PROMISES)}"
    yield from (
        f"{mutant.area}.toml, {mutant.name}: there is no {test}"
        for test in mutant.tests
        if not (ROOT / test.partition("::")[0]).exists()
    )


def test_every_mutant_applies() -> None:
    """One whose text was changed is adapted: the text as it is now, and one that breaks the same promise."""
    assert not [fault for mutant in MUTANTS for fault in faults(mutant)]


def test_each_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 100


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_one_in_ten_is_caught() -> None:
    """`make mutants` plants all. In a process of its own: what pytest has imported here is the package without bugs."""
    command = [sys.executable, "-m", "tests.mutants.support.run", "--every", "10"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout
