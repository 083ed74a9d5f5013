"""SGLang engines over models with windows that end and start again, with other tree cores, pages and pools, and 500
requests over a tier that fails, answers late, or has damaged blocks."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing import ChildFailed
from tests.connectors.sglang.support.answers import alike
from tests.connectors.sglang.support.boundaries import AWAY, PARTS, agree, conversation, moved, right_of
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PATIENT = {"get": "3s", "lookup": "1s"}


def tiers(folder: Path, ram: str = "32MiB") -> dict[str, Any]:
    return {"g2": {"capacity": ram}, "g3": {"path": str(folder), "capacity": "256MiB"}}


def assert_idle(engine: Any, *, hung: bool = False) -> None:
    """Nothing is held any more, and every block that came back was the one that had been computed. `hung`: memory under
    a read that never ends stays there."""
    engine.steer()
    engine.host.flush()
    held = engine.order("check")
    assert held.pop("quarantined") == 0 or hung
    assert set(held.values()) == {0}, held


def test_windows_that_sglang_keeps_whole_in_one_pool_come_back(
    serve: Any, gemma3: Path, prompt: Any, tmp_path: Path
) -> None:
    """Gemma 2 and 3: one pool for all layers, whose pages are blocks like those of any model."""
    engine = serve(tiers(tmp_path), path=gemma3, deadlines=PATIENT)
    assert engine.order("namespace")["group"] == "full"
    engine.host.generate(prompt(1))
    (own,) = engine.host.generate(prompt(1))
    for tier in ("g2", "g3"):
        engine.push_down(*(["g2"] if tier == "g3" else []))
        (restored,) = engine.host.generate(prompt(1))
        assert restored["host"] == restored["cached"] == own["cached"] == 384
        assert (restored["tokens"], restored["logprobs"]) == (own["tokens"], own["logprobs"])
        assert restored["answer"][0]["tokens_read"] == {tier: 384}
    (branch,) = engine.host.generate([*prompt(1, 200), *prompt(2, 90)])
    assert branch["cached"] == 192, "a prompt goes on behind any page"
    assert engine.order("witness") == {"same_blocks": 48, "other_blocks": 0}
    engine.push_down()
    engine.steer(scramble=True)
    (wrong,) = engine.host.generate(prompt(1))
    assert wrong["host"] == 384 and not alike(wrong, own)
    assert engine.order("witness")["other_blocks"] == 24


# ── restarts ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_kill_9_the_next_engine_resumes_at_the_boundaries_on_disk(
    serve: Any, windowed_model: Path, prompt: Any, tmp_path: Path
) -> None:
    engine = serve(tiers(tmp_path), path=windowed_model, deadlines=PATIENT)
    chats = [conversation(engine, prompt, seed, 3) for seed in range(40, 44)]
    asked = [chat[-1] for chat in chats]
    engine.push_down()
    tops = [engine.order("boundaries", tokens=one)[-1] * 16 for one in asked]
    right = [right_of(engine, one, top) for one, top in zip(asked, tops, strict=True)]
    assert engine.order("flush") == 0
    more = [prompt(seed, 400) for seed in range(900, 906)]
    asking = threading.Thread(target=_try, args=(engine, more), daemon=True)
    asking.start()
    os.killpg(engine.host.process.pid, signal.SIGKILL)  # wherever it is
    asking.join()

    engine = serve(tiers(tmp_path), path=windowed_model, deadlines=PATIENT)
    for one, top, own in zip(asked, tops, right, strict=True):
        (restored,) = engine.host.generate(one)
        assert restored["host"] == top and restored["answer"][0]["tokens_read"] == {"g3": top}
        assert agree(restored, own)
    assert engine.order("witness") == {"same_blocks": sum(moved(0, top) for top in tops), "other_blocks": 0}
    for one in more:
        (given,) = engine.host.generate(one)
        assert alike(given, right_of(engine, one, 0))
    assert_idle(engine)


def _try(engine: Any, prompts: list[list[int]]) -> None:
    try:
        engine.host.ask(do="generate", prompts=prompts, new=1)
    except ChildFailed:  # the engine is killed meanwhile
        pass


# ── other engines ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("core", "page"), [("rust", 1), ("rust", 64), ("python", 1), ("python", 16), ("python", 64)])
def test_windows_over_other_tree_cores_and_pages(
    serve: Any, windowed_model: Path, prompt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, core: str, page: int
) -> None:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", core)
    engine = serve(tiers(tmp_path), path=windowed_model, arguments={"page_size": page}, deadlines=PATIENT)
    engine.host.generate(prompt(1))
    longer, end = [*prompt(1), *prompt(3, 20)], 397 // page * page
    own = right_of(engine, longer, end)
    stem = prompt(2, 330)
    branches = [[*stem, *prompt(60 + branch, 90)] for branch in range(3)]
    computed = [right_of(engine, one, 0) for one in branches]
    engine.order("witness")
    engine.push_down("g2")
    (restored,) = engine.host.generate(longer)
    assert restored["host"] == restored["cached"] == own["cached"] == end and agree(restored, own)
    window = min(end // page, -(-63 // page))
    assert engine.order("witness") == {"same_blocks": end // page + PARTS * window, "other_blocks": 0}
    read = []
    for one, right in zip(branches, computed, strict=True):
        engine.host.flush()
        (given,) = engine.host.generate(one)
        read.append(given["host"])
        assert alike(given, right)
    assert read == [0, 0, 330 // page * page]
    assert_idle(engine)


def test_two_ranks_of_windows_decide_alike(
    serve: Any, windowed_model: Path, prompt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a manager and boundaries of its own; a boundary that one of them lacks, neither gives."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    engine = serve(tiers(tmp_path), path=windowed_model, arguments={"tp_size": 2}, deadlines=PATIENT)
    asked = conversation(engine, prompt, 50, 3)[2]
    engine.host.flush()
    for rank in (0, 1):
        assert engine.order("flush", rank=rank) == 0
    depths = engine.order("boundaries", tokens=asked)
    assert depths == engine.order("boundaries", rank=1, tokens=asked)
    right = right_of(engine, asked, depths[-1] * 16)
    for lacking in ((), (0,), (1,), (0, 1)):
        for rank in lacking:
            engine.order("evict", rank=rank, tier="g2")
        engine.host.flush()
        (restored,) = engine.host.generate(asked, kvtier={"store": False})
        assert restored["host"] == depths[-1] * 16 and agree(restored, right)
    other = conversation(engine, prompt, 52, 3)[2]
    engine.host.flush()
    top, next_best = engine.order("boundaries", tokens=other)[:-3:-1]
    own = right_of(engine, other, next_best * 16)
    assert engine.order("drop", rank=1, tokens=other, depth=top, group="windows") >= 1
    engine.host.flush()
    (shorter,) = engine.host.generate(other, kvtier={"store": False})
    assert shorter["host"] == next_best * 16 and agree(shorter, own)
    stem = prompt(51, 320)
    branches = [[*stem, *prompt(60 + branch, 90)] for branch in range(3)]
    computed, read = [right_of(engine, one, 0) for one in branches], []
    for one, own in zip(branches, computed, strict=True):
        engine.host.flush()
        (given,) = engine.host.generate(one)
        read.append(given["host"])
        assert alike(given, own)
    assert read == [0, 0, 320]
    engine.host.flush()
    for rank in (0, 1):
        assert set(engine.order("check", rank=rank).values()) == {0}
        assert engine.order("witness", rank=rank)["same_blocks"] > 0


def test_a_pool_of_windows_that_is_too_short_costs_hits_and_nothing_else(
    serve: Any, windowed_model: Path, prompt: Any, tmp_path: Path
) -> None:
    """Requests of one batch share it: windows are evicted from the tree while their pages of full attention stay, and
    loads find no room."""
    arguments = {"max_total_tokens": 4096, "swa_full_tokens_ratio": 0.1, "chunked_prefill_size": 128}
    engine = serve(tiers(tmp_path), path=windowed_model, arguments=arguments, deadlines=PATIENT)
    chats = [prompt(800 + chat, 180) for chat in range(6)]
    draw, hits, own = random.Random(3), 0, 0
    for turn in range(10):
        picked = draw.sample(range(len(chats)), 4)
        for out, chat in zip(engine.host.generate(*[chats[chat] for chat in picked], new=12), picked, strict=True):
            hits, own = hits + out["host"], own + out["cached"] - out["host"]
            chats[chat] = [*chats[chat], *out["tokens"], *prompt(900 + 10 * turn + chat, 40)]
        if turn % 4 == 3:
            engine.host.flush()
    assert hits > 0 and own > 0
    for chat in chats:
        engine.host.flush()
        (given,) = engine.host.generate(chat)
        assert alike(given, right_of(engine, chat, 0))
    assert_idle(engine)


# ── sick tiers ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["hang", "error", "corrupt"])
def test_500_requests_of_windows_over_a_sick_tier(
    serve: Any, windowed_model: Path, prompt: Any, damage: Any, tmp_path: Path, kind: str
) -> None:
    engine = serve(tiers(tmp_path, "8MiB"), path=windowed_model, deadlines={"get": "300ms", "lookup": "100ms"})
    chats = [conversation(engine, prompt, seed, 2)[-1] for seed in range(2000, 2030)]
    engine.push_down()
    right: list[dict[int, Any]] = []
    for chat in chats:  # what the engine says itself at each place where it could go on
        places = {0, *(depth * 16 for depth in engine.order("boundaries", tokens=chat))}
        right.append({place: right_of(engine, chat, place, new=4) for place in places})
    engine.order("witness")
    assert engine.order("flush") == 0
    before = engine.order("stats")
    if kind != "corrupt":
        engine.steer(faults={"g3": [[verb, kind, 0.3, None, 0.0] for verb in ("read", "write", "lookup")]})
    draw, asked, loaded, ties = random.Random(1), 0, 0, 0
    for turn in range(125):
        engine.order("evict", tier="g2")
        if kind == "corrupt" and turn % 10 == 0:
            engine.order("flush")
            assert damage(tmp_path)
        chosen = draw.sample(range(len(chats)), 4)
        for out, chat in zip(engine.host.generate(*[chats[i] for i in chosen], new=4), chosen, strict=True):
            own = right[chat].get(out["cached"], right[chat][0])
            assert alike(out, own), (turn, out, own)
            ties += out["tokens"] != own["tokens"]
            asked, loaded = asked + 1, loaded + moved(0, out["host"])
            assert out["host"] == out["cached"], "nothing but what came from below"
        engine.host.flush()
    assert asked == 500 and ties <= 5 and loaded > 0
    assert engine.order("witness") == {"same_blocks": loaded, "other_blocks": 0}
    struck = _misses(engine.order("stats")) - _misses(before)
    assert struck > 0, "the fault was never met"
    assert_idle(engine, hung=kind == "hang")


def _misses(stats: dict[str, Any]) -> int:
    tier = stats["g3"]
    reasons = ("corrupt", "mismatch", "error", "breaker", "late")
    return sum(tier["misses"].get(reason, 0) for reason in reasons) + sum(tier["unanswered"].values())


def test_an_aborted_request_leaves_nothing_of_its_boundary(
    serve: Any, windowed_model: Path, prompt: Any, tmp_path: Path
) -> None:
    engine = serve(tiers(tmp_path), path=windowed_model, deadlines=PATIENT)
    asked = prompt(70)
    engine.host.generate(asked)
    (own,) = engine.host.generate(asked)
    engine.push_down("g2")
    engine.steer(faults={"g3": [["read", "slow", 1.0, None, 1.0]]})
    assert engine.host.ask(do="abort", prompts=[asked], after=0.3) in ("abort", "CancelledError")
    engine.steer()
    assert eventually(lambda: engine.order("check")["quarantined"] == 0), "the slowest reads are over"
    assert_idle(engine)
    (restored,) = engine.host.generate(asked)
    assert restored["host"] == 384 and restored["tokens"] == own["tokens"]
    assert engine.order("witness") == {"same_blocks": moved(0, 384), "other_blocks": 0}
    (away,) = engine.host.generate(asked, kvtier=AWAY)
    assert away["host"] == 0
