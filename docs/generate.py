"""Writes docs/metrics.md and docs/configuration.md from the code, docs/proof.md and docs/comparison.md from
their tables and what was measured: `make reference`. tests/docs checks that they are current."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from prometheus_client import Counter, Gauge

from kvtier.config.reference import KeyReference, key_references, section_meanings
from kvtier.metrics import BOUNDS_S, BUILD, ENGINE, PORT, REQUESTS, TASKS, TIERS, Family, labels_of

ROOT = Path(__file__).parents[1]
RESULTS, MUTANTS, MODELS = ROOT / "benchmarks" / "results", ROOT / "tests" / "mutants", ROOT / "tests" / "models"
WIDTH = 118
NOTE = "<!-- Written by `make reference` from the code. -->"
SECTIONS = {
    "Requests": REQUESTS.values(),
    "Tiers": TIERS.values(),
    "Background tasks": TASKS.values(),
    "Below an engine": ENGINE.values(),
    "Release": [BUILD],
}
KINDS = {Counter: "counter", Gauge: "gauge"}


def metrics() -> str:
    """The page of metrics."""
    lines = [
        "# Metrics", "", NOTE, "",
        fill(
            f"`kvtier.metrics.serve` shows these on its own endpoint (port {PORT}); vLLM and SGLang show them on "
            "theirs, with the prefixes `vllm:` and `sglang:` and the engine's own labels. "
            "[operations.md](operations.md) explains reasons, states and kinds, and what to alert on.",
            WIDTH,
        ),
    ]  # fmt: skip
    for title, families in SECTIONS.items():
        lines += ["", f"## {title}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        lines += [_row(family) for family in families]
    bounds = ", ".join(f"{bound:g}" for bound in BOUNDS_S)
    lines += ["", f"Upper bounds of a histogram's buckets in seconds: {bounds} and +Inf."]
    return "\n".join(lines) + "\n"


def _row(family: Family) -> str:
    kind = KINDS.get(family.kind, "histogram")
    name = family.name + ("_total" if kind == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in labels_of(family))
    values = f" {family.label}: {', '.join(family.values)}." if family.values else ""
    return f"| `{name}` | {kind} | {labels} | {family.help}{values} |"


def configuration() -> str:
    """The page of the configuration's keys."""
    lines = [
        "# Configuration", "", NOTE, "",
        fill(
            "One YAML file. `kvtier init` writes one for a machine, `kvtier config check` reads it, and `kvtier config "
            "schema --json` prints a JSON Schema. Sizes: `64GiB` or bytes. Durations: `24h`. Rates: `500MiB/s`. `*` "
            "stands for a name of your own. [operations.md](operations.md#values-from-the-environment) says which "
            "values the environment can give.",
            WIDTH,
        ),
    ]  # fmt: skip
    return "\n".join([*lines, *_keys()]) + "\n"


def _keys() -> Iterator[str]:
    meanings = section_meanings()
    sections: dict[str, list[KeyReference]] = {"": []}
    for one in key_references():
        sections.setdefault(one.key.rpartition(".")[0], []).append(one)
    for section, keys in sections.items():
        title = f"`{section}`" if section else "Top level"
        yield from ("", f"## {title}", "", *([meanings[section], ""] if meanings.get(section) else []))
        yield from ("| key | value | default | meaning |", "|---|---|---|---|")
        for one in keys:
            default = f"`{one.default}`" if one.default else ""
            yield f"| `{one.key}` | {_cell(one.takes)} | {default} | {_cell(one.meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", " \\| ")


def proof() -> str:
    """The page of promises."""
    told = tomllib.loads((ROOT / "docs" / "proof.toml").read_text())
    planted = _planted()
    lines = [
        "# Proof", "", "<!-- Written by `make reference` from docs/proof.toml and benchmarks/results. -->", "",
        fill(
            "Each promise, the tests that hold it, and the figure that was reached. A test runs by its name: "
            "`.venv/bin/python -m pytest FILE -k NAME`, with `-m long` where it is marked so; `make test` runs all "
            "that are not, `make test-long` those that are. Planted bugs are those of `tests/mutants`, each of which "
            "breaks one promise: `make mutants` plants them one by one in a copy of the package, and counts those that "
            "a quick test of their area finds.",
            WIDTH,
        ),
        "", f"Planted bugs found: {_found(planted.values())}; the lists have {len(_listed())}.", *_survivors(planted),
    ]  # fmt: skip
    lines += ["", "## Models of protocols", "", *_models()]
    lines += _coverage()
    lines += _long_run()
    for promise in told["promises"]:
        ours = [caught for (number, _), caught in planted.items() if number == promise["id"]]
        lines += ["", f"## {promise['id']}", "", fill(promise["text"], WIDTH), "", "| test | in |", "|---|---|"]
        for test in promise["tests"]:
            path, _, name = test.partition("::")
            lines.append(f"| `{name}` | `{path}` |")
        lines += ["", f"- Planted bugs found: {_found(ours)}."] if ours else [""]
        lines += [f"- Measured: {_figure(one)}." for one in promise.get("figures", ())]
        lines += [f"- Not shown: {promise['unsaid']}"] if "unsaid" in promise else []
    lines += ["", "## Failures of others", "", *_failures(told["failures"])]
    lines += ["", "## Not promised", "", *(f"- {one};" for one in told["not_promised"])]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines).removesuffix(";") + ".\n")


def _coverage() -> Iterator[str]:
    """What `make coverage-package` counted; nothing where it has not run."""
    path = RESULTS / "coverage.json"
    if not path.exists():
        return
    run = json.loads(path.read_text())
    yield from ("", "## Coverage", "")
    yield fill(
        "Lines and branches of the package that the quick tests reach, in all of their processes "
        f"(`make coverage-package`, {run['date']}, commit `{run['commit']}`); those of names, terms, copy plans and "
        "pools are all reached by their own tests alone, which `make coverage` demands.",
        WIDTH,
    )
    yield from ("", "| folder | statements | reached | branches | reached |", "|---|---:|---:|---:|---:|")
    for row in (*run["results"]["folders"], run["results"]["total"]):
        counts = (row["statements"], row["statements_reached"], row["branches"], row["branches_reached"])
        shares = [f"{counts[place]:,} | {_percent(*counts[place : place + 2])}" for place in (0, 2)]
        yield f"| {'`' + row['folder'] + '`' if row['folder'] else 'all'} | {' | '.join(shares)} |"


def _percent(count: int, reached: int) -> str:
    return f"{100 * reached / count:.1f} %" if count else ""


def _long_run() -> Iterator[str]:
    """The tests of `make test-long`, by file; nothing where there was none."""
    path = RESULTS / "long_run.json"
    if not path.exists():
        return
    run = json.loads(path.read_text())["results"]
    yield from ("", "## The long run", "")
    yield fill(
        f"`make test-long`, which keeps each test's outcome and goes on where it was broken off: {run['passed']:,} "
        f"passed, {run['failed']:,} failed, {run['skipped']:,} skipped, {run['left']:,} not run; "
        f"it took {run['seconds'] / 3600:.1f} hours.",
        WIDTH,
    )
    yield from ("", "| tests | passed | skipped | failed | not run | seconds | days | commits |")
    yield "|---|---:|---:|---:|---:|---:|---|---|"
    for row in run["files"]:
        days = " to ".join(dict.fromkeys((row["days"][0], row["days"][-1])))
        commits = ", ".join(f"`{one}`" for one in row["commits"])
        counts = (
            f"{row['passed']:,} | {row['skipped']:,} | {len(row['failed']):,} | {row['left']:,} | {row['seconds']:,}"
        )
        yield f"| `{row['file']}` | {counts} | {days} | {commits} |"


def _failures(failures: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Others' failures, and the tests that look for them here."""
    yield fill(
        "Failures of other projects, as their issues and advisories tell them, and the tests that would see them here.",
        WIDTH,
    )
    yield from ("", "| | failure | tests |", "|---|---|---|")
    for failure in failures:
        tests = ", ".join(f"`{name}` ({path})" for path, _, name in (one.partition("::") for one in failure["tests"]))
        unsaid = f" Not shown {failure['unsaid']}." if "unsaid" in failure else ""
        yield f"| {failure['id']} | {_cell(failure['text'])} | {tests}.{unsaid} |"


def _models() -> Iterator[str]:
    """What Spin found in the models of protocols."""
    entry = json.loads((RESULTS / "models.json").read_text())
    yield fill(
        "Processes, kills and purges meet in more orders than tests can try. So a model in Promela has the steps of a "
        "protocol, and Spin looks at every state that they can lead to, in every order (`make models`). The "
        "control is errors planted in the model, each of which it must find. Tests repeat simulated runs of the first "
        "with the real index, and compare the state after each step.",
        WIDTH,
    )
    for model in tomllib.loads((MODELS / "models.toml").read_text())["models"]:
        found = entry["results"][model["name"]]
        yield from ("", fill(f"**`{model['name']}.pml`** ({', '.join(model['promises'])}). {model['text']}", WIDTH), "")
        yield from ("| run | bounds | states | invariants |", "|---|---|---:|---|")
        for run, bounds in model["runs"].items():
            answer = found["runs"][run]
            told = ", ".join(f"{name} {value}" for name, value in bounds.items()).lower()
            yield f"| {run} | {told} | {answer['states']:,} | {answer['found'] or 'hold'} |"
        yield from ("", "| planted error | found in | breaks |", "|---|---|---|")
        for error, run in model["errors"].items():
            broken = found["errors"][error]
            yield f"| {error.lower().replace('_', ' ')} | {run} | {broken or '**not found**'} |"
    yield from ("", f"Looked at {entry['date']}, commit {entry['commit']}.")


def _planted() -> dict[tuple[str, str], str]:
    """Promise and name of each planted bug that was tried → the test that found it, "" for none."""
    caught = json.loads((RESULTS / "mutants.json").read_text())["results"]["caught_by"]
    return {(row["promise"], row["name"]): caught[row["name"]] for row in _listed() if row["name"] in caught}


def _listed() -> list[dict[str, Any]]:
    return [row for path in sorted(MUTANTS.glob("*.toml")) for row in tomllib.loads(path.read_text())["mutants"]]


def _found(caught: Iterable[str]) -> str:
    tried = list(caught)
    return f"{sum(map(bool, tried))} of {len(tried)}"


def _survivors(planted: Mapping[tuple[str, str], str]) -> Iterator[str]:
    names = [f"`{name}` ({promise})" for (promise, name), caught in planted.items() if not caught]
    if names:
        yield from ("", fill(f"Not found: {', '.join(names)}.", WIDTH, break_on_hyphens=False))


def _figure(figure: Mapping[str, str]) -> str:
    """The text with its values, by whom and when they were measured."""
    entry = json.loads((RESULTS / f"{figure['file']}.json").read_text())

    def value(match: re.Match[str]) -> str:
        at: Any = entry["results"]
        for part in match[1].split("."):
            at = at[int(part)] if isinstance(at, list) else at[part]
        return f"{at:,.3g}" if isinstance(at, float) else f"{at:,}"

    text = re.sub(r"\{([^}]+)\}", value, figure["text"])
    cores = entry["machine"]["cores"]
    return f"{text} (`{figure['file']}.json`, {entry.get('date', 'undated')}, commit {entry['commit']}, {cores} cores)"


comparison = runpy.run_path(str(Path(__file__).with_name("comparison.py")))["page"]
PAGES = {"metrics.md": metrics, "configuration.md": configuration, "proof.md": proof, "comparison.md": comparison}

if __name__ == "__main__":
    for name, page in PAGES.items():
        Path(__file__).with_name(name).write_text(page())
