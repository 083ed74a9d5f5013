"""DevicePool: bytes of blocks in and out of a tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.errors import CapacityError, ConfigError, InvalidRequest, TierError
from kvtier.kernels.copy import Ack, Lane, Moves, Outcome
from kvtier.testing import chain_of, payload_of, sample_namespace
from kvtier.tiers.device.torch_pool import DevicePool
from kvtier.tiers.host.arena import Arena

torch = pytest.importorskip("torch")
BLOCK = 8192


def never(over: object, last: bool) -> None:
    raise AssertionError("no copy was late")


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    memory = Arena(BLOCK, request.param, 8 * BLOCK)
    memory.open()
    yield memory
    memory.close()


def test_bytes_come_back_from_the_host_as_they_went_there(arena: Arena) -> None:
    pool = DevicePool(6, BLOCK)
    pool.attach(arena)
    chain = chain_of(sample_namespace(BLOCK), 4)
    payloads = [payload_of(key, BLOCK) for key in chain]
    slots = pool.allocate(4)
    for slot, payload in zip(slots, payloads, strict=True):
        pool.rows[slot] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    places = [(5, 0), (0, 0), (7, 0), (2, 0)]
    assert pool.copy_out(slots, places, never) == [True] * 4
    assert [b"".join(arena.pieces(number)) for number, _ in places] == payloads
    pool.free(slots)
    pool.rows.zero_()
    again = pool.allocate(4)
    assert pool.copy_in(places, again, never) == [True] * 4
    assert [bytes(pool.rows[slot].numpy()) for slot in again] == payloads
    pool.detach()
    pool.detach()


def test_a_stale_place_is_refused_and_left_alone(arena: Arena) -> None:
    pool = DevicePool(2, BLOCK)
    pool.attach(arena)
    pool.rows.fill_(1)
    slots = pool.allocate(2)
    assert pool.copy_out(slots, [(0, 3), (1, 3)], never) == [True, True]
    pool.rows.fill_(2)
    assert pool.copy_out(slots, [(0, 3), (1, 4)], never) == [False, True]
    assert {bytes(piece)[0] for piece in arena.pieces(0)} == {1} and {bytes(p)[0] for p in arena.pieces(1)} == {2}
    pool.detach()


def test_a_late_copy_tells_of_the_very_places_when_it_has_ended(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = DevicePool(2, BLOCK)
    pool.attach(arena)
    slots, told = pool.allocate(2), []
    with monkeypatch.context() as patch:
        patch.setattr(pool._engine, "wait", lambda *_: False)
        with pytest.raises(TierError, match="did not finish 2 copies"):
            pool.copy_out(slots, [(3, 7), (1, 9)], lambda over, last: told.append((over, last)))
    assert pool.recovered(), "on a CPU the copy ends when it is asked about"
    assert told == [([(slots[0], (3, 7)), (slots[1], (1, 9))], True)]
    assert pool.copy_out(slots, [(3, 8), (1, 10)], never) == [True, True]
    assert pool.recovered() and len(told) == 1
    pool.detach()
    assert not pool.recovered()


def test_a_copy_that_the_device_does_not_take_arrives_nowhere(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = DevicePool(2, BLOCK)
    pool.attach(arena)
    slots = pool.allocate(2)

    def refused(moves: Moves) -> int:
        raise TierError("g1", "copy", "the device takes none")

    with monkeypatch.context() as patch:
        patch.setattr(pool._engine, "store", refused)
        assert pool.copy_out(slots, [(3, 7), (1, 9)], never) == [False, False]
    assert pool.recovered(), "both sides are the caller's again"
    assert pool.copy_out(slots, [(3, 7), (1, 9)], never) == [True, True]
    assert pool.copy_out([], [], never) == []
    pool.detach()


def test_copies_without_an_arena_or_a_place_are_refused(arena: Arena) -> None:
    pool = DevicePool(2, BLOCK)
    slots = pool.allocate(2)
    with pytest.raises(InvalidRequest, match="no arena"):
        pool.copy_out(slots, [(0, 0), (1, 0)], never)
    pool.attach(arena)
    with pytest.raises(InvalidRequest, match="2 blocks and 1 places"):
        pool.copy_in([(0, 0)], slots, never)
    pool.detach()


def test_a_typed_view_is_the_memory_itself() -> None:
    pool = DevicePool(3, BLOCK)
    blocks = pool.typed(torch.float32, (2, 2, 16, 32))
    blocks[1] = torch.arange(2048, dtype=torch.float32).view(2, 2, 16, 32)
    assert bytes(pool.rows[1].numpy()) == torch.arange(2048, dtype=torch.float32).numpy().tobytes()
    with pytest.raises(InvalidRequest, match="8192"):
        pool.typed(torch.float32, (2, 2, 16, 31))


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match="g1"):
        DevicePool(16, 1 << 56)


def test_every_ranks_memory_is_placed_near_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, frozenset[int]]] = []

    def populate(view: memoryview, cpus: frozenset[int] = frozenset(), **_: object) -> int:
        asked.append((view.nbytes, cpus))
        return view.nbytes

    monkeypatch.setattr("kvtier.tiers.host.arena.populate", populate)
    memory = Arena(BLOCK, 2, 8 * BLOCK, [frozenset({0, 1}), frozenset({64})])
    memory.open()
    memory.close()
    assert asked == [(4 * BLOCK, frozenset({0, 1})), (4 * BLOCK, frozenset({64}))]
    with pytest.raises(ConfigError, match="1 ranks"):
        Arena(BLOCK, 2, 8 * BLOCK, [frozenset()])


def test_a_late_copy_of_several_parts_is_over_with_its_last() -> None:
    pool, told = DevicePool(4, BLOCK), []
    pool._overdue[7] = lambda over, last: told.append((over, last))
    for number, last in ((1, False), (2, True), (3, True)):
        pool._deliver([Ack(7, Lane.STORE, Moves.of([(number, number + 4, 9)]), Outcome.ABORTED, last)])
    assert told == [([(1, (5, 9))], False), ([(2, (6, 9))], True)]
    assert not pool._overdue
