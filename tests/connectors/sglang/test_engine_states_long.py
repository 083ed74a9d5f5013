"""SGLang engines over models with states that end and start again, with other tree cores, pages and pools, on two
ranks, and under a storm over a tier that fails, with aborts."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing import ChildFailed
from tests.connectors.sglang.support.boundaries import AWAY, agree, conversation, right_of
from tests.connectors.sglang.support.tracked import BLOCKS, PAGE, TRACKS, moved
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PATIENT = {"get": "3s", "lookup": "1s"}


def tiers(folder: Path, ram: str = "32MiB") -> dict[str, Any]:
    return {"g2": {"capacity": ram}, "g3": {"path": str(folder), "capacity": "256MiB"}}


def assert_idle(engine: Any) -> None:
    """Nothing is held any more, and every block that came back was the one that had been computed."""
    engine.steer()
    engine.host.flush()
    assert eventually(lambda: not any(engine.order("check").values())), engine.order("check")


def test_after_kill_9_the_next_engine_resumes_at_the_states_on_disk(
    serve: Any, recurrent_model: Path, prompt: Any, tmp_path: Path
) -> None:
    engine = serve(tiers(tmp_path), path=recurrent_model, arguments=TRACKS, deadlines=PATIENT)
    asked = [conversation(engine, prompt, seed, 3)[-1] for seed in range(40, 43)]
    engine.push_down()
    tops = [engine.order("boundaries", tokens=one)[-1] * PAGE for one in asked]
    right = [right_of(engine, one, top) for one, top in zip(asked, tops, strict=True)]
    assert engine.order("flush") == 0
    more = [prompt(seed, 400) for seed in range(900, 904)]
    asking = threading.Thread(target=_try, args=(engine, more), daemon=True)
    asking.start()
    os.killpg(engine.host.process.pid, signal.SIGKILL)  # wherever it is
    asking.join()

    engine = serve(tiers(tmp_path), path=recurrent_model, arguments=TRACKS, deadlines=PATIENT)
    for one, top, own in zip(asked, tops, right, strict=True):
        (restored,) = engine.host.generate(one)
        assert restored["host"] == top and restored["answer"][0]["tokens_read"] == {"g3": top}
        assert agree(restored, own)
    assert engine.order("witness") == {"same_blocks": sum(moved(0, top) for top in tops), "other_blocks": 0}
    for one in more:
        (given,) = engine.host.generate(one)
        assert given["tokens"] == right_of(engine, one, 0)["tokens"]
    assert_idle(engine)


def _try(engine: Any, prompts: list[list[int]]) -> None:
    try:
        engine.host.ask(do="generate", prompts=prompts, new=1)
    except ChildFailed:  # the engine is killed meanwhile
        pass


@pytest.mark.parametrize(
    ("core", "page", "tracks"),
    [("rust", 1, False), ("rust", 1, True), ("rust", 64, True), ("python", 1, False), ("python", 16, True)],
)
def test_states_over_other_tree_cores_and_pages(
    serve: Any,
    recurrent_model: Path,
    prompt: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    core: str,
    page: int,
    tracks: bool,
) -> None:
    """Without an extra buffer there is a state at the end of each prompt, at any token, and at no branch."""
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", core)
    grid = max(page, 32) if tracks else 1
    arguments = {**TRACKS, "page_size": page, "mamba_track_interval": max(grid, 32)}
    arguments["mamba_radix_cache_strategy"] = "extra_buffer" if tracks else "no_buffer"
    engine = serve(tiers(tmp_path), path=recurrent_model, arguments=arguments, deadlines=PATIENT)
    engine.host.generate(prompt(1))
    longer, end = [*prompt(1), *prompt(3, 20)], 397 // grid * grid
    own = right_of(engine, longer, end)
    stem = prompt(2, 330)
    branches = [[*stem, *prompt(60 + branch, 90)] for branch in range(3)]
    computed = [right_of(engine, one, 0) for one in branches]
    engine.order("witness")
    engine.push_down("g2")
    (restored,) = engine.host.generate(longer)
    assert restored["host"] == restored["cached"] == own["cached"] == end and agree(restored, own)
    assert engine.order("witness") == {"same_blocks": end // page + BLOCKS[page], "other_blocks": 0}
    read = []
    for one, right in zip(branches, computed, strict=True):
        engine.host.flush()
        (given,) = engine.host.generate(one)
        read.append(given["host"])
        assert given["tokens"] == right["tokens"]
    assert read == [0, 0, 330 // grid * grid if tracks else 0]
    assert_idle(engine)


def test_two_ranks_of_states_decide_alike(
    serve: Any, recurrent_model: Path, prompt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a manager and its own part of the states; a boundary that one of them lacks, neither gives."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    engine = serve(tiers(tmp_path), path=recurrent_model, arguments={**TRACKS, "tp_size": 2}, deadlines=PATIENT)
    asked = conversation(engine, prompt, 50, 3)[2]
    engine.host.flush()
    for rank in (0, 1):
        assert engine.order("flush", rank=rank) == 0
    depths = engine.order("boundaries", tokens=asked)
    assert depths == engine.order("boundaries", rank=1, tokens=asked)
    right = right_of(engine, asked, depths[-1] * PAGE)
    for lacking in ((), (0,), (1,), (0, 1)):
        for rank in lacking:
            engine.order("evict", rank=rank, tier="g2")
        engine.host.flush()
        (restored,) = engine.host.generate(asked, kvtier={"store": False})
        assert restored["host"] == depths[-1] * PAGE and agree(restored, right)
    other = conversation(engine, prompt, 52, 3)[2]
    engine.host.flush()
    top, next_best = engine.order("boundaries", tokens=other)[:-3:-1]
    own = right_of(engine, other, next_best * PAGE)
    assert engine.order("drop", rank=1, tokens=other, depth=top, group="windows") >= 1
    engine.host.flush()
    (shorter,) = engine.host.generate(other, kvtier={"store": False})
    assert shorter["host"] == next_best * PAGE and agree(shorter, own)
    stem, read = prompt(51, 320), []
    for branch in range(3):
        one = [*stem, *prompt(60 + branch, 90)]
        own = right_of(engine, one, 0)
        (given,) = engine.host.generate(one)
        read.append(given["host"])
        assert given["tokens"] == own["tokens"]
    assert read == [0, 0, 320]
    engine.host.flush()
    for rank in (0, 1):
        assert set(engine.order("check", rank=rank).values()) == {0}
        assert engine.order("witness", rank=rank)["same_blocks"] > 0


def test_a_storm_over_a_pool_of_states_that_is_too_small(
    serve: Any, recurrent_model: Path, prompt: Any, tmp_path: Path
) -> None:
    """Requests of one batch share it: states are evicted from the tree while its pages stay, loads take the slots of
    others, prompts come in chunks and branch, and some are aborted while they wait, load or run."""
    arguments = {**TRACKS, "max_mamba_cache_size": 18, "max_running_requests": 4, "chunked_prefill_size": 128}
    engine = serve(tiers(tmp_path), path=recurrent_model, arguments=arguments, deadlines=PATIENT)
    fails = {"g3": [["read", "error", 0.2, None, 0.0], ["write", "error", 0.1, None, 0.0]]}
    slow = {"g3": [["read", "slow", 0.5, None, 0.3]]}
    chats = [[*prompt(800 + chat // 2, 150), *prompt(850 + chat, 40)] for chat in range(6)]
    draw, hits, own = random.Random(3), 0, 0
    for turn in range(12):
        engine.steer(faults=(None, fails, slow)[turn % 3])
        picked = draw.sample(range(len(chats)), 4)
        for out, chat in zip(engine.host.generate(*[chats[chat] for chat in picked], new=12), picked, strict=True):
            hits, own = hits + out["host"], own + out["cached"] - out["host"]
            chats[chat] = [*chats[chat], *out["tokens"], *prompt(900 + 10 * turn + chat, 40)]
        engine.host.ask(do="abort", prompts=[draw.choice(chats)], after=draw.choice([0.02, 0.1, 0.3, 1.0]))
        if turn % 4 == 3:
            engine.host.flush()
            engine.order("evict", tier="g2")
    engine.steer()
    assert hits > 0 and own > 0 and engine.order("witness")["other_blocks"] == 0
    for chat in chats:
        engine.host.flush()
        (given,) = engine.host.generate(chat)
        assert given["tokens"] == right_of(engine, chat, 0)["tokens"]
    assert_idle(engine)


def test_an_aborted_request_leaves_nothing_of_its_state(
    serve: Any, recurrent_model: Path, prompt: Any, tmp_path: Path
) -> None:
    engine = serve(tiers(tmp_path), path=recurrent_model, arguments=TRACKS, deadlines=PATIENT)
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
