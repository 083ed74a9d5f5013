"""G4 on real S3 servers."""

from __future__ import annotations

import pytest

from kvtier.clock import SystemClock
from kvtier.testing import VirtualClock, chain_of, check_tier, payload_of, sample_namespace, seal
from kvtier.testing.servers import S3Server
from kvtier.tiers.objects.deltas import Deltas
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Stored, Target


@pytest.fixture(autouse=True)
def unstamped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a server that does not stamp its objects: this one's clock is real, the contract's runs ahead of it."""

    async def untold(deltas: Deltas) -> None:
        pass

    monkeypatch.setattr(Deltas, "measure_skew", untold)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_seaweedfs_passes_the_contract(seaweedfs: S3Server, client: str) -> None:
    clock, url = VirtualClock(), f"{seaweedfs.new_bucket()}/some/prefix"
    await check_tier(
        lambda ns: ObjectTier(url, ns, clock=clock, stride=4, options=seaweedfs.options, client=client), clock
    )


@pytest.mark.parametrize("client", ["obstore", pytest.param("s3fs", marks=pytest.mark.long)])
async def test_a_server_that_ignores_conditions_passes_too(rclone: S3Server, client: str) -> None:
    clock, url = VirtualClock(), f"{rclone.new_bucket()}/some/prefix"
    await check_tier(
        lambda ns: ObjectTier(url, ns, clock=clock, stride=4, options=rclone.options, client=client),
        clock,
    )


@pytest.mark.long
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_ceph_passes_the_contract(ceph: S3Server, client: str) -> None:
    clock, url = VirtualClock(), f"{ceph.new_bucket()}/some/prefix"
    await check_tier(
        lambda ns: ObjectTier(url, ns, clock=clock, stride=4, options=ceph.options, client=client),
        clock,
    )


@pytest.mark.long
async def test_ceph_killed_and_restarted_keeps_what_it_acknowledged(ceph: S3Server) -> None:
    clock, ns = SystemClock(), sample_namespace(1 << 20)
    tier = ObjectTier(ceph.new_bucket(), ns, clock=clock, stride=4, options=ceph.options, attempts=2)
    await tier.open()
    chains = [chain_of(ns, 8, seed) for seed in range(4)]
    for chain in chains:
        results = await tier.write(seal(chain, range(8), 1 << 20, clock.wall()), clock.monotonic() + 60)
        assert results == [Stored.STORED] * 8
    ceph.kill()
    ceph.start()
    for chain in chains:
        buffers = [bytearray(1 << 20) for _ in chain]
        targets = [Target(index, (memoryview(buffer),)) for index, buffer in enumerate(buffers)]
        give_up = clock.monotonic() + 60
        while not all(isinstance(r, Loaded) for r in await tier.read(chain, targets, clock.monotonic() + 30)):
            assert clock.monotonic() < give_up
        assert [bytes(buffer) for buffer in buffers] == [payload_of(key, 1 << 20) for key in chain]
    await tier.close(clock.monotonic() + 5)
