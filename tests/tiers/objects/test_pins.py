"""Pins in the bucket: read beside the callers, all at once, and within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvtier
from kvtier.errors import InvalidRequest, TierError
from kvtier.identity.keys import scope_of
from kvtier.keyring import Keyring
from kvtier.retention import pins as codec
from kvtier.retention.pins import Pin
from kvtier.testing import SkewedClock, VirtualClock, chain_of
from kvtier.tiers.objects import pins
from kvtier.tiers.objects.bucket.protocol import Stat
from kvtier.tiers.objects.signed import Signer
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.times import Wall
from tests.support.waiting import until
from tests.tiers.objects.support.inline import inline_tier
from tests.tiers.objects.support.virtual_bucket import NS, Replica, VirtualServer

S = 4
CONFIG = kvtier.Config.parse({"tiers": {"g2": {"capacity": "64KiB"}}})


def put_signed(server: VirtualServer, replica: Replica, pin: Pin) -> None:
    name = replica.store.names.pin(pin.name)
    server.put(name, Signer(Keyring.public(), "p/").sign(name, codec.encode([pin])))


async def pinned(server: VirtualServer, count: int) -> Replica:
    replica = Replica(server)
    for number in range(count):
        now = server.clock.wall()
        await replica.store.pins.put(Pin(f"p{number}", tuple(chain_of(NS, 2, seed=number)), now, now + 1e6))
    return replica


async def test_many_slow_pins_do_not_keep_a_replica_from_getting_ready() -> None:
    server = VirtualServer()
    await pinned(server, 500)
    replica = Replica(server, seed=1, latency_s=0.03)
    await replica.store.refresh()
    assert replica.bucket.requests == {"list": 1}, "one listing has purges and pins"
    while not replica.store.pins.settled:
        left = len(replica.store.pins._unread)
        settling = asyncio.create_task(replica.store.pins.settle())
        await until(lambda: settling.done() or len(replica.store.pins._unread) <= max(0, left - 50))  # noqa: B023
        settling.cancel()
        await asyncio.wait({settling})
        await replica.store.refresh()
        assert len(replica.store.pins._unread) < left, "progress is kept"
    assert len(replica.store.pins.list()) == 500 and replica.bucket.requests["get"] < 600


async def test_who_finds_an_object_expired_waits_for_the_pins() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    chain = chain_of(NS, S)
    await one.write(chain, ttl=60)
    now = server.clock.wall()
    await one.store.pins.put(Pin("p", tuple(chain), now, now + 1e4))
    server.clock.advance(600)
    await two.store.refresh()
    assert not two.store.pins.settled
    entry = await two.store.probe(chain, 0)
    assert entry is not None and await two.store.settled_miss_of(entry) is None


@pytest.mark.parametrize("until", [1e300, 2.0**40])
async def test_a_pin_until_an_absurd_time_does_not_count(until: float) -> None:
    server = VirtualServer()
    replica = await pinned(server, 1)
    chain = tuple(chain_of(NS, S, seed=7))
    forged = Pin("forged", chain, server.clock.wall(), until)
    put_signed(server, replica, forged)
    tomorrow = Pin("later", chain, server.clock.wall() + 86400, server.clock.wall() + 90000)
    put_signed(server, replica, tomorrow)
    other = Replica(server, seed=1)
    await other.store.refresh()
    await other.store.pins.settle()
    assert [pin.name for pin in other.store.pins.list()] == ["p0"]
    with pytest.raises(InvalidRequest, match="ttl"):
        await replica.store.pins.put(forged)


async def test_pins_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    server = VirtualServer()
    replica = await pinned(server, 20)
    size = len(server.objects[server.under("pins")[0]].data)
    monkeypatch.setattr(pins, "ALL_BYTES_MAX", 10 * size + 50)
    other = Replica(server, seed=1)
    await other.store.refresh()
    await other.store.pins.settle()
    assert len(other.store.pins.list()) <= 11 < len(replica.store.pins.list())


async def test_what_is_no_pin_is_read_once_until_it_changes() -> None:
    server = VirtualServer()
    replica = Replica(server)
    name = f"{replica.store.names.pins}{'0' * 32}"
    server.put(name, b"junk")
    for _ in range(5):
        await replica.store.refresh()
        await replica.store.pins.settle()
    assert replica.bucket.requests["get"] == 1
    server.put(name, b"other junk")
    await replica.store.refresh()
    await replica.store.pins.settle()
    assert replica.bucket.requests["get"] == 2


async def test_a_pin_that_was_gone_when_it_was_read_counts_when_it_is_back() -> None:
    """Put again as it was it has the same ETag, by which it was taken for what had been read."""
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    chain, now = chain_of(NS, S), server.clock.wall()
    await one.write(chain, ttl=60)
    await one.store.pins.put(Pin("p", tuple(chain), now, now + 1e6))
    (name,) = server.under("pins")
    pin = server.objects[name]
    await two.store.refresh()
    server.drop(name)
    await two.store.pins.settle()
    server.objects[name] = pin
    server._gone.discard(name)
    server.clock.advance(50)
    await two.store.refresh()
    await two.store.pins.settle()
    assert [each.name for each in two.store.pins.list()] == ["p"]


async def test_a_pin_from_the_future_is_read_again_when_it_may_be_right() -> None:
    server = VirtualServer()
    ahead, replica = Replica(server, ahead_s=3600.0), Replica(server)
    now = ahead.clock.wall()
    await ahead.store.pins.put(Pin("p", tuple(chain_of(NS, 4)), now, now + 86400))
    for _ in range(3):
        await replica.store.refresh()
        await replica.store.pins.settle()
    assert replica.bucket.requests["get"] == 1 and replica.store.pins.list() == []
    server.clock.advance(3600)
    await replica.store.refresh()
    await replica.store.pins.settle()
    assert [pin.name for pin in replica.store.pins.list()] == ["p"]


async def test_an_unreadable_pin_stops_neither_the_others_nor_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    server = VirtualServer()
    writer, replica = Replica(server), Replica(server)
    old, purged, kept = (chain_of(NS, 4, seed, scope_of(str(seed))) for seed in range(3))
    for chain in (old, purged, kept):
        await writer.write(chain, ttl=3600)
    now = server.clock.wall()
    for count in range(40):
        await writer.store.pins.put(Pin(f"p{count}", tuple(kept), now, now + 30 * 86400))
    bad = set(server.under("pins")[:20])
    original = replica.bucket.read

    async def read(name: str, *args: object) -> object:
        if name in bad:
            raise TierError("g4", "get", "AccessDenied")
        return await original(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(replica.bucket, "read", read)
    await replica.store.refresh()
    with pytest.raises(TierError):
        await replica.store.pins.settle()
    assert len(replica.store.pins.list()) == 20
    await writer.store.purges.append(scope_of("1"))
    server.clock.advance(2 * 3600)
    await replica.walk()
    assert replica.sweeper.swept.objects == 1, "what was purged goes at once"
    server.clock.advance(25 * 3600)
    await replica.walk()
    assert replica.sweeper.swept.objects == 2, "what may be pinned goes after a day"
    assert await writer.store.probe(kept, 0) is not None and await writer.store.probe(old, 0) is None


async def test_a_pin_that_another_replica_has_extended_is_not_swept() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    now = server.clock.wall()
    pin = Pin("p", tuple(chain_of(NS, S)), now, now + 100)
    await one.store.pins.put(pin)
    await two.store.refresh()
    await two.store.pins.settle()
    server.clock.advance(80)
    await one.store.pins.put(replace(pin, until=now + 1e5))
    server.clock.advance(40)
    await two.store.pins.sweep(server.clock.wall())
    assert len(server.under("pins")) == 1, "by a list of before"
    await two.store.refresh()
    await two.store.pins.sweep(server.clock.wall())
    assert len(server.under("pins")) == 1, "changed, and not read yet"


async def test_a_replica_with_a_clock_ahead_sweeps_no_pin_that_holds() -> None:
    server = VirtualServer()
    right, ahead = Replica(server), Replica(server, seed=1, ahead_s=2 * 86400.0)
    now = server.clock.wall()
    for number, ttl in enumerate((60, 86400)):
        await right.store.pins.put(Pin(f"p{number}", tuple(chain_of(NS, S)), now, now + ttl))
    server.clock.advance(600)
    await ahead.store.deltas.publish()
    await ahead.store.refresh()
    await ahead.store.pins.settle()
    await ahead.sweeper.tidy()
    assert server.under("pins") == [right.store.names.pin("p1")], "what has ended for everybody may go"


async def test_a_pin_that_is_put_while_pins_are_listed_is_kept() -> None:
    server = VirtualServer()
    replica = Replica(server)
    now = server.clock.wall()
    pin = Pin("p", tuple(chain_of(NS, S)), now, now + 1e4)

    listing = replica.bucket
    real = listing.list

    async def seen_before(prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        pages = [page async for page in real(prefix, after)]
        await replica.store.pins.put(pin)
        for page in pages:
            yield [stat for stat in page if not stat.name.startswith(replica.store.names.pins)]

    listing.list = seen_before  # type: ignore[method-assign]
    await replica.store.refresh()
    assert [there.name for there in replica.store.pins.list()] == ["p"]


@pytest.mark.parametrize("ahead_s", [2 * 86400.0, 0.0])
async def test_a_replica_for_which_a_pin_has_ended_deletes_it_where_it_has_for_everybody(ahead_s: float) -> None:
    """The manager asks for it when the time is over by its own clock."""
    server = VirtualServer()
    right, _ = inline_tier(NS, server, S)
    other, _ = inline_tier(NS, server, S, clock=SkewedClock(server.clock, ahead_s), seed=1)
    now = server.clock.wall()
    pins = [Pin(name, tuple(chain_of(NS, S, scope=scope_of(name))), now, now + 86400.0) for name in "ab"]
    for tier in (right, other):
        await tier.open()
    for pin in pins:
        await right.pin(pin)
    await right.purge(scope_of("b"), Wall("inf"))
    server.clock.advance(3600)
    assert not await other.unpin("a", pins[0])
    assert [pin.name for pin in await right.pins()] == ["a"]
    server.clock.advance(86400)
    assert await other.unpin("a", pins[0])
    assert server.under("pins") == []
    for tier in (right, other):
        await tier.close(server.clock.monotonic() + 1)


async def test_a_pin_is_swept_where_listings_have_etags_of_another_kind() -> None:
    """Google's have those of the bytes, conditions name generations."""
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    page = two.bucket._page
    two.bucket._page = lambda *where: [replace(stat, etag=f"of {stat.size} bytes") for stat in page(*where)]  # type: ignore[method-assign]
    now = server.clock.wall()
    await one.store.pins.put(Pin("p", tuple(chain_of(NS, S)), now, now + 100))
    await two.store.refresh()
    await two.store.pins.settle()
    read = two.bucket.requests["get"]
    server.clock.advance(5000)
    await two.store.refresh()
    assert two.store.pins.settled and two.bucket.requests["get"] == read, "it has not changed"
    await two.store.pins.sweep(server.clock.wall())
    assert server.under("pins") == []


async def test_a_listing_of_before_does_not_hide_a_pin() -> None:
    """It ends late, as of a request that was tried again; the sweeper goes by the pins meanwhile."""
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    now = server.clock.wall()
    listed, ending, answering = asyncio.Event(), asyncio.Event(), one.bucket._answering

    async def held(verb: str, name: str) -> None:
        await answering(verb, name)
        if not listed.is_set():
            listed.set()
            await ending.wait()

    one.bucket._answering = held  # type: ignore[method-assign]
    late = asyncio.create_task(one.store.refresh())
    await listed.wait()
    await two.store.pins.put(Pin("p", tuple(chain_of(NS, S)), now, now + 1e4))
    server.clock.advance(1)
    await one.store.refresh()
    await one.store.pins.settle()
    ending.set()
    await late
    assert [pin.name for pin in one.store.pins.list()] == ["p"]


def test_a_pin_that_was_extended_elsewhere_outlives_its_end_here(tmp_path: Path) -> None:
    """Each replica reads the others' pins every half minute only."""
    clock = VirtualClock()

    def opened() -> kvtier.Cache:
        return kvtier.open(CONFIG, NS, clock=clock, tiers=[ObjectTier(f"file://{tmp_path}", NS, clock=clock, stride=S)])

    with opened() as one, opened() as two:
        one.pins.create("p", chain_of(NS, S), 100)
        clock.advance(50)
        tend(two, read_pins=True)
        assert [pin.name for pin in two.pins.list()] == ["p"]
        one.pins.extend("p", 1000)
        clock.advance(60)
        tend(two, read_pins=False)
        clock.advance(50)
        for cache in (one, two):
            tend(cache, read_pins=True)
            assert [pin.name for pin in cache.pins.list()] == ["p"]
        clock.advance(2000)
        tend(one, read_pins=True)
        tend(two, read_pins=True)
        assert not any(path.is_file() for path in tmp_path.glob("ctl/*/pins/*")), "whoever ended it last deletes it"


def tend(cache: kvtier.Cache, *, read_pins: bool) -> None:
    cache._run(cache.manager.protection.tend(read_pins=read_pins))
