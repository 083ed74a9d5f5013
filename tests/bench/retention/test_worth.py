"""Figures of the report and the planner, against the simulator and by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvtier.bench.retention.capacity import Rates, plan_capacity
from kvtier.bench.retention.charts import LABELS_MAX, line, nice, ranges, stacked
from kvtier.bench.retention.curves import CapacityCurve, Reuse
from kvtier.bench.retention.plots import draw_policies
from kvtier.bench.retention.report import render, write_report
from kvtier.bench.retention.shapes import SHAPES, CacheShape, shape_of
from kvtier.bench.retention.simulate import TierLevel, simulate_stack
from kvtier.bench.retention.trace import Trace
from kvtier.bench.retention.worth import Assumptions, PricedTier, appraise
from kvtier.cli import main
from kvtier.errors import InvalidRequest

GIVEN = Assumptions(CacheShape("toy", 100, 1000.0))
BLOCK = 16 * 100


def stores(*blocks: int) -> list[PricedTier]:
    return [PricedTier(f"g{n}", count * BLOCK, 10.0, 0.1) for n, count in enumerate(blocks, 1)]


def test_shapes_are_the_published_ones() -> None:
    assert {name: shape.bytes_per_token for name, shape in SHAPES.items()} == {
        "llama-3.1-8b": 131_072, "llama-3.1-70b": 327_680, "deepseek-v3": 70_272,
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match=r"known: llama-3\.1-8b"):
        shape_of("gpt")


def test_the_split_and_the_writes_are_the_simulators(made: Callable[..., Trace]) -> None:
    trace = made(1)
    worth = appraise(trace, Reuse(trace), stores(100, 200, 400), GIVEN)
    split = simulate_stack(trace, "lru", [TierLevel("g1", 100), TierLevel("g2", 200), TierLevel("g3", 400)])
    assert worth.percent == pytest.approx(dict(split.hit_percent))
    assert worth.ssd["written_gb"] == pytest.approx(split.written["g3"] * BLOCK / 1e9)
    for hour in worth.hours:
        assert 0 <= sum(hour[name] for name in ("g1", "g2", "g3")) <= 100 + 1e-9
    total = sum(hour["references"] for hour in worth.hours)
    assert total == trace.references


def test_break_even_is_bytes_per_token_times_prefill_rate(made: Callable[..., Trace]) -> None:
    trace = made(1, requests=60)
    worth = appraise(trace, Reuse(trace), stores(10), Assumptions(shape_of("llama-3.1-8b")))
    assert worth.break_even["g1"]["needed_gb_s"] == pytest.approx(1.31072)
    assert not worth.ssd  # no G3 in this stack


def test_a_larger_stack_never_waits_longer(made: Callable[..., Trace]) -> None:
    trace = made(2)
    worth = appraise(trace, Reuse(trace), stores(50, 300, trace.unique), GIVEN)
    assert sum(gap["requests"] for gap in worth.gaps.values()) <= len(trace.requests)
    for gap in worth.gaps.values():
        assert all(gap[f"ttft_p{n}_s"] <= gap[f"without_p{n}_s"] for n in (10, 50, 90))
    assert worth.cost["gpu_with"] <= worth.cost["gpu_without"]


def test_the_page_stands_alone_and_shows_names_as_text(made: Callable[..., Trace], tmp_path: Path) -> None:
    trace = replace(made(3), name="<script>alert(1)</script>")
    worth = appraise(trace, Reuse(trace), stores(50, 300, 900), GIVEN)
    page = render(worth, {"command": "kvtier bench retention", "commit": "abc", "date": "2026-01-01"})
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)", page)
    assert "prefers-color-scheme: dark" in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)  # well-formed
    assert page.count("<svg") == 3
    written = write_report(tmp_path / "r.html", worth, {})
    assert all(path.stat().st_size > 1000 for path in written) and len(written) == 4
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written[1:])


def test_charts_cope_with_little() -> None:
    for svg in (
        line([(60.0, 5.0), (600.0, 3.0)], {60.0: "1m"}, "a"),
        line([(60.0, 0.0), (60.0, 0.0)], {}, "flat"),
        stacked([("0", {"g1": 0.0, "left": 100.0})], "b"),
        stacked([], "none"),
        stacked([(f"{hour}.5", {"g1": 50.0, "left": 50.0}) for hour in range(24)], "a day"),
        ranges([("x", (0.5, 0.5, 0.5), (0.5, 1.0, 2.0))], "c"),
    ):
        ElementTree.fromstring(svg)
    assert [nice(x) for x in (0, 0.3, 1, 3.9, 20.4, 96)] == [1.0, 0.32, 1, 4, 24, 100]


def test_the_planner_agrees_with_the_curve(made: Callable[..., Trace]) -> None:
    trace = made(4)
    plan = plan_capacity(trace, GIVEN, ttl=float("inf"))
    percents = [point.hit_percent for point in plan.curve]
    assert percents == sorted(percents)
    assert plan.curve[-1].hit_percent == pytest.approx(CapacityCurve(trace).percent(trace.unique), abs=1e-3)
    assert plan.reachable_percent == plan.curve[-1].hit_percent
    sizes = list(plan.targets.values())
    assert sizes == sorted(sizes) and plan.sizes_gb["g2"] <= plan.sizes_gb["g3"]
    shorter = plan_capacity(trace, GIVEN, ttl=30.0)
    assert shorter.reachable_percent < plan.reachable_percent


def test_a_budget_bounds_the_ssd(made: Callable[..., Trace]) -> None:
    trace = made(5)
    given = Assumptions(CacheShape("large", 10_000_000, 1000.0))
    free, bound = (plan_capacity(trace, given, float("inf"), budget) for budget in (None, 5.0))
    assert bound.cost["g3"] <= 5.0 < free.cost["g3"]
    with pytest.raises(InvalidRequest, match="buys not one block"):
        plan_capacity(trace, given, float("inf"), budget=0.001)


def test_rates_make_a_trace() -> None:
    trace = Rates(sessions_per_hour=20, turns=4, hours=2.0).trace()
    assert trace == Rates(sessions_per_hour=20, turns=4, hours=2.0).trace()
    assert len(trace.requests) == 40 * 4
    assert {r.blocks[0] for r in trace.requests} == {0}  # what all sessions share
    for wrong in ({"sessions_per_hour": 0}, {"sessions_per_hour": float("nan")}, {"turns": -1}, {"pause_s": 0.0}):
        with pytest.raises(InvalidRequest, match="must be positive"):
            Rates(**({"sessions_per_hour": 5.0} | wrong)).trace()  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="too long to be tried"):
        Rates(sessions_per_hour=5, turns=10_000).trace()


def test_many_sessions_are_planned_from_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates(sessions_per_hour=400, turns=5, hours=4.0)
    whole = plan_capacity(rates.trace(), GIVEN, float("inf"), scale=rates.scale)
    monkeypatch.setattr("kvtier.bench.retention.capacity.REFERENCES_MAX", 8000)
    trace = rates.trace()
    assert rates.scale > 5 and trace.references < 10_000
    part = plan_capacity(trace, GIVEN, float("inf"), scale=rates.scale)
    assert part.hit_percent == pytest.approx(whole.hit_percent, abs=2)
    assert part.footprint_gb == pytest.approx(whole.footprint_gb, rel=0.1)
    assert part.cost["gpu_nothing_kept"] == pytest.approx(whole.cost["gpu_nothing_kept"], rel=0.1)


def test_the_plan_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["plan", "--sessions-per-hour", "5", "--turns", "3", "--json"])
    assert not done.value.code
    made = json.loads(capsys.readouterr().out)
    assert made["sizes_gb"]["g3"] > 0 and made["curve"] and made["seconds"] < 60
    with pytest.raises(SystemExit) as done:
        main(["plan"])
    assert done.value.code == 2
    assert "--trace FILE or --sessions-per-hour" in capsys.readouterr().err


def test_prices_move_the_advice(made: Callable[..., Trace]) -> None:
    trace = made(4)
    given = Assumptions(CacheShape("large", 10_000_000, 1000.0))
    cheap, dear = (plan_capacity(trace, replace(given, ssd_price=p), float("inf")) for p in (0.01, 1000.0))
    assert cheap.sizes_gb["g3"] > dear.sizes_gb["g3"] and cheap.hit_percent > dear.hit_percent
    slow, fast = (plan_capacity(trace, replace(given, ssd_read_gb_s=s), float("inf")) for s in (0.001, 1000.0))
    assert slow.sizes_gb["g2"] > fast.sizes_gb["g2"]


@pytest.mark.parametrize(
    ("fields", "per_token"),
    [
        ({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, 131072),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "torch_dtype": "float32"}, 1024),
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}, 70272),
        ({"text_config": {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "hidden_size": 99}}, 64),
    ],
)
def test_a_checkpoint_says_its_bytes_per_token(tmp_path: Path, fields: dict[str, Any], per_token: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for name in (tmp_path, tmp_path / "config.json"):
        assert shape_of(str(name)).bytes_per_token == per_token


GEMMA_270M = {
    "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
}  # fmt: skip
GEMMA_27B = {
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
    "sliding_window": 1024, "sliding_window_pattern": 6,
}  # fmt: skip
GPT_OSS_20B = {
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
QWEN3_NEXT_80B = {
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "per_token", "boundary"),
    [
        ({**GEMMA_270M, "_sliding_window_pattern": 6}, 3 * 1024, 15 * 1024 * 512),
        (
            {**GEMMA_270M, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3},
            3 * 1024,
            15 * 512 * 1024,
        ),
        (GEMMA_27B, 10 * 8192, 60 * 8192 * 1024),  # 52 layers in groups of 10
        (GPT_OSS_20B, 12 * 2048, 12 * 2048 * 128),
        (QWEN3_NEXT_80B, 12 * 2048, 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 2)),
        ({**QWEN3_NEXT_80B, "mamba_ssm_dtype": "float32"}, 12 * 2048, 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)),
        ({**GEMMA_270M, "layer_types": ["sliding_attention"] * 18}, 18 * 1024, 0),  # one group, as any
        ({**GPT_OSS_20B, "sliding_window": None}, 24 * 2048, 0),
    ],
)
def test_a_checkpoint_of_several_groups_says_its_bytes_per_boundary(
    tmp_path: Path, fields: dict[str, Any], per_token: int, boundary: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shape = shape_of(str(tmp_path))
    assert (shape.bytes_per_token, shape.boundary_bytes) == (per_token, boundary)
    assert shape.with_boundaries(1024).bytes_per_token == per_token + boundary / 1024


def test_a_plan_counts_the_boundaries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_27B))
    asked = ["plan", "--sessions-per-hour", "5", "--turns", "3", "--model", str(tmp_path)]
    with pytest.raises(SystemExit):
        main([*asked, "--json"])
    made = json.loads(capsys.readouterr().out)
    assert made["shape"]["boundary_bytes"] == 60 * 8192 * 1024
    assert made["bytes_per_token_with_boundaries"] > 2 * made["shape"]["bytes_per_token"]
    with pytest.raises(SystemExit):
        main(asked)
    assert "503,316,480 bytes per boundary" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*asked, "--bytes-per-token", "1000", "--json"])
    assert json.loads(capsys.readouterr().out)["bytes_per_token_with_boundaries"] == 1000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"num_hidden_layers": 3}',
        '{"num_hidden_layers": "many"}',
        '{"num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 8, "layer_types": ["full_attention"]}',
    ],
)
def test_a_checkpoint_that_says_nothing_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidRequest, match="bytes per token"):
        shape_of(str(tmp_path))


@pytest.mark.parametrize("columns", [1, 12, 13, 24, 100])
def test_labels_below_an_axis_do_not_touch(columns: int) -> None:
    drawn = stacked([(f"{hour}.5", {"left": 100.0}) for hour in range(columns)], "hours")
    assert min(columns, LABELS_MAX // 2) <= len(re.findall(r">\d+\.5</text>", drawn)) <= LABELS_MAX


def test_policies_are_drawn_over_capacities(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ("lru", "gapduel", "arc", "s3fifo", "lru + 60 s·log2 f", "lru + 300 s·log2 f", "ceiling")
    rows = {str(size): dict.fromkeys(names, float(size)) for size in (1, 5, 10, 50)}
    few = {size: rows[size] for size in ("1", "5")}
    found = {name: {"percent_of_footprint": rows} for name in ("one", "two", "three")}
    draw_policies({**found, "too few": {"percent_of_footprint": few}}, tmp_path / "new" / "policies.svg")
    drawn = (tmp_path / "new" / "policies.svg").read_text()
    assert len(set(re.findall(r'id="axes_\d+"', drawn))) == 3, "a panel for each trace with enough sizes"


def test_a_model_without_kv_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 0, "num_attention_heads": 2, "hidden_size": 8, "dtype": "float16"}'
    )
    with pytest.raises(InvalidRequest, match="describes 0 bytes of KV per token"):
        shape_of(str(file))
