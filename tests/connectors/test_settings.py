"""The arguments that engines hand to their connectors."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtier
from kvtier.connectors.settings import Settings, flag, port, recompute, seconds, size, size_or_none


def test_arguments_name_a_file_or_carry_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text("version: 1\ntiers:\n  g2: {capacity: 3MiB}\n")
    assert Settings.parse({"kvtier_config": str(file)}).config.tiers.g2.capacity == 3 << 20
    carried = Settings.parse({"kvtier_config": {"tiers": {"g2": {"capacity": "5MiB"}}}, "model": "m"})
    assert (carried.config.tiers.g2.capacity, carried.model) == (5 << 20, "m")


def test_without_a_file_the_environment_names_one_or_the_defaults_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)
    assert Settings.parse({}).config == kvtier.Config.parse({})
    (tmp_path / "kvtier.yaml").write_text("version: 1\ntiers:\n  g2: {capacity: 3MiB}\n")
    monkeypatch.setenv("KVTIER_CONFIG", str(tmp_path / "kvtier.yaml"))
    assert Settings.parse({}).config.tiers.g2.capacity == 3 << 20
    assert Settings.parse({"kvtier_config": {}}).config == kvtier.Config.parse({}), "an argument goes first"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"kvtier_config": 3}, "kvtier_config must be the path"),
        ({"kvtier_config": {}, "modle": "m"}, "'modle' is unknown"),
        ({"kvtier_config": {}, "model": 3}, "model must be a text"),
    ],
)
def test_wrong_arguments_are_named(extra: dict[str, object], said: str) -> None:
    with pytest.raises(kvtier.ConfigError, match=said):
        Settings.parse(extra)


OWN = {"wait": seconds, "bytes": size, "room": size_or_none, "on": flag, "at": port, "recompute": recompute}


def test_a_connectors_own_arguments_are_read() -> None:
    given = {"wait": "200ms", "bytes": "3MiB", "on": False, "at": 9400, "recompute": "never"}
    assert Settings.parse(given, OWN).own == {
        "wait": 0.2,
        "bytes": 3 << 20,
        "on": False,
        "at": 9400,
        "recompute": "never",
    }
    assert Settings.parse({"wait": 2, "bytes": 5}, OWN).own == {"wait": 2.0, "bytes": 5}
    assert Settings.parse({"wait": None}, OWN).own == {}
    assert [Settings.parse({"room": room}, OWN).own["room"] for room in (0, "0", "3MiB")] == [0, 0, 3 << 20]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wait", "10 parsecs"), ("wait", -1), ("wait", float("inf")), ("wait", float("nan")), ("wait", True),
        ("wait", [1]), ("bytes", "many"), ("bytes", -1), ("bytes", 0), ("bytes", 1.5), ("room", -1), ("room", False),
        ("on", "no"), ("at", "9400"), ("at", 70000),
        ("recompute", "sometimes"),
    ],
)  # fmt: skip
def test_a_wrong_value_of_a_connectors_own_is_named(name: str, value: object) -> None:
    with pytest.raises(kvtier.ConfigError, match=f"connector argument {name} "):
        Settings.parse({name: value}, OWN)
