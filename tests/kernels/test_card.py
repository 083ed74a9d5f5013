"""Copies over a card of virtual time: what a call costs the thread that makes it, and how much of the link is used."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from card import (
    DEEPSEEK,
    LLAMA_8B,
    LLAMA_8B_BLOCKS,
    LLAMA_8B_SPLIT,
    LLAMA_70B_RANK,
    LLAMA_70B_RANK_BLOCKS,
    SGLANG_8B,
    Card,
    Case,
)

from kvtier.kernels.copy import CopyEngine, CopyLimits, Moves, Outcome
from kvtier.kernels.cuda import CudaMover
from kvtier.kernels.method import Method, Table


@pytest.fixture
def card(libcuda: ctypes.CDLL) -> Iterator[Card]:
    card = Card(libcuda)
    yield card
    card.close()


def engine_of(
    card: Card, case: Case, blocks: int, method: Method | None = None, limits: CopyLimits = CopyLimits()
) -> CopyEngine:
    device, host, shape = case.memories(blocks)
    driver = card.driver()
    for region in host.regions:
        driver.register(region.start, region.nbytes)
    return CopyEngine(CudaMover(driver, device, host, shape, Table("", {}), method=method), limits)


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
        (LLAMA_8B_BLOCKS, Method.DMA, 52, 55),
        (LLAMA_70B_RANK, Method.DMA, 5, 17),
        (LLAMA_70B_RANK, Method.DIRECT, 43, 49),
        (LLAMA_70B_RANK_BLOCKS, Method.DMA, 50, 55),
        (DEEPSEEK, Method.DMA, 44, 52),
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
