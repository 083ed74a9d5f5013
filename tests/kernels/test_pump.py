"""Copies on a thread of their own: what the caller sees, and what of it holds the caller up."""

from __future__ import annotations

import threading

import pytest
from manual_mover import ManualFlight, ManualMover

from kvtier.errors import TierError
from kvtier.kernels.copy import Ack, CopyEngine, Moves, Outcome
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
