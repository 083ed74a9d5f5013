"""A measurement says what was run, where and at which commit."""

from __future__ import annotations

import json
from pathlib import Path

from kvtier.bench.record import commit, interleaved, record, save, summary


def test_rounds_are_interleaved() -> None:
    order: list[str] = []

    def subject(name: str) -> float:
        order.append(name)
        return float(len(order))

    figures = interleaved(3, {"ours": lambda: subject("ours"), "ceiling": lambda: subject("ceiling")})
    assert order == ["ours", "ceiling"] * 3
    assert figures == {"ours": [1.0, 3.0, 5.0], "ceiling": [2.0, 4.0, 6.0]}


def test_a_summary_keeps_the_spread() -> None:
    assert summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "rounds": 3}


def test_a_record_can_be_judged_and_repeated(tmp_path: Path) -> None:
    entry = record("index", ["kvtier", "bench", "index", "--tokens", "8192"], {"ns": 1.0})
    read = json.loads(save(entry, tmp_path / "results").read_text())
    assert read["command"] == "kvtier bench index --tokens 8192"
    assert read["results"] == {"ns": 1.0}
    assert read["machine"]["cores"] >= 1 and read["machine"]["memory_gib"] > 0
    assert set(read) == {"benchmark", "command", "commit", "date", "machine", "results"}


def test_the_commit_is_this_checkout_s(root_commit: str) -> None:
    assert commit().rstrip("+") == root_commit
