"""G4 on real S3 servers."""

from __future__ import annotations

import pytest

from kvtier.testing import VirtualClock, check_tier
from kvtier.testing.servers import S3Server
from kvtier.tiers.objects import ObjectTier


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
