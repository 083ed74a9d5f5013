"""Answers and errors of a tier that the protocol has not cost misses, of this tier alone and only while they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import kvtier
from kvtier.clock import SystemClock
from kvtier.testing import MemoryTier, VirtualClock, chain_of, payloads_of, sample_namespace
from kvtier.tiers.guard import Guarded
from kvtier.tiers.protocol import Loaded, Miss, Usage

BLOCK = 4096
NS = sample_namespace(BLOCK)
CONFIG = kvtier.Config.parse({"tiers": {"g2": {"capacity": 64 * BLOCK}}, "deadlines": {"close": "1s"}})
KEYS = list(chain_of(NS, 8))


class Panic(BaseException):
    """As pyo3 raises a panic of Rust's: no Exception."""


class OddTier(MemoryTier):
    """Changes the answers of some verbs: `odd[verb](answers)`."""

    odd: dict[str, Callable[[Any], Any]]

    def __init__(self, clock: Any) -> None:
        super().__init__(NS, clock)
        self.odd = {}

    def _answer(self, verb: str, answers: Any) -> Any:
        return self.odd.get(verb, lambda given: given)(answers)

    def peek(self, *asked: Any) -> Any:
        return self._answer("peek", super().peek(*asked))

    async def lookup(self, *asked: Any) -> Any:
        return self._answer("lookup", MemoryTier.peek(self, *asked[:2]))

    async def read(self, *asked: Any) -> Any:
        return self._answer("read", await super().read(*asked))

    async def write(self, *asked: Any) -> Any:
        return self._answer("write", await super().write(*asked))

    def touch(self, *asked: Any) -> None:
        self._answer("touch", super().touch(*asked))

    def restarts(self) -> Any:
        return self._answer("restarts", {})

    def usage(self) -> Usage:
        used: Usage = self._answer("usage", super().usage())
        return used


def panic(_answers: Any) -> Any:
    raise Panic("index out of bounds")


def leave(_answers: Any) -> Any:
    raise SystemExit("no credentials")


def each(change: Callable[[Loaded], Any]) -> Callable[[list[Loaded]], Any]:
    return lambda answers: [change(answer) for answer in answers]


ODD: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{f"{verb} panics": (verb, panic) for verb in ("peek", "lookup", "read", "write", "touch", "usage", "restarts")},
    **{f"{verb} exits": (verb, leave) for verb in ("lookup", "read", "write")},
    "a look-up says True": ("lookup", each(lambda _: True)),
    "a look-up says absent": ("lookup", each(lambda _: "absent")),
    "a look-up says nothing": ("lookup", lambda _: None),
    "a peek says True": ("peek", each(lambda _: True)),
    "a read says True": ("read", each(lambda _: True)),
    "a write says True": ("write", each(lambda _: True)),
    "a short digest": ("read", each(lambda loaded: replace(loaded, digest=b""))),
    "no digest": ("read", each(lambda loaded: replace(loaded, digest=None))),  # type: ignore[arg-type]
    "no life": ("read", each(lambda loaded: replace(loaded, life=None))),  # type: ignore[arg-type]
    "a priority beyond a byte": ("read", each(lambda loaded: replace(loaded, priority=1000))),
    "a priority beyond all": ("read", each(lambda loaded: replace(loaded, priority=101))),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_tier_costs_misses_and_works_again_when_it_is_well(odd: str) -> None:
    tier = OddTier(SystemClock())
    verb, change = ODD[odd]
    with kvtier.open(CONFIG, NS, tiers=[tier]) as cache:
        payloads = payloads_of(KEYS, BLOCK)
        cache.put(KEYS, payloads)
        cache.flush()
        cache.evict("g2")
        tier.odd = {verb: change}
        with cache.get(KEYS, timeout=1) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads[: len(hit)]
            assert len(hit) == 8 if verb in ("peek", "write", "touch", "usage", "restarts") else hit.miss is Miss.ERROR
        for seed in range(1, 4):  # more than there are writers
            keys = list(chain_of(NS, 4, seed=seed))
            assert cache.put(keys, payloads_of(keys, BLOCK), timeout=1) == 4
            cache.flush(timeout=1)
        cache.check()
        cache.stats()
        tier.odd = {}
        cache.evict("g2")
        keys = list(chain_of(NS, 8, seed=9))
        cache.put(keys, payloads_of(keys, BLOCK))
        flushed = cache.flush()
        assert flushed.pending == 0 and cache.stats()["g2"]["pinned"] == 0
        cache.evict("g2")
        with cache.get(keys) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(keys, BLOCK)
        cache.check()


async def test_answers_are_the_callers_own() -> None:
    clock = VirtualClock()
    tier = OddTier(clock)
    kept = [Miss.ABSENT]
    tier.odd = {"lookup": lambda _: kept}
    guard = Guarded(tier, clock)
    await guard.open()
    found = await guard.lookup(KEYS, [0], clock.monotonic() + 1)
    found[0] = Miss.LATE
    assert kept == [Miss.ABSENT]
    await guard.close(clock.monotonic() + 1)
