"""What others do between two requests of one verb: purges, replacements, snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvtier.errors import CorruptError, TierError
from kvtier.identity.keys import BlockKey, scope_of
from kvtier.retention.pins import Pin
from kvtier.testing import chain_of, payload_of, seal
from kvtier.tiers.objects import purge_log
from kvtier.tiers.objects.bucket.protocol import Stat
from kvtier.tiers.objects.delete import Remover
from kvtier.tiers.objects.encryption import UnitEncryption
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target
from kvtier.times import Wall
from tests.tiers.objects.support.virtual_bucket import NS, Replica, VirtualServer

S = 4
DAY_S = 86400.0
A = scope_of("a")


async def read(one: Replica, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Loaded | Miss]:
    buffers = {index: bytearray(NS.block_bytes) for index in wanted}
    targets = [Target(index, (memoryview(buffers[index]),)) for index in wanted]
    results = await one.store.read(chain, 0, one.store.index.get(chain[-1]), targets)
    for index in wanted:
        assert not isinstance(results[index], Loaded) or buffers[index] == payload_of(chain[index], NS.block_bytes)
    return [results[index] for index in wanted]


def before_reads(one: Replica, *acts: object) -> None:
    """The n-th read of a bucket comes behind the n-th of `acts`; None: nothing happens."""
    inner, left = one.bucket.read, list(acts)

    async def read(name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        act = left.pop(0) if left else None
        if act is not None:
            act()  # type: ignore[operator]
        return await inner(name, start, into, clipped)

    one.bucket.read = read  # type: ignore[method-assign]


async def test_an_object_that_is_replaced_between_two_requests_again_and_again_stays() -> None:
    server = VirtualServer()
    writer, reader = Replica(server), Replica(server, seed=1)
    chain = chain_of(NS, S)
    await writer.write(chain)
    name = writer.store.names.unit(chain[-1])

    def renew() -> None:
        server.put(name, server.objects[name].data)

    before_reads(reader, None, renew, None, renew, None, renew)
    assert await read(reader, chain, [1, 2]) == [Miss.RACED] * 2
    assert name in server.objects
    assert all(isinstance(result, Loaded) for result in await read(reader, chain, [1, 2]))


async def test_one_failed_check_of_a_version_deletes_nothing() -> None:
    server = VirtualServer()
    writer, reader = Replica(server), Replica(server, seed=1)
    chain = chain_of(NS, S)
    await writer.write(chain)
    name = writer.store.names.unit(chain[-1])
    right = server.objects[name].data
    wrong = right[:4096] + bytes([right[4096] ^ 1]) + right[4097:]

    def put(data: bytes) -> None:
        server.objects[name].data = data  # on the way, not in the bucket: the version stays

    def renew_and_damage() -> None:
        server.put(name, wrong)

    before_reads(reader, lambda: put(wrong), renew_and_damage, lambda: put(right))
    results = await read(reader, chain, range(S))
    assert name in server.objects and all(isinstance(result, Loaded) for result in results)


async def test_a_head_that_is_right_when_it_is_looked_at_again_is_not_damage() -> None:
    server = VirtualServer()
    writer, reader = Replica(server), Replica(server, seed=1)
    chain = chain_of(NS, S)
    await writer.write(chain)

    def fail() -> None:
        raise CorruptError("shorter than asked for")

    before_reads(reader, fail, fail)
    assert await read(reader, chain, range(S)) == [Miss.RACED] * S
    assert writer.store.names.unit(chain[-1]) in server.objects


async def test_a_purge_while_the_key_is_waited_for_is_kept() -> None:
    server = VirtualServer()
    one = Replica(server)
    chain = chain_of(NS, S, scope=A)
    await one.write(chain)

    class Slow(UnitEncryption):
        async def cipher_of(self, frame: object) -> None:
            await one.store.purges.append(A)

    one.store.payloads._encryption = Slow(None)
    assert await read(one, chain, range(S)) == [Miss.PURGED] * S


async def test_what_was_damaged_once_is_not_overwritten_once_another_lies_there() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    chain = chain_of(NS, S)
    await one.write(chain)
    name = one.store.names.unit(chain[-1])
    there = server.objects[name]
    there.data = there.data[:-1] + bytes([there.data[-1] ^ 1])
    assert Miss.CORRUPT in await read(one, chain, range(S)) and name not in server.objects
    await two.write(chain, ttl=50 * 86400.0)
    longer = server.objects[name].data
    sealed = seal(list(chain), range(S), NS.block_bytes, one.clock.wall())
    assert await one.writer.write(sealed) is Stored.PRESENT
    assert server.objects[name].data == longer, "the life that another gave it is kept"


@pytest.mark.parametrize("others", [1, 3])
async def test_a_snapshot_has_the_purges_that_came_before_it_while_it_was_written(
    monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    monkeypatch.setattr(purge_log, "SNAPSHOT_EVERY", 4)
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    for _ in range(4):
        await one.store.purges.append(A)
    await two.store.refresh()
    for number in range(others):  # `two` does not know it
        tenant = scope_of(f"b{number}")
        raw = one.store.purges._signer.sign(
            one.store.names.entry(5 + number),
            purge_log.encode(5 + number, one.store.purges._digest, 0, {tenant: 5 + number}),
        )
        server.put(one.store.names.entry(5 + number), raw)
        one.store.purges._apply(5 + number, bytes(raw))
    await two.store.purges.append(A)
    for number in range(1, 5 + others):
        server.drop(one.store.names.entry(number))  # as a rule of the bucket does
    reader = Replica(server, seed=2)
    await reader.store.refresh()
    assert all(reader.store.purges.covers(scope_of(f"b{number}"), 4) for number in range(others))


def unreadable_pins(one: Replica) -> None:
    inner = one.bucket.read

    async def read(name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        if name.startswith(one.store.names.pins):
            raise TierError("g4", "get", "403")
        return await inner(name, start, into, clipped)

    one.bucket.read = read  # type: ignore[method-assign]


async def test_a_pin_that_cannot_be_read_keeps_no_delta_from_being() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    chain, now = chain_of(NS, S), server.clock.wall()
    await one.store.pins.put(Pin("p", tuple(chain), now, Wall(now + 5000)))
    await one.write(chain)
    await one.store.deltas.publish()
    unreadable_pins(two)
    await two.store.refresh()
    with pytest.raises(TierError):
        await two.background._learn_pins_and_deltas()
    assert two.store.deltas.received == 1


async def test_a_purge_deletes_although_pins_cannot_be_read() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    chain, other, now = chain_of(NS, S, scope=A), chain_of(NS, S, scope=scope_of("b")), server.clock.wall()
    await one.store.pins.put(Pin("p", tuple(chain), now, Wall(now + 5000)))
    await one.write(chain)
    await one.write(other)
    unreadable_pins(two)
    await two.store.refresh()
    with pytest.raises(TierError):
        await Remover(two.store).purge(A)
    assert server.strides() == 1


async def test_a_pin_whose_tenant_was_purged_holds_nothing_that_came_after() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    chain, now = chain_of(NS, S, scope=A), server.clock.wall()
    await one.store.pins.put(Pin("p", tuple(chain), now, Wall(now + 5000)))
    await two.store.refresh()
    await two.store.pins.settle()
    await one.store.purges.append(A)  # and dies before it deletes the pin
    for replica in (two, Replica(server, seed=2)):
        await replica.store.refresh()
        await replica.store.pins.settle()
        await replica.write(chain, ttl=60)
        server.clock.advance(100)
        assert await read(replica, chain, range(S)) == [Miss.EXPIRED] * S
    await two.store.pins.sweep(server.clock.wall())
    assert server.under("pins") == []


async def test_a_use_in_a_header_by_a_clock_that_is_ahead_keeps_nothing_alive() -> None:
    server = VirtualServer()
    right, ahead = Replica(server), Replica(server, seed=1, ahead_s=2 * DAY_S)
    chain = chain_of(NS, S)
    await right.write(chain, ttl=3 * DAY_S)
    ahead.store.renewer._copies = False  # as where a copy cannot keep a proof
    entry = await ahead.store.probe(chain, 0)
    assert entry is not None
    now = ahead.clock.wall()
    await ahead.store.renewer.renew(replace(entry, life=entry.life.used(now)), now)
    server.clock.advance(DAY_S)
    reader = Replica(server, seed=2)
    found = await reader.store.probe(chain, 0)
    assert found is not None and reader.store.miss_of(found, reader.clock.wall()) is None
    server.clock.advance(2.5 * DAY_S)
    assert reader.store.miss_of(found, reader.clock.wall()) is Miss.EXPIRED


async def test_a_use_in_a_delta_by_a_clock_that_is_ahead_is_not_learnt() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    chain = chain_of(NS, S)
    await one.write(chain)
    entry = one.store.index.get(chain[-1])
    assert entry is not None
    ahead = replace(entry, life=replace(entry.life, last_use=Wall(one.clock.wall() + 2 * DAY_S)))
    one.store.deltas._pending = [ahead.hint]
    await one.store.deltas.publish()
    await two.store.deltas.poll()
    assert two.store.deltas.received == 0


async def test_an_eviction_by_keys_searches_the_index_beside_lookups() -> None:
    replica = Replica(VirtualServer())
    first, second = chain_of(NS, S, seed=1), chain_of(NS, S, seed=2)
    for chain in (first, second):
        await replica.write(chain)
    index = replica.store.index

    searching = False

    class Watched(tuple[bytes, ...]):
        def __iter__(self) -> Iterator[bytes]:
            assert not searching or not index._lock.locked()
            return super().__iter__()

        def __getitem__(self, at: Any) -> Any:
            assert not searching or not index._lock.locked()
            return super().__getitem__(at)

    for chain in (first, second):
        entry = index.get(chain[-1])
        assert entry is not None
        index.put(replace(entry, frame=replace(entry.frame, hashes=Watched(entry.frame.hashes))))
    searching = True
    assert [entry.last for entry in index.holding(second[1:2])] == [second[-1]]
    assert index.holding(chain_of(NS, S, seed=3)) == []


@pytest.mark.parametrize("wrong", [1, 2, 3, 10])
@pytest.mark.parametrize("verb", ["probe", "read"])
async def test_an_object_that_was_not_seen_to_be_damaged_stays(
    monkeypatch: pytest.MonkeyPatch, verb: str, wrong: int
) -> None:
    """The first answer is garbled on its way, and others are of another range, as from a proxy that mixes them up."""
    server = VirtualServer()
    await Replica(server).write(chain := chain_of(NS, S))
    replica = Replica(server, seed=1)
    real, count = replica.bucket.read, 0

    async def answered(name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        nonlocal count
        count += 1
        if 1 < count <= wrong:
            raise CorruptError("the object has 0 bytes")
        stat = await real(name, start, into, clipped)
        if count == 1:
            into[0][100] ^= 1
        return stat

    monkeypatch.setattr(replica.bucket, "read", answered)
    for _ in range(wrong):
        await (replica.store.probe(chain, 0) if verb == "probe" else read(replica, chain, range(S)))
    assert server.strides() == 1 and not replica.store.damaged
