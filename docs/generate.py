"""Writes docs/metrics.md and docs/configuration.md from the code: `make reference`. tests/docs checks that they are
current."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from prometheus_client import Counter, Gauge

from kvtier.config.reference import KeyReference, key_references, section_meanings
from kvtier.metrics import BOUNDS_S, BUILD, ENGINE, PORT, REQUESTS, TASKS, TIERS, Family, labels_of

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


PAGES = {"metrics.md": metrics, "configuration.md": configuration}

if __name__ == "__main__":
    for name, page in PAGES.items():
        Path(__file__).with_name(name).write_text(page())
