"""`kvtier bench tiers`: each of its measurements, small, and what it writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.tiers import bucket, disk, encryption, large_store, objects
from kvtier.cli import main
from kvtier.cli.bench.tiers import RESTART_BLOCKS, _place
from kvtier.config import Config
from kvtier.errors import ConfigError

pytest.importorskip("s3fs")

Figures = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Figures:
    """Runs `kvtier bench tiers …` in small units; the results that it saved. A second run shows them as tables."""
    for module, names in (
        (disk, {"BATCH_BYTES": 1 << 20, "GETS": 8, "GETS_MAX": 16}),
        (objects, {"BLOCK_BYTES": 1 << 16, "OBJECTS": 2, "BATCH_BYTES": 1 << 20, "READ_BLOCKS": (1,)}),
        (objects, {"CONCURRENCY": (8,)}),
        (encryption, {"BLOCK_BYTES": 1 << 16, "OBJECTS": 2}),
        (bucket, {"WARM_TURNS": 3, "COLD_TURNS": 1, "DELAY_S": 0.02, "LIKE_BYTES": 1 << 12}),
    ):
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)

    def bench(name: str, *words: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as done:
            main(["bench", "tiers", *words, "--rounds", "1", "--path", str(tmp_path), "--save", str(tmp_path)])
        assert not done.value.code, capsys.readouterr().err
        written = capsys.readouterr().out
        assert written.count("\n") >= 2, "nothing is shown"
        results = json.loads((tmp_path / f"{name}.json").read_text())["results"]
        assert {file.name for file in tmp_path.iterdir()} == {f"{name}.json"}, "something is left"
        assert isinstance(results, dict)
        return results

    return bench


def direct(folder: Path) -> None:
    """Skip where the file system has no O_DIRECT."""
    try:
        os.close(os.open(folder / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        pytest.skip("no O_DIRECT here")
    (folder / "direct").unlink()


def test_g2_beside_memory(bench: Figures) -> None:
    figures = bench("tiers_g2", "--tier", "g2", "--block", "64KiB")["blocks"]["64KiB"]
    assert {"put", "get", "put_ratio", "get_ratio", "copy_put", "copy_get"} == figures.keys()
    assert all(one["median"] > 0 for one in figures.values())


def test_g3_beside_the_bare_disk(bench: Figures, tmp_path: Path) -> None:
    direct(tmp_path)
    results = bench("tiers_g3", "--tier", "g3", "--size", "16MiB", "--block", "64KiB")
    figures = results["blocks"]["64KiB"]
    assert results["total_bytes"] == 16 << 20
    for name in ("raw_write", "digested_write", "synced_write", "put", "raw_read", "get"):
        assert figures[name]["gb_per_s"]["median"] > 0, name
    assert results["targets"].keys() <= figures["ratios"].keys() and all(figures["ratios"].values())


@pytest.mark.parametrize("tier", ["g3", "g4"])
def test_encrypted_beside_plain(bench: Figures, tier: str, tmp_path: Path) -> None:
    direct(tmp_path)
    name = "tiers_encryption" + ("" if tier == "g3" else "_g4")
    results = bench(name, "--tier", tier, "--encrypted", "--size", "16MiB", "--block", "64KiB")
    (figures,) = results["blocks"].values()
    assert figures["ratios"].keys() == results["targets"].keys() and figures["put_encrypted"]["gb_per_s"]["median"] > 0


def test_g4_beside_its_client_and_bare_http(bench: Figures) -> None:
    pytest.importorskip("obstore")
    for client, figures in bench("tiers_g4", "--tier", "g4")["clients"].items():
        (reads,) = figures["reads"].values()
        assert reads["ratios"].keys() == {"kvtier/client", "kvtier/http"}, client
        assert all(reads[name]["gb_per_s"]["median"] > 0 for name in ("kvtier", "client", "http"))


def test_lookups_requests_and_prices_of_g4(bench: Figures) -> None:
    results = bench("tiers_g4_bucket", "--tier", "g4", "--part", "bucket", "--strides", "64")
    assert results["lookup"]["strides"] == 64 and results["lookup"]["cold"]["round_trips"] > 0
    assert results["requests"]["store"]["requests"] and results["requests"]["dollars_per_day_kept"] > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tier", "g1"], "--tier is 'g1'"),
        (["--tier", "g4", "--part", "all"], "--part is 'all'"),
        (["--tier", "g3", "--path", "/nowhere/at/all"], "--path /nowhere/at/all"),
        (["--tier", "g3", "--size", "1MiB"], "at least"),
    ],
)
def test_what_cannot_be_measured_is_told_with_the_option(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["bench", "tiers", "--path", str(tmp_path), *words])
    assert done.value.code == 2 and told in capsys.readouterr().err


def test_a_restart_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A million blocks take minutes: what was measured of them is given here."""
    monkeypatch.setenv("COLUMNS", "500")
    figures = {
        "blocks": 1000000, "open_s": 0.25, "first_hit_after_open_s": 0.002, "puts_per_s": {"alone": 9000.0},
        "beside_verify_over_alone": 0.9, "index_bytes_per_block": 300.0, "index_bytes_written_per_lone_put": 12000.0,
        "index_bytes_written_per_put_of_32": 900.0,
        "turnover": {"blocks": 1000, "puts_per_s": 5000.0, "transaction_cpu_ms": {"p50": 1.0, "p99": 2.0, "max": 3.0},
                     "index_bytes_written_per_put": 1000.0, "index_bytes_per_block": 310.0},
        "shrink": {"blocks": 500, "seconds": 4.0, "puts_per_s": 2000.0, "puts_per_s_afterwards": 6000.0,
                   "transaction_cpu_ms": {"p50": 1.0, "p99": 2.0, "max": 3.0}},
    }  # fmt: skip
    asked = list[int]()
    one = {"gb_per_s": {"median": 1.0, "min": 1.0, "max": 1.0}, "cpu_s_per_gb": {"median": 0.1}}
    speeds = dict.fromkeys(("raw_write", "digested_write", "synced_write", "put", "raw_read", "get"), one)
    more = {
        "ratios": {},
        "written_beside_gets_gb_per_s": {"median": 1.0},
    }
    monkeypatch.setattr(disk, "measure", lambda folder, block, total, rounds: speeds | more)
    monkeypatch.setattr(large_store, "measure", lambda folder, blocks: (asked.append(blocks), figures)[1])
    with pytest.raises(SystemExit) as done:
        main(["bench", "tiers", "--tier", "g3", "--restart", "--path", str(tmp_path)])
    told = " ".join(capsys.readouterr().out.split())
    assert not done.value.code and asked == [RESTART_BLOCKS], told
    assert "restart with 1,000,000 blocks: open in 0.250 s, first block 2.0 ms later" in told
    assert "1,000 blocks replaced at 5000 per second" in told
    assert "with half the capacity: 500 blocks after 4.0 s" in told


def test_a_configured_bucket_is_measured_below_a_prefix_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    places = list[str]()

    @contextmanager
    def emptied(place: objects.ServerPlace) -> Iterator[objects.ServerPlace]:
        yield place
        places.append(place.url)

    monkeypatch.setattr(objects, "emptied", emptied)
    given = Config.parse({"tiers": {"g4": {"url": "s3://bucket/p/"}}}).tiers.g4
    with _place(given) as place:
        assert place.url.startswith("s3://bucket/p/kvtier-bench-")
    assert places == [place.url], "it is emptied afterwards"
    other = Config.parse({"tiers": {"g4": {"url": "file:///g4"}}}).tiers.g4
    with pytest.raises(ConfigError, match="measures an s3:// URL"), _place(other):
        pass
