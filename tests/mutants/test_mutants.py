"""The list of planted bugs stays true: each still applies, is a program, and names tests that exist."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.support.mutant import ROOT, Mutant, mutants
from tests.mutants.support.run import Laboratory

MUTANTS = mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant) -> None:
    ast.parse(mutant.source())
    assert mutant.old != mutant.new
    assert mutant.promise in {f"P{number}" for number in range(1, 16)}
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)


def test_each_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 100


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("area", sorted({mutant.area for mutant in MUTANTS}))
def test_mutants_are_caught(area: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One in ten of each area: `make mutants` takes all."""
    laboratory = Laboratory(tmp_path_factory.mktemp("mutants"))
    some = [mutant for mutant in MUTANTS if mutant.area == area][::10]
    outcomes = [laboratory.look(mutant) for mutant in some]
    assert not [outcome.name for outcome in outcomes if not outcome.caught_by]
    assert not laboratory.unsound(outcomes)
