"""What both engine connectors share: arguments, identity, scope, per-request control."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import kvtier
from kvtier.connectors import common
from kvtier.identity.keys import SHARED
from kvtier.retention.terms import BUILTIN, Depth


def make_config(**more: object) -> kvtier.Config:
    return kvtier.Config.parse({"tiers": {"g2": {"capacity": "1MiB"}}, **more})


def test_arguments_name_a_file_or_carry_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text("version: 1\ntiers:\n  g2: {capacity: 3MiB}\n")
    assert common.Settings.parse({"kvtier_config": str(file)}).config.tiers.g2.capacity == 3 << 20
    carried = common.Settings.parse({"kvtier_config": {"tiers": {"g2": {"capacity": "5MiB"}}}, "model": "m"})
    assert (carried.config.tiers.g2.capacity, carried.model) == (5 << 20, "m")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "kvtier_config is missing"),
        ({"kvtier_config": {}, "modle": "m"}, "'modle' is unknown"),
        ({"kvtier_config": {}, "model": 3}, "model must be a text"),
    ],
)
def test_wrong_arguments_are_named(extra: dict[str, object], said: str) -> None:
    with pytest.raises(kvtier.ConfigError, match=said):
        common.Settings.parse(extra)


def test_a_model_is_named_by_what_it_is_not_by_where_it_lies(tmp_path: Path) -> None:
    assert common.model_name("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    assert common.model_name("/models/llama") == "llama"
    assert common.model_name(str(tmp_path)) == tmp_path.name
    assert common.model_name("/models/llama", "mine") == "mine"


def test_weights_are_the_operators_id_or_the_files(tmp_path: Path) -> None:
    settings = common.Settings(make_config())
    (tmp_path / "model.bin").write_bytes(b"weights" * 1000)
    first = common.weights_of(settings, str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"Weights" * 1000)
    assert common.weights_of(settings, str(tmp_path)) != first
    assert common.weights_of(common.Settings(make_config(), weights="v2"), "nowhere") == "id:v2"
    with pytest.raises(kvtier.IdentityError, match="set the connector argument weights"):
        common.weights_of(settings, "no-such-org/no-such-model")


def test_an_update_of_weights_starts_an_epoch_of_its_own() -> None:
    namespace = kvtier.Namespace(model="m", weights="w", dtype="float32", layout="x", block_tokens=16, block_bytes=64)
    one, two = (common.epoch_after_reset(make_config(), namespace) for _ in range(2))
    assert len({namespace.digest, one.digest, two.digest}) == 3
    assert common.epoch_after_reset(make_config(keep_on_reset=True), namespace) is namespace


def test_engine_hashes_are_used_as_they_are_if_they_are_long_enough() -> None:
    assert common.engine_keys(SHARED, [b"h" * 32]) == [bytes(16) + b"h" * 32]
    with pytest.raises(kvtier.IdentityError, match="have 16 bytes"):
        common.engine_keys(SHARED, [b"h" * 16])


def test_a_request_asks_for_less_than_the_default() -> None:
    controls = common.Controls(make_config())
    assert controls.parse(None) == common.Control(BUILTIN["24h"])
    asked = controls.parse({"retention": "1h", "ceiling": "g2", "load": False})
    assert (asked.terms.ttl, asked.terms.ceiling, asked.load, asked.store) == (3600, Depth.G2, False, True)
    assert controls.parse({"retention": "in_memory", "ceiling": "g4"}).terms.ceiling is Depth.G2


def test_a_request_asks_for_its_parts_a_pin_and_a_comparison() -> None:
    controls = common.Controls(make_config())
    asked = controls.parse({"retention": "5m", "ranges": [[0, 64, "24h"]], "ceiling": "g3",
                            "pin": {"name": "docs/manual", "ttl": "2h"}, "compared_with": "req-1"})  # fmt: skip
    terms = asked.chain_terms(block_tokens=16)
    assert [(terms.at(n).terms.ttl, terms.at(n).terms.ceiling) for n in (3, 4)] == [(86400, 3), (300, 3)]
    assert (asked.pin, asked.compared_with) == (common.PinWish("docs/manual", 7200.0), "req-1")
    alone = controls.parse({"ranges": [[0, 64, "in_memory"]]})
    scopes = common.Scopes(make_config())
    assert scopes.of("a", b"", alone.request) == scopes.of("a", b"", BUILTIN["in_memory"])


@pytest.mark.parametrize(
    "raw",
    [
        "1h",
        {"retention": "1 hour"},
        {"retention": 3},
        {"ceiling": "g5"},
        {"ttl": "1h"},
        {"load": 1},
        {"ranges": "24h"},
        {"ranges": [[5, 5, "24h"]]},
        {"ranges": [[0, 5, "a day"]]},
        {"ranges": [[0, 5, "in_memory"], [5, 9, "other"]]},
        {"pin": "manual"},
        {"pin": {"name": "manual", "ttl": 5}},
        {"compared_with": 7},
    ],
)
def test_a_request_that_cannot_be_understood_is_not_cached(raw: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        control = common.Controls(make_config()).parse(raw)
    assert (control.load, control.store) == (False, False)
    assert "a request is not cached" in caplog.text


def test_scopes_part_salts_adapters_and_isolated_classes() -> None:
    scopes, day, alone = common.Scopes(make_config()), BUILTIN["24h"], BUILTIN["in_memory"]
    assert len({scopes.of(None, b"", day), scopes.of("a", b"", day), scopes.of("b", b"", day),
                scopes.of("a", b"x", day), scopes.of("a", b"", alone)}) == 5  # fmt: skip
    assert scopes.of("a", b"", day) == scopes.of("a", b"", BUILTIN["1h"])
    deny = common.Scopes(make_config(security={"salt": "deny"}))
    assert deny.of(None, b"", day) is None and deny.of("a", b"", day) is not None
