"""Objects of another version, another stride, or none of kvtier's: a miss with a reason, and left as they are."""

from __future__ import annotations

import pytest

from kvtier.testing import chain_of, seal
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Stored
from tests.tiers.objects.support.replicas import NS, S, Site


@pytest.mark.parametrize("offset", [8, 9])
async def test_another_version_is_a_miss_and_stays(site: Site, offset: int) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    await site.store(one, chain)
    (path,) = site.objects()
    site.flip(path, offset)
    there = path.read_bytes()
    assert await site.read(two, chain) == [Miss.FOREIGN] * S
    assert await two.lookup(chain, range(S), site.deadline) == [Miss.FOREIGN] * S
    assert await site.store(two, chain) == [Stored.REFUSED] * S
    site.clock.advance(200_000)
    await two._loop.run(two._sweeper.page())
    assert await site.store(two, chain) == [Stored.REFUSED] * S
    assert path.read_bytes() == there, "a rolling upgrade is no war"
    assert two.counters()["foreign_units"] >= 3


async def test_what_is_no_frame_stays_for_readers_and_gives_way_to_a_writer(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    await site.store(one, chain)
    (path,) = site.objects()
    for junk in (b"", b"junk", b"junk" * 8192):
        path.write_bytes(junk)
        assert set(await site.read(two, chain)) <= {Miss.FOREIGN, Miss.ABSENT}
        await two.lookup(chain, range(S), site.deadline)
        assert path.read_bytes() == junk
        assert await site.store(two, chain) == [Stored.STORED] * S
        assert all(isinstance(result, Loaded) for result in await site.read(two, chain))


async def test_replicas_of_two_strides_leave_each_others_objects_alone(site: Site) -> None:
    four = await site.replica()
    eight = ObjectTier(f"file://{site.root}", NS, clock=site.clock, stride=2 * S, seed=9)
    await eight.open()
    site.tiers.append(eight)
    chain = chain_of(NS, 4 * S)
    await site.store(four, chain)
    theirs = {path: path.read_bytes() for path in site.objects()}
    results = await eight.write(seal(chain, range(4 * S), NS.block_bytes, site.clock.wall()), site.deadline)
    assert results == [Stored.REFUSED] * (4 * S), "every name of a long stride is taken by a short one"
    assert Miss.FOREIGN in await site.read(eight, chain)
    await eight.flush(site.deadline)
    other = chain_of(NS, 4 * S, seed=5)
    assert await eight.write(seal(other, range(4 * S), NS.block_bytes, site.clock.wall()), site.deadline) == (
        [Stored.STORED] * (4 * S)
    )
    await eight.flush(site.deadline)
    site.clock.advance(60)
    await four._loop.run(four._store.deltas.poll())
    await four.lookup(other, range(4 * S), site.deadline)
    results = await site.read(four, other)
    assert results[S] is Miss.FOREIGN
    assert {path: path.read_bytes() for path in theirs} == theirs
    assert len(site.objects()) == 6 and all(isinstance(r, Loaded) for r in await site.read(eight, other))
    four.check()
