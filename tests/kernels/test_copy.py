"""The copy engine's promises: order, priority, cancellation, generations."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from manual_mover import ManualEvent, ManualFlight, ManualMover

from kvtier.errors import CapacityError, ClosedError, InvalidRequest, TierError
from kvtier.kernels.copy import Ack, CopyEngine, CopyLimits, Lane, Moves, Outcome
from kvtier.kernels.mover import Flight, Gate, State

SMALL = CopyLimits(
    chunk_bytes=200, load_window_bytes=10_000, store_window_bytes=1_000, store_window_while_loading_bytes=400
)


def engine_of(mover: ManualMover, limits: CopyLimits = SMALL) -> CopyEngine:
    return CopyEngine(mover, limits)


def moves(*triples: tuple[int, int, int]) -> Moves:
    return Moves.of(triples)


def some(count: int, generation: int = 0, first: int = 0) -> Moves:
    """Blocks and slots `first` .. `first + count - 1`."""
    return Moves.of((i, i, generation) for i in range(first, first + count))


def outcomes(acks: list[Ack]) -> Counter[Outcome]:
    total: Counter[Outcome] = Counter()
    for ack in acks:
        total[ack.outcome] += len(ack.moves)
    return total


def test_a_ticket_is_acknowledged_with_its_own_triples_and_once() -> None:
    mover = ManualMover()
    engine = engine_of(mover)
    ticket = engine.store(moves((3, 7, 1), (4, 9, 5), (5, 2, 0)))
    assert engine.poll() == []
    mover.end(0, 1)
    acks = engine.poll()
    assert [ack.ticket for ack in acks] == [ticket, ticket]
    assert [triple for ack in acks for triple in ack.moves.triples()] == [(3, 7, 1), (4, 9, 5), (5, 2, 0)]
    assert [ack.last for ack in acks] == [False, True]
    assert outcomes(acks) == {Outcome.DONE: 3}
    assert engine.poll() == []
    assert mover.gates[0].closed == 1
    engine.check()


def test_an_empty_command_is_over_at_once() -> None:
    engine = engine_of(ManualMover())
    ticket = engine.load(moves())
    assert [(ack.ticket, ack.last, len(ack.moves)) for ack in engine.poll()] == [(ticket, True, 0)]


def test_a_store_of_a_generation_already_named_is_refused() -> None:
    mover = ManualMover()
    engine = engine_of(mover)
    engine.store(moves((0, 5, 3)))
    mover.end(0)
    engine.poll()
    engine.store(moves((1, 5, 3), (2, 6, 0)))
    engine.store(moves((1, 5, 2)))
    acks = engine.poll()
    assert [(ack.outcome, ack.moves.triples()) for ack in acks] == [
        (Outcome.REFUSED, [(1, 5, 3)]),
        (Outcome.REFUSED, [(1, 5, 2)]),
    ]
    assert len(mover.flights) == 2 and mover.flights[1].moves.triples() == [(2, 6, 0)]
    engine.store(moves((1, 5, 4)))
    assert mover.flights[2].moves.triples() == [(1, 5, 4)], "a newer generation is taken"
    engine.check()


def test_a_load_of_an_older_generation_is_refused_and_of_this_one_is_not() -> None:
    mover = ManualMover()
    engine = engine_of(mover)
    engine.load(moves((0, 5, 3)))
    engine.load(moves((1, 5, 3)))
    engine.load(moves((2, 5, 2)))
    engine.load(moves((3, 8, 1), (4, 8, 2)))
    assert [flight.moves.triples() for flight in mover.flights] == [[(0, 5, 3)], [(1, 5, 3)], [(4, 8, 2)]]
    assert outcomes(engine.poll()) == {Outcome.REFUSED: 2}
    engine.check()


def test_a_slot_being_filled_or_read_is_taken() -> None:
    mover = ManualMover()
    engine = engine_of(mover)
    engine.store(moves((0, 5, 1)))
    engine.load(moves((1, 5, 1)))  # not filled yet
    engine.load(moves((2, 6, 1)))
    engine.store(moves((3, 6, 2)))  # still read
    engine.load(moves((2, 7, 1)))  # that block is being loaded
    assert outcomes(engine.poll()) == {Outcome.REFUSED: 3}
    mover.end(0, 1)
    assert outcomes(engine.poll()) == {Outcome.DONE: 2}
    engine.load(moves((1, 5, 1)))
    engine.store(moves((3, 6, 2)))
    engine.load(moves((2, 7, 1)))
    assert len(mover.flights) == 5, "free again after the acknowledgement"
    engine.check()


def test_a_load_waits_for_the_store_that_still_reads_its_block() -> None:
    mover = ManualMover()
    engine = engine_of(mover)
    engine.store(moves((4, 1, 0)))
    engine.store(moves((9, 2, 0)))
    engine.load(moves((4, 3, 0)))
    store, other, load = mover.flights
    assert load.behind == (store,) and other not in load.behind
    engine.check()


def test_a_cancelled_store_does_not_hide_an_older_one_that_reads_the_same_block() -> None:
    mover = ManualMover()
    engine = engine_of(mover, CopyLimits(chunk_bytes=100, store_window_bytes=100))
    engine.store(moves((4, 1, 0)))
    second = engine.store(moves((4, 2, 0)))
    assert len(mover.flights) == 1
    engine.cancel(second)
    engine.load(moves((4, 3, 0)))
    assert mover.flights[1].behind == (mover.flights[0],)
    engine.check()


def test_a_load_pulls_the_throttled_store_it_depends_on() -> None:
    mover = ManualMover()
    engine = engine_of(mover, CopyLimits(chunk_bytes=100, store_window_bytes=200, store_window_while_loading_bytes=100))
    engine.store(some(6))
    assert len(mover.flights) == 2
    engine.load(moves((3, 40, 0)))
    assert [flight.lane for flight in mover.flights] == [Lane.STORE] * 4 + [Lane.LOAD]
    assert mover.flights[4].behind == (mover.flights[3],)
    engine.check()


def test_a_store_waits_for_the_load_into_its_block() -> None:
    mover = ManualMover()
    engine = engine_of(mover)
    engine.load(moves((4, 1, 0)))
    engine.store(moves((4, 2, 0)))
    assert mover.flights[1].behind == (mover.flights[0],)


def test_loads_go_before_stores_that_wait() -> None:
    mover = ManualMover()
    engine = engine_of(mover, CopyLimits(chunk_bytes=100, store_window_bytes=100, store_window_while_loading_bytes=100))
    engine.store(some(3))
    engine.load(some(1, first=20))
    assert [flight.lane for flight in mover.flights] == [Lane.STORE, Lane.LOAD]
    mover.end(0, 1)
    engine.poll()
    assert [flight.lane for flight in mover.flights] == [Lane.STORE, Lane.LOAD, Lane.STORE]


def test_stores_are_throttled_while_a_load_flies_and_only_then() -> None:
    mover = ManualMover()
    engine = engine_of(mover)
    engine.load(some(1, first=40))
    engine.store(some(20))
    flying = [flight for flight in mover.flights if flight.lane is Lane.STORE]
    assert sum(len(flight.moves) for flight in flying) * 100 == 400
    mover.end(0)
    engine.poll()
    flying = [flight for flight in mover.flights if flight.lane is Lane.STORE]
    assert sum(len(flight.moves) for flight in flying) * 100 == 1000
    engine.check()


def test_an_expedited_load_does_not_queue_behind_others() -> None:
    mover = ManualMover()
    engine = engine_of(mover, CopyLimits(chunk_bytes=100, load_window_bytes=200))
    engine.load(some(10))
    engine.load(some(1, first=30), expedited=True)
    assert [flight.lane for flight in mover.flights] == [Lane.LOAD, Lane.LOAD, Lane.EXPEDITED]


def test_cancelling_frees_what_never_flew_at_once_and_the_rest_on_landing() -> None:
    mover = ManualMover()
    engine = engine_of(mover, CopyLimits(chunk_bytes=200, store_window_bytes=400))
    ticket = engine.store(some(10))
    assert len(mover.flights) == 2
    engine.cancel(ticket)
    engine.cancel(ticket)
    acks = engine.poll()
    assert outcomes(acks) == {Outcome.ABORTED: 6} and not any(ack.last for ack in acks)
    assert engine.stats().quarantined == 4
    engine.store(moves((0, 0, 1)))
    assert outcomes(engine.poll()) == {Outcome.REFUSED: 1}, "a quarantined slot is not given out again"
    mover.end(0, 1)
    acks = engine.poll()
    assert outcomes(acks) == {Outcome.ABORTED: 4} and acks[-1].last
    assert engine.stats().quarantined == 0
    engine.store(moves((0, 0, 1)))
    assert mover.flights[-1].moves.triples() == [(0, 0, 1)]
    assert mover.gates[0].closed == 1
    engine.check()


def test_a_failed_copy_is_acknowledged_as_failed() -> None:
    mover = ManualMover()
    engine = engine_of(mover)
    engine.load(some(1))
    mover.end(0, state=State.FAILED)
    assert outcomes(engine.poll()) == {Outcome.FAILED: 1}
    engine.load(some(1))
    mover.end(1)
    assert outcomes(engine.poll()) == {Outcome.DONE: 1}


def test_a_lost_copy_is_never_acknowledged_and_ends_the_engine() -> None:
    mover = ManualMover()
    engine = engine_of(mover)
    ticket = engine.load(some(2))
    mover.end(0, state=State.LOST)
    assert engine.poll() == []
    assert engine.stats().quarantined == 2 and engine.stats().broken
    with pytest.raises(TierError, match="lost"):
        engine.store(some(1, first=9))
    assert not engine.wait([ticket], timeout_s=10.0)
    assert not engine.close(timeout_s=10.0) and not mover.closed
    engine.check()


def test_what_never_flew_is_given_back_when_the_engine_breaks() -> None:
    mover = ManualMover()
    engine = engine_of(mover, CopyLimits(chunk_bytes=100, store_window_bytes=100))
    engine.store(some(3))
    mover.end(0, state=State.LOST)
    acks = engine.poll()
    assert outcomes(acks) == {Outcome.FAILED: 2} and not any(ack.last for ack in acks)
    assert engine.stats().quarantined == 1 and len(mover.flights) == 1 and mover.gates[0].closed == 1
    engine.check()


class Buggy(ManualMover):
    """Its launches from number `good` on go wrong, after they have begun to copy."""

    good = 1

    def launch(
        self, lane: Lane, moves: Moves, gate: Gate, behind: Sequence[Flight], show: Callable[[Flight], None]
    ) -> ManualFlight:
        flight = super().launch(lane, moves, gate, behind, show)
        if len(self.flights) > self.good:
            raise RuntimeError("a bug")
        return flight


@pytest.mark.parametrize("lane", [Lane.LOAD, Lane.STORE])
def test_a_launch_that_raises_is_lost_and_its_command_has_a_ticket(lane: Lane) -> None:
    mover = Buggy()
    engine = engine_of(mover)
    give = engine.load if lane is Lane.LOAD else engine.store
    ticket = give(some(4))  # two chunks: one flies, one is perhaps being copied
    assert engine.poll() == [], "who gave the command may not use its memory: copies are under way"
    mover.end(0)
    acks = engine.poll()
    assert [(ack.ticket, ack.outcome, ack.moves.slots.tolist()) for ack in acks] == [(ticket, Outcome.DONE, [0, 1])]
    assert not engine.ready and engine.stats().quarantined == 2 and not engine.close(0.0)
    engine.check()


def test_a_flight_whose_state_cannot_be_asked_for_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = ManualMover()
    engine = engine_of(mover)
    engine.store(some(1))
    monkeypatch.setattr(ManualFlight, "state", lambda self: 1 / 0)
    assert engine.poll() == [] and not engine.ready and not engine.close(0.0) and not mover.closed


def test_a_fence_launches_the_whole_ticket_and_orders_the_stream_behind_it() -> None:
    mover = ManualMover()
    engine = engine_of(mover, CopyLimits(chunk_bytes=100, store_window_bytes=100))
    engine.store(some(2))
    ticket = engine.store(some(2, first=10))
    engine.fence(ticket)
    assert [flight.fences for flight in mover.flights] == [0, 0, 1, 1]
    mover.end(0, 1, 2, 3)
    engine.poll()
    engine.fence(ticket)
    assert [flight.fences for flight in mover.flights] == [0, 0, 1, 1], "a ticket that is over needs no fence"


def test_every_launch_gets_the_gate_taken_when_the_command_came() -> None:
    mover = ManualMover()
    engine = engine_of(mover, CopyLimits(chunk_bytes=100, store_window_bytes=100))
    event = ManualEvent()
    engine.store(some(2), after=event)
    mover.end(0)
    engine.poll()
    first, second = mover.flights
    assert first.gate is second.gate and mover.gates[0].after is event
    assert mover.gates[0].closed == 1 and len(mover.gates) == 1


def test_waiting_ends_at_its_deadline_and_keeps_the_acknowledgements() -> None:
    mover = ManualMover()
    engine = engine_of(mover)
    ticket = engine.load(some(1))
    time = [0.0]

    def sleep(seconds: float) -> None:
        time[0] += seconds

    assert not engine.wait([ticket], 0.001, now=lambda: time[0], sleep=sleep)
    mover.end(0)
    assert engine.wait([ticket], 0.0, now=lambda: time[0], sleep=sleep)
    assert outcomes(engine.poll()) == {Outcome.DONE: 1}


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    mover = ManualMover()
    engine = engine_of(mover, CopyLimits(chunk_bytes=100, queued_moves=4))
    engine.store(some(3))
    with pytest.raises(CapacityError):
        engine.load(some(2, first=10))
    engine.check()
    engine.load(some(1, first=10))


@pytest.mark.parametrize(
    "wrong", [[(64, 0, 0)], [(-1, 0, 0)], [(0, 64, 0)], [(0, -1, 0)]], ids=["block", "block<0", "slot", "slot<0"]
)
def test_an_index_out_of_range_is_an_error_not_a_copy(wrong: list[tuple[int, int, int]]) -> None:
    mover = ManualMover()
    engine = engine_of(mover)
    for command in (engine.store, engine.load):
        with pytest.raises(InvalidRequest):
            command(Moves.of(wrong))
    with pytest.raises(InvalidRequest):
        engine.store(moves((0, 1, 0), (1, 1, 1)))
    with pytest.raises(InvalidRequest):
        engine.load(moves((1, 0, 0), (1, 1, 0)))
    assert not mover.flights
    engine.load(moves((0, 1, 0), (1, 1, 0)))
    assert len(mover.flights) == 1, "one slot may be read into two blocks"


def test_closing_cancels_waits_and_releases_the_mover() -> None:
    mover = ManualMover()
    engine = engine_of(mover, CopyLimits(chunk_bytes=100, store_window_bytes=100))
    engine.store(some(3))
    assert not engine.close(timeout_s=0.0) and not mover.closed
    mover.end(0)
    assert engine.close(timeout_s=0.0) and mover.closed
    assert outcomes(engine.poll()) == {Outcome.ABORTED: 3}
    with pytest.raises(ClosedError):
        engine.load(some(1))


def test_an_engine_that_is_closed_with_a_copy_in_flight_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever closed it may let go of it: the copy goes on."""
    monkeypatch.setattr("kvtier.kernels.copy._UNENDED", [])
    for ends in (True, False):
        mover = ManualMover()
        engine, memory = engine_of(mover), weakref.ref(mover)
        engine.load(some(1))
        mover.end(*([0] if ends else []))
        assert engine.close(0.0) is ends and mover.closed is ends
        del engine, mover
        gc.collect()
        assert (memory() is None) is ends
