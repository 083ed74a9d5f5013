"""The page that sets kvtier beside other stores: written from docs/comparison.toml and benchmarks/results.

Which row is a loss follows from the results: what is better elsewhere stands first, whatever it is.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 118
NOTE = "<!-- Written by `make reference` from docs/comparison.toml and benchmarks/results. -->"
FAULTS = "peers_faults"
NEAR = 0.02
"""Figures that differ by less than this share are called equal."""
BAD = ("wrong", "hang", "dead", "raised")


@dataclass(frozen=True, slots=True)
class Beside:
    """One figure of kvtier's and the same of another store; its text names it."""

    text: str
    file: str
    ours: float
    theirs: float
    whose: str
    lower_is_better: bool
    why: str
    ours_spread: str = ""
    spread: str = ""

    @property
    def gain(self) -> float:
        """How much better kvtier's is, as a share of the worse of the two; negative: worse."""
        worse, better = max(self.ours, self.theirs), min(self.ours, self.theirs)
        share = (worse - better) / worse if worse else 0.0
        return share if (self.ours < self.theirs) == self.lower_is_better else -share

    def other(self) -> str:
        """Whose figure it is compared with, and that."""
        return f"{self.whose} {_number(self.theirs)}{self.spread}"


def page() -> str:
    """The whole page."""
    told = tomllib.loads((ROOT / "docs" / "comparison.toml").read_text())
    found = [one for figure in told["figures"] for one in figures_of(figure, _results(figure["file"]))]
    beside = sorted(found, key=lambda one: one.gain)
    faults = _results(FAULTS)
    lines = [
        "# Comparison", "", NOTE, "",
        fill(
            "kvtier beside other stores, on the same machine and the same data. Losses stand first. "
            "[Where the figures come from](#where-the-figures-come-from) has date, commit, machine and command of "
            "each; [proof.md](proof.md) says what kvtier promises. Of figures with rounds it is the median, with the "
            "least and the most in brackets.",
            WIDTH,
        ),
        "", "## Better elsewhere", "", *_losses(faults, told.get("why", {})), "",
        *_table([one for one in beside if one.gain < -NEAR], reasons=True),
        "", "## Damages", "", *_damages(faults),
        "", "## Better with kvtier", "", *_table([one for one in reversed(beside) if one.gain > NEAR]),
        "", f"## Equal within {NEAR:.0%}", "", *_table([one for one in beside if abs(one.gain) <= NEAR]),
        "", "## Not compared", "", *(f"- {one}" for one in told["not_compared"]),
        "", "## Where the figures come from", "", *_sources([*{one.file: None for one in beside}, FAULTS]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def figures_of(figure: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Beside]:
    """A figure beside each other store's; a store that was not run has none."""
    text = figure["text"]
    if "of" in figure:
        text = text.format(of=_at(results, figure["of"]))
    value, ours = figure["value"], _at(results, figure["ours"])
    for whose, place in figure["theirs"].items():
        theirs = _at(results, place)
        if theirs is not None and value in theirs:
            yield Beside(
                text, figure["file"], ours[value], theirs[value], whose, figure["better"] == "lower",
                figure.get("why", ""), _spread(ours, value), _spread(theirs, value),
            )  # fmt: skip


def _spread(figures: Mapping[str, Any], value: str) -> str:
    """The least and the most of a figure's rounds, in brackets; empty for one that no round differs in."""
    least, most = figures.get("spread", {}).get(value) or (figures.get("min"), figures.get("max"))
    return "" if least == most else f" ({_number(least)} to {_number(most)})"


def _at(results: Any, place: str) -> Any:
    for part in place.split("."):
        results = None if results is None else results.get(part)
    return results


def _losses(faults: Mapping[str, Any], why: Mapping[str, str]) -> Iterator[str]:
    """Damages that kvtier does not answer with right bytes or a miss."""
    lost = [
        (store, damage, row["outcome"])
        for store, rows in faults["stores"].items() if store.startswith("kvtier")
        for damage, row in rows.items() if row["outcome"] in BAD
    ]  # fmt: skip
    for store, damage, outcome in lost:
        reason = why.get(f"{store}: {damage}", "")
        text = f"**{store}, {damage}: {outcome}.** {faults['damages'][damage]} {reason}"
        yield fill(" ".join(text.split()), WIDTH, initial_indent="- ", subsequent_indent="  ")
    if not lost:
        yield "None of the damages below gave wrong bytes, an error, a hang or an end of the process with kvtier."


def _table(rows: Sequence[Beside], *, reasons: bool = False) -> list[str]:
    if not rows:
        return ["Nothing."]
    titles = ["figure", "kvtier", "others", "from", *(["why"] if reasons else [])]
    cells = [titles, ["---"] * len(titles)]
    for text in dict.fromkeys(row.text for row in rows):
        same = [row for row in rows if row.text == text]
        others = "; ".join(row.other() for row in same)
        cells.append(
            [
                text,
                _number(same[0].ours) + same[0].ours_spread,
                others,
                f"`{same[0].file}`",
                *([same[0].why] if reasons else []),
            ]
        )
    return [f"| {' | '.join(line)} |" for line in cells]


def _damages(faults: Mapping[str, Any]) -> Iterator[str]:
    stores = faults["stores"]
    yield fill(
        "The same damages on each store, through its own programming interface, over real files: one instance puts "
        f"{faults['blocks']} blocks, the damage is done, another instance reads them. **right**: all bytes as stored. "
        "**miss**: no other bytes, and some blocks are computed. **wrong**: other bytes served as a hit. **raised**: "
        f"the call raised. **hang**: no answer for a block within {faults['patience_s']:.0f} s. **dead**: the process "
        "ended. –: the store has nothing of the kind, or leaves it to its caller.",
        WIDTH,
    )
    yield from ("", f"| damage | {' | '.join(stores)} |", "|---|" + "---|" * len(stores))
    for damage in faults["damages"]:
        cells = (_outcome(rows.get(damage)) for rows in stores.values())
        yield f"| {damage} | {' | '.join(cells)} |"
    counts = (_counts(rows) for rows in stores.values())
    yield f"| **right or miss, of those tried** | {' | '.join(counts)} |"
    yield from ("", "| damage | means |", "|---|---|")
    yield from (f"| {name} | {about} |" for name, about in faults["damages"].items())
    yield from ("", "| store | is | release |", "|---|---|---|")
    for name, rows in stores.items():
        versions = next((row["versions"] for row in rows.values() if "versions" in row), {})
        release = ", ".join(f"{package} {number}" for package, number in versions.items())
        yield f"| {name} | {faults['about'][name]} | {release} |"


def _outcome(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not run"
    outcome = str(row["outcome"])
    if outcome == "-":
        return "–"
    lasting = " for good" if row.get("recovers") is False and outcome not in BAD else ""
    return f"**{outcome}**" if outcome in BAD else outcome + lasting


def _counts(rows: Mapping[str, Any]) -> str:
    outcomes = [row["outcome"] for damage, row in rows.items() if damage != "control"]
    tried = [outcome for outcome in outcomes if outcome not in ("-", "not run")]
    return f"{sum(outcome not in BAD for outcome in tried)} of {len(tried)}"


def _sources(files: Sequence[str]) -> Iterator[str]:
    yield from ("| results | date | commit | machine | command |", "|---|---|---|---|---|")
    for file in files:
        entry = json.loads((RESULTS / f"{file}.json").read_text())
        machine = entry["machine"]
        about = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
        yield f"| `{file}.json` | {entry['date']} | {entry['commit']} | {about} | `{entry['command']}` |"


def _results(file: str) -> Any:
    return json.loads((RESULTS / f"{file}.json").read_text())["results"]


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
