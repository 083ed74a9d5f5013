"""Waits for lower tiers cost at most a share of all time more than what they find saves."""

from __future__ import annotations

from kvtier.connectors.ask_gate import AskGate

LONGEST_S = 0.2


def asked(
    gate: AskGate, count: int, wait_s: float, saved_s: float = 0.0, every: int = 1, request_s: float = 0.1
) -> int:
    """How many of so many requests ask, one after another; one in `every` of those finds what saves `saved_s`."""
    asks = 0
    for number in range(count):
        if gate.decide("request", 1.0):
            asks += 1
            gate.answered("request", wait_s, saved_s if number % every == 0 else 0.0)
        gate.spent(request_s)
    return asks


def test_a_burst_asks_a_few_before_a_wait_is_known_and_what_it_can_pay_later() -> None:
    gate = AskGate(LONGEST_S)
    assert sum(gate.decide(f"first {number}", None) for number in range(100)) == 8
    for number in range(8):
        gate.answered(f"first {number}", 0.1, 0.0)
    assert not gate.decide("next", None), "waits are drawn that nothing was found for"
    for _ in range(400):
        gate.spent(1.0)
    assert sum(gate.decide(f"second {number}", None) for number in range(100)) == 9, "what is saved up is bounded"


def test_what_finds_pay_for_is_asked() -> None:
    assert asked(AskGate(LONGEST_S), 400, wait_s=0.004, saved_s=0.1, every=20) >= 390
    assert asked(AskGate(LONGEST_S), 400, wait_s=0.001) >= 390, "and what hardly costs anything"
    assert asked(AskGate(LONGEST_S), 400, wait_s=0.05, saved_s=0.1, every=20) <= 40


def test_a_first_find_pays_for_a_few_waits_ahead() -> None:
    """After a restart short prompts may come first, whose finds hardly repay their waits."""
    gate = AskGate(LONGEST_S)
    for number in range(3):
        assert gate.decide("short", 0.006), number
        gate.answered("short", 0.005, 0.0045)
    assert gate.decide("long", 0.06)
    gate.answered("long", 0.006, 0.06)
    assert asked(gate, 1000, wait_s=0.05, request_s=0.001) <= 5, "once"


def test_a_process_that_stood_still_does_not_end_asking() -> None:
    gate = AskGate(LONGEST_S)
    asked(gate, 20, wait_s=0.001)
    assert gate.decide("still", 1.0)
    gate.answered("still", 3600.0, 0.0)
    assert asked(gate, 600, wait_s=0.001) >= 400


def test_what_is_too_short_to_repay_a_wait_is_asked_for_now_and_then() -> None:
    gate = AskGate(LONGEST_S)
    asked(gate, 20, wait_s=0.01, saved_s=1.0)
    assert sum(gate.decide(f"short {number}", 0.005) for number in range(64)) == 2
    assert gate.decide("long", 0.05)


def test_requests_that_end_leave_nothing() -> None:
    gate = AskGate(LONGEST_S)
    for number in range(100):
        assert gate.decide(f"gone {number}", None)
        gate.forget(f"gone {number}")
        gate.answered(f"gone {number}", 5.0, 0.0)
    assert gate.decide("next", None), "an answer for what nobody asked is nothing"
