"""`kvtier pin` over a bucket or a directory that caches share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.cli.pin import TOKENS_BYTES_MAX
from kvtier.testing import payloads_of, sample_namespace

NS = sample_namespace(4096)


@pytest.fixture(params=["g4: {{url: 'file://{}/g4', stride: 2}}", "g3: {{path: {}/g3, capacity: 64MiB}}"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    lower = request.param.format(tmp_path)
    (tmp_path / "kvtier.yaml").write_text(f"tiers: {{g2: {{capacity: 4MiB}}, {lower}}}\n")
    (tmp_path / "namespace.json").write_text(json.dumps(NS.fields()))
    (tmp_path / "prompt.json").write_text(json.dumps(list(range(64))))
    return tmp_path


def pin(run: Callable[..., Any], place: Path, *words: str) -> Any:
    command, *rest = words
    return run("pin", command, place / "kvtier.yaml", *rest, "--namespace", place / "namespace.json", "--json")


def test_a_pin_from_creation_to_its_end(run: Callable[..., Any], place: Path) -> None:
    keys = kvtier.chain_hashes(range(64), NS, salt="a")
    with kvtier.open(kvtier.Config.load(place / "kvtier.yaml"), NS) as cache:
        cache.put(keys, payloads_of(keys, 4096))
    tokens = ("--tokens", str(place / "prompt.json"))
    made = pin(run, place, "create", "system/v1", *tokens, "--ttl", "7d", "--salt", "a").json()
    assert (made["blocks"], made["resident_blocks"], made["tokens"]) == (4, 4, 64)
    assert 6.9 * 86400 < made["until"] - made["created"] < 7.1 * 86400
    assert pin(run, place, "create", "other", *tokens, "--ttl", "7d").json()["resident_blocks"] == 0, "no salt: no hit"
    again = pin(run, place, "create", "system/v1", *tokens, "--ttl", "7d", "--salt", "a")
    assert again.status == 2 and "exists" in again.err
    longer = pin(run, place, "extend", "system/v1", "--ttl", "30d").json()
    assert longer["until"] > made["until"] + 20 * 86400
    assert [each["name"] for each in pin(run, place, "list").json()["pins"]] == ["other", "system/v1"]
    assert pin(run, place, "delete", "system/v1").json()["deleted"]
    assert [each["name"] for each in pin(run, place, "list").json()["pins"]] == ["other"]
    assert pin(run, place, "delete", "system/v1").status == 1
    assert pin(run, place, "extend", "system/v1", "--ttl", "1d").status == 2


@pytest.mark.parametrize(
    ("text", "says"), [("[1, -2]", "token id"), ("one two", "token ids"), ("[1, 2]", "no whole block"), ("{}", "token")]
)
def test_a_wrong_prompt_is_said_so(run: Callable[..., Any], place: Path, text: str, says: str) -> None:
    (place / "wrong").write_text(text)
    done = pin(run, place, "create", "p", "--tokens", str(place / "wrong"), "--ttl", "1d")
    assert done.status == 2 and says in done.err


def test_a_pin_needs_a_tier_that_stays(run: Callable[..., Any], place: Path) -> None:
    (place / "kvtier.yaml").write_text("tiers: {g2: {capacity: 4MiB}}\n")
    done = pin(run, place, "list")
    assert done.status == 2 and "tiers.g4" in done.err
    done = pin(run, place, "create", "p", "--tokens", str(place / "prompt.json"), "--ttl", "1d")
    assert done.status == 2 and "needs a tier that outlives the process" in done.err


def test_a_running_cache_learns_of_it(run: Callable[..., Any], place: Path) -> None:
    tokens = ("--tokens", str(place / "prompt.json"))
    assert pin(run, place, "create", "p", *tokens, "--ttl", "7d").status == 0
    with kvtier.open(kvtier.Config.load(place / "kvtier.yaml"), NS) as cache:
        assert [(each.name, each.blocks) for each in cache.pins.list()] == [("p", 4)]
        assert cache.pins.delete("p")
    assert pin(run, place, "list").json()["pins"] == []


def test_what_a_pin_does_is_told_in_words(run: Callable[..., Any], place: Path) -> None:
    def told(command: str, *rest: object) -> tuple[int, str]:
        ran = run("pin", command, place / "kvtier.yaml", *rest, "--namespace", place / "namespace.json")
        return ran.status, ran.told

    status, text = told("create", "system/v1", "--tokens", place / "prompt.json", "--ttl", "7d")
    assert status == 0 and text.startswith("system/v1: 4 blocks until") and "0 of its 4 blocks are there now" in text
    status, text = told("list")
    assert status == 0 and "since" in text and "system/v1 4 64" in text
    assert told("delete", "system/v1") == (0, "system/v1: deleted")
    assert told("delete", "system/v1") == (1, "system/v1: there is no such pin")


def test_a_prompt_file_has_a_bound(run: Callable[..., Any], place: Path) -> None:
    with (place / "large").open("wb") as file:
        file.truncate(TOKENS_BYTES_MAX + 1)
    done = pin(run, place, "create", "p", "--tokens", str(place / "large"), "--ttl", "1d")
    assert done.status == 2 and "is larger than" in done.err
