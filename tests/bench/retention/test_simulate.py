"""The simulator drives the real manager; its figures equal independent replays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.bench.policies import COMPARED
from kvtier.bench.retention.curves import CapacityCurve, TtlCurve, ceiling_hits
from kvtier.bench.retention.simulate import Admit, TierLevel, capacity_of, simulate, simulate_stack
from kvtier.bench.retention.trace import Trace
from kvtier.cli import main
from kvtier.retention.terms import Terms

MOONCAKE_LRU = {0.01: 5.246, 0.05: 19.577, 0.10: 27.891, 0.25: 35.348}
CLAUDE_LRU = {0.01: 78.828, 0.05: 95.938}
CLAUDE_TTL = {300: 8.151, 600: 6.277, 3600: 3.898, 86400: 3.532}
# GapDuel's reference implementation, and the best of five fixed policies, as published with the policy.
MOONCAKE_DUEL = {0.001: 5.64, 0.01: 10.96, 0.05: 21.80, 0.10: 29.27}


@pytest.mark.parametrize("fraction", [0.01])
def test_lru_on_the_mooncake_trace_is_exact(mooncake: Trace, fraction: float) -> None:
    assert round(simulate(mooncake, "lru", capacity_of(mooncake, fraction)).hit_percent, 3) == MOONCAKE_LRU[fraction]


def test_the_curve_is_exact_on_real_traces(mooncake: Trace, claude: Trace) -> None:
    for trace, figures in ((mooncake, MOONCAKE_LRU), (claude, CLAUDE_LRU)):
        curve = CapacityCurve(trace)
        assert {f: round(curve.percent(capacity_of(trace, f)), 3) for f in figures} == figures
    ttls = TtlCurve(claude)
    assert {s: round(ttls.prefill_left_percent(s), 3) for s in CLAUDE_TTL} == CLAUDE_TTL


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fraction", [0.05, 0.10, 0.25])
def test_lru_on_the_mooncake_trace_is_exact_at_more_sizes(mooncake: Trace, fraction: float) -> None:
    assert round(simulate(mooncake, "lru", capacity_of(mooncake, fraction)).hit_percent, 3) == MOONCAKE_LRU[fraction]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fraction", sorted(CLAUDE_LRU))
def test_lru_on_the_agent_trace_is_exact(claude: Trace, fraction: float) -> None:
    outcome = simulate(claude, "lru", capacity_of(claude, fraction))
    assert round(outcome.hit_percent, 3) == CLAUDE_LRU[fraction]
    assert outcome.cpu_seconds < 180


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ttl", sorted(CLAUDE_TTL))
def test_a_sliding_ttl_leaves_this_much_prefill(claude: Trace, ttl: float) -> None:
    outcome = simulate(claude, "lru", claude.unique, Terms("ttl", ttl=ttl))
    assert round(100 - outcome.hit_percent, 3) == CLAUDE_TTL[ttl]


@pytest.mark.parametrize("fraction", [pytest.param(0.001, marks=pytest.mark.long), 0.01])
def test_gapduel_does_what_its_reference_does(mooncake: Trace, fraction: float) -> None:
    outcome = simulate(mooncake, "gapduel", capacity_of(mooncake, fraction))
    assert outcome.hit_percent == pytest.approx(MOONCAKE_DUEL[fraction], abs=0.05)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_pass_gives_what_replays_give(made: Callable[..., Trace], seed: int) -> None:
    trace = made(seed)
    curve, ttls = CapacityCurve(trace), TtlCurve(trace)
    for capacity in (1, 7, 60, 200, trace.unique):
        outcome = simulate(trace, "lru", capacity)
        assert sum(outcome.hits) == curve.hits(capacity) <= ceiling_hits(trace, capacity)
    for ttl in (1.0, 30.0, 300.0):
        outcome = simulate(trace, "lru", trace.unique, Terms("ttl", ttl=ttl))
        assert 100 - outcome.hit_percent == pytest.approx(ttls.prefill_left_percent(ttl))


@pytest.mark.parametrize("name", sorted(COMPARED))
def test_no_policy_beats_the_ceiling(made: Callable[..., Trace], name: str) -> None:
    trace = made(4)
    for capacity in (20, 150):
        assert 0 < sum(simulate(trace, name, capacity).hits) <= ceiling_hits(trace, capacity)


def test_a_replay_is_deterministic(made: Callable[..., Trace]) -> None:
    trace = made(5)
    first, second = (simulate(trace, "gapduel", 90) for _ in range(2))
    assert first.hits == second.hits and first.policy == second.policy


@pytest.mark.parametrize(
    "sizes",
    [
        {"g1": 60, "g2": 200, "g3": 400},
        {"g1": 30, "g2": 90, "g3": 300},  # g1 is shorter than a chain
        {"g2": 90, "g3": 300},
        {"g2": 200, "g4": 700},
        {"g1": 150},
    ],
    ids=lambda sizes: "-".join(sizes),
)
@pytest.mark.parametrize("seed", [6, pytest.param(7, marks=pytest.mark.long)])
def test_the_manager_over_a_stack_serves_what_an_exact_replay_does(
    made: Callable[..., Trace], seed: int, sizes: dict[str, int]
) -> None:
    """Under LRU a smaller tier holds a subset, so the split is the difference between capacities (`CapacityCurve`)."""
    trace = made(seed)
    curve = CapacityCurve(trace)
    split = simulate_stack(trace, "lru", [TierLevel(name, blocks) for name, blocks in sizes.items()])
    below = 0.0
    for name, blocks in sizes.items():
        assert split.hit_percent[name] == pytest.approx(curve.percent(blocks) - below)
        below = curve.percent(blocks)
    if "g3" in sizes:
        assert split.written["g3"] == trace.references - curve.hits(sizes["g3"])
    assert simulate_stack(trace, "lru", [TierLevel(n, b) for n, b in sizes.items()]).hit_percent == split.hit_percent


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_manager_over_a_stack_on_the_mooncake_trace(mooncake: Trace) -> None:
    """60 GB, 256 GB and 4 TB for an 8B model: published as 4.4, 3.9 and 27.6 %, with 12.4 TB written below G2."""
    block_bytes = 512 * 131_072
    sizes = {"g1": 60e9, "g2": 256e9, "g3": 4e12}
    split = simulate_stack(mooncake, "lru", [TierLevel(name, int(size / block_bytes)) for name, size in sizes.items()])
    assert {name: round(share, 3) for name, share in split.hit_percent.items()} == {
        "g1": 4.385, "g2": 3.877, "g3": 27.631,
    }  # fmt: skip
    assert round(split.written["g3"] * block_bytes / 1e12, 1) == 12.4


def test_a_stack_of_four_serves_what_its_deepest_tier_would(made: Callable[..., Trace]) -> None:
    """What comes from g4 goes into g3 too, a little later than an exact replay has it there: the sum is the same."""
    trace = made(6)
    curve = CapacityCurve(trace)
    split = simulate_stack(
        trace, "lru", [TierLevel("g1", 60), TierLevel("g2", 200), TierLevel("g3", 400), TierLevel("g4", 700)]
    )
    assert split.total_percent == pytest.approx(curve.percent(700))
    assert split.hit_percent["g2"] == pytest.approx(curve.percent(200) - curve.percent(60))
    assert split.hit_percent["g3"] == pytest.approx(curve.percent(400) - curve.percent(200), abs=2.0)
    assert split.written["g4"] == trace.references - curve.hits(700)


def test_writing_less_below_g2_costs_hits(made: Callable[..., Trace]) -> None:
    trace = made(6)
    levels = [TierLevel("g1", 60), TierLevel("g2", 200), TierLevel("g3", 900)]
    everything, twice, long = (
        simulate_stack(trace, "lru", levels, admit=admit)
        for admit in (Admit(), Admit(threshold=2), Admit(min_prefix=320))
    )
    for less in (twice, long):
        assert 0 < less.written["g3"] < everything.written["g3"]
        assert less.hit_percent["g3"] < everything.hit_percent["g3"]
        assert less.hit_percent["g2"] == pytest.approx(everything.hit_percent["g2"], abs=1)


def test_a_stack_keeps_to_a_ttl(made: Callable[..., Trace]) -> None:
    trace = made(7)
    whole = trace.unique
    for ttl in (30.0, 300.0):
        for names in (("g1", "g2", "g3"), ("g2", "g3", "g4")):
            split = simulate_stack(trace, "lru", [TierLevel(name, whole) for name in names], Terms("ttl", ttl=ttl))
            assert 100 - split.total_percent == pytest.approx(TtlCurve(trace).prefill_left_percent(ttl))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    with pytest.raises(SystemExit) as done:
        main(["bench", "retention", "simulate", *words, "--json"])
    assert not done.value.code
    return dict(json.loads(capsys.readouterr().out))


def test_the_command_prints_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    entry = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text("".join(json.dumps(entry | {"timestamp": at}) + "\n" for at in (0, 1000, 400_000)))
    base = ("--trace", str(trace))
    found = run(capsys, *base, "--policy", "lru", "--capacity-fraction", "1.0")
    assert found["hit_percent"] == pytest.approx(100 * 4 / 6)
    assert run(capsys, *base, "--policy", "lru", "--capacity-fraction", "0.5")["hit_percent"] == pytest.approx(
        100 * 2 / 6
    )
    assert run(capsys, *base, "--ttl", "300")["prefill_left_percent"] == pytest.approx(100 * 4 / 6)
    assert run(capsys, *base, "--ttl", "10m")["prefill_left_percent"] == pytest.approx(100 * 2 / 6)
    stack = run(capsys, *base, "--policy", "lru", "--tiers", "64MiB,1GiB")
    assert stack["hit_percent"] == pytest.approx(100 * 4 / 6)
    assert stack["admission"] is None
    found = run(capsys, *base, "--policy", "lru", "--tiers", "64MiB,128MiB,1GiB", "--admission")["admission"]
    assert list(found) == ["all", "wanted by 2 requests", "wanted by 3 requests", "prompts of 1,024 tokens or more",
                           "prompts of 4,096 tokens or more"]  # type: ignore[call-overload]  # fmt: skip
    written = {admit: row["written_below_g2_gb"] for admit, row in found.items()}  # type: ignore[attr-defined]
    assert written["all"] == written["wanted by 3 requests"] > written["prompts of 4,096 tokens or more"] == 0
    assert stack["tiers"]["g1"]["hit_percent"] + stack["tiers"]["g2"]["hit_percent"] == pytest.approx(66.666, abs=0.01)  # type: ignore[index]


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "hash_ids": [1]}\n')
    with pytest.raises(SystemExit) as done:
        main(["bench", "retention", "simulate", "--trace", str(bad), "--ttl", "60"])
    assert done.value.code == 2
    assert "bad.jsonl:1: input_length" in capsys.readouterr().err
