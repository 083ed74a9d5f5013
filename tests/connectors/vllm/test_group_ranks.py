"""Windows and states beside full attention on several ranks of a real engine: tensor parallelism, pipeline stages, and
both. Each rank has its own part of every block, whatever its group."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.conftest import Engine
from tests.connectors.vllm.support.prompts import IDLE, prompt, tiers, tokens
from tests.connectors.vllm.support.storms import storm
from tests.connectors.vllm.test_hybrid import ENGINE

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

Start = Callable[..., Engine]
AWAY = {"load": False, "store": False}
SHAPES = {
    "stages": {"pipeline_parallel_size": 2},
    "ranks": {"pipeline_parallel_size": 1, "tensor_parallel_size": 2},
    "both": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}


def options(make_other: Callable[[str], Path], shape: str, kind: str) -> dict[str, Any]:
    """How to start an engine of this kind of model on so many ranks. States of `state_of_two` have as many heads as a
    stage has ranks, and `one_head` has fewer of keys and values: both ranks hold a copy."""
    engine = {"num_gpu_blocks_override": 256, **SHAPES[shape], **ENGINE.get(kind.removesuffix("_of_two"), {})}
    return {"model": str(make_other(kind)), "engine": engine, "mended": kind == "mamba2"}


@pytest.fixture
def several(start: Start) -> Start:
    """Starts engines of several ranks, with the scheduler in the process that is asked."""
    return partial(start, script="stages_host.py")


def own_of(engine: Engine, asked: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """What the engine answers by itself: where it computes all, and at its own hits. It forgets both."""
    cold, own = ([engine.generate(prompts=[one], control=AWAY)[0] for one in asked] for _ in range(2))
    assert [out["cached"] for out in own] == [(len(one) - 1) // 32 * 32 for one in asked]
    assert engine.reset()
    return tokens(cold), tokens(own)


@pytest.fixture(scope="module", params=["sliding", "state_of_two"])
def two(
    request: pytest.FixtureRequest, start: Start, make_other: Callable[[str], Path], tmp_path_factory: Any
) -> Iterator[Engine]:
    """One engine of two ranks, for what goes wrong in it."""
    folder = tmp_path_factory.mktemp("two")
    engine = start(
        script="stages_host.py", config=tiers(folder), arguments={"ack_timeout": "2s"},
        **options(make_other, "ranks", request.param),
    )  # fmt: skip
    engine.folder = str(folder / "g3")
    yield engine
    engine.kill()


Stored = tuple[list[list[int]], list[list[int]], list[list[int]]]


@pytest.fixture
def stored(two: Engine, request: pytest.FixtureRequest) -> Iterator[Stored]:
    """Prompts of this test alone, which are stored, their answers where all is computed, and those of the engine's own
    hits. Mended at the end, when nothing may be held."""
    seed = 100 * (1 + sum(map(ord, request.node.name)) % 97)
    prompts = [prompt(seed + number, 260 + 40 * number) for number in range(3)]
    cold, own = own_of(two, prompts)
    for one in prompts:
        two.generate(prompts=[one], control={"load": False})
    assert two.reset()
    two.compared()
    yield prompts, cold, own
    two.mend()
    two.settle()
    assert two.check() == IDLE and two.held() == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("position", [0, -1], ids=["full", "last"])
@pytest.mark.parametrize("how", ["fail", "late"])
def test_a_load_that_fails_or_comes_late_on_one_rank_costs_time_alone(
    two: Engine, stored: Stored, rank: int, position: int, how: str
) -> None:
    """It fails on both; what was computed again is what is kept."""
    prompts, cold, own = stored
    before = two.counters().get("load_failures", 0)
    two.break_stage(rank=rank, how=how, positions=[position])
    right = cold if how == "fail" else own
    assert tokens([two.generate(prompts=[one])[0] for one in prompts]) == right
    assert two.counters().get("load_failures", 0) - before == (3 if how == "fail" else 0)
    two.mend()
    assert two.reset()
    again = [two.generate(prompts=[one])[0] for one in prompts]
    assert tokens(again) == own and all(out["read"] for out in again)
    counts = two.compared()
    assert counts["wrong"] == [0, 0] and min(counts["compared"]) > 20


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_answer_its_loads_holds_up_no_request_for_good(
    two: Engine, stored: Stored, rank: int
) -> None:
    """Aborted while its load hangs on one rank: its blocks, of every group, come back when that rank has answered."""
    prompts, _, own = stored
    two.break_stage(rank=rank, how="hang")
    two.add(name="gone", prompt=prompts[0])
    two.steps(count=4)
    two.abort(name="gone")
    two.steps(count=3)
    assert two.check()["blocks_used"] > 0, "the other rank's answer gives nothing back"
    two.mend()
    two.settle()
    assert two.check() == IDLE
    assert tokens([two.generate(prompts=[one])[0] for one in prompts]) == own


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("group", ["full", "last"])
def test_a_damaged_piece_of_one_rank_and_group_is_a_miss_of_the_boundary(
    two: Engine, stored: Stored, rank: int, group: str
) -> None:
    prompts, cold, own = stored
    two.flush()
    assert two.damage_piece(folder=two.folder, prompt=prompts[0], depth=7, rank=rank, group=group) == 1
    two.evict(tier="g2")
    found = [two.generate(prompts=[one])[0] for one in prompts]
    assert [sum(out["read"].values()) for out in found] == [0, 288, 320], "the other prompts' are whole"
    assert tokens(found) == [cold[0], *own[1:]]
    assert two.compared()["wrong"] == [0, 0]
    assert two.reset()
    again = two.generate(prompts=prompts[:1])[0]
    assert again["read"] == {"g2": 256} and again["tokens"] == own[0], "computed again, and kept"


def test_a_boundary_is_visible_once_both_ranks_have_written_it(two: Engine, stored: Stored) -> None:
    asked = [prompt(9000 + number, 300) for number in range(2)]
    for rank in (0, 1):
        two.hold_stores_of(rank=rank)
        two.generate(prompts=[asked[rank]], tokens=1, settle=False)
        two.sleep(seconds=0.1)
        for _ in range(4):
            two.step_idle()
        assert two.resident(prompt=asked[rank])[0] == 0 and two.boundaries(prompt=asked[rank]) == []
        two.mend()
        two.settle()
        assert two.resident(prompt=asked[rank])[0] == 9 and two.boundaries(prompt=asked[rank]) == [9]


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        # Not mamba2: vLLM 0.32 cannot load Granite 4 in stages (KeyError of the weights of another stage's layers).
        *(("stages", kind) for kind in ("sliding", "gptoss", "filled_up", "state")),
        *(("ranks", kind) for kind in ("sliding", "gptoss", "filled_up", "one_head", "state_of_two", "mamba2")),
        *(("both", kind) for kind in ("sliding", "state_of_two")),
    ],
)
def test_windows_and_states_come_back_on_all_ranks(
    several: Start, make_other: Callable[[str], Path], tmp_path: Path, shape: str, kind: str
) -> None:
    """Tokens are those of the engine's own hit at the same boundary; where a load fails on one rank, of none. Every
    byte that comes back is the one that this rank stored, over a restart, too."""
    given, stages = options(make_other, shape, kind), SHAPES[shape]["pipeline_parallel_size"]
    ranks = stages * SHAPES[shape].get("tensor_parallel_size", 1)
    asked = [prompt(seed, length) for seed, length in ((1, 500), (2, 330), (3, 1300))]
    first = several(config=tiers(tmp_path), **given)
    named = first.namespace()
    assert (named["group"].count("|") + 1, named["ranks_served"]) == (stages, ranks)
    cold, own = own_of(first, asked)
    for one in asked:
        first.generate(prompts=[one], control={"load": False})
    assert first.check() == IDLE
    assert first.reset()
    warm = [first.generate(prompts=[one])[0] for one in asked]
    assert [out["read"].get("g2") for out in warm] == [480, 320, 1280]
    assert tokens(warm) == own
    assert first.reset()
    assert tokens(first.generate(prompts=asked)) == own
    found = first.compared()
    assert min(found["compared"]) >= 65 and found["wrong"] == [0] * ranks
    first.flush()
    assert first.check() == IDLE
    assert first.stop() == 0
    second = several(config=tiers(tmp_path), **given)
    second.know(stored=found["known"])
    again = [second.generate(prompts=[one])[0] for one in asked]
    assert [out["read"].get("g3") for out in again] == [480, 320, 1280] and tokens(again) == own
    found = second.compared()
    assert min(found["compared"]) >= 65 and found["wrong"] == [0] * ranks
    for rank in range(ranks):
        assert second.reset()
        second.break_stage(rank=rank, how="fail", positions=[3])
        assert tokens([second.generate(prompts=[one])[0] for one in asked]) == cold
        second.mend()
        second.settle()
        assert second.check() == IDLE
    second.compared()
    for rank in range(ranks):
        assert second.reset()
        second.break_stage(rank=rank, how="zeros")
        wrong = second.generate(prompts=asked, control={"store": False})
        second.mend()
        assert all(out["tokens"] != right for out, right in zip(wrong, own, strict=True)), "the control"
        counts = second.compared()
        assert [count > 0 for count in counts["wrong"]] == [one == rank for one in range(ranks)]
    second.kill()


@pytest.mark.parametrize("shape", ["stages", "ranks"])
def test_five_hundred_requests_with_faults(
    several: Start, make_other: Callable[[str], Path], tmp_path: Path, shape: str
) -> None:
    """Clients go away at every stage of a request, loads fail on one rank or the other, in either group, and come late;
    every token is right, and every byte that comes back is the one that its rank stored."""
    chance, engine = random.Random("ranks"), several(config=tiers(tmp_path), **options(make_other, shape, "sliding"))
    asked = [prompt(70 + i // 2, 200) + prompt(80 + i, 100) for i in range(6)]
    cold, right = own_of(engine, asked)
    assert cold == right
    storm(engine, asked, right, chance, turns=200)
    engine.break_loads(how="now and then")
    for _ in range(17):
        if chance.random() < 0.7:
            engine.settle()
            engine.reset()
        several_at_once = [chance.randrange(6) for _ in range(6)]
        outs = tokens(engine.generate(prompts=[asked[i] for i in several_at_once], settle=False))
        assert outs == [right[i] for i in several_at_once]
    engine.mend()
    engine.settle()
    assert engine.counters()["load_failures"] > 20 and engine.counters()["tokens_read_g2"] > 5000
    counts = engine.compared()
    assert min(counts["compared"]) > 100 and counts["wrong"] == [0, 0]
    assert engine.check() == IDLE and engine.held() == 0
    assert engine.stop() == 0
