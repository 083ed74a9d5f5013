"""Servers that the G4 tests share: one of each per test run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvtier.testing.servers import S3Server, SeaweedFS
from tests.tiers.objects.support.ceph import CephRGW, missing
from tests.tiers.objects.support.rclone import RcloneS3
from tests.tiers.objects.support.replicas import Site
from tests.tiers.objects.support.s3 import running, started


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from running(SeaweedFS, tmp_path_factory)


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    absent = missing()
    if absent:
        # Debian packages, not Python's: nothing that `make setup` could have installed, so CI may lack them too.
        pytest.skip(f"Ceph is not installed ({', '.join(absent)}); see support/ceph.py")
    yield from started(CephRGW(tmp_path_factory.mktemp("ceph")))


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from running(RcloneS3, tmp_path_factory)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path / "g4")
    yield site
    for tier in site.tiers:
        tier.check()
        await tier.close(site.deadline)
