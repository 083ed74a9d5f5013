"""Uses of units in the bucket: each renews what lives, and revives nothing, whoever reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest

from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey
from kvtier.keyring import Key, Keyring
from kvtier.retention.lifetime import Lifetime, Stamp
from kvtier.retention.terms import Depth, Terms
from kvtier.testing import SkewedClock, chain_of, seal
from kvtier.tiers.objects import renewal
from kvtier.tiers.objects.bucket.protocol import USED, use_text
from kvtier.tiers.objects.bucket.s3fs import S3Bucket
from kvtier.tiers.objects.payload import make_unit
from kvtier.tiers.objects.uses import UseProofs
from kvtier.tiers.protocol import Miss
from kvtier.times import Wall
from tests.tiers.objects.support.virtual_bucket import NS, Replica, VirtualServer

S = 4
CHAIN = chain_of(NS, S)
KEYS = Keyring([Key(b"aaaaaaaa", bytes(32))], bytes(32))


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


@pytest.mark.parametrize("reader_s", [-3600.0, -90.0, 0.0])
@pytest.mark.parametrize("writer_s", [0.0, 100.0])
@pytest.mark.parametrize("keyring", [KEYS, Keyring.public()], ids=["keys", "public"])
def test_a_use_that_s3_bounds_keeps_its_proof(keyring: Keyring, writer_s: float, reader_s: float) -> None:
    """By the server's stamps and the reader's clock, it was at most a minute later than the copy that recorded it."""
    server = VirtualServer()
    replica = Replica(server, keyring=keyring)
    frame = make_unit(NS.digest, seal(CHAIN, range(S), NS.block_bytes, 0.0), Lifetime(Wall(0.0)), keyring)[0]
    name, now = replica.store.names.unit(CHAIN[-1]), server.clock.wall()
    proofs = UseProofs(keyring, replica.store.names.root)
    recorded = proofs.prove(name, frame, Wall(now + writer_s))
    bucket = S3Bucket(
        "b", {}, SkewedClock(server.clock, reader_s), connections=1, connect_timeout_s=1, read_timeout_s=1
    )
    modified = datetime.fromtimestamp(now, UTC)
    answer = {
        "ETag": "1",
        "LastModified": modified,
        "Metadata": {USED: use_text(recorded)},
        "ResponseMetadata": {"HTTPHeaders": {"date": format_datetime(modified, usegmt=True)}},
    }
    stat = bucket._stat(name, answer, 1)
    used = proofs.last_use(frame, stat, Wall(max(now + reader_s, now)))
    assert used == pytest.approx(now + min(writer_s, 60.0), abs=1)


async def test_a_bucket_that_refuses_records_is_not_asked_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """An account that may only read was asked thousands of times in a minute, and so was an overloaded server."""
    server = VirtualServer()
    replica = Replica(server)
    for number in range(100):
        await replica.write(chain_of(NS, 4, seed=number), ttl=3600)
    asked, refused = replica.bucket._asked, set[str]()

    async def deny(verb: str, name: str) -> None:
        await asked(verb, name)
        if verb == "copy" and (not refused or name in refused):
            raise TierError("g4", "copy", "AccessDenied (HTTP 403)")

    monkeypatch.setattr(replica.bucket, "_asked", deny)
    server.clock.advance(3000)
    replica.store.index.touch([chain_of(NS, 4, seed=number)[-1] for number in range(100)], server.clock.wall())
    with pytest.raises(TierError):
        await replica.store.renewer.record_uses()
    assert replica.bucket.requests["copy"] == renewal.AT_ONCE
    refused.add(replica.store.names.unit(chain_of(NS, 4, seed=5)[-1]))
    with pytest.raises(TierError):
        await replica.store.renewer.record_uses()
    assert replica.store.renewer.renewed == 99 and len(replica.store.index.unrecorded()) == 1


async def test_a_unit_of_the_longest_terms_since_different_times_is_written_and_told_to_others() -> None:
    """Its common life had more seconds than a hint has room for: five such writes put G4 out of use."""
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    now = one.clock.wall()
    lives = [Stamp(Wall(now - 5000), None, None, Depth.G4), *[Stamp(now, None, 2.0**32 - 1, Depth.G4)] * (S - 1)]
    blocks = seal(list(CHAIN), range(S), NS.block_bytes, now, Terms("t"))
    blocks = [replace(block, life=Lifetime(now, (stamp,))) for block, stamp in zip(blocks, lives, strict=True)]
    assert (await one.writer.write(blocks)).durable
    await one.store.deltas.publish()
    await two.store.deltas.poll()
    hint = two.store.index.find_hint(CHAIN[0], CHAIN[-1], S - 1)
    assert hint is not None and hint.life.servable(Depth.G4, Wall(now + 1e9))


async def test_records_that_always_fail_keep_none_of_the_others_from_being_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of each pass were the same: where they were as many as end it, none of the rest was ever recorded."""
    server, chains = VirtualServer(), [chain_of(NS, S, seed=number) for number in range(64)]
    replica = Replica(server)
    for chain in chains:
        await replica.write(chain, ttl=3600)
    asked = replica.bucket._asked
    server.clock.advance(3000)
    replica.store.index.touch([chain[-1] for chain in chains], server.clock.wall())
    bad = {replica.store.names.unit(entry.last) for entry in replica.store.index.unrecorded()[: renewal.AT_ONCE]}

    async def deny(verb: str, name: str) -> None:
        await asked(verb, name)
        if verb == "copy" and name in bad:
            raise TierError("g4", "copy", "AccessDenied (HTTP 403)")

    monkeypatch.setattr(replica.bucket, "_asked", deny)
    for _ in range(3):
        with pytest.raises(TierError):
            await replica.store.renewer.record_uses()
    assert replica.store.renewer.renewed == len(chains) - len(bad)
