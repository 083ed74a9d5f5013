"""The sweeper: a walk that ends whatever is written meanwhile, and clocks that are wrong."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.errors import TierError, TierFull
from kvtier.retention.pins import Pin
from kvtier.testing import chain_of
from kvtier.tiers.objects import deltas, sweep
from kvtier.tiers.objects.delete import Remover
from tests.support.waiting import until
from tests.tiers.objects.support.virtual_bucket import NS, Replica, SkewedClock, VirtualBucket, VirtualServer

S = 4
DAY_S = 86400.0


async def test_a_default_deployment_sweeps_what_expires() -> None:
    """Four hours in which a replica writes a unit and so a delta every 20 s, all of a ttl of five minutes."""
    server = VirtualServer()
    replica = Replica(server)
    for number in range(720):
        await replica.write(chain_of(NS, S, seed=number), ttl=300)
        server.clock.advance(20)
        await replica.turn()
    assert replica.sweeper.swept.objects > 600, f"{replica.sweeper.swept.objects} of 720"
    assert server.strides() < 120
    kept = deltas.KEEP_S + deltas.OVERLAP_S + 2 * 600
    assert len(server.under("delta")) <= kept / 20


async def test_all_old_deltas_go_at_once() -> None:
    server = VirtualServer()
    replica = Replica(server)
    for number in range(3500):
        server.put(f"{replica.store.names.deltas}{int((server.clock.wall() + number) * 1e6):016x}-00000000", b"x")
    server.clock.advance(3500 + 2 * deltas.KEEP_S)
    assert await replica.store.deltas.sweep(server.clock.wall()) == 3500
    assert server.under("delta") == []


async def test_a_page_looks_at_few_objects_though_there_is_a_pin() -> None:
    server = VirtualServer()
    replica = Replica(server)
    for number in range(600):
        await replica.write(chain_of(NS, S, seed=number), ttl=100 * DAY_S)
    now = server.clock.wall()
    await replica.store.pins.put(Pin("p", tuple(chain_of(NS, S, seed=1)), now, now + 10 * DAY_S))
    server.clock.advance(DAY_S)
    other = Replica(server, seed=1)
    before = other.bucket.requests.copy()
    assert not await other.sweeper.page()
    asked = other.bucket.requests - before
    assert asked["get"] <= sweep.HEADERS_MAX + 1, "uncapped, one pin stalls the sweeper"
    await other.walk()


@pytest.mark.parametrize("stride", [16, 3])
async def test_a_pinned_object_of_another_stride_is_renewed_and_gets_into_no_index(stride: int) -> None:
    """Replicas of two strides share a bucket while the setting changes. More blocks than a hint has room for were
    written over the next hint."""
    server = VirtualServer()
    other, one = Replica(server, stride=stride), Replica(server, seed=1, stride=S)
    for number in range(8):
        await one.write(chain_of(NS, S, seed=100 + number), ttl=100 * DAY_S)
    chain = chain_of(NS, stride, seed=1)
    await other.write(chain, ttl=3600)
    now = server.clock.wall()
    await other.store.pins.put(Pin("p", tuple(chain), now, now + 10 * DAY_S))
    server.clock.advance(DAY_S)
    await one.walk()
    assert one.store.renewer.renewed
    one.store.index.check()
    for number in range(8):
        last = chain_of(NS, S, seed=100 + number)[-1]
        entry, hint = one.store.index.get(last), one.store.named(one.store.names.unit(last))
        assert entry is not None and hint is not None and hint.prints == entry.hint.prints


class Full(VirtualBucket):
    """Takes nothing more."""

    async def _asked(self, verb: str, name: str) -> None:
        await super()._asked(verb, name)
        if verb == "put":
            raise TierFull("g4", "put", "ENOSPC")


@pytest.mark.parametrize("stamps", [True, False])
async def test_a_full_bucket_is_swept(stamps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure the clock something is written, which a full bucket refuses until something was swept."""
    server = VirtualServer(stamps=stamps)
    replica = Replica(server)
    for number in range(40):
        await replica.write(chain_of(NS, S, seed=number), ttl=300 if number < 20 else 100 * DAY_S)
    await replica.walk()
    late = Replica(server, seed=1)
    for each in (replica, late):
        monkeypatch.setattr(each.bucket, "_asked", Full(server)._asked)
    server.clock.advance(DAY_S)
    await late.walk()
    assert server.strides() == (40 if stamps else 20), "it cannot know how long ago the latest was written"
    server.clock.advance(600)
    await late.walk()
    assert server.strides() == 20


@pytest.mark.parametrize("ahead_s", [0.0, 2 * DAY_S])
async def test_a_full_bucket_loses_nothing_alive_by_a_clock_that_was_set(ahead_s: float) -> None:
    server = VirtualServer()
    replica = Replica(server, ahead_s=1.0)
    for number in range(20):
        await replica.write(chain_of(NS, S, seed=number), ttl=DAY_S)
    await replica.store.measure_clock()
    replica.bucket._asked = Full(server)._asked  # type: ignore[method-assign]
    server.clock.advance(3600)
    assert isinstance(replica.clock, SkewedClock)
    replica.clock.ahead_s = ahead_s
    await replica.walk()
    assert server.strides() == 20
    server.clock.advance(DAY_S)
    await replica.walk()
    assert server.strides() == 0


async def test_a_page_that_is_cut_off_has_made_progress() -> None:
    server = VirtualServer()
    replica = Replica(server)
    for number in range(100):
        await replica.write(chain_of(NS, S, seed=number), ttl=300)
    server.clock.advance(1000)
    slow = Replica(server, latency_s=0.01)
    for _ in range(40):
        before = slow.bucket.requests.total()
        walking = asyncio.create_task(slow.walk())
        await until(lambda: walking.done() or slow.bucket.requests.total() >= before + 20)  # noqa: B023
        walking.cancel()
        await asyncio.wait({walking})
        if server.strides() == 0:
            break
    assert server.strides() == 0


async def test_what_others_have_just_written_is_looked_at_by_nobody_before_their_deltas_came() -> None:
    """A bucket of a large fleet has thousands of such objects, and each replica walks it."""
    server = VirtualServer()
    writer, other = Replica(server), Replica(server, seed=1)
    for number in range(20):
        await writer.write(chain_of(NS, S, seed=number), ttl=30)
    server.clock.advance(sweep.YOUNG_S - 1)
    await other.walk()
    assert other.bucket.requests["get"] == 0
    server.clock.advance(2)
    await other.walk()
    assert other.sweeper.swept.objects == 20


@pytest.mark.parametrize("days", [2, 365])
async def test_a_replica_with_a_clock_ahead_sweeps_nothing_alive(days: int) -> None:
    server = VirtualServer()
    right, ahead = Replica(server), Replica(server, seed=1, ahead_s=days * DAY_S)
    for number in range(20):
        await right.write(chain_of(NS, S, seed=number), ttl=DAY_S)
    for number in range(20, 25):
        await right.write(chain_of(NS, S, seed=number), ttl=60)
    server.clock.advance(600)
    await ahead.walk()
    assert server.strides() == 20, "what is dead to everybody may go, the rest must stay"
    await right.walk()
    assert server.strides() == 20
    first = chain_of(NS, S, seed=0)
    with pytest.raises(AssertionError):
        await ahead.write(first)
    entry = await right.store.probe(first, 0)
    assert entry is not None and right.store.miss_of(entry, server.clock.wall()) is None, "nor does it write over it"


async def test_a_replica_with_a_clock_ahead_sweeps_nothing_alive_when_its_delta_was_deleted() -> None:
    """Whoever empties the namespace deletes all deltas, by one of which the replica would have measured its clock."""
    server = VirtualServer()
    right, ahead = Replica(server), Replica(server, seed=1, ahead_s=2 * DAY_S)
    await ahead.write(chain_of(NS, S, seed=99))
    await ahead.store.deltas.publish()
    await Remover(right.store).everything()
    for number in range(20):
        await right.write(chain_of(NS, S, seed=number), ttl=DAY_S)
    server.clock.advance(sweep.YOUNG_S + 1)
    await ahead.walk()
    assert server.strides() == 20


async def test_a_replica_with_a_clock_behind_sweeps_nothing_alive() -> None:
    server = VirtualServer()
    right, behind = Replica(server), Replica(server, seed=1, ahead_s=-2 * DAY_S)
    for number in range(20):
        await right.write(chain_of(NS, S, seed=number), ttl=DAY_S)
    server.clock.advance(600)
    await behind.walk()
    assert server.strides() == 20, "to it they are from the future"


async def test_an_object_that_cannot_be_read_stops_no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one whose key the server's key store has disabled, among others that live and that no delta told of."""
    server = VirtualServer()
    writer, replica = Replica(server), Replica(server, seed=1)
    for number in range(60):
        await writer.write(chain_of(NS, S, seed=number), ttl=10 * DAY_S if number % 5 else 300)
    server.clock.advance(1000)
    denied = next(name for name in server.names if len(name.rpartition("/")[2]) == 64)
    asked = replica.bucket._asked

    async def refused(verb: str, name: str) -> None:
        await asked(verb, name)
        if verb == "get" and name == denied:
            raise TierError("g4", "get", "AccessDenied")

    monkeypatch.setattr(replica.bucket, "_asked", refused)
    await replica.walk()
    assert server.strides() in (48, 49)


@pytest.mark.parametrize("ttl", [1000, 5000])
async def test_a_replica_with_a_clock_behind_sweeps_nothing_that_was_renewed(ttl: float) -> None:
    """A use of now lies in its future, but not beyond the server's own stamp."""
    server = VirtualServer()
    right, behind = Replica(server), Replica(server, seed=1, ahead_s=-3600)
    chain = chain_of(NS, S)
    await right.write(chain, ttl=ttl)
    for _ in range(20):
        server.clock.advance(0.6 * ttl)
        right.store.index.touch([chain[-1]], server.clock.wall())
        await right.store.renewer.record_uses()
    assert await behind.store.probe(chain, 0) is not None
    await behind.walk()
    assert server.strides() == 1


@pytest.mark.parametrize("ahead_s", [2 * DAY_S, -2 * DAY_S])
async def test_a_clock_two_days_off_writes_over_nothing_alive(ahead_s: float) -> None:
    """Though the replica has just been opened, and has swept nothing: what it wrote would be dead to the others."""
    server = VirtualServer()
    right, wrong = Replica(server), Replica(server, seed=1, ahead_s=ahead_s)
    alive, dead = chain_of(NS, S, seed=1), chain_of(NS, S, seed=2)
    await right.write(alive, ttl=3600)
    await right.write(dead, ttl=60)
    server.clock.advance(100)
    with pytest.raises(AssertionError):
        await wrong.write(alive, ttl=3600)
    await wrong.write(dead, ttl=3600)
    entry = await right.store.probe(alive, 0)
    assert entry is not None and right.store.miss_of(entry, server.clock.wall()) is None


async def test_a_replica_with_a_clock_ahead_deletes_no_delta_that_others_need() -> None:
    server = VirtualServer()
    right, ahead, new = (Replica(server, seed, ahead_s=2 * DAY_S * (seed == 1)) for seed in range(3))
    for number in range(3):
        await right.write(chain_of(NS, S, seed=number))
        await right.store.deltas.publish()
        server.clock.advance(60)
    await ahead.sweeper.tidy()
    await new.store.deltas.poll()
    assert new.store.deltas.received == 3


@pytest.mark.parametrize("units", [2000, pytest.param(100_000, marks=pytest.mark.long)])
async def test_a_lone_replica_sweeps_a_million_units_within_a_day(units: int) -> None:
    """By its pace over fewer of them: what it does in a page does not depend on how many there are."""
    server = VirtualServer()
    writer, replica = Replica(server), Replica(server, seed=1)
    for number in range(units):
        await writer.write(chain_of(NS, 1, seed=number), ttl=300)
    server.clock.advance(DAY_S)
    began = server.clock.wall()
    while replica.sweeper.swept.objects < units and server.clock.wall() - began < DAY_S:
        server.clock.advance(1)
        if replica.sweeper.due:
            await replica.sweeper.page()
    took_s = server.clock.wall() - began
    print(f"{units} units in {took_s:.0f} s: a million in {took_s / units * 1e6 / 3600:.1f} hours")
    assert replica.sweeper.swept.objects == units and not server.strides()
    assert took_s / units * 1e6 <= DAY_S
