"""`kvtier g3 gc` says beforehand what it deletes, and counts it."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.testing import chain_of, payloads_of, sample_namespace

Run = Callable[..., Any]
BLOCKS = 512
NS = sample_namespace(4096)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """BLOCKS blocks, 2 MiB; a quarter of them expires in ten minutes."""
    tiers = {"g2": {"capacity": "4MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "2MiB"}}
    config = {"tiers": tiers, "retention": {"classes": {"brief": {"ttl": "10m"}}}}
    with kvtier.open(Config.parse(config), NS) as cache:
        for seed, retention in enumerate(("24h", "24h", "24h", "brief")):
            keys = chain_of(NS, BLOCKS // 4, seed)
            cache.put(keys, payloads_of(keys, 4096), retention=retention)
            cache.flush()
    return tmp_path / "g3"


def held(run: Run, store: Path) -> int:
    return int(run("g3", "inspect", store, "--json").json()["blocks"])


def test_a_size_without_a_unit_or_too_small_is_refused(run: Run, store: Path) -> None:
    for size, says in (("10", "10GiB"), ("1KiB", "4KiB"), ("0", "above 0"), ("ten", "not a size")):
        done = run("g3", "gc", store, "--resize", size, "--yes")
        assert done.status == 2 and says in done.err, size
    assert held(run, store) == BLOCKS


def test_a_resize_that_deletes_is_confirmed_and_counted(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foretold = run("g3", "gc", store, "--resize", "1MiB", "--dry-run", "--json").json()
    assert foretold["resized_away_blocks"] == BLOCKS // 2 and foretold["capacity_bytes"] == 2 << 20
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    done = run("g3", "gc", store, "--resize", "1MiB")
    assert done.status == 4 and f"deletes {BLOCKS // 2} of {BLOCKS} blocks" in done.err
    assert held(run, store) == BLOCKS
    told = run("g3", "gc", store, "--resize", "1MiB", "--yes", "--json").json()
    assert told["resized_away_blocks"] == BLOCKS // 2
    assert told["blocks"] == BLOCKS - told["resized_away_blocks"] - told["deleted_blocks"] == held(run, store)
    assert told["capacity_bytes"] == 1 << 20


def test_a_larger_store_needs_no_answer(run: Run, store: Path) -> None:
    told = run("g3", "gc", store, "--resize", "8MiB", "--json").json()
    assert (told["resized_away_blocks"], told["capacity_bytes"]) == (0, 8 << 20)


def test_a_dry_run_counts_what_gc_then_deletes(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("g3", "gc", store, "--dry-run", "--json").json()["deleted_blocks"] == 0
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)
    foretold = run("g3", "gc", store, "--dry-run", "--json").json()
    assert foretold["dry_run"] and foretold["deleted_blocks"] == BLOCKS // 4 and held(run, store) == BLOCKS
    assert run("g3", "gc", store, "--json").json()["deleted_blocks"] == foretold["deleted_blocks"]
    assert run("g3", "gc", store, "--dry-run", "--json").json()["deleted_blocks"] == 0


def test_a_capacity_without_a_unit_is_a_mistake_in_a_configuration_too() -> None:
    """The next start would cut the store to it."""
    with pytest.raises(ConfigError, match=r"^tiers\.g3\.capacity: .*10GiB"):
        Config.parse({"tiers": {"g3": {"path": "kv", "capacity": 10}}})


def test_what_is_found_is_shown_to_a_reader(run: Run, store: Path) -> None:
    sound = run("g3", "doctor", store)
    assert sound.status == 0 and "stopped reader" in sound.out and "remedy" in sound.out
    foretold = run("g3", "gc", store, "--dry-run")
    assert foretold.status == 0 and "nothing was changed" in foretold.out and str(BLOCKS) in foretold.out
    assert "nothing was changed" not in run("g3", "gc", store).out
    slab = next(file for file in sorted((store / "slab").iterdir()) if file.stat().st_size)
    with slab.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))
    found = run("g3", "verify", store)
    damaged = run("g3", "verify", store, "--json").json()["damaged"]
    assert found.status == 1 and len(damaged) == 1
    assert damaged[0].split(":")[0] in "".join(found.out.split()), "which block it is"


def test_a_long_run_shows_how_far_it_is(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    shown = run("g3", "verify", store)
    assert shown.status == 0 and f"{BLOCKS}/{BLOCKS}" in shown.err
    assert run("g3", "verify", store, "--json").err == "", "a program reads this"
