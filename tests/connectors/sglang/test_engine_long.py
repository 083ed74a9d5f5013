"""SGLang engines that end and start again over what an earlier one left, beside each other, with other settings, and
500 requests over each way in which a tier can be sick."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing import ChildFailed
from tests.connectors.sglang.support.answers import alike
from tests.connectors.sglang.support.served import forget_pages, served

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PROMPT_PAGES = 24
SEEDS = range(6)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("g3")


@pytest.fixture(scope="module")
def bucket(seaweedfs: Any) -> dict[str, Any]:
    """A G4 on an S3 server."""
    return {"url": f"{seaweedfs.new_bucket()}/kv", "options": seaweedfs.options}


def tiers(disk: Path, bucket: Path | dict[str, Any], ram: str = "16MiB", room: str = "256MiB") -> dict[str, Any]:
    where = {"url": f"file://{bucket}/kv"} if isinstance(bucket, Path) else bucket
    return {
        "g2": {"capacity": ram},
        "g3": {"path": str(disk), "capacity": room},
        "g4": {**where, "stride": 4},
    }


def assert_idle_and_right(engine: Any, restored_blocks: int, rank: int = 0) -> None:
    """Nothing is held any more, and at least so many blocks came back, each as it was computed, bit for bit."""
    assert set(engine.order("check", rank=rank).values()) == {0}
    seen = engine.order("witness", rank=rank)
    assert seen["other_blocks"] == 0 and seen["same_blocks"] >= restored_blocks, seen


@pytest.fixture(scope="module")
def expected(serve: Any, disk: Path, bucket: dict[str, Any], prompt: Any) -> dict[int, list[int]]:
    """Tokens of the engine's own prefix hits, by seed, as a first engine gave them, which stored their blocks. It was
    killed while it stored others."""
    engine, tokens = serve(tiers(disk, bucket)), dict[int, list[int]]()
    for seed in SEEDS:
        engine.host.generate(prompt(seed))
        (own,) = engine.host.generate(prompt(seed))
        assert own["host"] == 0 < own["cached"]
        tokens[seed] = own["tokens"]
    assert engine.order("flush") == 0
    more = [prompt(seed, 800) for seed in range(900, 930)]
    asking = threading.Thread(target=_try, args=(engine, more), daemon=True)
    asking.start()
    time.sleep(1.5)
    os.killpg(engine.host.process.pid, signal.SIGKILL)
    asking.join()
    return tokens


def _try(engine: Any, prompts: list[list[int]]) -> None:
    try:
        engine.host.ask(do="generate", prompts=prompts, new=1)
    except ChildFailed:  # the engine is killed meanwhile
        pass


def test_after_kill_9_the_next_engine_is_served_from_the_disk(
    serve: Any, disk: Path, bucket: dict[str, Any], prompt: Any, expected: dict[int, list[int]]
) -> None:
    engine = serve(tiers(disk, bucket))
    for seed in SEEDS:
        (restored,) = engine.host.generate(prompt(seed))
        assert restored["host"] == PROMPT_PAGES * 16, seed
        assert restored["tokens"] == expected[seed]
    assert engine.read("g3") == len(SEEDS) * PROMPT_PAGES * 16
    engine.host.generate(*[prompt(seed, 800) for seed in range(900, 930)], new=1)  # half of them were being written
    assert_idle_and_right(engine, len(SEEDS) * PROMPT_PAGES)


def test_an_engine_beside_it_is_served_from_the_bucket(
    serve: Any, bucket: dict[str, Any], prompt: Any, expected: dict[int, list[int]], tmp_path: Path
) -> None:
    engine = serve(tiers(tmp_path, bucket), beside=True)
    for seed in SEEDS:
        (restored,) = engine.host.generate(prompt(seed))
        assert restored["host"] == PROMPT_PAGES * 16, seed
        assert restored["tokens"] == expected[seed]
    assert engine.read("g4") == len(SEEDS) * PROMPT_PAGES * 16
    assert_idle_and_right(engine, len(SEEDS) * PROMPT_PAGES)
    (stranger,) = engine.host.generate(prompt(0), cache_salt="alice")
    engine.host.flush()
    (other,) = engine.host.generate(prompt(0), cache_salt="bob")
    assert stranger["cached"] == other["cached"] == 0


def test_new_weights_at_the_same_path_miss(
    serve: Any, prompt: Any, model: Path, other_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "g3").mkdir()
    below = {"g2": {"capacity": "16MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "64MiB"}}
    path, answers = tmp_path / "model", []
    for weights in (model, other_model, model):
        path.unlink(missing_ok=True)
        path.symlink_to(weights)
        engine = serve(below, path=path)
        answers += engine.host.generate(prompt(1))
        engine.order("flush")
    assert [answer["host"] for answer in answers] == [0, 0, PROMPT_PAGES * 16]
    assert answers[0]["tokens"] == answers[2]["tokens"] != answers[1]["tokens"]


# ── sick tiers ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sick(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine whose lower tiers can be sick, and the folders of these. Not shared: calls that hang never end, and
    keep their tier out of service."""
    folders = {name: tmp_path_factory.mktemp(f"sick-{name}") for name in ("g3", "g4")}
    engine = serve(tiers(folders["g3"], folders["g4"], "4MiB"), deadlines={"get": "300ms", "lookup": "100ms"})
    return engine, folders


def five_hundred(
    engine: Any, prompt: Any, prepare: Callable[[], None], each_turn: Callable[[int], None]
) -> tuple[int, float]:
    """500 requests of 40 prompts, four at a time; every answer is right, and every block that came back. Returns how
    many tokens came from below, and the slowest turn."""
    prompts = [prompt(seed, 120) for seed in range(2000, 2040)]
    if not engine.own:
        for tokens in prompts:
            engine.host.generate(tokens, new=4)
            engine.own += engine.host.generate(tokens, new=4)
    own = engine.own
    engine.host.flush()
    prepare()
    draw, served, slowest, ties = random.Random(1), 0, 0.0, 0
    for turn in range(125):
        each_turn(turn)
        chosen = [draw.randrange(len(prompts)) for _ in range(4)]
        answers = engine.host.generate(*[prompts[i] for i in chosen], new=4)
        for answer, i in zip(answers, chosen, strict=True):
            assert alike(answer, own[i]), f"turn {turn}: {answer} instead of {own[i]}"
            ties += answer["tokens"] != own[i]["tokens"]
        served += sum(answer["host"] for answer in answers)
        slowest = max(slowest, answers[0]["seconds"])
        engine.host.flush()
    assert ties <= 5
    engine.steer()
    held = engine.order("check")
    held.pop("quarantined")  # memory under a read that hangs for ever stays there
    assert set(held.values()) == {0}, held
    seen = engine.order("witness")
    assert seen == {"same_blocks": served // 16, "other_blocks": 0}
    return served, slowest


@pytest.mark.parametrize("kind", ["hang", "error", "corrupt"])
@pytest.mark.parametrize("tier", ["g3", "g4"])
def test_500_requests_over_a_sick_tier(sick: Any, prompt: Any, damage: Any, tier: str, kind: str) -> None:
    engine, folders = sick
    above = ["g2"] if tier == "g3" else ["g2", "g3"]

    def prepare() -> None:
        engine.order("flush")
        if kind != "corrupt":
            engine.steer(faults={tier: [[verb, kind, 0.5, None, 0.0] for verb in ("read", "write", "lookup")]})

    def each_turn(turn: int) -> None:
        for name in above:
            engine.order("evict", tier=name)
        if kind == "corrupt" and turn % 10 == 0:
            engine.order("flush")
            assert damage(folders[tier])

    before = engine.order("stats")
    _, slowest = five_hundred(engine, prompt, prepare, each_turn)
    after = engine.order("stats")
    assert slowest < 20
    struck = _misses(after, tier) - _misses(before, tier)
    if kind == "hang":
        struck += sum(after[tier]["unanswered"].values()) - sum(before[tier]["unanswered"].values())
    assert struck > 0, "the fault was never met"


def _misses(stats: dict[str, Any], tier: str) -> int:
    return sum(stats[tier]["misses"].get(reason, 0) for reason in ("corrupt", "mismatch", "error", "breaker", "late"))


@pytest.mark.parametrize("small", ["g2", "g3", "g4"])
def test_500_requests_over_a_full_tier(serve: Any, prompt: Any, tmp_path: Path, small: str) -> None:
    """G2 and G3 hold a fraction of what is asked for; a bucket has no bound of its own, so its writes are refused."""
    for name in ("g3", "g4"):
        (tmp_path / name).mkdir()
    ram, room = ("1MiB" if small == "g2" else "4MiB"), ("2MiB" if small == "g3" else "256MiB")
    engine = serve(tiers(tmp_path / "g3", tmp_path / "g4", ram, room), deadlines={"get": "1s", "lookup": "100ms"})
    if small == "g4":
        engine.steer(faults={"g4": [["write", "drop", 1.0, None, 0.0]]})

    def each_turn(turn: int) -> None:
        if small != "g2" and turn % 2:
            engine.order("evict", tier="g2")

    served, slowest = five_hundred(engine, prompt, lambda: None, each_turn)
    assert served > 0
    assert slowest < 20
    stats = engine.order("stats")
    for name in ("g2", "g3"):
        assert stats[name]["bytes"] <= stats[name]["capacity_bytes"]
    if small != "g4":
        assert stats[small]["evictions"] > 0


# ── other engines ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("core", "page"), [("python", 64), ("python", 16), ("rust", 1)])
def test_other_tree_cores_and_pages(
    serve: Any, prompt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, core: str, page: int
) -> None:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", core)
    for name in ("g3", "g4"):
        (tmp_path / name).mkdir()
    engine = serve(tiers(tmp_path / "g3", tmp_path / "g4"), arguments={"page_size": page})
    engine.host.generate(prompt(1))
    (own,) = engine.host.generate(prompt(1))
    engine.push_down("g2")
    (restored,) = engine.host.generate(prompt(1))
    assert restored["host"] == restored["cached"] == own["cached"] == 396 // page * page
    assert restored["tokens"] == own["tokens"]
    assert_idle_and_right(engine, 396 // page)


def test_two_ranks_decide_alike(serve: Any, prompt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a manager of its own; what one of them lacks, both compute."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    for name in ("g3", "g4"):
        (tmp_path / name).mkdir()
    engine = serve(tiers(tmp_path / "g3", tmp_path / "g4"), arguments={"tp_size": 2})
    assert [engine.order("namespace", rank=rank)["rank"] for rank in (0, 1)] == [0, 1]
    engine.host.generate(prompt(1))
    (own,) = engine.host.generate(prompt(1))
    for lacking in ((), (0,), (1,), (0, 1)):
        engine.host.flush()
        for rank in (0, 1):
            assert engine.order("flush", rank=rank) == 0
        for rank in lacking:
            engine.order("evict", rank=rank, tier="g2")
        (restored,) = engine.host.generate(prompt(1))
        assert restored["host"] == PROMPT_PAGES * 16, lacking
        assert restored["tokens"] == own["tokens"]
    engine.host.flush()
    engine.order("evict", rank=1, tier="g2")
    engine.order("steer", rank=1, faults={"g3": [["read", "error"]], "g4": [["read", "error"]]})
    (computed,) = engine.host.generate(prompt(1))
    assert computed["host"] == 0
    assert computed["tokens"] == own["tokens"]
    for refusing in (0, 1):
        engine.host.flush()
        engine.order("steer", rank=1)
        engine.order("steer", rank=refusing, refuse=True)
        (computed,) = engine.host.generate(prompt(1))
        assert computed["host"] == 0
        engine.order("steer", rank=refusing)
    engine.host.flush()
    (restored,) = engine.host.generate(prompt(1))
    assert restored["host"] == PROMPT_PAGES * 16
    for rank in (0, 1):
        assert_idle_and_right(engine, 5 * PROMPT_PAGES, rank)


def test_the_server_as_the_readme_starts_it(model: Path, prompt: Any, ports: Any, tmp_path: Path) -> None:
    (tmp_path / "g3").mkdir()
    config = tmp_path / "sglang.yaml"
    preset = (Path(__file__).parents[3] / "configs" / "sglang.yaml").read_text()
    preset = preset.replace("32GiB", "16MiB").replace("1TiB", "64MiB").replace("/nvme/kvtier", str(tmp_path / "g3"))
    config.write_text(preset)
    linker = {
        "linker": "KVTierLinker",
        "linker_module_path": "kvtier.connectors.sglang",
        "linker_extra_config": {"kvtier_config": str(config), "recompute": "never"},
    }
    with served(model, *ports(1), "--page-size", "64", linker=linker) as ask:
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        body = {
            "input_ids": prompt(1),
            "sampling_params": {**sampling, "custom_params": {"kvtier": {"retention": "1h"}}},
        }
        ask("/generate", body)
        own = json.loads(ask("/generate", body))
        forget_pages(ask)
        restored = json.loads(ask("/generate", body))
        assert restored["output_ids"] == own["output_ids"]
        assert restored["meta_info"]["cached_tokens_details"]["host"] == 384
        assert restored["meta_info"]["kvtier"] == [{"tokens_read": {"g2": 384}}]
        metrics = ask("/metrics")
        assert 'tier="g2"' in metrics and "sglang:kvtier_tokens_read_total" in metrics
        assert "sglang:kvtier_events_total" in metrics
        time.sleep(1.1)  # the tiers' figures are asked for once a second, by a batch
        ask("/generate", {**body, "input_ids": prompt(2)})
        metrics = ask("/metrics")
        for name, labels in (
            ("kvtier_tier_blocks", 'tier="g2"'),
            ("kvtier_tier_hit_blocks_total", 'tier="g2"'),
            ("kvtier_tier_call_seconds_count", 'tier="g3",.*verb="write"'),
        ):
            found = re.search(rf"^sglang:{name}\{{(.*{labels}.*)\}} (\S+)$", metrics, re.MULTILINE)
            assert found is not None and float(found[2]) > 0 and 'dp_rank="0"' in found[1], name
