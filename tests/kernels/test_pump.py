"""Copies on a thread of their own: what the caller sees, and what of it holds the caller up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from manual_mover import ManualFlight, ManualMover

from kvtier.errors import TierError
from kvtier.kernels.copy import Ack, CopyEngine, CopyLimits, Lane, Moves, Outcome
from kvtier.kernels.mover import Flight, Gate, State
from kvtier.kernels.pump import Pump
from tests.support.waiting import eventually


def outcomes(acks: list[Ack]) -> list[tuple[int, Outcome]]:
    return [(ack.ticket, ack.outcome) for ack in acks]


def opened(mover: ManualMover) -> Pump:
    pump = Pump(lambda: CopyEngine(mover), threaded=False)
    pump.open()
    return pump


def test_commands_are_carried_out_by_ticks_and_answered_under_the_callers_tickets() -> None:
    mover = ManualMover()
    pump = opened(mover)
    first, second = pump.store(Moves.of([(1, 2, 0)])), pump.load(Moves.of([(3, 4, 0)]))
    assert len(mover.gates) == 2 and not mover.flights, "the point in the stream is taken, nothing is launched"
    assert pump.tick() and len(mover.flights) == 2
    mover.end(0, 1)
    assert pump.poll() == [] and pump.tick()
    assert sorted(outcomes(pump.poll())) == [(first, Outcome.DONE), (second, Outcome.DONE)]
    assert not pump.tick()
    third = pump.load(Moves.of([(5, 4, 0)]))
    pump.tick()
    pump.cancel(third)
    pump.cancel(99)
    pump.tick()
    mover.end(2)
    pump.tick()
    assert outcomes(pump.poll()) == [(third, Outcome.ABORTED)]
    assert pump.close(1.0) and mover.closed
    assert outcomes([*pump.poll()]) == []
    late = pump.store(Moves.of([(1, 2, 1)]))
    assert outcomes(pump.poll()) == [(late, Outcome.REFUSED)]


def test_a_command_that_the_engine_refuses_is_answered_and_its_gate_closed() -> None:
    mover = ManualMover()
    pump = opened(mover)
    wrong = pump.store(Moves.of([(1, 2, 0), (3, 2, 0)]))
    good = pump.store(Moves.of([(1, 5, 3)]))
    stale = pump.store(Moves.of([(1, 5, 3)]))
    pump.tick()
    assert outcomes(pump.poll()) == [(wrong, Outcome.REFUSED), (stale, Outcome.REFUSED)]
    mover.end(0)
    pump.tick()
    assert outcomes(pump.poll()) == [(good, Outcome.DONE)]
    assert all(gate.closed == 1 for gate in mover.gates)


def test_opening_holds_nobody_up_and_commands_before_its_end_are_refused() -> None:
    may_open, mover = threading.Event(), ManualMover()

    def slow() -> CopyEngine:
        assert may_open.wait(20.0)
        return CopyEngine(mover)

    pump = Pump(slow)
    ticket = pump.load(Moves.of([(1, 1, 0)]))
    assert not pump.ready and pump.mark() is None and outcomes(pump.poll()) == [(ticket, Outcome.REFUSED)]
    may_open.set()
    assert eventually(lambda: pump.ready)
    ticket = pump.load(Moves.of([(1, 1, 0)]))
    assert eventually(lambda: mover.flights)
    mover.end(0)
    acks: list[Ack] = []
    assert eventually(lambda: acks.extend(pump.poll()) or acks)
    assert outcomes(acks) == [(ticket, Outcome.DONE)]
    assert pump.close(5.0) and mover.closed


def test_an_engine_that_is_still_being_opened_is_closed_once_it_is_open() -> None:
    may_open, mover = threading.Event(), ManualMover()

    def slow() -> CopyEngine:
        assert may_open.wait(20.0)
        return CopyEngine(mover)

    pump = Pump(slow)
    assert pump.close(0.0) and not mover.closed, "nothing was copied"
    may_open.set()
    assert eventually(lambda: mover.closed)


def test_an_engine_that_cannot_be_opened_refuses_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> CopyEngine:
        raise TierError("g1", "open", "no such device")

    pump = Pump(broken)
    assert eventually(lambda: pump.failure)
    ticket = pump.load(Moves.of([(1, 1, 0)]))
    assert outcomes(pump.poll()) == [(ticket, Outcome.REFUSED)]
    assert "no such device" in pump.failure and not pump.ready and pump.close(1.0)


class Buggy(ManualMover):
    """Its launches go wrong from its second on."""

    def launch(self, *args: object, **options: object) -> ManualFlight:  # type: ignore[override]
        if self.flights:
            raise RuntimeError("a bug")
        return super().launch(*args, **options)  # type: ignore[arg-type]


def test_a_bug_in_a_launch_leaves_others_answers_and_ends_with_refusals() -> None:
    mover = Buggy()
    pump = opened(mover)
    good, lost = pump.load(Moves.of([(1, 1, 0)])), pump.load(Moves.of([(2, 2, 0)]))
    pump.tick()
    mover.end(0)
    pump.tick()
    assert outcomes(pump.poll()) == [(good, Outcome.DONE)], "the other may still be under way"
    assert not pump.ready
    late = pump.load(Moves.of([(3, 3, 0)]))
    assert outcomes(pump.poll()) == [(late, Outcome.REFUSED)] and lost < late
    assert not pump.close(0.0), "its memory stays held"


def test_a_bug_in_a_command_is_its_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = ManualMover()
    pump = opened(mover)
    with monkeypatch.context() as patch:
        patch.setattr(CopyEngine, "load", lambda *args, **options: [][0])
        wrong, good = pump.load(Moves.of([(1, 1, 0)])), pump.store(Moves.of([(2, 2, 0)]))
        pump.tick()
    mover.end(0)
    pump.tick()
    assert outcomes(pump.poll()) == [(wrong, Outcome.REFUSED), (good, Outcome.DONE)]
    assert [gate.closed for gate in mover.gates] == [1, 1]


def test_a_bug_in_a_tick_is_logged_and_does_not_end_the_thread_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover, real, bugs = ManualMover(), CopyEngine.poll, iter([True])

    def buggy(self: CopyEngine) -> list[Ack]:
        if next(bugs, False):
            raise RuntimeError("a bug")
        return real(self)

    monkeypatch.setattr(CopyEngine, "poll", buggy)
    pump = Pump(lambda: CopyEngine(mover))
    assert eventually(lambda: "a bug" in caplog.text)
    pump.load(Moves.of([(2, 2, 0)]))
    assert eventually(lambda: mover.flights)
    assert not pump.failure
    mover.end(0)
    assert eventually(pump.poll)
    assert pump.close(5.0)


class Layered(ManualMover):
    """Launches layers one after another, each when it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_launch = threading.Semaphore(0)

    def launch(
        self, lane: Lane, moves: Moves, gate: Gate, behind: Sequence[Flight], show: Callable[[Flight], None]
    ) -> ManualFlight:
        flight = LayeredFlight(lane, moves, gate, behind)
        for layer in range(3):
            assert self.may_launch.acquire(timeout=20.0)
            flight.launched = layer + 1
            if layer < 2:
                show(flight)
        self.flights.append(flight)
        return flight


class LayeredFlight(ManualFlight):
    launched = 0

    def covers(self, layer: int | None = None) -> bool:
        return self.launched > (2 if layer is None else layer)

    def fence(self, layer: int | None = None) -> None:
        assert self.covers(layer), "an event that is not recorded orders nothing"
        super().fence(layer)


def test_a_fence_waits_for_the_launch_of_its_layer_and_for_no_other() -> None:
    mover = Layered()
    pump = Pump(lambda: CopyEngine(mover))
    assert eventually(lambda: pump.ready)
    ticket = pump.load(Moves.of([(1, 1, 0)]))
    with pytest.raises(TierError, match="not launched within"):
        pump.fence(ticket, 0, timeout_s=0.01)
    mover.may_launch.release()
    pump.fence(ticket, 0)
    with pytest.raises(TierError, match="not launched within"):
        pump.fence(ticket, 1, timeout_s=0.01)
    mover.may_launch.release()
    pump.fence(ticket, 1)
    with pytest.raises(TierError, match="not launched within"):
        pump.fence(ticket, timeout_s=0.01)
    mover.may_launch.release()
    pump.fence(ticket, 2)
    pump.fence(ticket)
    assert mover.flights[0].fences == 4 and not pump.wait([ticket], 0.0)
    mover.end(0)
    assert pump.wait([ticket], 20.0) and outcomes(pump.poll()) == [(ticket, Outcome.DONE)]
    pump.fence(ticket)
    pump.fence(99)
    assert mover.flights[0].fences == 4, "what is over needs no order"
    assert pump.close(5.0)


def test_a_fence_launches_all_chunks_beyond_the_window() -> None:
    mover = ManualMover()
    pump = Pump(lambda: CopyEngine(mover, CopyLimits(chunk_bytes=100, load_window_bytes=100)))
    assert eventually(lambda: pump.ready)
    ticket = pump.load(Moves.of([(1, 1, 0), (2, 2, 0), (3, 3, 0)]))
    assert eventually(lambda: mover.flights)
    assert len(mover.flights) == 1
    pump.fence(ticket)
    assert [flight.fences for flight in mover.flights] == [1, 1, 1]
    mover.end(0, 1, 2)
    assert pump.wait([ticket], 20.0) and pump.close(5.0)


def test_nobody_waits_for_copies_that_are_lost() -> None:
    mover = ManualMover()
    pump = Pump(lambda: CopyEngine(mover))
    assert eventually(lambda: pump.ready)
    ticket, other = pump.load(Moves.of([(1, 1, 0)])), pump.store(Moves.of([(2, 2, 0)]))
    assert eventually(lambda: len(mover.flights) == 2)
    mover.end(0, state=State.LOST)
    began = time.monotonic()
    assert not pump.wait([ticket, other], 20.0) and time.monotonic() - began < 10.0
    assert not pump.close(0.0), "its memory stays held"


def test_a_fence_and_a_wait_behind_a_refused_command_return() -> None:
    mover = ManualMover()
    pump = Pump(lambda: CopyEngine(mover))
    assert eventually(lambda: pump.ready)
    ticket = pump.load(Moves.of([(1, 2, 0), (1, 3, 0)]))
    assert pump.wait([ticket], 20.0)
    pump.fence(ticket)
    assert outcomes(pump.poll()) == [(ticket, Outcome.REFUSED)] and pump.close(5.0)


def test_a_gate_that_cannot_be_had_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an error in the caller's thread, which launches the model."""
    mover = ManualMover()
    pump = opened(mover)

    def refuse(after: object) -> None:
        raise TierError("g1", "record event", "out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(mover, "gate", refuse)
        refused = pump.load(Moves.of([(1, 2, 0)]))
    assert outcomes(pump.poll()) == [(refused, Outcome.REFUSED)]
    assert pump.wait([refused], 0.0)
    taken = pump.load(Moves.of([(1, 2, 0)]))
    pump.tick()
    mover.end(0)
    pump.tick()
    assert outcomes(pump.poll()) == [(taken, Outcome.DONE)]
