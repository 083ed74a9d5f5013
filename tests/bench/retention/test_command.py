"""`kvtier bench retention …`: what the four commands give together, and what the one command before them gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.retention.trace import REQUESTS_MIN, Request, Trace
from kvtier.cli import main

VARYING = {"seconds", "cpu_seconds", "load_p50_ms", "load_p99_ms", "dropped_by_last_process", "files_under_o_direct"}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two turns of twenty conversations, and the second turn again."""
    turns = [(turn, user) for turn in (1, 2, 3) for user in range(20)]
    lines = [
        {
            "timestamp": 1000 * (90 * turn + user), "input_length": 512 * (2 + min(turn, 2)), "output_length": 1,
            "hash_ids": [0, *(100 * user + depth for depth in range(1, 2 + min(turn, 2)))],
        }
        for turn, user in turns
    ]  # fmt: skip
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """The JSON object of `kvtier bench retention …` without what varies, and what it wrote to standard error."""
    with pytest.raises(SystemExit) as done:
        main(["bench", "retention", *words, "--json"])
    assert not done.value.code
    written = capsys.readouterr()
    return steady(json.loads(written.out)), written.err


def steady(value: Any) -> Any:
    return {k: steady(v) for k, v in value.items() if k not in VARYING} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    "options",
    [
        ("--capacity-fraction", "0.5", "--policy", "lru"),
        ("--ttl", "2m"),
        ("--tiers", "256MiB,1GiB,4GiB", "--admission", "--ttl", "1h", "--bytes-per-token", "100000"),
    ],
)
def test_the_one_command_simulates_as_before(
    trace: str, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    new, silent = run(capsys, "simulate", "--trace", trace, *options)
    old, hint = run(capsys, "--simulate", "--trace", trace, *options)
    assert old == new and not silent
    assert hint.count("\n") == 1 and "kvtier bench retention simulate" in hint


def test_a_replay_goes_into_the_report(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--trace", trace, "--ttls", "1m,1h", "--sample", "1", "--no-kill", "--g2", "4MiB", "--g4", "directory")
    replayed, _ = run(capsys, "replay", *options, "--save", str(tmp_path))
    assert replayed["1h"]["prefill_left_percent"] == replayed["1h"]["unbounded_percent"]
    assert replayed["prefill_ratio"] < 1 and replayed["references_replayed"] == replayed["references"]
    page = tmp_path / "r.html"
    record = str(tmp_path / "retention_replay.json")
    reported, _ = run(capsys, "report", "--trace", trace, "--html", str(page), "--replay", record, "--tiers", "1GB,4GB")
    assert "Replayed with real bytes" in page.read_text() and "<td>1h</td>" in page.read_text()
    again = tmp_path / "old.html"
    old, hint = run(capsys, *options, "--report", str(again), "--tiers", "1GB,4GB")
    assert "Replayed with real bytes" in again.read_text() and hint.count("\n") == 1
    assert old.pop("report")[0] == str(again) and reported.pop("report")[0] == str(page)
    assert old == replayed | reported
    old, _ = run(capsys, "--simulate", "--trace", trace, "--report", str(again), "--tiers", "1GB,4GB", "--ttl", "1h")
    assert old["worth"] and old["tiers"] and "Replayed" not in again.read_text()


def test_a_record_of_another_trace_is_refused(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    for text in ("{}", "no json", '{"results": {"trace": "other", "references_replayed": 1}}', '{"results": 3}'):
        record.write_text(text)
        with pytest.raises(SystemExit) as done:
            main(["bench", "retention", "report", "--trace", trace, "--html", "r.html", "--replay", str(record)])
        assert done.value.code == 2 and "record.json is not the record of a replay of t" in capsys.readouterr().err


def test_policies_are_compared(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--trace", trace, "--capacity-fraction", "0.1", "--capacity-fraction", "0.5")
    rows = run(capsys, "compare", *options, "--save", str(tmp_path))[0]["percent_of_footprint"]
    assert list(rows) == ["10", "50"]
    for row in rows.values():
        assert row["ceiling"] >= max(row[name] for name in ("lru", "arc", "s3fifo", "gapduel"))
    kept = json.loads((tmp_path / "retention_compared.json").read_text())["results"]
    assert kept["percent_of_footprint"].keys() == rows.keys()
    with pytest.raises(SystemExit):
        main(["bench", "retention", "compare", *options])
    assert "gapduel" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        main(["bench", "retention", "compare", "--trace", trace, "--capacity-fraction", "1.5"])
    assert done.value.code == 2 and "--capacity-fraction" in capsys.readouterr().err


def test_a_trace_that_is_too_small_is_said_and_has_neither_ratio_nor_prices(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """60 requests over three minutes."""
    simulated, _ = run(capsys, "simulate", "--trace", trace, "--ttl", "24h")
    assert "60 requests are too few" in simulated["doubts"][0] and "spans 3 minutes" in simulated["doubts"][1]
    reported, _ = run(capsys, "report", "--trace", trace, "--html", str(tmp_path / "r.html"))
    assert reported["doubts"] and "cost_per_month" not in reported["worth"]
    page = (tmp_path / "r.html").read_text()
    assert "60 requests are too few" in page and "$ per month" not in page and "× " not in page.split("<h2>")[0]
    with pytest.raises(SystemExit):
        main(["bench", "retention", "replay", "--trace", trace, "--sample", "1", "--no-kill", "--ttls", "1m,10m"])
    shown = capsys.readouterr().out
    assert "too small a trace: 60 requests" in shown and "prefill ratio" not in shown
    with pytest.raises(SystemExit):
        main(["plan", "--trace", trace])
    assert "too small a trace: 60 requests" in capsys.readouterr().out


def test_enough_requests_over_enough_time_raise_no_doubt() -> None:
    requests = tuple(Request(60.0 * number, [number % 50], 16, 1) for number in range(REQUESTS_MIN))
    trace = Trace("t", "test", 16, requests, 50)
    assert trace.doubts(3600) == trace.doubts(float("inf")) == []
    assert len(trace.doubts(24 * 3600)) == 1


@pytest.mark.parametrize("command", ["simulate", "replay", "--simulate"])
def test_a_mistyped_policy_is_refused_before_the_trace_is_read(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the command would not use it."""
    with pytest.raises(SystemExit) as done:
        main(
            [
                "bench",
                "retention",
                command,
                "--trace",
                "absent",
                "--ttl" if command != "replay" else "--ttls",
                "1h",
                "--policy",
                "gapdule",
            ]
        )
    assert done.value.code == 2 and "did you mean gapduel?" in capsys.readouterr().err


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """The status and the tables of `kvtier bench retention …`."""
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as done:
        main(["bench", "retention", *words])
    written = capsys.readouterr()
    return int(done.value.code or 0), " ".join((written.out + written.err).split())


def test_what_a_stack_is_worth_is_shown(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace that is large enough for prices has them, and one whose stack has no disk says nothing of wear."""
    options = ("report", "--trace", trace, "--html", str(tmp_path / "r.html"), "--tiers")
    status, small = shown(capsys, monkeypatch, *options, "1GB,4GB,16GB")
    assert status == 0 and "× break-even" in small and "GB written a day" in small and "A month's prefill" not in small
    monkeypatch.setattr(Trace, "doubts", lambda self, kept_s=0.0: [])
    status, large = shown(capsys, monkeypatch, *options, "1GB,4GB,16GB")
    assert "A month's prefill costs" in large and "too small a trace" not in large
    status, ram = shown(capsys, monkeypatch, *options, "1GB,4GB")
    assert status == 0 and "GB written a day" not in ram
    assert "drive writes per day" not in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("simulate", "--tiers", "1GB,2GB,3GB,4GB,5GB"), "--tiers: give one to four sizes, nearest first, got 5"),
        (("simulate",), "give --capacity-fraction, --ttl or --tiers"),
        (("replay", "--sample", "0.0001"), "not one session was drawn"),
    ],
)
def test_what_cannot_be_simulated_is_told_with_the_option(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    status, told = shown(capsys, monkeypatch, *words, "--trace", trace)
    assert status == 2 and says in told
