"""`kvtier purge` reaches what other processes stored, asks first, and creates nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.clock import SystemClock
from kvtier.testing import payloads_of, sample_namespace
from kvtier.tiers.disk.maintenance import looking_after
from tests.support.trace_socket import listens
from tests.support.waiting import eventually

NS = sample_namespace(4096)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "namespace.json").write_text(json.dumps(NS.fields()))
    return configured(tmp_path)


def configured(folder: Path, g3: str = "g3", bucket: bool = False) -> Path:
    g4 = f", g4: {{url: 'file://{folder}/g4', stride: 2}}" if bucket else ""
    (folder / "kvtier.yaml").write_text(
        f"tiers: {{g2: {{capacity: 4MiB}}, g3: {{path: {folder}/{g3}, capacity: 64MiB}}{g4}}}\n"
    )
    return folder


def purge(run: Callable[..., Any], place: Path, *words: str) -> Any:
    return run("purge", place / "kvtier.yaml", "--namespace", place / "namespace.json", *words, "--json")


def stored(place: Path, *salts: str | None) -> list[list[bytes]]:
    chains = [kvtier.chain_hashes(range(64), NS, salt=salt) for salt in salts]
    with kvtier.open(kvtier.Config.load(place / "kvtier.yaml"), NS) as cache:
        for keys in chains:
            cache.put(keys, payloads_of(keys, 4096))
    return chains


def matched(place: Path, chains: list[list[bytes]]) -> list[int]:
    with kvtier.open(kvtier.Config.load(place / "kvtier.yaml"), NS) as cache:
        return [cache.match(keys) for keys in chains]


def test_purge_drops_one_tenant_from_disk_and_objects(run: Callable[..., Any], place: Path) -> None:
    configured(place, bucket=True)
    chains = stored(place, "a", "b")
    done = purge(run, place, "--salt", "a", "--yes")
    assert done.status == 0
    assert done.json()["purged_blocks"] == 8
    assert matched(place, chains) == [0, 4]


def test_a_mistyped_path_creates_nothing(run: Callable[..., Any], place: Path) -> None:
    stored(place, "a")
    before = set(configured(place, "g3x").iterdir())
    for words in (["--salt", "a", "--yes"], ["--salt", "a", "--dry-run"]):
        done = purge(run, place, *words)
        assert done.status == 2 and "there is no store in" in done.err and "g3x" in done.err
    for verb in (["list"], ["delete", "p"], ["extend", "p", "--ttl", "1d"]):
        words = ["pin", verb[0], place / "kvtier.yaml", *verb[1:], "--namespace", place / "namespace.json"]
        assert run(*words).status == 2
    assert set(place.iterdir()) == before


def test_a_namespace_that_the_store_never_held_is_refused(run: Callable[..., Any], place: Path) -> None:
    chains = stored(place, "a")
    (place / "namespace.json").write_text(json.dumps({**NS.fields(), "model": "another/model"}))
    done = purge(run, place, "--salt", "a", "--yes")
    assert done.status == 2 and "another/model" in done.err and NS.model in done.err
    assert matched(place, chains) == [4]


def test_one_tenant_is_named_and_confirmed(
    run: Callable[..., Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = stored(place, None, "a")
    for words in (["--yes"], ["--salt", "a", "--without-salt", "--yes"]):
        done = purge(run, place, *words)
        assert done.status == 2 and "--without-salt" in done.err
    for answer in ("n\n", ""):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        done = purge(run, place, "--salt", "a")
        assert (done.status, done.json()["error"]["kind"]) == (4, "Declined")
        assert "4 blocks in" in done.err
    assert purge(run, place, "--salt", "a", "--dry-run").json() == {"dry_run": True, "g3_blocks": 4}
    assert purge(run, place, "--salt", "unknown", "--dry-run").json()["g3_blocks"] == 0
    words = ("purge", place / "kvtier.yaml", "--namespace", place / "namespace.json")
    told = run(*words, "--salt", "a", "--dry-run")
    assert told.status == 0 and "would delete 4 blocks" in told.told and "nothing was changed" in told.told
    assert matched(place, chains) == [4, 4]
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert purge(run, place, "--without-salt").json()["purged_blocks"] == 4
    assert matched(place, chains) == [0, 4]


def test_without_the_directory_only_the_bucket_is_purged(run: Callable[..., Any], place: Path) -> None:
    """As from a machine that runs no engine."""
    configured(place, bucket=True)
    chains = stored(place, "a")
    configured(place, "elsewhere", bucket=True)
    done = purge(run, place, "--salt", "a", "--yes")
    assert done.status == 0 and "only the bucket" in done.err and not (place / "elsewhere").exists()
    assert matched(place, chains) == [0]


def test_a_purge_is_told_in_words(run: Callable[..., Any], place: Path) -> None:
    stored(place, "a")
    words = ("purge", place / "kvtier.yaml", "--namespace", place / "namespace.json", "--salt", "a", "--yes")
    assert "4 blocks deleted; every block stored until now is a miss" in run(*words).told


def test_a_bucket_that_is_no_directory_is_named(run: Callable[..., Any], place: Path) -> None:
    configured(place, bucket=True)
    done = purge(run, place, "--salt", "a", "--yes")
    assert done.status == 2 and f"no directory {place}/g4" in done.err and not (place / "g4").exists()


@pytest.mark.parametrize("name", ["a%20b", "a#b", "user@domain"])
def test_the_bucket_s_directory_is_the_one_that_engines_use(run: Callable[..., Any], tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "namespace.json").write_text(json.dumps(NS.fields()))
    place = configured(folder, bucket=True)
    chains = stored(place, "a")
    assert purge(run, place, "--salt", "a", "--yes").status == 0
    assert matched(place, chains) == [0]


@pytest.mark.parametrize("capacity", ["256KiB", "1GiB"])
def test_a_command_leaves_the_store_as_large_as_it_is(run: Callable[..., Any], place: Path, capacity: str) -> None:
    stored(place, "a", *map(str, range(30)))
    before = held(place)
    text = (place / "kvtier.yaml").read_text()
    (place / "kvtier.yaml").write_text(text.replace("64MiB", capacity))
    (place / "prompt.json").write_text(json.dumps(list(range(64))))
    of_namespace = ("--namespace", place / "namespace.json")
    lasting = ("--ttl", "1d", "--tokens", place / "prompt.json")
    assert run("pin", "create", place / "kvtier.yaml", "p", *of_namespace, *lasting).status == 0
    assert run("pin", "list", place / "kvtier.yaml", *of_namespace).status == 0
    assert held(place) == before
    assert purge(run, place, "--salt", "a", "--yes").json()["purged_blocks"] == 4
    assert held(place) == (before[0] - 4, before[1])


def held(place: Path) -> tuple[int, int]:
    """Blocks, and the capacity."""
    with looking_after([place / "g3"], SystemClock()) as store:
        found = store.inspect()
    return found["blocks"], found["capacity_bytes"]


def test_a_command_leaves_the_trace_socket_to_the_engine(run: Callable[..., Any], place: Path) -> None:
    with (place / "kvtier.yaml").open("a") as file:
        file.write(f"trace: {{socket: {place}/trace.sock}}\n")
    of_namespace = ("--namespace", place / "namespace.json")
    stored(place, "a")  # G3 notes a namespace with its first block, or when it has time
    with kvtier.open(place / "kvtier.yaml", NS):
        assert eventually(lambda: listens(place / "trace.sock"))
        assert run("pin", "list", place / "kvtier.yaml", *of_namespace).status == 0
        assert purge(run, place, "--salt", "a", "--yes").status == 0
        assert run("reload", place / "kvtier.yaml", "--json").json()["changed"] == []
