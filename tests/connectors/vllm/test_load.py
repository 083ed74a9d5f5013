"""Many requests over tiers that are sick, or shared."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.prompts import IDLE, prompt, tiers

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

Start = Callable[..., Any]


def served_from_below(engine: Any, prompts: list[list[int]], right: list[list[int]]) -> float:
    """All prompts at once, with nothing of them above G3; the seconds that took."""
    engine.evict(tier="g2")
    assert engine.reset()
    out = engine.timed(prompts=prompts, tokens=4)
    assert out["tokens"] == right
    return float(out["seconds"])


@pytest.mark.parametrize("fault", ["error", "hang", "corrupt"])
@pytest.mark.parametrize("tier", ["g3", "g4"])
def test_five_hundred_requests_over_a_sick_tier(start: Start, tmp_path: Path, tier: str, fault: str) -> None:
    """All right, none late by more than what a wait for promotion may cost, engine alive."""
    (tmp_path / "g4").mkdir()
    below = {"g3": {"path": f"{tmp_path}/g3", "capacity": "1GiB"}, "g4": {"url": f"file://{tmp_path}/g4/kv"}}
    config = {"tiers": {"g2": {"capacity": "32MiB"}, tier: {**below[tier], **({"stride": 2} if tier == "g4" else {})}}}
    engine = start(config=config, arguments={"lookup_deadline": "200ms"})
    prompts = [prompt(seed, 140) for seed in range(1, 51)]
    cold = [engine.generate(prompts=[p], tokens=4)[0]["tokens"] for p in prompts]
    engine.flush()
    if fault == "corrupt":
        assert engine.corrupt(folder=f"{tmp_path}/{tier}") > 0
    else:
        engine.sicken(tier=tier, how=fault)
    engine.record_waits()
    slowest = 0.0
    for _ in range(10):
        slowest = max(slowest, served_from_below(engine, prompts, cold))
    misses = engine.stats()["requests"]["misses"]
    reported = {"error": ("error", "breaker"), "hang": ("late", "breaker"), "corrupt": ("corrupt",)}[fault]
    struck = sum(misses.get(reason, 0) for reason in reported)
    assert struck > 0, "the fault was never met"
    assert slowest < 30
    waits = engine.waits()
    assert max(waits, default=0.0) < 0.2 + 1.0, "each asked again for the deadline at most, and then for a step"
    assert fault != "hang" or waits, "the control: some had to wait"
    if fault != "hang":
        assert engine.check()["forgotten"] == 0
    assert engine.stop() == 0


@pytest.mark.parametrize("blow", ["killed", "frozen"])
def test_five_hundred_requests_while_the_process_of_g3_is(start: Start, tmp_path: Path, blow: str) -> None:
    """It dies, or stands still for most of the time, again and again; then it is left alone, and all is found again."""
    config = {"tiers": {"g2": {"capacity": "32MiB"}, "g3": {"path": f"{tmp_path}/g3", "capacity": "1GiB"}}}
    engine = start(config=config, arguments={"lookup_deadline": "200ms"})
    prompts = [prompt(seed, 140) for seed in range(1, 51)]
    cold = [engine.generate(prompts=[p], tokens=4)[0]["tokens"] for p in prompts]
    engine.flush()
    if blow == "killed":
        engine.strike_process(number=signal.SIGKILL, every=0.3)
    else:
        engine.strike_process(number=signal.SIGSTOP, every=0.2, seconds=0.5)
    slowest = 0.0
    for turn in range(100):
        slowest = max(slowest, served_from_below(engine, prompts, cold))
        if turn >= 9 and engine.struck() >= 12:
            break
    engine.spare_process()
    assert engine.struck() >= 12 and slowest < 30
    misses = engine.stats()["requests"]["misses"]
    assert sum(misses.get(reason, 0) for reason in ("error", "late", "breaker")) > 0, "it was never missed"
    for _ in range(60):
        engine.sleep(seconds=1.0)
        engine.evict(tier="g2")
        assert engine.reset()
        warm = [engine.generate(prompts=[p], tokens=4)[0] for p in prompts]
        assert [out["tokens"] for out in warm] == cold
        if all(out["read"] == {"g3": 128} for out in warm):
            break
    else:
        raise AssertionError("G3 is not found again")
    state = engine.check()
    assert state["loading"] == state["pinned"] == state["blocks_used"] == state["forgotten"] == 0
    assert engine.stop() == 0


def test_five_hundred_requests_over_copies_that_fail_and_copies_that_are_late(start: Start, tmp_path: Path) -> None:
    """G2 as the engine sees it: every third load has a bad block, every fifth is answered only three steps later."""
    engine = start(config=tiers(tmp_path))
    prompts = [prompt(seed, 140) for seed in range(1, 51)]
    cold = [engine.generate(prompts=[p], tokens=4)[0]["tokens"] for p in prompts]
    engine.settle()
    engine.break_loads(how="now and then")
    for turn in range(10):
        assert engine.reset()
        out = engine.timed(prompts=prompts, tokens=4)
        assert out["tokens"] == cold, f"turn {turn}"
        assert out["seconds"] < 30
    engine.mend()
    engine.settle()
    assert engine.counters()["load_failures"] > 50
    state = engine.check()
    assert state["loading"] == state["pinned"] == state["blocks_used"] == state["forgotten"] == 0
    assert engine.stop() == 0


def test_two_engines_share_one_directory(start: Start, tmp_path: Path) -> None:
    one, two = start(config=tiers(tmp_path)), start(config=tiers(tmp_path))
    cold = one.generate(prompts=[prompt(1)])[0]
    one.flush()
    warm = two.generate(prompts=[prompt(1)])[0]
    assert warm["read"] == {"g3": 288} and warm["tokens"] == cold["tokens"]
    prompts = [prompt(seed, 400) for seed in range(2, 14)]
    with ThreadPoolExecutor(2) as pool:
        for turn in range(4):
            order = prompts if turn % 2 else prompts[::-1]
            answers = pool.map(lambda engine, asked: engine.generate(prompts=asked), (one, two), (prompts, order))
            mine, theirs = ({tuple(p): out["tokens"] for p, out in zip(asked, outs, strict=True)}
                            for asked, outs in zip((prompts, order), answers, strict=True))  # fmt: skip
            assert mine == theirs
            for engine in (one, two):
                engine.flush()
                engine.evict(tier="g2")
                assert engine.reset()
    assert sum(engine.stats()["g3"]["hits"] for engine in (one, two)) > 100
    assert one.stop() == 0 and two.stop() == 0


FAULTS: dict[str, Callable[[Any, random.Random], None]] = {
    "fail": lambda engine, chance: engine.break_loads(how="fail", positions=chance.sample(range(15), 2)),
    "hold": lambda engine, chance: engine.hold_copies(),
    "late": lambda engine, chance: engine.hold_stores(),
    "healthy": lambda engine, chance: None,
}


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_nothing_wrong_is_kept_of_a_long_disorder(start: Start, tmp_path: Path, mode: str) -> None:
    """Requests over shared prefixes come and are aborted while loads fail, copies hang, blocks go bad under running
    requests, caches are reset and evicted. What the tiers hold in the end is right, block by block."""
    engine = start(config={**tiers(tmp_path), "offload": {"mode": mode}})
    chance = random.Random(mode)
    asked = [prompt(300 + i // 3, 330) + prompt(330 + i, 170) for i in range(12)]
    right = [engine.generate(prompts=[p], control={"load": False, "store": False})[0]["tokens"] for p in asked]
    assert engine.reset()
    running: list[str] = []
    for turn in range(400):
        act = chance.choice(["add", "add", "add", "fill", "steps", "steps", "abort", "bad", "clear", "evict", *FAULTS])
        if act == "add" and len(running) < 8:
            engine.add(name=f"r{turn}", prompt=chance.choice(asked), tokens=chance.choice([2, 24, 60]))
        elif act == "fill":
            engine.add(name=f"r{turn}", prompt=prompt(400 + turn, 1200), tokens=2)
        elif act == "steps":
            engine.steps(count=chance.randrange(1, 12))
        elif act == "abort" and running:
            engine.abort(name=chance.choice(running))
        elif act == "bad" and running:
            engine.spoil_if_placed(name=chance.choice(running), positions=chance.sample(range(15), 2))
        elif act == "clear":  # takes place where nothing runs
            if chance.random() < 0.5:
                engine.mend()
                engine.run_out()
            engine.reset()
        elif act == "evict":
            engine.evict(tier="g2")
        elif act in FAULTS:
            engine.mend()
            FAULTS[act](engine, chance)
        running = engine.unfinished()
    engine.mend()
    engine.run_out()
    engine.settle()
    assert engine.check() == IDLE
    found = []
    for tier in ("g2", "g3"):
        assert engine.reset()
        found.append(engine.generate(prompts=asked))
        assert [out["tokens"] for out in found[-1]] == right, tier
        engine.flush()
        engine.evict(tier="g2")
    counters = engine.counters()
    assert counters["load_failures"] > 0 and counters["spill_lost"] > 0 and counters["tokens_read_g2"] > 0, counters
    assert all(sum(out["read"].values()) > 0 for out in found[1])
    assert engine.check() == IDLE
    assert engine.stop() == 0
