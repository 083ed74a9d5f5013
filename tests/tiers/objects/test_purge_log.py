"""The purge log: an order that no clock decides, read by every replica, and noticed where it is cut or forked."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvtier.errors import CorruptError, TierError
from kvtier.identity.keys import Scope, scope_of, tenant_of
from kvtier.keyring import Key, Keyring, KeyState
from kvtier.retention.marks import mark_below, number_of
from kvtier.testing import chain_of
from kvtier.tiers.objects import purge_log
from kvtier.tiers.objects.bucket.protocol import Stat
from kvtier.tiers.objects.purge_log import LogBroken
from kvtier.tiers.protocol import Miss
from kvtier.times import Wall
from tests.tiers.objects.support.virtual_bucket import NS, Replica, VirtualServer

S = 4
DAY_S = 86400.0
A, B = scope_of("a"), scope_of("b")


def log_names(server: VirtualServer) -> list[str]:
    return server.under("log")


async def miss(replica: Replica, chain: list) -> Miss | None:  # type: ignore[type-arg]
    entry = await replica.store.probe(chain, 0)
    return Miss.ABSENT if entry is None else replica.store.miss_of(entry, replica.clock.wall())


async def test_a_purge_reaches_every_replica_in_one_listing_and_one_read() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    mine, other = chain_of(NS, S, scope=A), chain_of(NS, S, scope=B)
    await one.write(mine)
    await one.write(other)
    await one.store.purges.append(A)
    await two.store.refresh()
    assert two.bucket.requests == {"list": 1, "get": 1}
    assert await miss(two, mine) is Miss.PURGED and await miss(two, other) is None
    assert two.store.purges.all() == {tenant_of(A): mark_below(1)}
    await two.store.refresh()
    assert two.bucket.requests["list"] == 2 and two.store.purges.position == 1


async def test_a_purge_covers_every_variant_of_its_tenant_and_no_other() -> None:
    server = VirtualServer()
    one = Replica(server)
    variants = [scope_of("a"), scope_of("a", b"adapter"), scope_of("a", isolated="class")]
    others = [scope_of(None), scope_of(None, b"adapter"), scope_of("b", b"adapter")]
    for scope in [*variants, *others]:
        await one.write(chain_of(NS, S, scope=scope))
    await one.store.purges.append(scope_of("a"))
    assert [await miss(one, chain_of(NS, S, scope=scope)) for scope in variants] == [Miss.PURGED] * 3
    assert [await miss(one, chain_of(NS, S, scope=scope)) for scope in others] == [None] * 3


@pytest.mark.parametrize("ahead_s", [5.0, 2 * DAY_S, 365 * DAY_S, -2 * DAY_S])
async def test_a_late_writer_is_purged_whatever_its_clock(ahead_s: float) -> None:
    server = VirtualServer()
    right, late = Replica(server), Replica(server, seed=1, ahead_s=ahead_s)
    old, new = chain_of(NS, S, seed=1, scope=A), chain_of(NS, S, seed=2, scope=A)
    await right.store.purges.append(A)
    await late.write(old, ttl=1000 * DAY_S)  # it has not read the log since
    assert await miss(right, old) is Miss.PURGED
    await late.store.refresh()
    assert await miss(late, old) is Miss.PURGED
    await right.write(new)
    assert await miss(right, new) is None, "what is stored behind the purge is not covered"


async def test_a_purge_that_cannot_be_written_yet_is_in_force_here() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    old, new = chain_of(NS, S, seed=1, scope=A), chain_of(NS, S, seed=2, scope=A)
    await one.write(old)
    await two.store.refresh()
    one.store.purges.hold(A)
    assert await miss(one, old) is Miss.PURGED and await miss(two, old) is None
    await one.store.purges.append(A)
    await one.write(new)
    assert await miss(one, old) is Miss.PURGED and await miss(one, new) is None


def test_an_entry_is_read_under_its_own_number_only() -> None:
    body = purge_log.encode(3, bytes(16), 1, {tenant_of(A): 3, tenant_of(B): 2})
    assert purge_log.decode(body, 3) == (bytes(16), 1, {tenant_of(A): 3, tenant_of(B): 2})
    for wrong in (
        (body, 4),
        (body[:-1], 3),
        (purge_log.encode(3, bytes(16), 4, {tenant_of(A): 3}), 3),
        (purge_log.encode(3, bytes(16), 0, {tenant_of(A): 4}), 3),
        (purge_log.encode(3, bytes(16), 0, {}), 3),
    ):
        with pytest.raises(CorruptError, match="entry of a purge log"):
            purge_log.decode(*wrong)


async def test_a_purge_by_a_clock_a_year_ahead_is_one_of_now() -> None:
    server = VirtualServer()
    ahead, right = Replica(server, ahead_s=365 * DAY_S), Replica(server, seed=1)
    old, new = chain_of(NS, S, seed=1, scope=A), chain_of(NS, S, seed=2, scope=A)
    await right.write(old)
    await ahead.store.purges.append(A)
    await right.store.refresh()
    await right.write(new)
    assert await miss(right, old) is Miss.PURGED and await miss(right, new) is None


async def test_purges_at_the_same_time_are_both_in_the_log() -> None:
    server = VirtualServer()
    replicas = [Replica(server, seed=n) for n in range(5)]
    for replica, tenant in zip(replicas, "abcde", strict=True):
        await replica.store.purges.append(scope_of(tenant))  # none has read what the others wrote
    reader = Replica(server, seed=9)
    await reader.store.refresh()
    assert reader.store.purges.position == 5
    assert set(reader.store.purges.all()) == {tenant_of(scope_of(tenant)) for tenant in "abcde"}


async def test_snapshots_bound_the_log_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge_log, "SNAPSHOT_EVERY", 8)
    server = VirtualServer()
    writer, behind, rng = Replica(server), Replica(server, seed=1), random.Random(5)
    wanted: dict[Scope, int] = {}
    for number in range(100):
        tenant = scope_of(f"t{rng.randrange(20)}")
        wanted[tenant_of(tenant)] = await writer.store.purges.append(tenant)
        if number in (3, 40):
            await behind.store.refresh()
    assert len(log_names(server)) <= 2 * 8 + 2
    for reader in (behind, Replica(server, seed=2)):
        await reader.store.refresh()
        found = {tenant: number_of(mark) for tenant, mark in reader.store.purges.all().items()}
        assert found == wanted and reader.store.purges.position == writer.store.purges.position


async def test_many_tenants_give_way_to_a_floor_that_covers_more_never_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge_log, "SNAPSHOT_EVERY", 8)
    monkeypatch.setattr(purge_log, "TENANTS_MAX", 10)
    server = VirtualServer()
    writer = Replica(server)
    numbers = {f"t{n}": await writer.store.purges.append(scope_of(f"t{n}")) for n in range(60)}
    reader = Replica(server, seed=1)
    await reader.store.refresh()
    for tenant, number in numbers.items():
        for replica in (writer, reader):
            assert replica.store.purges.covers(scope_of(tenant), number - 1)
            assert not replica.store.purges.covers(scope_of(tenant), replica.store.purges.position)
    assert len(reader.store.purges.all()) <= 10 + 8


async def broken(replica: Replica, why: str) -> None:
    for _ in range(2):  # and it stays so
        with pytest.raises(LogBroken, match=why):
            await replica.store.refresh()
    assert replica.store.purges.faults == 2


async def test_a_log_that_was_cut_is_noticed_by_who_read_it() -> None:
    server = VirtualServer()
    one = Replica(server)
    for tenant in "abc":
        await one.store.purges.append(scope_of(tenant))
    memory = one.store.purges.memory()
    server.drop(log_names(server)[-1])
    await broken(one, "entry 3 was read before and is gone")
    again = Replica(server, seed=1)
    assert again.store.purges.remember(memory) == 3
    await broken(again, "it ends at 2, and 3 was read before")
    unknowing = Replica(server, seed=2)
    await unknowing.store.refresh()
    assert unknowing.store.purges.position == 2, "who has no memory cannot know: SECURITY.md says so"


async def test_a_log_that_was_forked_is_noticed_by_who_read_it() -> None:
    server, other = VirtualServer(), VirtualServer()
    one, elsewhere = Replica(server), Replica(other)
    for tenant in "abc":
        await one.store.purges.append(scope_of(tenant))
    for tenant in "abxy":
        await elsewhere.store.purges.append(scope_of(tenant))
    memory = one.store.purges.memory()
    for name in log_names(other):
        server.put(name, other.objects[name].data)
    await broken(one, "entry 3 is not the one that was read before")
    again = Replica(server, seed=1)
    again.store.purges.remember(memory)
    await broken(again, "entry 3 is not the one that was read before")


async def test_a_gap_and_a_broken_chain_are_noticed_by_anybody() -> None:
    server, other = VirtualServer(), VirtualServer()
    one, elsewhere = Replica(server), Replica(other)
    for tenant in "abc":
        await one.store.purges.append(scope_of(tenant))
        await elsewhere.store.purges.append(scope_of("z" + tenant))
    names = log_names(server)
    whole = server.objects[names[1]].data
    server.put(names[1], other.objects[names[1]].data)
    await broken(Replica(server, seed=1), "entry 2 does not follow entry 1")
    server.drop(names[1])
    await broken(Replica(server, seed=2), "entries 2 to 2 are missing")
    server.put(names[1], whole)
    await Replica(server, seed=3).store.refresh()


async def test_memory_of_another_process_is_found_again_behind_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge_log, "SNAPSHOT_EVERY", 4)
    server = VirtualServer()
    one = Replica(server)
    for tenant in "abc":
        await one.store.purges.append(scope_of(tenant))
    memory = one.store.purges.memory()
    for number in range(30):
        await one.store.purges.append(scope_of(f"t{number}"))
    again = Replica(server, seed=1)
    again.store.purges.remember(memory)
    await again.store.refresh()
    assert again.store.purges.position == one.store.purges.position
    assert again.store.purges.remember(b"junk") == 0


@pytest.mark.parametrize("read", [0, 3])
@pytest.mark.parametrize("lost", [False, True], ids=["answered", "answer-lost"])
async def test_a_purge_by_who_has_not_read_what_was_compacted_since_reaches_everybody(
    monkeypatch: pytest.MonkeyPatch, read: int, lost: bool
) -> None:
    """Snapshots have freed the number behind the last entry that it has read: an entry there is read by nobody."""
    monkeypatch.setattr(purge_log, "SNAPSHOT_EVERY", 4)
    server = VirtualServer()
    one, late = Replica(server), Replica(server, seed=1)
    chain = chain_of(NS, S, scope=A)
    await one.write(chain)
    for number in range(12):
        if number == read:
            await late.store.refresh()
        await one.store.purges.append(scope_of(f"tenant {number}"))
    assert one.store.names.entry(read + 1) not in server.names
    create = late.store.purges._bucket.create

    async def twice(name: str, data: bytearray, used: Wall) -> Stat | None:
        first = await create(name, data, used)
        return await create(name, data, used) if lost else first

    with monkeypatch.context() as patch:
        patch.setattr(late.store.purges._bucket, "create", twice)
        if lost:  # it cannot tell its own entry from another's, and tries as often as it may
            patch.setattr(purge_log, "APPENDS_MAX", 3)
            with pytest.raises(TierError):
                await late.store.purges.append(A)
        else:
            await late.store.purges.append(A)
    for reader in (one, Replica(server, seed=2)):
        await reader.store.refresh()
        assert await miss(reader, chain) is Miss.PURGED
    await late.store.refresh()
    assert late.store.purges.position == one.store.purges.position


async def test_a_log_outlives_the_keys_that_signed_it() -> None:
    """Whoever rotates retires the old key when its data has expired; entries of the log never do."""
    server, name_key = VirtualServer(), bytes(32 * [7])

    def ring(**states: KeyState) -> Keyring:
        keys = [Key(name.encode().ljust(8), name.encode().ljust(32), state) for name, state in states.items()]
        return Keyring(keys, name_key)

    before = Replica(server, keyring=ring(old=KeyState.ACTIVE))
    await before.store.purges.append(A)
    await before.store.purges.append(B)
    rotated = [Replica(server, seed=seed, keyring=ring(old=KeyState.ACCEPT, new=KeyState.ACTIVE)) for seed in (1, 2)]
    for replica in rotated:
        await replica.sweeper.tidy()
    assert len(log_names(server)) == 3, "one snapshot, by the first"
    for keys in (ring(old=KeyState.RETIRED, new=KeyState.ACTIVE), ring(new=KeyState.ACTIVE)):
        after = Replica(server, seed=3, keyring=keys)
        await after.store.refresh()
        assert after.store.purges.all() == rotated[0].store.purges.all()
        assert after.store.purges.covers(A, 0) and after.store.purges.covers(B, 1)
    behind = Replica(server, keyring=ring(old=KeyState.ACTIVE, new=KeyState.ACCEPT))
    await behind.store.refresh()
    await behind.store.purges.append(B)
    late = Replica(server, seed=4, keyring=ring(new=KeyState.ACTIVE))
    await broken(late, "entry 4: key .* is not in the keyring")


async def test_an_entry_that_a_killed_purge_left_among_compacted_ones_breaks_no_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would have been deleted next: its number was free only for who had not read on for long."""
    monkeypatch.setattr(purge_log, "SNAPSHOT_EVERY", 4)
    server = VirtualServer()
    one, late = Replica(server), Replica(server, seed=1)
    await one.store.purges.append(A)
    await late.store.refresh()
    for number in range(12):
        await one.store.purges.append(scope_of(f"tenant {number}"))

    async def killed(name: str, etag: str | None = None) -> bool:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(late.bucket, "delete", killed)
        with pytest.raises(asyncio.CancelledError):
            await late.store.purges.append(B)
    for reader in (late, Replica(server, seed=2)):
        await reader.store.refresh()
        assert reader.store.purges.all().items() >= one.store.purges.all().items()


async def test_who_may_not_delete_may_purge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge_log, "SNAPSHOT_EVERY", 4)
    server = VirtualServer()
    one, reader = Replica(server), Replica(server, seed=1)
    asked = one.bucket._asked

    async def denied(verb: str, name: str) -> None:
        await asked(verb, name)
        if verb == "delete":
            raise TierError("g4", "delete", "AccessDenied (HTTP 403)")

    monkeypatch.setattr(one.bucket, "_asked", denied)
    for number in range(20):
        await one.store.purges.append(scope_of(f"tenant {number}"))
    await reader.store.refresh()
    assert reader.store.purges.all() == one.store.purges.all()


async def test_a_purge_that_cannot_be_written_raises() -> None:
    server = VirtualServer()
    one = Replica(server)

    async def fails(*_: object) -> None:
        raise TierError("g4", "put", "no")

    one.store.bucket.create = fails  # type: ignore[assignment,method-assign]
    with pytest.raises(TierError):
        await one.store.purges.append(A)
    assert one.store.purges.all() == {} and log_names(server) == []


async def test_a_joined_and_a_renewed_unit_keep_their_position() -> None:
    server = VirtualServer()
    one = Replica(server)
    chain = chain_of(NS, S, scope=A)
    await one.write(chain, ttl=300)
    await one.store.purges.append(B)
    await one.write(chain, ttl=200)  # covered by what is there
    entry = await one.store.probe(chain, 0)
    assert entry is not None and entry.frame.position == 0
    await one.store.renewer.renew(entry, one.clock.wall())
    entry = await one.store.probe(chain, 0)
    assert entry is not None and entry.frame.position == 0


async def test_pins_made_before_a_purge_end_and_later_ones_stay() -> None:
    from kvtier.retention.pins import Pin

    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    chain = tuple(chain_of(NS, S, scope=A))
    now = server.clock.wall()
    await one.store.pins.put(Pin("old", chain, now, now + 5000))
    await one.store.purges.append(A)
    await one.store.pins.put(Pin("new", chain, now, now + 5000))
    for replica in (one, two):
        await replica.store.refresh()
        await replica.store.pins.settle()
        assert [pin.name for pin in replica.store.pins.list()] == ["new"]


async def test_a_purge_that_looks_like_an_earlier_one_covers_what_was_written_between_them() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    await one.store.purges.append(A)
    chain = chain_of(NS, S, scope=A)
    await one.write(chain)
    await two.store.purges.append(A)  # it has not read the first
    await one.store.refresh()
    assert len(log_names(server)) == 2
    assert await miss(one, chain) is Miss.PURGED and await miss(two, chain) is Miss.PURGED


async def test_an_entry_that_cannot_be_one_is_not_read() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    await one.store.purges.append(A)
    (name,) = log_names(server)
    server.objects[name].data = bytes(purge_log.ENTRY_BYTES_MAX + 1)
    with pytest.raises(LogBroken, match=r"has .* bytes"):
        await two.store.refresh()


async def test_an_entry_that_is_taken_and_gone_or_always_anothers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Replica(VirtualServer())

    async def taken(*_: object) -> None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(one.store.bucket, "create", taken)
        with pytest.raises(LogBroken, match="is taken, and gone"):
            await one.store.purges.append(A)
        there = Stat("x", 1)

        async def head(*_: object) -> Stat:
            return there

        patch.setattr(one.store.bucket, "head", head)
        patch.setattr(one.store.purges, "_read", taken)
        with pytest.raises(TierError, match="others were faster"):
            await one.store.purges.append(A)
    assert await one.store.purges.append(A) == 1
