"""A real SGLang engine over kvtier whose model keeps windows in a pool of their own: a prompt comes back up to a
boundary of both pools, as the engine's own prefix cache gives it back, or not at all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.sglang.support.answers import alike
from tests.connectors.sglang.support.boundaries import (
    AWAY,
    PAGE,
    PARTS,
    WINDOW_PAGES,
    agree,
    conversation,
    moved,
    right_of,
    whole,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(600)  # the first of them starts the engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("g3")


@pytest.fixture(scope="module")
def engine(serve: Any, windowed_model: Path, folder: Path) -> Any:
    return serve(
        {"g2": {"capacity": "32MiB"}, "g3": {"path": str(folder), "capacity": "256MiB"}},
        path=windowed_model,
        arguments={"chunked_prefill_size": 512},
        deadlines={"get": "3s", "lookup": "1s"},
    )


@pytest.fixture(autouse=True)
def _whole(engine: Any) -> Iterator[None]:
    """After every scenario nothing is held (once the slowest reads are over), and every invariant stands."""
    yield
    engine.steer()
    engine.host.flush()
    assert eventually(lambda: not any(engine.order("check").values())), engine.order("check")


def test_the_engine_keeps_its_windows_in_a_pool_of_their_own(engine: Any) -> None:
    fields = engine.order("namespace")
    assert fields["group"].startswith(f"full+{PARTS}*window:") and fields["layers"] == "0:5"


def test_a_prompt_comes_back_as_the_engines_own_hit(engine: Any, prompt: Any) -> None:
    asked = prompt(1)
    (cold,) = engine.host.generate(asked)
    (own,) = engine.host.generate(asked)
    engine.host.flush()
    (restored,) = engine.host.generate(asked)
    assert (cold["host"], own["host"]) == (0, 0)
    assert own["cached"] == restored["cached"] == restored["host"] == 384
    assert (restored["tokens"], restored["logprobs"]) == (own["tokens"], own["logprobs"])
    assert alike(restored, cold), "a full prefill says the same"
    assert engine.order("witness") == {"same_blocks": moved(0, 384), "other_blocks": 0}
    engine.push_down("g2")
    (restored,) = engine.host.generate(asked)
    assert restored["host"] == 384 and restored["answer"][0]["tokens_read"] == {"g3": 384}
    assert (restored["tokens"], restored["logprobs"]) == (own["tokens"], own["logprobs"])
    assert engine.order("witness") == {"same_blocks": moved(0, 384), "other_blocks": 0}


@pytest.mark.parametrize("group", ["chain", "window"])
def test_wrong_bytes_of_either_pool_would_be_noticed(engine: Any, prompt: Any, group: str) -> None:
    asked = prompt({"chain": 2, "window": 3}[group])
    (own,) = engine.host.generate(asked)
    engine.host.flush()
    engine.steer(scramble=group)
    (wrong,) = engine.host.generate(asked)
    engine.steer()
    assert wrong["host"] == 384 and wrong["tokens"] != own["tokens"] and not alike(wrong, own)
    others = {"chain": 24, "window": PARTS * WINDOW_PAGES}[group]
    assert engine.order("witness") == {"same_blocks": moved(0, 384) - others, "other_blocks": others}


def test_a_conversation_resumes_at_the_end_of_the_last_answer(engine: Any, prompt: Any) -> None:
    asked, had = prompt(4, 150), 0
    for turn in range(3):
        right = right_of(engine, asked, had, new=40)
        (out,) = engine.host.generate(asked, new=40)
        assert out["cached"] == out["host"] == had and agree(out, right)
        had = whole(len(asked) + 39)  # all that has KV: the last token was never an input
        asked = [*asked, *out["tokens"], *prompt(500 + turn, 70)]
    assert engine.order("witness")["other_blocks"] == 0


def test_branches_resume_where_a_prompt_was_seen_to_leave(engine: Any, prompt: Any) -> None:
    """The first branch finds no boundary there, and stores one for the next."""
    stem = prompt(5, 320)
    asked = [[*stem, *prompt(60 + branch, 90)] for branch in range(4)]
    right = [right_of(engine, one, 0) for one in asked]
    read = []
    for one, computed in zip(asked, right, strict=True):
        engine.host.flush()
        (out,) = engine.host.generate(one)
        assert alike(out, computed)
        read.append(out["host"])
    assert read == [0, 0, 320, 320]
    other = [*stem, *prompt(70, 90)]
    own = right_of(engine, other, 320)
    (restored,) = engine.host.generate(other, kvtier={"store": False})
    assert restored["host"] == 320 and agree(restored, own)


@pytest.mark.long
def test_a_branch_of_what_the_engine_has_is_kept(engine: Any, prompt: Any) -> None:
    """The engine takes the window back into pages that its tree has offered before, and offers them no more."""
    stem = prompt(9, 325)
    asked = [[*stem, *prompt(80 + branch, 90)] for branch in range(3)]
    right = [right_of(engine, one, 0) for one in asked]
    for one, computed in zip(asked[:2], right[:2], strict=True):  # one after the other, without a flush
        (out,) = engine.host.generate(one)
        assert out["host"] == 0 and alike(out, computed)
    own = right_of(engine, asked[2], 320)
    (restored,) = engine.host.generate(asked[2])
    assert restored["host"] == 320 and agree(restored, own) and alike(restored, right[2])


def test_a_long_prompt_in_chunks_keeps_its_end(engine: Any, prompt: Any) -> None:
    asked = prompt(6, 1500)
    (cold,) = engine.host.generate(asked)
    depths = engine.order("boundaries", tokens=asked)
    assert depths[-1] == 1500 // PAGE and 1 <= len(depths) <= 1 + 93 // (4 * PARTS * WINDOW_PAGES)
    own = right_of(engine, asked, whole(1499))
    (restored,) = engine.host.generate(asked)
    assert restored["cached"] == restored["host"] == whole(1499) and agree(restored, cold) and agree(restored, own)


@pytest.mark.parametrize("more", [20, 40, 200])
def test_a_part_that_the_engine_has_is_not_loaded(engine: Any, prompt: Any, more: int) -> None:
    """The engine's own hit ends before kvtier's, in the window's reach or not: what is behind it is brought."""
    stem = prompt(7, 330)
    asked = [*stem, *prompt(8, more)]
    engine.host.generate(asked)
    own = right_of(engine, asked, whole(len(asked) - 1))
    engine.host.generate(stem, new=1, kvtier=AWAY)
    engine.order("witness")
    (restored,) = engine.host.generate(asked)
    assert restored["cached"] == own["cached"] and restored["host"] == own["cached"] - 320
    assert agree(restored, own)
    assert engine.order("witness") == {"same_blocks": moved(320, own["cached"]), "other_blocks": 0}


@pytest.mark.parametrize("group", ["windows", "last", "full"])
def test_one_group_that_was_evicted_costs_a_shorter_hit(engine: Any, prompt: Any, group: str) -> None:
    asked = conversation(engine, prompt, 10 + ["windows", "last", "full"].index(group), 3)[2]
    engine.push_down()
    top, next_best = engine.order("boundaries", tokens=asked)[:-3:-1]
    right, other = right_of(engine, asked, top * PAGE), right_of(engine, asked, next_best * PAGE)
    (warm,) = engine.host.generate(asked, kvtier={"store": False})
    assert warm["host"] == top * PAGE and agree(warm, right)
    assert engine.order("drop", tokens=asked, depth=top, group=group) >= 2, "in G2 and in G3"
    engine.host.flush()
    (shorter,) = engine.host.generate(asked, kvtier={"store": False})
    assert shorter["host"] == next_best * PAGE and agree(shorter, other)


@pytest.mark.parametrize("group", ["last", "full"])
def test_one_group_that_is_damaged_on_disk_costs_a_shorter_hit(
    engine: Any, prompt: Any, folder: Path, group: str
) -> None:
    asked = conversation(engine, prompt, 20 + ["last", "full"].index(group), 3)[2]
    engine.push_down()
    depths = engine.order("boundaries", tokens=asked)
    top, next_best = depths[:-3:-1]
    right = {depth * PAGE: right_of(engine, asked, depth * PAGE) for depth in (0, *depths)}
    assert engine.order("damage", folder=str(folder), tokens=asked, depth=top, group=group) > 0
    assert engine.order("evict", tier="g2") > 0
    reads = []
    for _ in range(2):
        (warm,) = engine.host.generate(asked, kvtier={"store": False})
        reads.append(warm["host"])
        assert agree(warm, right[reads[-1]])
        engine.host.flush()
    assert reads[0] < top * PAGE and reads[1] == next_best * PAGE
    assert engine.order("witness")["other_blocks"] == 0


def test_refused_and_failing_loads(engine: Any, prompt: Any) -> None:
    asked = prompt(30)
    (own,) = engine.host.generate(asked)
    engine.host.flush()
    engine.steer(refuse=True)
    (computed,) = engine.host.generate(asked)
    engine.steer()
    assert computed["host"] == 0 and alike(computed, own)
    engine.host.flush()
    engine.steer(lose=True)
    assert "error" in engine.host.ask(do="generate", prompts=[asked])
    engine.steer()
    (again,) = engine.host.generate(asked)
    assert again["host"] == 384 and again["tokens"] == own["tokens"]


def test_salts_never_share(engine: Any, prompt: Any) -> None:
    asked = prompt(31)
    engine.host.generate(asked, cache_salt="alice")
    engine.host.flush()
    (stranger,) = engine.host.generate(asked, cache_salt="bob")
    (own,) = engine.host.generate(asked, cache_salt="alice")
    assert (stranger["host"], own["host"]) == (0, 384)


@pytest.mark.long
def test_a_storm_reads_the_right_bytes(engine: Any, prompt: Any) -> None:
    """Conversations that come and go over a tier with faults, at once and one by one."""
    chance = random.Random(5)
    chats = [prompt(800 + chat, 120) for chat in range(6)]
    fails = {"g3": [["read", "error", 0.2, None, 0.0], ["write", "error", 0.1, None, 0.0]]}
    hits = 0
    for turn in range(8):
        engine.steer(faults=fails if turn % 2 else None)
        picked = chance.sample(range(len(chats)), 3)
        for out, chat in zip(engine.host.generate(*[chats[chat] for chat in picked], new=12), picked, strict=True):
            hits += out["host"]
            chats[chat] = [*chats[chat], *out["tokens"], *prompt(900 + 10 * turn + chat, 50)]
        if turn % 3 == 2:
            engine.host.flush()
        if turn % 4 == 3:
            engine.order("evict", tier="g2")
    engine.steer()
    assert hits > 0 and engine.order("witness")["other_blocks"] == 0
    for chat in chats:
        engine.host.flush()
        (given,) = engine.host.generate(chat)
        assert alike(given, right_of(engine, chat, 0))
