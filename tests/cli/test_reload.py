"""`kvtier reload`: a cache that listens at its trace socket reads its own file anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.config import Config
from kvtier.testing import chain_of, payloads_of, sample_namespace
from tests.support.trace_socket import listens
from tests.support.waiting import eventually

NS = sample_namespace(4096)
FILE = (
    "tiers: {{g2: {{capacity: {g2}}}}}\nretention: {{default: {default}}}\ntrace: {{socket: {folder}/kv.sock}}\n{more}"
)


def text(folder: Path, g2: str = "1MiB", default: str = "24h", more: str = "") -> str:
    return FILE.format(folder=folder, g2=g2, default=default, more=more)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier.yaml"
    path.write_text(text(tmp_path))
    return path


@pytest.fixture
def cache(file: Path, tmp_path: Path) -> Iterator[kvtier.Cache]:
    with kvtier.open(file, NS) as cache:
        assert eventually(lambda: listens(tmp_path / "kv.sock"))
        yield cache


def test_it_takes_over_what_the_file_changes_and_keeps_every_block(
    cache: kvtier.Cache, file: Path, tmp_path: Path, run: Any
) -> None:
    keys, heard = chain_of(NS, 4), list[Config]()
    cache.put(keys, payloads_of(keys, 4096))
    cache.on_reload = heard.append
    file.write_text(text(tmp_path, default="5m", g2="512KiB"))
    done = run("reload", file, "--json")
    assert done.json() == {"file": str(file), "changed": ["retention.default", "tiers.g2.capacity"]}
    assert heard == [cache.config] and cache.config.retention.default == "5m"
    with cache.get(keys) as hit:
        assert len(hit) == 4
    assert run("reload", tmp_path / "kv.sock").out == f"{file}: nothing changed\n"


def test_who_reloads_need_not_have_the_engine_s_secrets(file: Path, tmp_path: Path, run: Any, monkeypatch: Any) -> None:
    """A service manager gave them to the engine; the operator's shell has none."""
    file.write_text(text(tmp_path, more="security: {scope_secret: '${KVTIER_TEST_SECRET}'}\n"))
    monkeypatch.setenv("KVTIER_TEST_SECRET", "0123456789abcdef")
    with kvtier.open(file, NS) as cache:
        assert eventually(lambda: listens(tmp_path / "kv.sock"))
        cache.source = None  # it shares this process's environment: nothing is read anew
        monkeypatch.delenv("KVTIER_TEST_SECRET")
        failed = run("reload", file)
        assert failed.status == 2 and "opened with no YAML file" in failed.err, "the engine was asked"
        assert run("namespace", file, "--json").status == 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"g2": "8MiB"}, "tiers.g2.capacity: changes at a start only"),
        ({"more": "policy: lru\n"}, "policy: changes at a start only"),
        ({"default": "for_ever"}, "retention.default"),
    ],
)
def test_what_cannot_be_taken_over_is_named_and_nothing_changes(
    cache: kvtier.Cache, file: Path, tmp_path: Path, run: Any, options: dict[str, str], part: str
) -> None:
    before = cache.config
    file.write_text(text(tmp_path, **options))
    failed = run("reload", tmp_path / "kv.sock")
    assert failed.status == 2 and part in failed.err and cache.config is before


def test_another_file_than_its_own_is_refused(cache: kvtier.Cache, file: Path, tmp_path: Path, run: Any) -> None:
    """The engine would read its own, and the operator would take the other for the one in force."""
    (other := tmp_path / "other.yaml").write_text(text(tmp_path, default="5m"))
    failed = run("reload", other)
    assert failed.status == 2 and f"opened with {file}, not with" in failed.err and "other.yaml" in failed.err
    assert cache.config.retention.default == "24h"
    (link := tmp_path / "link.yaml").symlink_to(file)
    assert run("reload", link).out == f"{file}: nothing changed\n", "another name of its own"


def test_a_cache_without_a_file_says_so(tmp_path: Path, run: Any) -> None:
    raw = {"tiers": {"g2": {"capacity": "1MiB"}}, "trace": {"socket": str(tmp_path / "kv.sock")}}
    with kvtier.open(Config.parse(raw), NS):
        assert eventually(lambda: listens(tmp_path / "kv.sock"))
        failed = run("reload", tmp_path / "kv.sock")
    assert failed.status == 2 and "opened with no YAML file" in failed.err
    assert run("reload", tmp_path / "kv.sock").status == 2


def test_where_nobody_listens_it_is_the_machine_that_does_not_let_it(file: Path, run: Any) -> None:
    failed = run("reload", file)
    assert failed.status == 3 and "no cache listens there" in failed.err
