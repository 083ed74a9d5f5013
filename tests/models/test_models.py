"""The models of protocols say what is planted in them, and what was found is of today's lists."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from tests.models.support.checker import MODELS, Model, models, rows

RESULTS = json.loads((MODELS.parents[1] / "benchmarks" / "results" / "models.json").read_text())["results"]
each = pytest.mark.parametrize("model", models(), ids=lambda model: model.name)


def defined(model: Model) -> set[str]:
    """The errors that the model can have."""
    head = model.path.read_text().partition("#ifndef BUG")[0]
    return set(re.findall(r"^#define ([A-Z0-9_]+) \d+$", head, re.MULTILINE))


@each
def test_each_error_of_a_model_is_planted(model: Model) -> None:
    assert defined(model) - {"NO_BUG"} == set(model.errors)
    assert set(model.errors.values()) <= set(model.runs)


@each
def test_every_run_was_looked_through_and_every_error_found(model: Model) -> None:
    """By `make models`, which is to be run again where a model is changed."""
    ours = RESULTS[model.name]
    assert {run: answer["found"] for run, answer in ours["runs"].items()} == dict.fromkeys(model.runs, "")
    assert set(ours["errors"]) == set(model.errors) and all(ours["errors"].values())


@each
def test_each_invariant_can_be_broken(model: Model) -> None:
    """Each name that the model's head explains marks an assertion, and a planted error breaks one of that name."""
    text = model.path.read_text()
    explained = set(re.findall(r"^     ([A-Z]+)  ", text, re.MULTILINE))
    marked = re.findall(r"/\* ([A-Z]+) \*/", text)
    assert explained == set(marked) == set(RESULTS[model.name]["errors"].values())


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("spin") is None, reason="`make models` fetches Spin")
@each
def test_spin_finds_what_was_planted_and_nothing_else(model: Model) -> None:
    for run, error, answer in rows(model):
        assert bool(answer.found) == bool(error), (run, error, answer)
