"""A fleet on one bucket, simulated by the real code over a virtual bucket and clock."""

from __future__ import annotations

import math
import sys
from collections import Counter
from hashlib import blake2b
from typing import Any

import pytest

from kvtier.identity.keys import scope_of
from kvtier.testing import chain_of
from kvtier.testing.fleet import STEP_S, Fleet
from kvtier.tiers.objects import background, catalogue, deltas, sweep
from kvtier.tiers.objects.bucket.protocol import Stat
from kvtier.tiers.objects.probe import Prober
from kvtier.times import Mono
from tests.tiers.objects.support.virtual_bucket import NS, Replica, VirtualServer


async def per_minute(count: int, seconds: float = 60.0, every_s: float = 20) -> tuple[float, float]:
    """Requests per replica and minute of a fleet at work, mean and maximum, after it has started. Each replica writes a
    unit every `every_s`."""
    fleet = Fleet(count, every_s)
    await fleet.run(120)
    before = fleet.requests()
    await fleet.run(seconds)
    spent = [after - then for after, then in zip(fleet.requests(), before, strict=True)]
    return sum(spent) / count * 60 / seconds, max(spent) * 60 / seconds


async def test_an_idle_replica_asks_little() -> None:
    """With what the manager's heartbeat costs: a listing every 20 s."""
    server = VirtualServer()
    replica = Replica(server)
    await replica.turn()
    before = replica.bucket.requests.total()
    for _ in range(90):
        server.clock.advance(20)
        await replica.store.refresh()
        await replica.turn()
    assert (replica.bucket.requests.total() - before) / 30 <= 6


async def test_ten_replicas_ask_little_more_than_one() -> None:
    one, ten = await per_minute(1), await per_minute(10)
    assert ten[0] <= one[0] + 40 * math.log2(10)
    assert ten[1] <= 3 * ten[0], "nobody's share is many times another's"


@pytest.mark.long
async def test_requests_grow_with_the_logarithm_of_the_fleet() -> None:
    ten, hundred = await per_minute(10), await per_minute(100)
    print(f"requests per replica and minute: 10: {ten}, 100: {hundred}")
    assert hundred[0] <= ten[0] + 10 * math.log2(10)
    assert hundred[1] <= 3 * ten[1], "nobody's share is many times another's"


@pytest.mark.long
async def test_ten_times_as_many_replicas_add_the_same_each_time() -> None:
    one, ten, hundred = [(await per_minute(count, 300, every_s=60))[0] for count in (1, 10, 100)]
    print(f"requests per replica and minute: 1: {one}, 10: {ten}, 100: {hundred}")
    assert hundred - ten <= ten - one


async def published(count: int) -> VirtualServer:
    """A bucket with one delta each of so many replicas."""
    server = VirtualServer()
    for number in range(count):
        replica = Replica(server, number, stride=1, number=number)
        await replica.write(chain_of(NS, 1, number))
        await replica.store.deltas.publish()
    return server


@pytest.mark.parametrize(("count", "most"), [(1, 1), (8, 5), (64, 2), (130, 1)])
async def test_the_more_replicas_write_the_fewer_deltas_are_read_one_by_one(count: int, most: int) -> None:
    """The windows bring the rest."""
    reader = Replica(await published(count), stride=1, number=count)
    await reader.store.deltas.poll()
    assert reader.bucket.requests["get"] == most


async def test_a_poll_lists_few_names_again() -> None:
    server = await published(100)
    reader, writer, listed = Replica(server, stride=1), Replica(server, stride=1), list[int]()
    page = reader.bucket._page

    def counted(prefix: str, after: str) -> list[Any]:
        found = page(prefix, after)
        listed.append(len(found))
        return found

    reader.bucket._page = counted  # type: ignore[method-assign]
    for number in range(6):
        await reader.store.deltas.poll()
        server.clock.advance(deltas.POLL_S)
        await writer.write(chain_of(NS, 1, 100 + number))
        await writer.store.deltas.publish()
    assert sum(listed) <= 450, "in each listing for twenty seconds, not in that of two minutes"


@pytest.mark.parametrize("ahead_s", [-110.0, -30.0, -5.0])
async def test_the_deltas_of_a_clock_that_is_behind_are_found_within_a_minute(ahead_s: float) -> None:
    server, chain = VirtualServer(), chain_of(NS, 1)
    reader, late = Replica(server, 0, stride=1), Replica(server, 1, stride=1, ahead_s=ahead_s)
    await reader.write(chain_of(NS, 1, 7))
    for _ in range(3):
        await reader.store.deltas.publish()
        await reader.store.deltas.poll()
        server.clock.advance(deltas.POLL_S)
    await late.write(chain)
    await late.store.deltas.publish()
    waited = 0.0
    await reader.store.deltas.poll()
    while reader.store.known(chain[0], chain[-1], 0) is None:
        assert waited < deltas.OVERLAP_EVERY_S
        server.clock.advance(deltas.POLL_S)
        waited += deltas.POLL_S
        await reader.store.deltas.poll()
    assert waited == 0 or ahead_s < -deltas.NEAR_S


async def test_a_clock_that_is_ahead_hides_nobody_elses_deltas() -> None:
    server, chain = VirtualServer(), chain_of(NS, 1)
    reader, early, other = (Replica(server, number, stride=1, ahead_s=100.0 * (number == 1)) for number in range(3))
    await early.write(chain_of(NS, 1, 7))
    await early.store.deltas.publish()
    await reader.store.deltas.poll()
    server.clock.advance(deltas.POLL_S)
    await other.write(chain)
    await other.store.deltas.publish()
    await reader.store.deltas.poll()
    assert reader.store.known(chain[0], chain[-1], 0) is not None


@pytest.mark.parametrize("count", [1, 10, pytest.param(100, marks=pytest.mark.long)])
async def test_a_new_replica_knows_the_last_hour_within_a_minute(count: int) -> None:
    fleet = Fleet(count, every_s=60)
    await fleet.run(3600)
    since = fleet.server.clock.wall() - 3600
    new = fleet.newcomer()
    read, learned_from = new.bucket.read, list[str]()

    async def counted(name: str, *arguments: Any, **more: Any) -> Any:
        if not new.store.names.is_unit(name):  # else the sweep looks at its header
            learned_from.append(name)
        return await read(name, *arguments, **more)

    new.bucket.read = counted  # type: ignore[method-assign]
    for _ in range(round(60 / STEP_S)):
        await new.turn()
        await fleet.step()
    await new.turn()
    assert fleet.known(new, since) >= 0.95
    assert 0 < len(learned_from) <= 3600 / catalogue.WINDOW_S + 7 * deltas.READS_MAX + 40
    assert new.bucket.requests["get"] - len(learned_from) <= 2 * sweep.HEADERS_MAX
    per_hour = deltas.KEEP_S / max(deltas.PUBLISH_S, count * deltas.PUBLISH_SHARE_S) * count
    assert len(fleet.server.under("delta")) <= max(200, per_hour / 3)
    for replica in fleet.replicas:
        replica.store.index.check()


async def test_a_new_replica_reads_the_windows_of_more_deltas_than_it_would_read_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a thousand replicas there are ten thousand in ten minutes."""
    fleet = Fleet(10, every_s=60)
    await fleet.run(1200)
    monkeypatch.setattr(deltas, "UNREAD_MAX", 15)
    assert len(fleet.server.under("delta")) > 4 * deltas.UNREAD_MAX
    new = fleet.newcomer()
    for _ in range(round(60 / STEP_S)):
        await new.turn()
        await fleet.step()
    await new.turn()
    assert fleet.known(new, 0) >= 0.95


async def test_a_large_fleets_window_is_whole_after_two_polls() -> None:
    """A level more is ten seconds more in which nobody knows its units: a thousand replicas write 500 in a window."""
    server = VirtualServer()
    replicas = [Replica(server, number, stride=1, number=number) for number in range(300)]
    for number, replica in enumerate(replicas):
        await replica.write(chain_of(NS, 1, number))
        await replica.store.deltas.publish()
    server.clock.advance(catalogue.WINDOW_S + catalogue.CLOSE_S - server.clock.wall() % catalogue.WINDOW_S)
    for _ in range(2):
        for replica in replicas:
            await replica.store.deltas.poll()
        server.clock.advance(deltas.POLL_S)
    assert len(server.under("catalogue/0")) == 1
    asked = [replica.bucket.requests.total() for replica in replicas]
    assert max(asked) <= 2 * catalogue.FAN_IN and sum(asked) <= 12 * len(replicas)


async def test_two_deltas_of_one_instant_are_both_read() -> None:
    """The clock of the skew's measurement, an empty delta, may read the same as that of the next put."""
    server = VirtualServer()
    one, other, chain = Replica(server, 0, stride=1), Replica(server, 1, stride=1), chain_of(NS, 1)
    await one.store.deltas.measure_skew()
    await one.write(chain)
    await one.store.deltas.publish()
    await other.turn()
    assert len(server.under("delta")) == 2 and other.store.known(chain[0], chain[-1], 0) is not None


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_thousand_replicas_ask_no_more_than_a_hundred() -> None:
    hundred, thousand = await per_minute(100), await per_minute(1000)
    print(f"requests per replica and minute: 100: {hundred}, 1000: {thousand}")
    assert thousand[0] <= hundred[0] + 10 * math.log2(10)


async def test_looking_for_its_share_of_a_large_window_costs_little() -> None:
    """Lookups share the loop on which a replica of a thousand does so at each poll."""
    server, calls = VirtualServer(), Counter[str]()
    replica = Replica(server, stride=1, number=5000)
    shelf, wall_s = replica.store.deltas._catalogue, server.clock.wall()
    start_s = wall_s // catalogue.WINDOW_S * catalogue.WINDOW_S
    for number in range(1000):  # none of them is this replica
        writer = blake2b(b"%d" % number, digest_size=4).hexdigest()
        shelf.note(Stat(f"{replica.store.names.deltas}{int(start_s * 1e6) + number:016x}-{writer}", 100))
    server.clock.advance(start_s + catalogue.WINDOW_S + catalogue.CLOSE_S - wall_s)
    sys.setprofile(lambda _frame, event, _argument: calls.update([event]))
    try:
        await shelf.merge_due()
    finally:
        sys.setprofile(None)
    assert replica.bucket.requests.total() == 0, "nothing is its own"
    assert 1000 < calls["call"] + calls["c_call"] <= 20 * 1000


async def test_who_is_gone_is_stood_in_for() -> None:
    """Half of the fleet ends before its windows are merged: the others merge them."""
    fleet = Fleet(10, every_s=20)
    await fleet.run(100)
    fleet.end(5)
    await fleet.run(600)
    windows = {catalogue.window_of(name) for name in fleet.server.under("delta")}
    top = {name.rpartition("/")[2].partition("-")[0] for name in fleet.server.under("catalogue/0")}
    closed = {w for w in windows if (w + 1) * catalogue.WINDOW_S < fleet.server.clock.wall() - 60}
    missing = [window for window in closed if f"{window:010x}" not in top]
    assert len(missing) <= 1, f"{len(missing)} of {len(closed)} windows are not merged"
    assert all(fleet.known(replica, 0) >= 0.95 for replica in fleet.replicas)


async def test_a_fleet_that_started_together_does_not_tidy_all_at_once() -> None:
    """Each lists ten thousand deltas for it, and would delete the same."""
    server, tidied = VirtualServer(), list[float]()
    replicas = [Replica(server, seed, number=seed) for seed in range(40)]

    async def sweep() -> bool:
        tidied.append(server.clock.monotonic())
        return False

    for replica in replicas:
        replica.sweeper._next = Mono(math.inf)  # it tidies at the end of a walk, too
        replica.store.deltas.any_old = sweep  # type: ignore[method-assign]
    for _ in range(round(1.5 * background.TIDY_S / STEP_S) + 1):
        for replica in replicas:
            await replica.turn()
        server.clock.advance(STEP_S)
    assert len(tidied) >= len(replicas)
    assert max(Counter(tidied).values()) <= 5


async def test_merged_windows_are_swept_and_are_no_units() -> None:
    fleet = Fleet(3, every_s=20)
    await fleet.run(600)
    names = fleet.replicas[0].store.names
    assert (merged := fleet.server.under("catalogue"))
    assert not any(name.startswith(names.deltas) or names.is_unit(name) for name in merged)
    fleet.server.clock.advance(3 * deltas.KEEP_S)
    await fleet.replicas[0].store.deltas.sweep(fleet.server.clock.wall())
    assert not fleet.server.under("catalogue") and not fleet.server.under("delta")


@pytest.mark.parametrize("why", ["expired", "purged"])
@pytest.mark.parametrize("header", [False, True], ids=["hint", "header"])
async def test_what_was_written_anew_is_learnt_anew(why: str, header: bool) -> None:
    """Else each replica that has known it would probe for it from then on, at each prompt."""
    server = VirtualServer()
    one, two = Replica(server, 0), Replica(server, 1)
    chain = chain_of(NS, 4, scope=scope_of("a"))
    for again in range(3):
        await one.write(chain, ttl=60 if why == "expired" else 10**9)
        await one.store.deltas.publish()
        server.clock.advance(STEP_S)
        await two.store.refresh()
        await two.store.deltas.poll()
        assert two.store.deltas.received == again + 1
        assert Prober(two.store, two.clock).peek(chain, range(4)) == [None] * 4
        if header:
            assert await two.store.probe(chain, 0) is not None
        two.store.index.check()
        server.clock.advance(100)
        if why == "purged":
            await one.store.purges.append(scope_of("a"))
