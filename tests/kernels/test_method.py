"""The table of copy methods: what is measured is used, what is not follows the rule, and files are trusted little."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.kernels.method import (
    COUNTS,
    FRAGMENTS_BYTES,
    KIB,
    Measure,
    Method,
    Table,
    calibrate,
    load_table,
    parse,
    rule,
    table_path,
)


def test_the_rule_leaves_long_or_few_fragments_to_the_copy_engine() -> None:
    assert rule(64 * KIB, 1024) is rule(KIB, 8) is Method.DMA
    assert rule(32 * KIB, 1024) is rule(8 * KIB, 64) is Method.STAGED


def test_a_measured_cell_wins_over_the_rule() -> None:
    table = Table("gpu", {(True, 8 * KIB, 64): Method.DMA})
    assert table.choose(True, 9 * KIB, 100) is Method.DMA
    assert table.choose(True, 8 * KIB, 300) is Method.STAGED, "another count was not measured"
    assert table.choose(False, 9 * KIB, 100) is Method.STAGED, "nor was the other direction"


def times(method: Method, fragment: int) -> Mapping[tuple[bool, int], float]:
    """A device whose kernel wins below 32 KiB, by a hair at 16 KiB."""
    kernel = {True: 0.5, False: 2.0}[fragment < 32 * KIB]
    if fragment == 16 * KIB:
        kernel = 0.97
    seconds = {Method.DMA: 1.0, Method.DIRECT: kernel, Method.STAGED: 3.0}[method]
    return {(store, count): seconds for store in (True, False) for count in COUNTS}


def test_calibration_takes_the_fastest_and_the_copy_engine_in_a_near_tie() -> None:
    table = calibrate("gpu", times, lambda: 0.0, first=KIB)
    assert len(table.best) == 2 * len(FRAGMENTS_BYTES) * len(COUNTS)
    assert table.choose(True, 8 * KIB, 64) is Method.DIRECT
    assert table.choose(True, 16 * KIB, 64) is Method.DMA
    assert table.choose(False, 1 << 20, 64) is Method.DMA


def test_a_method_that_takes_less_of_the_model_may_be_a_little_slower() -> None:
    def seconds(method: Method, fragment: int) -> Mapping[tuple[bool, int], float]:
        staged = 1.2 if fragment < 16 * KIB else 1.3
        value = {Method.DMA: 3.0, Method.DIRECT: 1.0, Method.STAGED: staged}[method]
        return {(store, count): value for store in (True, False) for count in COUNTS}

    table = calibrate("gpu", seconds, lambda: 0.0, first=KIB)
    assert table.choose(False, 8 * KIB, 64) is Method.STAGED
    assert table.choose(False, 16 * KIB, 64) is Method.DIRECT


def test_calibration_ends_with_its_budget_and_begins_with_what_is_needed() -> None:
    time = [0.0]
    asked: list[int] = []

    def slow(method: Method, fragment: int) -> Mapping[tuple[bool, int], float]:
        time[0] += 0.3
        asked.append(fragment)
        return times(method, fragment)

    table = calibrate("gpu", slow, lambda: time[0], first=40 * KIB, budget_s=2.0)
    assert time[0] < 2.0 + 0.3 + 1e-9
    assert asked[:3] == [32 * KIB] * 3
    assert {fragment for _, fragment, _ in table.best} == {32 * KIB, 64 * KIB}


def test_a_method_that_cannot_run_is_not_chosen() -> None:
    table = calibrate("gpu", lambda m, f: times(m, f) if m is Method.STAGED else {}, lambda: 0.0, first=KIB)
    assert set(table.best.values()) == {Method.STAGED}


def test_a_table_survives_its_file_and_only_for_its_device(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "calibration.json"
    table = calibrate("GPU one, driver 13000", times, lambda: 0.0, first=KIB)
    table.save(path)
    assert load_table(path, "GPU one, driver 13000") == table
    assert load_table(path, "GPU one, driver 13010") is None
    assert load_table(tmp_path / "absent.json", "GPU one, driver 13000") is None


def test_every_device_has_a_file_of_its_own(tmp_path: Path) -> None:
    names = ["NVIDIA H200, driver 13000", "NVIDIA H200, driver 13010", "../../etc/passwd"]
    paths = {table_path(tmp_path, name) for name in names}
    assert len(paths) == 3 and all(path.parent == tmp_path for path in paths)
    assert table_path(tmp_path, names[0]).name == "copy-nvidia-h200-driver-13000.json"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 1, "device": "g", "best": []}', '{"version": 3, "device": "g", "best": [[1]]}',
     '{"version": 3, "device": "g", "best": [[true, 512, 16, "warp"]]}', "\x00"],
)  # fmt: skip
def test_a_damaged_file_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    assert load_table(path, "g") is None
    path.write_text('{"version": 3, "device": "g", "best": [[true, 512, 16, "direct"]]}')
    assert load_table(path, "g") == Table("g", {(True, 512, 16): Method.DIRECT})


def test_the_configured_method_is_checked() -> None:
    assert parse("auto") is None and parse("staged") is Method.STAGED
    with pytest.raises(ConfigError, match="auto, dma, staged, direct"):
        parse("warp")


def test_a_table_is_whole_where_every_method_was_measured_for_every_wanted_cell() -> None:
    assert calibrate("gpu", times, lambda: 0.0, first=KIB).whole

    def unmeasured(missing: tuple[int, int]) -> Measure:
        def measure(method: Method, fragment: int) -> Mapping[tuple[bool, int], float]:
            cells = times(method, fragment).items()
            return {cell: s for cell, s in cells if method is not Method.STAGED or (fragment, cell[1]) != missing}

        return measure

    def small(fragment: int, count: int) -> bool:
        return fragment * count < 64 << 20

    assert calibrate("gpu", unmeasured((256 * KIB, 1024)), lambda: 0.0, first=KIB, wanted=small).whole
    assert not calibrate("gpu", unmeasured((8 * KIB, 64)), lambda: 0.0, first=KIB, wanted=small).whole
    time = iter(range(100))
    assert not calibrate("gpu", times, lambda: float(next(time)), first=KIB, budget_s=9.0).whole
