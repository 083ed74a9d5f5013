"""Uses of units in the bucket: each renews what lives, and revives nothing, whoever reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvtier.identity.keys import BlockKey
from kvtier.retention.lifetime import Lifetime, Stamp
from kvtier.retention.terms import Depth, Terms
from kvtier.testing import chain_of, seal
from kvtier.tiers.protocol import Miss
from tests.tiers.objects.support.virtual_bucket import NS, Replica, VirtualServer

S = 4
CHAIN = chain_of(NS, S)


async def stored(replica: Replica, chain: Sequence[BlockKey], *stamps: Stamp) -> None:
    now = replica.clock.wall()
    blocks = seal(list(chain), range(len(chain)), NS.block_bytes, now, Terms("t"))
    assert (await replica.writer.write([replace(block, life=Lifetime(now, stamps)) for block in blocks])).durable


async def used(replica: Replica, after_s: float) -> None:
    replica.server.clock.advance(after_s)
    replica.store.index.touch(CHAIN, replica.clock.wall())
    await replica.store.renewer.record_uses()


async def miss_of(replica: Replica) -> Miss | None:
    entry = await replica.store.probe(CHAIN, 0)
    assert entry is not None
    known = replica.store.index.get(entry.last)
    assert known is not None
    return replica.store.miss_of(known, replica.clock.wall())


@pytest.mark.parametrize("later", ["a tier above", "a hard end"])
async def test_a_use_revives_no_terms_that_were_over_before_it(later: str) -> None:
    """The header has all terms, and a recorded use is that of all."""
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    now = server.clock.wall()
    brief = Stamp(now, 60, None, Depth.G4)
    other = Stamp(now, 3600, None, Depth.G3) if later == "a tier above" else Stamp(now, 600, 1000, Depth.G4)
    await stored(one, CHAIN, brief, other)
    for _ in range(2):
        await used(one, 495)
        assert (await miss_of(one) is None) is (await miss_of(two) is None) is (later == "a hard end")
    for _ in range(3):
        await used(one, 600)
        for replica in (one, two):
            assert await miss_of(replica) is Miss.EXPIRED


async def test_a_use_of_what_lives_is_recorded_by_a_copy() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    now = server.clock.wall()
    await stored(one, CHAIN, Stamp(now, 600, None, Depth.G4), Stamp(now, 500, None, Depth.G4))
    for _ in range(4):
        await used(one, 400)
        assert await miss_of(two) is None
    assert one.bucket.requests["put"] == 1 and one.bucket.requests["copy"] == 4


async def test_a_header_that_is_read_again_revives_nothing() -> None:
    server = VirtualServer()
    replica = Replica(server)
    now = server.clock.wall()
    await stored(replica, CHAIN, Stamp(now, 60, None, Depth.G4), Stamp(now, 3600, None, Depth.G3))
    server.clock.advance(100)
    replica.store.index.touch(CHAIN, replica.clock.wall())
    assert await miss_of(replica) is Miss.EXPIRED
