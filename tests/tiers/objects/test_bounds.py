"""What others write into the bucket has bounds: times of use, and deltas in time and in bytes."""

from __future__ import annotations

import math

import pytest

from kvtier.keyring import Keyring
from kvtier.testing import chain_of
from kvtier.tiers.objects import delta_format, deltas
from kvtier.tiers.objects.bucket.protocol import USED, recorded_use
from kvtier.tiers.objects.signed import Signer
from tests.tiers.objects.support.virtual_bucket import NS, Replica, VirtualServer

S = 4


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "1e300", "", "soon", str(2**40)])
def test_a_use_that_is_no_time_is_not_recorded(text: str) -> None:
    assert recorded_use({USED: text}) is None
    assert recorded_use({USED: "1800000000.5"}) == 1_800_000_000.5


async def test_a_use_in_the_future_does_not_keep_an_object_for_ever() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    chain = chain_of(NS, S)
    await one.write(chain, ttl=300)
    server.objects[one.store.names.unit(chain[-1])].used = 2.0**39
    server.clock.advance(1000)
    entry = await two.store.probe(chain, 0)
    assert entry is not None and math.isfinite(entry.life.last_use)
    assert two.store.miss_of(entry, server.clock.wall()) == "expired"


async def test_a_delta_named_in_the_future_blinds_nobody() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    for stamp in ("00ffffffffffffff", "ffffffffffffffff"):
        name = f"{one.store.names.deltas}{stamp}-00000000"
        server.put(name, Signer(Keyring.public(), "p/").sign(name, delta_format.encode([])))
    for number in range(3):
        await one.write(chain_of(NS, S, seed=number))
        server.clock.advance(300)
        await one.store.deltas.publish()
        await two.turn()
        assert two.store.deltas.received == number + 1


async def test_deltas_are_read_within_a_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    for number in range(4):
        await one.write(chain_of(NS, S, seed=number))
        server.clock.advance(5)
        await one.store.deltas.publish()
    size = max(len(server.objects[name].data) for name in server.under("delta"))
    monkeypatch.setattr(deltas, "READ_BYTES_MAX", 2 * size)
    for received in (2, 4):
        server.clock.advance(deltas.POLL_S)
        await two.store.deltas.poll()
        assert two.store.deltas.received == received
