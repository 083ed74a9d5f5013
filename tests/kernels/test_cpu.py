"""The whole path without a device: bytes, layouts, ordering, and a random walk against a model."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from manual_mover import ManualEvent

from kvtier.kernels.copy import CopyEngine, CopyLimits, Lane, Moves, Outcome
from kvtier.kernels.cpu import open_engine
from kvtier.kernels.layout import Order, Shape, of_arenas, of_pool, of_slots, of_tensors


def arena_of(nbytes: int, fill: int = 0xA5) -> memoryview:
    return memoryview(bytearray([fill]) * nbytes)


def drain(engine: CopyEngine, rounds: int = 100) -> list[tuple[int, Outcome]]:
    acks = [ack for _ in range(rounds) for ack in engine.poll()]
    return [(ack.ticket, ack.outcome) for ack in acks]


def test_whole_blocks_travel_to_every_rank_and_back() -> None:
    generator = torch.Generator().manual_seed(1)
    pool = torch.randint(0, 256, (8, 6 * 1000), dtype=torch.uint8, generator=generator)
    before = pool.clone()
    device, shape = of_pool(pool, pieces=3)
    arenas = [arena_of(10 * 2048) for _ in range(3)]
    engine = open_engine(device, of_arenas(arenas, 2048, shape), shape)
    store = engine.store(Moves.of([(1, 9, 0), (2, 0, 0), (3, 1, 4)]))
    assert drain(engine) == [(store, Outcome.DONE)]
    for block, slot in ((1, 9), (2, 0), (3, 1)):
        pieces = b"".join(bytes(arena[slot * 2048 : slot * 2048 + 2000]) for arena in arenas)
        assert pieces == before[block].numpy().tobytes()
    assert all(bytes(arena[2000:2048]) == b"\xa5" * 48 for arena in arenas), "the padding of a slot is not written"
    pool.zero_()
    load = engine.load(Moves.of([(6, 9, 0), (5, 0, 0), (4, 1, 4)]))
    assert drain(engine) == [(load, Outcome.DONE)]
    expected = torch.zeros_like(pool)
    expected[6], expected[5], expected[4] = before[1], before[2], before[3]
    assert torch.equal(pool, expected)
    assert engine.close(timeout_s=1.0)


LAYOUTS = list(product(["KBNHC", "BKNHC", "BKHNC", "BNHKC", "BHNKC"], Order, [False, True]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("dims", "order", "packed"), LAYOUTS)
def test_a_slot_has_its_own_layout_whatever_the_engine_uses(
    dims: str, order: Order, packed: bool, dtype: torch.dtype
) -> None:
    shape = Shape(layers=3, kv=2, tokens=4, heads=3, channels=5, element_bytes=dtype.itemsize)
    generator = torch.Generator().manual_seed(2)
    extents = {"B": 6, "K": 2, "N": 4, "H": 3, "C": 5}
    logical = torch.randint(0, 256, (3, 6, 2, 4, 3, 5 * dtype.itemsize), dtype=torch.uint8, generator=generator)
    size = [extents[axis] for axis in dims]
    places = ["BKNHC".index(axis) for axis in dims]
    layers = [
        logical[layer].permute(*places).contiguous().view(dtype).reshape(size).clone() for layer in range(shape.layers)
    ]
    slot_bytes = shape.block_bytes + 7
    arena = arena_of(4 * slot_bytes)
    device, host = of_tensors(layers, dims, shape), of_slots(arena, slot_bytes, shape, order, packed)
    engine = open_engine(device, host, shape)
    engine.store(Moves.of([(5, 2, 0), (0, 3, 0)]))
    drain(engine)
    inner = ("NHKC" if order is Order.NHD else "HNKC") if packed else ("KNHC" if order is Order.NHD else "KHNC")
    slots = np.frombuffer(arena, dtype=np.uint8).reshape(4, slot_bytes)
    for block, slot in ((5, 2), (0, 3)):
        expected = logical[:, block].permute(0, *(1 + "KNHC".index(axis) for axis in inner)).contiguous()
        assert slots[slot, : shape.block_bytes].tobytes() == expected.numpy().tobytes()
        assert slots[slot, shape.block_bytes :].tobytes() == b"\xa5" * 7
    assert (slots[:2] == 0xA5).all()
    wanted = [layer.clone() for layer in layers]
    for layer, want in zip(layers, wanted, strict=True):
        at = dims.index("B")
        want.select(at, 1).copy_(layer.select(at, 5))
        want.select(at, 2).copy_(layer.select(at, 0))
    engine.load(Moves.of([(1, 2, 0), (2, 3, 0)]))
    drain(engine)
    for layer, want in zip(layers, wanted, strict=True):
        assert torch.equal(layer.view(torch.uint8), want.view(torch.uint8))


def small_engine(limits: CopyLimits | None = None) -> tuple[CopyEngine, torch.Tensor, memoryview]:
    pool = torch.zeros(8, 64, dtype=torch.uint8)
    device, shape = of_pool(pool)
    arena = arena_of(8 * 64)
    host = of_arenas([arena], 64, shape)
    return (open_engine(device, host, shape, limits) if limits else open_engine(device, host, shape)), pool, arena


def test_a_store_reads_nothing_before_its_event() -> None:
    engine, pool, arena = small_engine()
    event = ManualEvent()
    engine.store(Moves.of([(0, 0, 0)]), after=event)
    assert drain(engine) == []
    pool[0] = 7  # the compute that fills the block
    event.reached = True
    assert drain(engine) == [(1, Outcome.DONE)]
    assert bytes(arena[:64]) == bytes([7]) * 64


def test_a_load_over_a_block_being_stored_does_not_change_what_is_stored() -> None:
    engine, pool, arena = small_engine()
    pool[3] = 9
    arena[128:192] = bytes([4]) * 64
    event = ManualEvent()
    engine.store(Moves.of([(3, 0, 0)]), after=event)
    engine.load(Moves.of([(3, 2, 0)]))
    assert drain(engine) == []
    event.reached = True
    drain(engine)
    assert bytes(arena[:64]) == bytes([9]) * 64
    assert bytes(pool[3].numpy()) == bytes([4]) * 64


def test_a_fence_copies_now() -> None:
    engine, pool, arena = small_engine(CopyLimits(chunk_bytes=64, load_window_bytes=64))
    arena[:] = bytes(range(8)) * 64
    ticket = engine.load(Moves.of([(i, i, 0) for i in range(8)]))
    engine.fence(ticket)
    assert bytes(pool.numpy().tobytes()) == bytes(range(8)) * 64
    assert drain(engine) == [(ticket, Outcome.DONE)] * 8


def test_a_cancelled_copy_behind_a_closed_gate_leaves_only_quarantine() -> None:
    engine, _, _ = small_engine()
    event = ManualEvent()
    ticket = engine.load(Moves.of([(0, 0, 0)]), after=event)
    engine.cancel(ticket)
    assert drain(engine) == [] and engine.stats().quarantined == 1
    assert not engine.close(timeout_s=0.0)
    event.reached = True
    assert engine.close(timeout_s=1.0)
    assert drain(engine) == [(ticket, Outcome.ABORTED)]


@pytest.mark.parametrize("seed", range(20))
def test_a_random_walk_never_leaves_a_wrong_byte(seed: int) -> None:
    """Stores, loads, cancellations, late events and block reuse, against a model that trusts acknowledgements only."""
    rng = random.Random(seed)
    pool = torch.zeros(12, 24, dtype=torch.uint8)
    device, shape = of_pool(pool)
    arena = arena_of(9 * 32)
    limits = CopyLimits(
        chunk_bytes=48, load_window_bytes=96, store_window_bytes=96, store_window_while_loading_bytes=48
    )
    engine = open_engine(device, of_arenas([arena], 32, shape), shape, limits)
    generation = [0] * 9
    slot_value: dict[int, int] = {}  # READY slots
    filling: dict[int, tuple[int, int]] = {}  # slot → (generation, expected value)
    block_value = dict.fromkeys(range(12), 0)  # blocks whose bytes are known
    reading: dict[int, int] = {}  # slot → loads in flight
    loading: dict[int, tuple[int, int]] = {}  # block → (slot, expected value)
    storing: dict[int, int] = {}  # block → stores in flight
    events: list[ManualEvent] = []
    tickets: list[int] = []
    counter = 0

    def settle() -> None:
        for ack in engine.poll():
            for block, slot, slot_generation in ack.moves.triples():
                if ack.lane is Lane.STORE:
                    storing[block] -= 1
                    expected_generation, value = filling.pop(slot)
                    assert slot_generation == expected_generation
                    if ack.outcome is Outcome.DONE:
                        slot_value[slot] = value
                        assert bytes(arena[slot * 32 : slot * 32 + 24]) == bytes([value]) * 24
                else:
                    reading[slot] -= 1
                    _, value = loading.pop(block)
                    if ack.outcome is Outcome.DONE:
                        block_value[block] = value
                        assert bytes(pool[block].numpy()) == bytes([value]) * 24
        engine.check()

    for _ in range(400):
        action = rng.random()
        event = ManualEvent()
        event.reached = rng.random() < 0.5
        if action < 0.3:
            free = [s for s in range(9) if s not in filling and not reading.get(s)]
            known = [b for b in block_value if b not in loading]
            pairs = list(zip(rng.sample(known, min(3, len(known))), rng.sample(free, min(3, len(free))), strict=False))
            triples = []
            for block, slot in pairs:
                generation[slot] += 1
                slot_value.pop(slot, None)
                filling[slot] = (generation[slot], block_value[block])
                storing[block] = storing.get(block, 0) + 1
                triples.append((block, slot, generation[slot]))
            if triples:
                events.append(event)
                tickets.append(engine.store(Moves.of(triples), after=event))
        elif action < 0.6 and slot_value:
            blocks = rng.sample([b for b in range(12) if b not in loading], min(3, 12 - len(loading)))
            triples = []
            for block in blocks:
                slot = rng.choice(sorted(slot_value))
                reading[slot] = reading.get(slot, 0) + 1
                loading[block] = (slot, slot_value[slot])
                block_value.pop(block, None)  # unknown until acknowledged
                triples.append((block, slot, generation[slot]))
            if triples:
                events.append(event)
                tickets.append(engine.load(Moves.of(triples), after=event, expedited=rng.random() < 0.3))
        elif action < 0.7 and tickets:
            engine.cancel(rng.choice(tickets))
        elif action < 0.8:
            idle = [b for b in range(12) if b not in loading and not storing.get(b)]
            if idle:  # the compute fills a block that no copy uses
                counter = counter % 255 + 1
                block = rng.choice(idle)
                pool[block] = counter
                block_value[block] = counter
        elif action < 0.9:
            for late in rng.sample(events, min(2, len(events))):
                late.reached = True
        settle()
    for late in events:
        late.reached = True
    for _ in range(400):
        settle()
    stats = engine.stats()
    assert not filling and not loading and stats.queued == stats.in_flight == stats.quarantined == stats.refused == 0
    assert stats.stored_bytes and stats.loaded_bytes and stats.aborted
