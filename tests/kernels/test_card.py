"""Copies over a card of virtual time: what a call costs the thread that makes it, and how much of the link is used."""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from card import (
    DEEPSEEK,
    LLAMA_8B,
    LLAMA_8B_BLOCKS,
    LLAMA_8B_SPLIT,
    LLAMA_70B_RANK,
    LLAMA_70B_RANK_BLOCKS,
    PUMP,
    SGLANG_8B,
    Card,
    Case,
    Recorded,
)

from kvtier.kernels import calibration
from kvtier.kernels.calibration import measurement
from kvtier.kernels.copy import CopyEngine, CopyLimits, Moves, Outcome
from kvtier.kernels.cuda import CudaMover
from kvtier.kernels.method import COUNTS, Method, Table
from kvtier.kernels.mover import Flight
from kvtier.kernels.pump import LIMITS, Pump
from tests.support.cpu import slowness, uncollected


@pytest.fixture
def card(libcuda: ctypes.CDLL) -> Iterator[Card]:
    card = Card(libcuda)
    yield card
    card.close()


def engine_of(
    card: Card,
    case: Case,
    blocks: int,
    method: Method | None = None,
    limits: CopyLimits | None = None,
    load_parts: int = 1,
) -> CopyEngine:
    device, host, shape = case.memories(blocks)
    driver = card.driver()
    for region in host.regions:
        driver.register(region.start, region.nbytes)
    mover = CudaMover(driver, device, host, shape, Table("", {}), method=method, load_parts=load_parts)
    return CopyEngine(mover, limits or CopyLimits())


def moves_of(blocks: int, seed: int = 7) -> Moves:
    """Scattered blocks to scattered slots."""
    random = np.random.default_rng(seed)
    return Moves(random.permutation(blocks), random.permutation(blocks), np.zeros(blocks, np.int64))


def finish(card: Card, engine: CopyEngine, every_s: float = 1e-3) -> float:
    """Poll until nothing is open; the time of the last acknowledgement, to `every_s`."""
    while True:
        acks = engine.poll()
        assert all(ack.outcome is Outcome.DONE for ack in acks)
        if not engine.stats().queued and not engine.stats().in_flight:
            return card.clock
        card.sleep(every_s)


BLOCKS = 1000


@pytest.mark.parametrize(
    ("case", "method", "least", "most"),
    [
        (LLAMA_8B, Method.DMA, 43, 52),
        (LLAMA_8B, Method.DIRECT, 45, 50),
        (LLAMA_8B_SPLIT, Method.DMA, 36, 45),
        (LLAMA_8B_SPLIT, Method.DIRECT, 45, 50),
        (LLAMA_8B_BLOCKS, Method.DMA, 52, 55),
        (LLAMA_70B_RANK, Method.DMA, 5, 17),
        (LLAMA_70B_RANK, Method.DIRECT, 43, 50),
        (LLAMA_70B_RANK, Method.STAGED, 43, 55),
        (LLAMA_70B_RANK_BLOCKS, Method.DMA, 50, 55),
        (DEEPSEEK, Method.DMA, 44, 52),
        (DEEPSEEK, Method.DIRECT, 45, 50),
        (SGLANG_8B, Method.DMA, 48, 54),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_an_idle_card_copies_as_fast_as_the_model_says(
    card: Card, case: Case, method: Method, least: float, most: float
) -> None:
    engine = engine_of(card, case, BLOCKS, method)
    engine.load(moves_of(BLOCKS))
    rate = BLOCKS * case.block_bytes / finish(card, engine, 0.1e-3)
    assert least <= rate / 1e9 <= most


GIB_4 = 2048
"""Blocks of the 8B's 32k tokens: 4 GiB."""


@pytest.mark.parametrize("method", Method)
def test_loads_behind_a_long_forward_fill_no_launch_queue(card: Card, method: Method) -> None:
    engine = engine_of(card, LLAMA_8B, GIB_4, method)
    card.forward(0.2)
    engine.load(moves_of(GIB_4))
    assert card.blocked_s == 0


def pump_of(card: Card, case: Case, blocks: int, method: Method | None = None, load_parts: int = 1) -> Pump:
    limits = LIMITS if load_parts == 1 else replace(LIMITS, load_chunk_bytes=1 << 62)
    pump = Pump(lambda: engine_of(card, case, blocks, method, limits, load_parts), threaded=False)
    pump.open()
    return pump


def finish_pump(card: Card, pump: Pump, tickets: int, until: float = 10.0) -> float:
    """Tick as the pump's thread does until so many commands have ended; the time of the last of them, to a tick."""
    ended = 0
    with card.thread(PUMP):
        while ended < tickets:
            pump.tick()
            acks = pump.poll()
            assert all(ack.outcome is Outcome.DONE for ack in acks) and card.clock < until
            ended += sum(ack.last for ack in acks)
            card.sleep(0.5e-3)
        return card.clock


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("case", [LLAMA_8B, LLAMA_8B_BLOCKS], ids=lambda case: case.name)
def test_submitting_4_gib_of_loads_takes_the_models_thread_less_than_5_ms(
    card: Card, case: Case, method: Method
) -> None:
    pump = pump_of(card, case, GIB_4, method)
    card.forward(0.2)
    moves = moves_of(GIB_4)
    with uncollected():
        began, cpu = card.clock, time.thread_time()
        pump.load(moves)
        spent = card.clock - began + time.thread_time() - cpu
    assert spent <= 5e-3 * slowness(), "the driver's time, and Python's"
    assert 0.2 < finish_pump(card, pump, 1) < 0.2 + 1.3 * GIB_4 * case.block_bytes / card.parameters["link_bytes_s"]


@pytest.mark.parametrize("method", [None, *Method])
def test_a_pool_of_whole_blocks_submits_4_gib_in_less_than_5_ms_without_a_pump(
    card: Card, method: Method | None
) -> None:
    """`DevicePool` submits on the thread that then waits for the copies: neither a forward nor a full launch queue may
    hold it. `None`: the method is chosen. Of Python's time, which has the model's own in it, the least of three."""
    engine = engine_of(card, LLAMA_8B_BLOCKS, GIB_4, method)
    load_s = GIB_4 * LLAMA_8B_BLOCKS.block_bytes / card.parameters["link_bytes_s"]
    spent: list[float] = []
    for seed in range(3):
        card.forward(0.2)
        moves = moves_of(GIB_4, seed)
        began, cpu = card.clock, time.thread_time()
        engine.load(moves)
        spent.append(time.thread_time() - cpu)
        assert card.clock - began <= 4e-3, "the driver's time"
        assert 0.2 < finish(card, engine) - began <= 0.2 + 1.2 * load_s
    assert card.blocked_s == 0
    assert method is not None or min(spent) <= 8e-3 * slowness()


@pytest.mark.parametrize("jobs", [1, 4])
def test_loads_beside_prefill_steps_take_the_links_time(card: Card, jobs: int) -> None:
    """32k tokens of an 8B whose blocks were marked free before the step that now runs, in one load or in several."""
    pump = pump_of(card, LLAMA_8B_BLOCKS, GIB_4)
    mark = pump.mark()
    for _ in range(3):
        card.forward(0.3)
    began = card.clock
    moves = moves_of(GIB_4)
    for part in range(jobs):
        pump.load(moves.take(slice(part, None, jobs)), after=mark)
    nbytes = GIB_4 * LLAMA_8B_BLOCKS.block_bytes
    assert finish_pump(card, pump, jobs) - began <= 1.15 * nbytes / card.parameters["link_bytes_s"]


def test_loads_of_more_than_the_window_do_not_wait_for_a_step(card: Card) -> None:
    """16 GiB, four times what an engine without a pump has in flight until it is polled."""
    blocks = 4 * GIB_4
    pump = pump_of(card, LLAMA_8B_BLOCKS, blocks)
    mark = pump.mark()
    for _ in range(3):
        card.forward(0.3)
    began = card.clock
    pump.load(moves_of(blocks), after=mark)
    nbytes = blocks * LLAMA_8B_BLOCKS.block_bytes
    assert finish_pump(card, pump, 1) - began <= 1.1 * nbytes / card.parameters["link_bytes_s"]


@pytest.mark.parametrize("method", [Method.DMA, Method.DIRECT])
def test_a_forward_overlaps_a_load_by_layer(card: Card, method: Method) -> None:
    """SGLang loads for a batch whose forward follows at once. 4 GiB, and a forward that takes as long as they do."""
    load_s = GIB_4 * LLAMA_8B.block_bytes / card.parameters["link_bytes_s"]

    def batch_s(parts: int) -> float:
        limits = CopyLimits(load_chunk_bytes=4 << 30) if parts > 1 else None
        engine = engine_of(card, LLAMA_8B, GIB_4, method, limits, parts)
        began = card.clock
        ticket = engine.load(moves_of(GIB_4))
        for layer in range(LLAMA_8B.fragments):
            engine.fence(ticket, layer)
            card.forward(load_s / LLAMA_8B.fragments)
        while not card.idle:
            card.sleep(0.1e-3)
        return card.clock - began

    assert batch_s(1) > 2 * load_s
    assert batch_s(8) < 1.5 * load_s


@pytest.mark.parametrize("method", [Method.DMA, Method.DIRECT])
def test_a_pump_launches_layers_while_the_model_launches_its_own(card: Card, method: Method) -> None:
    """SGLang's pages of 64 tokens, 4 GiB, and a forward as long, behind another forward. The model's thread waits for
    the launch of each group of layers, never submits, and the batch ends no later than with a caller that submits."""
    blocks = (4 << 30) // SGLANG_8B.block_bytes
    load_s = (4 << 30) / card.parameters["link_bytes_s"]
    pump = pump_of(card, SGLANG_8B, blocks, method, load_parts=8)
    card.forward(0.2)
    moves = moves_of(blocks)
    with uncollected():
        began, cpu = card.clock, time.thread_time()
        ticket = pump.load(moves)
        spent = card.clock - began + time.thread_time() - cpu
    assert spent <= 5e-3 * slowness(), "the driver's time, and Python's"
    launched: list[tuple[int, float]] = []  # layers that are launched, and when
    real = pump._launched

    def note(ticket: int, flight: Flight, last: bool) -> None:
        real(ticket, flight, last)
        job = pump._under_way[ticket]
        layers = sum(job.covers(layer) for layer in range(SGLANG_8B.fragments))
        launched.append((layers, card.clock))

    pump._launched = note  # type: ignore[method-assign]
    with card.thread(PUMP):
        pump.tick()
    held = []
    for layer in range(SGLANG_8B.fragments):
        due = next(clock for layers, clock in launched if layers > layer)
        held.append(max(0.0, due - card.clock))
        card.sleep_until(max(due, card.clock))
        pump.fence(ticket, layer)
        card.forward(load_s / SGLANG_8B.fragments)
    assert max(held) <= 5e-3
    while not card.idle:
        card.sleep(0.1e-3)
    assert card.clock - began - 0.2 < 1.3 * load_s


def test_marks_are_used_again(card: Card) -> None:
    device, host, shape = LLAMA_8B_BLOCKS.memories(8)
    mover = CudaMover(card.driver(), device, host, shape, Table("", {}))
    first = mover.mark()
    number = first.cuda_event  # type: ignore[attr-defined]
    second = mover.mark()
    assert second.cuda_event != number  # type: ignore[attr-defined]
    del first
    assert mover.mark().cuda_event == number  # type: ignore[attr-defined]


@pytest.mark.parametrize(("store", "share"), [(False, 0.9), (True, 0.9)], ids=["load", "store"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "beside forwards"])
def test_staging_crosses_the_link_while_it_turns(card: Card, store: bool, share: float, busy: bool) -> None:
    engine = engine_of(card, LLAMA_70B_RANK, 4000, Method.STAGED)
    if busy:
        event = Recorded(card)
        for _ in range(4):
            card.forward(0.3)
    moves = moves_of(4000)
    after = event if busy else None
    began = card.clock
    _ = engine.store(moves, after=after) if store else engine.load(moves, after=after)
    rate = 4000 * LLAMA_70B_RANK.block_bytes / (finish(card, engine, 0.1e-3) - began)
    assert rate >= share * card.parameters["link_bytes_s"]


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "beside forwards"])
def test_small_fragments_by_the_method_that_is_chosen(card: Card, busy: bool) -> None:
    engine = engine_of(card, LLAMA_70B_RANK, 4000)
    event = Recorded(card)
    for _ in range(4 if busy else 0):
        card.forward(0.3)
    began = card.clock
    engine.load(moves_of(4000), after=event)
    assert 4000 * LLAMA_70B_RANK.block_bytes / (finish(card, engine, 0.1e-3) - began) >= 40e9


def test_a_measurement_does_not_wait_for_the_forward_that_runs(card: Card) -> None:
    card.forward(5.0)
    measure = measurement(card.driver, lambda: card.clock)
    for method in Method:
        cells = measure(method, 8 << 10)
        assert set(cells) == {(store, count) for store in (True, False) for count in COUNTS}
        assert max(cells.values()) < 10e-3
    assert card.clock < 1.0


def test_only_a_whole_table_is_kept_and_one_process_measures_at_a_time(
    card: Card, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = card.driver()
    taken: list[bool] = []

    def measure(_: object, device: str, __: int) -> Table:
        handle = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
        taken.append(True)
        return Table(device, {(True, 512, 16): Method.DIRECT}, whole=len(taken) > 1)

    monkeypatch.setattr(calibration, "_measure", measure)
    for count in (1, 2, 2, 2):
        table = calibration.measured_table(driver, tmp_path, 512)
        assert table.choose(True, 512, 16) is Method.DIRECT and len(taken) == count
    assert "kernels" in driver.scope and "link" in driver.scope and driver.name in driver.scope
    (tmp_path / "copies").write_text("")
    assert calibration.measured_table(driver, tmp_path / "copies" / "here", 512).best == {}


def test_a_table_is_measured_once_by_whoever_comes_first(
    card: Card, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where another process measures for too long, the rule of thumb serves."""
    driver, table = card.driver(), Table(card.driver().scope, {(True, 512, 16): Method.DIRECT}, whole=True)
    measured = list[bool]()
    monkeypatch.setattr(calibration, "_measure", lambda *_: (measured.append(True), table)[1])
    assert calibration.measured_table(driver, None, 512) is table and len(measured) == 1, "it is kept nowhere"
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    monkeypatch.setattr(calibration, "_TURN_S", 0.1)
    assert calibration.measured_table(driver, tmp_path, 512).best == {} and len(measured) == 1
    os.close(handle)
    answers = iter([None, table])
    monkeypatch.setattr(calibration, "load_table", lambda path, device: next(answers))
    assert calibration.measured_table(driver, tmp_path, 512) is table, "the one before has written it"
    assert len(measured) == 1


def test_a_copy_that_hangs_ends_its_measurement(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_once", lambda *_: None)
    assert measurement(card.driver, lambda: card.clock)(Method.DMA, 8 << 10) == {}
