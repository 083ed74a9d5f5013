"""Requests in vLLM's own scheduler, without a model: what to ask, and storms of them that come, go away and fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.connectors.vllm.support.modelless import Modelless

Make = Callable[..., Modelless]
SIZE = 8
"""Tokens of a block."""
WIDTHS = [1, 2, 7, 8, 9, 16, 17, 20, 33, 40]
RAISING = [
    ("half", "_follow"), ("half", "_more"), ("half", "_pin"), ("half", "_end"), ("_held", "cover"),
    ("_held", "extend"), ("_held", "place"), ("_held", "complete"), ("_held", "_hold"),
    ("_held", "finish"), ("_boundaries", "plan"), ("_boundaries", "_reserve"), ("_confirmer", "plan"),
    ("_stores", "plan"),
]  # fmt: skip
"""Calls of the scheduler half, or of a part of it, each of which raises now and then."""


def prompt(seed: int, length: int) -> list[int]:
    return [(i * 7919 + seed * 104729) % 1000 + 3 for i in range(length)]


def warm(engine: Modelless, asked: list[int], tokens: int = 4) -> int:
    """Tokens that a request finds after the engine has lost its own; all that it reads is right."""
    assert engine.reset()
    name = engine.add(asked, tokens)
    engine.run()
    assert engine.answers[name][len(asked) :] == engine.right(asked, tokens)
    return engine.reads[name]


class Storm:
    """Requests of every kind that come, go away, are preempted and fail, on one engine."""

    raising = RAISING

    def __init__(self, make: Make, seed: int, drafts: tuple[int, float] = (0, 0.0), drafter: str = "") -> None:
        self.drafts, self.drafter = drafts, drafter
        self.chance = random.Random(seed)
        self.engine = self.begin(make)
        self.stems = [[self.chance.randrange(3, 1000) for _ in range(88)] for _ in range(3)]
        self.asked: dict[str, list[int]] = {}
        self.broken: list[str] = []
        self.waits = self.fails = 0.0
        self.wrap()

    def wrap(self) -> None:
        worker = self.engine.worker
        self._poll, self._submit = worker.poll, worker._submit
        worker.poll, worker._submit = self.poll, self.submit

    def begin(self, make: Make) -> Modelless:
        chance = self.chance
        windows = [(chance.choice(WIDTHS), chance.choice([1, 2, 2])) for _ in range(chance.choice([1, 1, 2, 3]))]
        capacity = chance.choice(["24KiB", "64KiB", "512KiB"])
        return make(
            windows,
            blocks=max(chance.choice([34, 44, 60, 120]), 20 * (1 + len(windows)) + 2),
            full_at=chance.randrange(1 + len(windows)),
            max_model_len=160,
            drafts=self.drafts,
            drafter=(self.drafter, chance.randrange(1 + len(windows)) if self.drafter else 0),
            async_scheduling=chance.random() < 0.5,
            # vLLM never plans a request with one token left where a step has no room for it, all drafts and one more.
            max_num_batched_tokens=max(chance.choice([6, 13, 16, 40, 64, 200]), 2 + self.drafts[0]),
            scheduling_policy=chance.choice(["fcfs", "priority"]),
            prefix_cache_retention_interval=chance.choice([0, None]),
            connector={"kvtier_config": {"tiers": {"g2": {"capacity": capacity}}}},
        )

    def poll(self) -> None:
        """Copies are late."""
        if self.chance.random() >= self.waits:
            self._poll()

    def submit(self, job: Any) -> Any:
        """A block of a load comes wrong, and is said to."""
        ticket, moves = self._submit(job), job.moves
        strikes = job.request and self.chance.random() < self.fails
        if strikes and ticket is not None:  # a refused job moves nothing
            place = self.chance.randrange(len(moves.blocks))
            self.engine.worker._failed.setdefault(moves.job, set()).add(place)
            self._poll()
            for memory in self.engine.memory:
                memory[moves.blocks[place]] = -7
        return ticket

    def arrive(self) -> None:
        chance, stem = self.chance, self.chance.choice(self.stems)
        shared = stem[: chance.choice([chance.randrange(len(stem)), len(stem), 8 * chance.randrange(11)])]
        asked = [*shared, *(chance.randrange(3, 1000) for _ in range(chance.choice([1, 3, 9, 20])))]
        control = chance.choice([None] * 8 + [{"load": False}, {"store": False}])
        tokens = chance.choice([1, 2, 9, 17, 25])
        name = self.engine.add(asked, tokens, priority=chance.randrange(3), control=control)
        self.asked[name] = asked

    def go_away(self) -> None:
        if living := list(self.engine.scheduler.requests):
            self.engine.abort(self.chance.choice(living))

    def evict(self) -> None:
        cache = self.engine.cache
        if cache is not None and (keys := list(cache.manager.host.index)):
            gone = set(self.chance.sample(keys, min(len(keys), self.chance.choice([1, 1, 8]))))
            with cache.manager.lock:
                for key in gone:
                    cache.manager.host.drop(key)

    def break_once(self) -> None:
        owner, call = self.chance.choice(self.raising)
        part = self.part(owner)

        def broken(*arguments: Any, **named: Any) -> None:
            part.__dict__.pop(call, None)
            raise RuntimeError("injected")

        part.__dict__[call] = broken
        self.broken.append(call)

    def part(self, owner: str) -> Any:
        return self.engine.half if owner == "half" else getattr(self.engine.half, owner)

    def turn(self) -> None:
        chance, cache = self.chance, self.engine.cache
        roll = chance.random()
        if roll < 0.3:
            self.arrive()
        elif roll < 0.35:
            self.go_away()
        elif roll < 0.38:
            self.engine.reset()
        elif roll < 0.43:
            self.evict()
        elif roll < 0.46:
            self.break_once()
        elif roll < 0.5:
            self.waits, self.fails = chance.choice([0, 0, 0.5, 0.9]), chance.choice([0, 0, 0.3])
        elif roll < 0.505 and cache is not None:
            cache.purge()
        for _ in range(chance.choice([1, 1, 2, 5])):
            self.engine.step()

    def end(self) -> None:
        self.waits = self.fails = 0.0
        for owner, call in self.raising:
            self.part(owner).__dict__.pop(call, None)
        self.engine.run()
        self.engine.check()
        for name, answer in self.engine.answers.items():
            asked = self.asked[name]
            assert answer[len(asked) :] == self.engine.right(asked, len(answer) - len(asked))
        assert self.engine.reset()
