"""The arguments that engines hand to their connectors."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtier
from kvtier.connectors.settings import Settings, seconds_of, weighs_loads


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


def test_times_are_seconds_or_texts_and_recompute_is_a_choice() -> None:
    extra = {"one": 2, "other": "200ms"}
    assert [seconds_of(extra, name, 9.0) for name in ("one", "other", "none")] == [2.0, 0.2, 9.0]
    assert weighs_loads({}) and weighs_loads({"recompute": "auto"}) and not weighs_loads({"recompute": "never"})
    with pytest.raises(kvtier.ConfigError, match="sometimes"):
        weighs_loads({"recompute": "sometimes"})
