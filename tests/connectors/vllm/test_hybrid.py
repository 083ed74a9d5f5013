"""Models with sliding windows or states beside full attention, in a real vLLM engine: Gemma 3, gpt-oss, Qwen3-Next and
Granite 4 (Mamba 2), small and random.

Tokens are those of the engine's own hit at the same boundary; every block that is loaded is compared, byte by byte,
with the one that was stored under its name. Each comparison has a control that fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.prompts import BLOCK, IDLE, prompt, tiers, tokens
from tests.connectors.vllm.support.storms import storm

pytestmark = pytest.mark.timeout(900)

Start = Callable[..., Any]
KINDS = {"sliding": [2], "gptoss": [2], "many_windows": [3, 3], "filled_up": [2, 2], "state": [1, 1],
         "mamba2": [1, 1]}  # fmt: skip
"""Blocks that each group beside the full one of a model needs at a boundary."""
LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != "sliding"]
STATES = ("state", "mamba2")
ENGINE: dict[str, dict[str, Any]] = {
    "state": {"dtype": "bfloat16", "enable_prefix_caching": True, "prefix_cache_retention_interval": None},
    "mamba2": {"enable_prefix_caching": True},
}
"""Options of an engine, by model. Kernels of linear attention know one type on CPUs, in which a state is rounded where
a step ends: so tokens depend on where it was resumed, and the engine is to keep all boundaries to compare with."""


@pytest.fixture(scope="module", params=["sliding", *LONG])
def hybrid(
    request: pytest.FixtureRequest, start: Start, make_other: Callable[[str], Path], tmp_path_factory: Any
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("hybrid")
    options = ENGINE.get(request.param, {})
    mended = request.param == "mamba2"  # vLLM's own kernels on CPUs cannot keep prefixes
    engine = start(model=str(make_other(request.param)), config=tiers(folder), engine=options, mended=mended)
    engine.watch_bytes()
    engine.folder = folder
    engine.kind = request.param
    yield engine
    watched = engine.bytes_watched()
    assert watched["compared"] > 0 and watched["wrong"] == 0
    assert (watched["blank"] > 0) == (engine.kind in ("filled_up", *STATES))
    engine.kill()


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "hybrid" in request.fixturenames:  # some tests start engines of their own
        request.getfixturevalue("hybrid").mend()
        request.getfixturevalue("hybrid").reset()


def blocks(count: int) -> int:
    return count // BLOCK * BLOCK


def conversation(engine: Any, seed: int, turns: int) -> list[list[int]]:
    """Prompts of a chat's turns: each is the last one, its answer, and something new."""
    asked: list[list[int]] = []
    history = prompt(seed, 150)
    for turn in range(turns):
        asked.append(history)
        answer = engine.generate(prompts=[history], tokens=40)[0]["tokens"]
        history = [*history, *answer, *prompt(seed + 100 + turn, 70)]
    return asked


def right_of(engine: Any, asked: list[list[int]], boundary: int, tokens: int = 24) -> list[int]:
    """What the engine answers to the last prompt of a conversation where it resumes by itself at this boundary: of a
    model with states, at no other. Without one (0) it computes all of it."""
    away = {"load": False, "store": False}
    assert engine.reset()
    for history in asked if engine.kind == "state" else ():
        ends = blocks(len(history) - 1), blocks(len(history) + 39)
        if boundary >= ends[0] > 0:
            engine.generate(prompts=[history], tokens=40 if boundary >= ends[1] else 1, control=away)
    out = engine.generate(prompts=asked[-1:], tokens=tokens, control=away)[0]
    assert engine.reset()
    assert out["cached"] == boundary or engine.kind != "state"
    answer: list[int] = out["tokens"]
    return answer


def test_the_engine_has_several_groups(hybrid: Any) -> None:
    groups = hybrid.groups()
    beside = "MambaSpec" if hybrid.kind in STATES else "SlidingWindowSpec"
    assert sorted(kind for kind, _, _ in groups) == sorted(["FullAttentionSpec"] + [beside] * len(KINDS[hybrid.kind]))


def test_a_prompt_comes_back_as_the_engines_own_hit(hybrid: Any) -> None:
    asked = prompt(1, 500)
    cold = hybrid.generate(prompts=[asked])[0]
    own = hybrid.generate(prompts=[asked])[0]
    assert own["read"] == {} and own["cached"] == 480
    assert hybrid.reset(), "nothing that kvtier holds stops the engine from resetting its cache"
    warm = hybrid.generate(prompts=[asked])[0]
    assert warm["read"] == {"g2": 480} and warm["tokens"] == own["tokens"] == cold["tokens"]
    assert hybrid.check() == IDLE and hybrid.held() == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sliding", "gptoss", "many_windows"])
def test_an_answer_with_drafts_comes_back(
    start: Start, make_other: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """Drafts that repeat the text: a boundary may be crossed by tokens that are refused, and a block filled by those
    that are not."""
    speculation = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 4}
    engine = start(model=str(make_other(kind)), config=tiers(tmp_path), engine={"speculative_config": speculation})
    engine.watch_bytes()
    for seed in range(4):
        asked = prompt(seed, 70 + 9 * seed) + prompt(30 + seed, 12) * 5
        answer = engine.generate(prompts=[asked], tokens=90)[0]["tokens"]
        whole = [*asked, *answer, 5]
        right = engine.generate(prompts=[whole], control={"load": False, "store": False})[0]["tokens"]
        assert engine.reset()
        warm = engine.generate(prompts=[whole])[0]
        assert warm["tokens"] == right and warm["read"] == {"g2": blocks(len(whole) - 2)}
    assert engine.check() == IDLE and engine.held() == 0
    watched = engine.bytes_watched()
    assert watched["compared"] > 0 and watched["wrong"] == 0
    assert engine.stop() == 0


def test_a_drafters_kv_comes_back_beside_windows(
    start: Start, make_other: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its layer lies with those of full attention. All drafts are right that know the prompt. The control: those that
    do not."""
    drafter = str(make_other("drafter_fwwwf"))
    speculation = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 3}
    model = str(make_other("drafted_fwwwf"))
    engine = start(model=model, config=tiers(tmp_path), engine={"speculative_config": speculation})
    engine.watch_bytes()
    kept = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens")

    def share(asked: list[int], read: dict[str, int]) -> tuple[float, list[int]]:
        """Of drafts that are accepted; and the tokens."""
        before = engine.sources()
        out = engine.generate(prompts=[asked], tokens=60)[0]
        accepted, drafted = (engine.sources()[kind] - before.get(kind, 0) for kind in kept)
        assert out["read"] == read and engine.reset()
        return accepted / drafted, out["tokens"]

    asked = prompt(1, 400)
    cold, right = share(asked, {})
    assert cold > 0.9 and share(asked, {"g2": 384}) == (cold, right)
    longer = [*asked, *right, *prompt(2, 20)]
    assert share(longer, {"g2": blocks(len(asked) + len(right) - 1)})[0] > 0.9, "behind an answer with drafts"
    watched = engine.bytes_watched()
    assert watched["compared"] > 0 and watched["wrong"] == 0
    engine.break_loads(how="zeros", layers="draft")
    wrong, tokens_then = share(asked, {"g2": 384})
    assert wrong < cold / 2 and tokens_then == right, "what a drafter does not know costs drafts, and no token"
    print(f"drafts accepted: {cold:.2f}, and without the drafter's part {wrong:.2f}")
    engine.mend()
    assert engine.check() == IDLE and engine.held() == 0
    assert engine.stop() == 0


@pytest.mark.parametrize("position", [0, -1])
def test_wrong_bytes_of_either_group_would_be_noticed(hybrid: Any, position: int) -> None:
    """The control: zeros in one block, the first of the full group or the last of another one, change the tokens."""
    asked = prompt(2, 500)
    right = hybrid.generate(prompts=[asked], tokens=60)[0]
    assert hybrid.reset()
    hybrid.break_loads(how="zeros", positions=[position])
    wrong = hybrid.generate(prompts=[asked], tokens=60)[0]
    hybrid.mend()
    assert wrong["read"] == {"g2": 480} and wrong["tokens"] != right["tokens"]
    assert hybrid.reset()
    assert hybrid.generate(prompts=[asked], tokens=60)[0]["tokens"] == right["tokens"]


def test_a_conversation_resumes_at_the_end_of_the_last_answer(hybrid: Any) -> None:
    asked, had = [prompt(3, 150)], 0
    for turn in range(4):
        right = right_of(hybrid, asked, had, tokens=40)
        warm = hybrid.generate(prompts=asked[-1:], tokens=40)[0]
        assert warm["tokens"] == right
        assert warm["read"] == ({"g2": had} if turn else {})
        had = blocks(len(asked[-1]) + 39)  # all that has KV: the last token was never an input
        asked.append([*asked[-1], *right, *prompt(100 + turn, 70)])
    assert hybrid.check() == IDLE


def test_branches_resume_where_a_prompt_was_seen_to_leave(hybrid: Any) -> None:
    """The first branch finds no boundary there, and stores one for the next."""
    stem = prompt(5, 320)
    asked = [[*stem, *prompt(60 + branch, 90)] for branch in range(4)]
    right = [hybrid.generate(prompts=[one], control={"load": False, "store": False})[0]["tokens"] for one in asked]
    read = []
    for one, answer in zip(asked, right, strict=True):
        assert hybrid.reset()
        out = hybrid.generate(prompts=[one])[0]
        assert out["tokens"] == answer
        read.append(out["read"])
    assert read == [{}, {}, {"g2": 320}, {"g2": 320}]
    assert hybrid.check() == IDLE


def test_a_long_prompt_in_chunks_keeps_its_end(hybrid: Any) -> None:
    asked = prompt(6, 1500)
    right = hybrid.generate(prompts=[asked])[0]["tokens"]
    assert hybrid.reset()
    warm = hybrid.generate(prompts=[asked])[0]
    assert warm["read"] == {"g2": blocks(1499)} and warm["tokens"] == right
    assert hybrid.check() == IDLE


def test_a_part_that_the_engine_has_is_not_loaded(hybrid: Any) -> None:
    """The engine's own hit ends before kvtier's: only what is behind it is brought, of every group."""
    stem = prompt(7, 330)
    whole = [*stem, *prompt(8, 40)]
    right = hybrid.generate(prompts=[whole])[0]["tokens"]
    assert hybrid.reset()
    hybrid.generate(prompts=[stem], control={"load": False, "store": False})
    warm = hybrid.generate(prompts=[whole])[0]
    assert warm["read"] == {"g2": 32} and warm["cached"] == 352 and warm["tokens"] == right
    assert hybrid.check() == IDLE


@pytest.mark.parametrize("group", ["windows", "last", "full"])
def test_one_group_that_was_evicted_costs_a_shorter_hit(hybrid: Any, group: str) -> None:
    asked = conversation(hybrid, 10 + ["windows", "last", "full"].index(group), 3)
    hybrid.flush()
    depths = hybrid.boundaries(prompt=asked[2])
    top, next_best = depths[-1], depths[-2]
    right, other = right_of(hybrid, asked, top * BLOCK), right_of(hybrid, asked, next_best * BLOCK)
    warm = hybrid.generate(prompts=[asked[2]], control={"store": False})[0]
    assert warm["tokens"] == right and warm["read"] == {"g2": top * BLOCK}
    assert hybrid.drop(prompt=asked[2], depth=top, group=group) >= 2, "in G2 and in G3"
    assert hybrid.reset()
    shorter = hybrid.generate(prompts=[asked[2]], control={"store": False})[0]
    assert shorter["tokens"] == other and sum(shorter["read"].values()) == next_best * BLOCK
    assert hybrid.check() == IDLE


@pytest.mark.parametrize("group", ["last", "full"])
def test_one_group_that_is_damaged_on_disk_costs_a_shorter_hit(hybrid: Any, group: str) -> None:
    asked = conversation(hybrid, 20 + ["last", "full"].index(group), 3)
    hybrid.flush()
    depths = hybrid.boundaries(prompt=asked[2])
    right = {depth * BLOCK: right_of(hybrid, asked, depth * BLOCK) for depth in (0, *depths[-2:])}
    assert hybrid.damage(folder=str(hybrid.folder), prompt=asked[2], depth=depths[-1], group=group) > 0
    assert hybrid.evict(tier="g2") > 0 and hybrid.reset()
    reads = []
    for _ in range(2):
        warm = hybrid.generate(prompts=[asked[2]], control={"store": False})[0]
        reads.append(sum(warm["read"].values()))
        assert warm["tokens"] == right[reads[-1]]
        assert hybrid.reset()
    assert reads[0] < depths[-1] * BLOCK and reads[1] == depths[-2] * BLOCK
    assert hybrid.check() == IDLE


@pytest.mark.parametrize("position", [0, -1])
def test_a_load_that_fails_in_one_group_is_computed_as_a_whole(hybrid: Any, position: int) -> None:
    asked = prompt(30 + position, 500)
    right = hybrid.generate(prompts=[asked])[0]["tokens"]
    moved = 15 + sum(KINDS[hybrid.kind])
    assert hybrid.reset()
    failures = hybrid.counters().get("load_failures", 0)
    hybrid.break_loads(how="fail", positions=[position % moved])
    warm = hybrid.generate(prompts=[asked])[0]
    hybrid.mend()
    assert warm["tokens"] == right and warm["read"] == {} and hybrid.counters()["load_failures"] == failures + 1
    assert hybrid.reset()
    again = hybrid.generate(prompts=[asked])[0]
    assert again["tokens"] == right and again["read"] == {"g2": 480}
    assert hybrid.check() == IDLE


def test_nothing_is_held_that_nobody_will_copy(hybrid: Any) -> None:
    """Requests that do not store, that go away, and that end between two steps; and a pool that runs short."""
    hybrid.generate(prompts=[prompt(50, 300)], control={"store": False})
    assert hybrid.held() == 0
    for turn in range(4):
        hybrid.add(name=f"gone{turn}", prompt=prompt(51 + turn, 500), tokens=200)
        hybrid.steps(count=1 + 9 * turn)
        hybrid.abort(name=f"gone{turn}")
    hybrid.settle()
    assert hybrid.held() == 0 and hybrid.check() == IDLE
    asked = [prompt(60 + i, 900) for i in range(5)]  # more than the pool holds
    right = [hybrid.generate(prompts=[one], control={"load": False})[0]["tokens"] for one in asked]
    assert tokens(hybrid.generate(prompts=asked)) == right
    assert hybrid.held() == 0 and hybrid.check() == IDLE


@pytest.mark.long
def test_five_hundred_requests_with_faults(hybrid: Any) -> None:
    """Clients go away at every stage, loads fail in either group, and come late; every token is right. Those of a model
    with states depend on where its steps end: there no two prompts have a part in common, and what is asked at once is
    computed in one step, so that steps end where those of the engine's own answer did."""
    chance, rounded = random.Random("hybrid"), hybrid.kind == "state"
    stems = [prompt(70 + i, 100) if rounded else prompt(70 + i // 2, 200) for i in range(6)]
    asked = [stems[i] + prompt(80 + i, 60 if rounded else 100) for i in range(6)]
    right = []
    for one in asked:
        cold = hybrid.generate(prompts=[one], control={"load": False, "store": False})[0]
        own = hybrid.generate(prompts=[one], control={"load": False})[0]
        assert own["cached"] == blocks(len(one) - 1), "the engine's own hit"
        assert own["tokens"] == cold["tokens"]
        right.append(own["tokens"])
    storm(hybrid, asked, right, chance, turns=200)
    hybrid.break_loads(how="now and then")
    count = 3 if rounded else 6
    for _ in range(102 // count):
        if chance.random() < 0.7:
            hybrid.settle()
            hybrid.reset()
        several = [chance.randrange(6) for _ in range(count)]
        outs = tokens(hybrid.generate(prompts=[asked[i] for i in several], settle=False))
        assert outs == [right[i] for i in several]
    hybrid.mend()
    hybrid.settle()
    assert hybrid.counters()["load_failures"] > 20 and hybrid.counters()["tokens_read_g2"] > 5000
    assert hybrid.check() == IDLE and hybrid.held() == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sliding", "state"])
@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 54, "max_model_len": 704, "scheduling_policy": "priority"},
        {"prefix_cache_retention_interval": None},
        {"max_num_batched_tokens": 96},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_engines_own_settings(
    start: Start, make_other: Callable[[str], Path], tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    """Steps in advance, preemption, blocks kept everywhere, many chunks: the same tokens, and nothing is left."""
    model, insist = str(make_other(kind)), "async_scheduling" in options
    options = ENGINE.get(kind, {}) | options
    plain = start(model=model, config=None, engine=options, insist=insist)
    asked = [prompt(i // 2, 300) + prompt(90 + i, 60 + 20 * i) for i in range(8)]
    right = [plain.ask(prompts=[one], tokens=60)[0]["all"] for one in asked]
    plain.kill()
    engine = start(model=model, config=tiers(tmp_path), engine=options, insist=insist)
    engine.watch_bytes()
    for _ in range(3):
        outs = engine.ask(prompts=asked, tokens=60, priorities="scheduling_policy" in options)
        assert [out["all"] for out in outs] == right or kind == "state"  # which depend on where each was resumed
        engine.settle()
        assert engine.reset()
    alone = [engine.generate(prompts=[one], tokens=60)[0] for one in asked]
    assert [[out["tokens"]] for out in alone] == right or kind == "state"
    assert all(out["read"] for out in alone)
    watched = engine.bytes_watched()
    assert watched["compared"] > 0 and watched["wrong"] == 0
    assert engine.check() == IDLE and engine.held() == 0
    if "scheduling_policy" in options:
        assert engine.sources()["vllm:num_preemptions"] > 0
    assert engine.stop() == 0


def agent(engine: Any, forget: Callable[[], None]) -> tuple[list[int], list[list[int]]]:
    """An agent's conversations: one system prompt, three tasks, answers of tools of many lengths. Returns the tokens
    that each prompt was given from a cache, and all answers; `forget` is called before each prompt."""
    system, cached, answers = prompt(200, 290), [], []
    for task in range(3):
        history = [*system, *prompt(201 + task, 45)]
        for turn in range(9):
            forget()
            out = engine.generate(prompts=[history], tokens=30)[0]
            cached.append(out["cached"])
            answers.append(out["tokens"])
            history = [*history, *out["tokens"], *prompt(210 + 10 * task + turn, 20 + 37 * (turn * turn % 5))]
    return cached, answers


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sliding", "state"])
@pytest.mark.parametrize("retention", [0, None])
def test_an_agent_hits_after_a_restart_what_the_engine_hits_with_all_its_memory(
    start: Start, make_other: Callable[[str], Path], tmp_path: Path, kind: str, retention: int | None
) -> None:
    """Before each prompt kvtier has lost all but its disk; the engine of the comparison loses nothing."""
    model, options = str(make_other(kind)), ENGINE.get(kind, {})
    kept = {**options, "num_gpu_blocks_override": 1500, "prefix_cache_retention_interval": retention}
    plain = start(model=model, config=None, engine=kept)
    theirs, right = agent(plain, lambda: None)
    plain.kill()
    engine = start(model=model, config=tiers(tmp_path), engine=options)

    def forget() -> None:
        engine.flush()
        engine.evict(tier="g2")
        assert engine.reset()

    ours, answers = agent(engine, forget)
    print(f"hits {sum(ours)} of {sum(theirs)} tokens, retention {retention}: {sum(ours) / sum(theirs):.3f}")
    assert answers == right or kind == "state"  # whose tokens depend on where a prompt is resumed
    assert sum(ours) >= 0.95 * sum(theirs)
    assert engine.check() == IDLE
    assert engine.stop() == 0


def test_what_one_engine_wrote_another_finds(hybrid: Any, start: Start, make_other: Callable[[str], Path]) -> None:
    asked = [prompt(40, 400), *conversation(hybrid, 41, 2)]
    right = [hybrid.generate(prompts=[one])[0]["tokens"] for one in asked]
    assert hybrid.flush()["pending"] == 0
    folder = hybrid.folder
    options = ENGINE.get(hybrid.kind, {})
    processes = "one" if hybrid.kind == "sliding" else "own"  # the dense model of test_engine_restart has its own
    other = start(model=str(make_other(hybrid.kind)), config=tiers(folder), processes=processes, engine=options)
    warm = [other.generate(prompts=[one])[0] for one in asked]
    assert tokens(warm) == right
    assert [out["cached"] for out in warm] == [blocks(len(one) - 1) for one in asked]
    assert warm[0]["read"] == {"g3": 384} and warm[2]["read"]["g3"] > 0
    assert other.stop() == 0
