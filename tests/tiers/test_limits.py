"""Rates and health, on a clock that moves when told to."""

from __future__ import annotations

from kvtier.testing import VirtualClock
from kvtier.tiers.breaker import Breaker, BreakerLimits, Health
from kvtier.tiers.rate_limiter import TokenBucket


async def test_a_bucket_holds_its_average() -> None:
    clock = VirtualClock()
    bucket = TokenBucket(clock, rate=100, burst=200)
    began = clock.monotonic()
    for _ in range(50):
        await bucket.take(40)
    took = clock.monotonic() - began
    assert abs(took - (50 * 40 - 200) / 100) < 0.5


async def test_more_than_the_burst_passes_and_is_paid_for() -> None:
    clock = VirtualClock()
    bucket = TokenBucket(clock, rate=10, burst=100)
    assert bucket.try_take(500)
    assert not bucket.try_take(1)
    clock.advance(41)
    assert bucket.try_take(1)


def test_no_rate_is_no_bound() -> None:
    assert all(TokenBucket(VirtualClock(), 0, 0).try_take(1e12) for _ in range(10))


def test_a_breaker_opens_probes_and_closes() -> None:
    clock = VirtualClock()
    breaker = Breaker(clock, BreakerLimits(errors_max=3, open_s=2, open_s_max=8))
    for _ in range(2):
        breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert breaker.health is Health.OUT
    assert not breaker.allows()
    clock.advance(2)
    assert breaker.allows()
    assert not breaker.allows(), "two probes at once"
    breaker.failed()
    clock.advance(3.9)
    assert not breaker.allows(), "the open time did not double"
    clock.advance(0.2)
    assert breaker.allows()
    breaker.succeeded()
    assert (breaker.health, breaker.allows()) == (Health.WELL, True)
    for _ in range(2):
        breaker.failed()
    assert breaker.allows(), "failures before a success count no more"


def test_a_probe_that_never_reports_does_not_lock_the_tier_out() -> None:
    clock = VirtualClock()
    breaker = Breaker(clock, BreakerLimits(errors_max=1, open_s=2, open_s_max=8))
    breaker.failed()
    for _ in range(5):
        clock.advance(10)
        assert breaker.allows()
