"""Has Spin look at the models: every state of every run, then each planted error, which a run must find.

    python -m tests.models.support.checker [--model NAME …] [--save FOLDER] [--histories]

Prints a row per run; exits with status 1 if one finds an error that was not planted, or does not find one that was.
`--histories`: writes tests/models/histories, simulated runs of the models, anew. Needs `spin` and `cc`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MODELS = Path(__file__).parents[1]
HISTORIES = MODELS / "histories"
TIMEOUT_S = 1800
MEMORY_MIB = 8000
DEPTH = 200_000
_STATES = re.compile(r"^\s*(\d+) states, stored", re.MULTILINE)
_FOUND = re.compile(r"^pan:1: .+ \(at depth \d+\)", re.MULTILINE)
_FAILED = re.compile(r":(\d+), Error: assertion violated")


@dataclass(frozen=True)
class Model:
    """`runs`: what each defines; `errors`: planted error → the run that must find it."""

    name: str
    promises: list[str]
    text: str
    runs: Mapping[str, Mapping[str, int]]
    errors: Mapping[str, str]
    history: Mapping[str, int] = field(default_factory=dict)
    histories: int = 0

    @property
    def path(self) -> Path:
        return MODELS / f"{self.name}.pml"


def models() -> list[Model]:
    """All of them."""
    return [Model(**row) for row in tomllib.loads((MODELS / "models.toml").read_text())["models"]]


@dataclass(frozen=True)
class Answer:
    """`states` that were looked at; `found`: the invariant that does not hold, "" if all do."""

    states: int
    found: str
    seconds: float


def verify(model: Model, defined: Mapping[str, int | str]) -> Answer:
    """Look at every state, or until one violates an assertion. Raises RuntimeError where that breaks off."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-models-") as folder:
        _call(folder, "spin", "-a", *_defines(defined), str(model.path))
        options = ["-O2", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}"]
        _call(folder, "cc", *options, "-o", "pan", "pan.c")
        out = _call(folder, "./pan", f"-m{DEPTH}", "-n")
        found = _broken(folder, model, defined) if _FOUND.search(out) else ""
    states = _STATES.search(out)
    if states is None or ("Search not completed" in out and not found) or "max search depth" in out:
        raise RuntimeError(f"{model.name}: the search broke off:\n{out}")
    return Answer(int(states[1]), found, round(time.monotonic() - began, 1))


def _broken(folder: str, model: Model, defined: Mapping[str, int | str]) -> str:
    """The invariant that the assertion at the end of the trail is marked with; STUCK where there is none."""
    trail = Path(folder, f"{model.path.name}.trail")
    done = subprocess.run(
        ["spin", "-t", "-k", str(trail), "-T", *_defines(defined), str(model.path)],
        cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    line = _FAILED.search(done.stdout)
    mark = re.search(r"/\* ([A-Z]+) \*/", model.path.read_text().splitlines()[int(line[1]) - 1]) if line else None
    return mark[1] if mark else "STUCK"


def simulate(model: Model, seed: int) -> str:
    """The history of one random run."""
    with tempfile.TemporaryDirectory(prefix="kvtier-models-") as folder:
        out = _call(folder, "spin", "-T", f"-n{seed}", *_defines(model.history), str(model.path))
    return "".join(f"{line}\n" for line in out.splitlines() if re.match(r"[a-z]+ \d|=|purge$", line.strip()))


def _defines(defined: Mapping[str, int | str]) -> list[str]:
    return [f"-D{name}={value}" for name, value in defined.items()]


def _call(folder: str, *command: str) -> str:
    """Its output. Raises RuntimeError where it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode or "Error:" in done.stdout:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def rows(model: Model) -> Iterator[tuple[str, str, Answer]]:
    """(run, planted error or "", answer) of each run and each planted error."""
    for name, defined in model.runs.items():
        yield name, "", verify(model, defined)
    for error, run in model.errors.items():
        yield run, error, verify(model, {**model.runs[run], "BUG": error})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--histories", action="store_true")
    given = parser.parse_args()
    wrong, results = 0, {}
    for model in models():
        if given.model and model.name not in given.model:
            continue
        if given.histories:
            told = [f"# {seed}\n{simulate(model, seed)}" for seed in range(model.histories)]
            (HISTORIES / f"{model.name}.txt").write_text("".join(told))
            continue
        ours: dict[str, dict[str, object]] = {"runs": {}, "errors": {}}
        for run, error, answer in rows(model):
            right = bool(answer.found) == bool(error)
            wrong += not right
            verdict = answer.found or "holds"
            print(
                f"{answer.seconds:6.1f} s  {answer.states:>10} states  {model.name} {run} {error} {verdict}", flush=True
            )
            if error:
                ours["errors"][error] = answer.found
            else:
                ours["runs"][run] = {"states": answer.states, "found": answer.found}
        results[model.name] = ours
    if given.save is not None and results:
        from kvtier.bench.record import record, save

        path = given.save / "models.json"
        earlier = json.loads(path.read_text())["results"] if path.exists() else {}
        save(record("models", ["make", "models"], earlier | results), given.save)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
