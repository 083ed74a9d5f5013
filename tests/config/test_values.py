"""What a right configuration gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.config import G2_CAPACITY_DEFAULT, Config, cache_folder
from kvtier.config.explain import known_keys
from kvtier.errors import ConfigError, InvalidRequest
from kvtier.retention.terms import Depth
from kvtier.units import format_duration, format_size, parse_duration, parse_endurance, parse_rate, parse_size

FULL = """
version: 1
tiers:
  g1: {blocks: 4096}                          # only where kvtier owns the pool
  g2: {capacity: 64GiB}
  g3: {path: /nvme/kvtier, capacity: 2TiB, write_rate: 500MiB/s, write_budget: 3DWPD}
  g4: {url: "s3://bucket/prefix", options: {endpoint_url: "http://127.0.0.1:8333"}}
offload: {mode: auto, spill_ahead: auto, dirty_max_age: 5s}
retention:
  default: agents
  classes:
    agents: {ttl: 12h, max_age: 3d, guarantee: true, ceiling: g3, priority: 80, isolate: true}
policy: auto
"""


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text(FULL)
    config = Config.load(file)
    assert config.tiers.g1.blocks == 4096
    assert config.tiers.g2.capacity == 64 << 30
    assert config.tiers.g3 is not None and config.tiers.g4 is not None
    assert config.tiers.g3.path == (Path("/nvme/kvtier"),)
    assert config.tiers.g3.capacity == 2 << 40
    assert config.tiers.g3.write_rate == 500 << 20
    assert config.tiers.g3.write_budget == 3.0
    assert config.tiers.g4.options == {"endpoint_url": "http://127.0.0.1:8333"}
    assert config.offload.dirty_max_age == 5.0
    own = config.terms()[-1]
    assert (own.name, own.ttl, own.max_age, own.guarantee) == ("agents", 43200.0, 259200.0, True)
    assert (own.ceiling, own.priority, own.isolate) == (Depth.G3, 80, True)


def test_nothing_given_is_ram_only() -> None:
    config = Config.parse({})
    assert config.tiers.g2.capacity == G2_CAPACITY_DEFAULT
    assert config.tiers.g3 is None and config.tiers.g4 is None
    assert [terms.name for terms in config.terms()] == ["in_memory", "5m", "1h", "24h"]
    assert config == Config.parse({"version": 1})


def test_several_directories() -> None:
    config = Config.parse({"tiers": {"g3": {"path": ["/nvme0", "/nvme1"], "capacity": "1TB"}}})
    assert config.tiers.g3 is not None
    assert config.tiers.g3.path == (Path("/nvme0"), Path("/nvme1"))
    assert config.tiers.g3.capacity == 10**12


def test_it_is_frozen() -> None:
    config = Config.parse({})
    with pytest.raises(ValueError, match="frozen"):
        config.policy = "lru"


def test_at_most_fifty_two_keys_each_described() -> None:
    keys = known_keys(Config)
    assert len(keys) <= 52
    schema = Config.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    assert all("description" in section for section in sections)
    assert all(
        "description" in value or "$ref" in value for section in sections for value in section["properties"].values()
    )


def test_a_dump_reads_back_as_the_same_configuration() -> None:
    config = Config.parse(
        {
            "tiers": {
                "g3": {"path": ["/a", "/b"], "capacity": "3GiB", "write_rate": "1MB/s", "write_budget": "0.5DWPD"}
            },
            "retention": {"classes": {"own": {"ttl": "90s"}}},
            "deadlines": {"lookup": "150ms"},
        }
    )
    assert Config.parse(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 << 30), ("1.5KiB", 1536), ("1kB", 1000), ("12", 12), (12, 12), (" 2 MiB ", 2 << 20), ("1B", 1)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "wrong", ["", "GiB", "64GB/s", "-1GiB", "1e9", "64 gib", "0", 0, -5, True, 1.5, None, "9" * 40]
)
def test_wrong_sizes(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="such as 64GiB"):
        parse_size(wrong)  # type: ignore[arg-type]


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 2**60))
def test_sizes_survive_printing(size: int) -> None:
    assert parse_size(format_size(size)) == size


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 10**9))
def test_durations_survive_printing(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 10**6), st.integers(0, 999), st.sampled_from(["ms", "s", "m", "h", "d"]))
def test_parts_of_a_unit_survive_printing(whole: int, part: int, unit: str) -> None:
    seconds = parse_duration(f"{whole}.{part:03}{unit}")
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize("budget", ["3DWPD", "0.3DWPD", "123456.7DWPD", "0.000001DWPD"])
def test_what_is_shown_of_budgets_is_a_configuration(budget: str) -> None:
    given = {"tiers": {"g3": {"path": "/x", "capacity": "1GiB", "write_budget": budget}}}
    shown = Config.parse(given).model_dump(mode="json")
    assert shown["tiers"]["g3"]["write_budget"] == budget and Config.parse(shown) == Config.parse(given)


def test_rates_and_budgets() -> None:
    assert parse_rate("500MiB/s") == 500 << 20
    assert parse_endurance("0.3 DWPD") == 0.3
    for wrong in ("500MiB", "0MiB/s", "fast"):
        with pytest.raises(InvalidRequest, match="such as 500MiB/s"):
            parse_rate(wrong)
    for wrong in ("3", "0DWPD", "-1DWPD", "DWPD"):
        with pytest.raises(InvalidRequest, match="such as 3DWPD"):
            parse_endurance(wrong)


def test_every_preset_is_valid_and_says_what_it_is() -> None:
    presets = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    assert {"8xH100", "laptop", "shared-s3", "single-gpu"} <= {preset.stem for preset in presets}
    for preset in presets:
        assert preset.read_text().startswith("# ")
        environ = {"KVTIER_SECRET": "0123456789abcdef"}
        assert isinstance(Config.load(preset, environ), Config)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        Config.load(tmp_path / "absent.yaml")


def test_measurements_go_to_the_users_cache_folder() -> None:
    assert cache_folder({"HOME": "/people/u"}) == Path("/people/u/.cache/kvtier")
    assert cache_folder({"HOME": "/people/u", "XDG_CACHE_HOME": "/caches"}) == Path("/caches/kvtier")
    assert cache_folder({"HOME": "/people/u", "XDG_CACHE_HOME": "relative"}) == Path("/people/u/.cache/kvtier")
    assert cache_folder({}) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"retention": {"classes": {"brief": {"ttl": "0s"}}}}, "out of range"),
        ({"retention": {"classes": {"brief": {"ttl": "4000d"}}}}, "at most 10 years"),
        ({"tiers": {"g3": {"path": ["/a", "/a/"], "capacity": "1GiB"}}}, "the same directory is listed twice"),
        ({"retention": {"classes": {"a b": {"ttl": "1h"}}}}, "is not a name of 1"),
        ({"trace": {"socket": "/" + "é" * 54}}, "trace.socket: .* has 109 bytes; a socket's path has at most 107"),
        ({"retention": {"classes": {f"c{number}": {"ttl": "1h"} for number in range(1000)}}}, "at most"),
    ],
)
def test_a_value_out_of_its_range_is_named(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config.parse(given)
