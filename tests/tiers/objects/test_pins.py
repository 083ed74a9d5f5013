"""Pins in the bucket: read beside the callers, all at once, and within bounds."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.errors import InvalidRequest, TierError
from kvtier.identity.keys import scope_of
from kvtier.keyring import Keyring
from kvtier.retention import pins as codec
from kvtier.retention.pins import Pin
from kvtier.testing import chain_of
from kvtier.tiers.objects import pins
from kvtier.tiers.objects.signed import Signer
from tests.tiers.objects.support.virtual_bucket import NS, Replica, VirtualServer

S = 4


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
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await replica.store.pins.settle()
                raise TimeoutError
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
