"""G4 on Azure's blob storage, by its emulator where that is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from kvtier.cli.g4 import findings
from kvtier.clock import SystemClock
from kvtier.config import Config
from kvtier.errors import ConfigError, TierError
from kvtier.testing import VirtualClock, check_tier
from kvtier.tiers.objects.bucket.azure import DELETES_AT_ONCE, AzureBucket, translated
from kvtier.tiers.objects.bucket.open import BucketLimits, open_bucket
from kvtier.tiers.objects.deltas import Deltas
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.times import Wall
from tests.tiers.objects.support.azurite import Azurite
from tests.tiers.objects.support.s3 import started

pytest.importorskip("obstore")
OPTIONS = {"account_name": "ours", "account_key": "c2VjcmV0"}


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    if Azurite.binary() is None:
        pytest.skip("Azurite is not installed: npm install -g azurite")
    yield from started(Azurite(tmp_path_factory.mktemp("azurite")))  # type: ignore[misc]


def opened(url: str, options: dict[str, object], client: str = "auto") -> tuple[object, str]:
    return open_bucket(url, options, client, SystemClock(), BucketLimits())  # type: ignore[arg-type]


def test_a_container_is_opened_with_the_options_of_adlfs() -> None:
    bucket, prefix = opened("az://container/some/prefix", {**OPTIONS, "sas_token": None})
    assert isinstance(bucket, AzureBucket) and prefix == "some/prefix"
    assert translated({"sas_token": "t", "endpoint_url": "http://e"}) == {"sas_key": "t", "endpoint": "http://e"}
    assert translated({"connection_string": "all of it"}) is None


def test_what_cannot_be_opened_names_the_field_and_no_secret() -> None:
    wrong = {"connection_string": "AccountKey=c2VjcmV0"}
    for url, options, client, named in (
        ("az:///prefix", OPTIONS, "auto", r"tiers\.g4\.url names no container"),
        ("az://container/p", wrong, "obstore", r"tiers\.g4\.options"),
    ):
        with pytest.raises(ConfigError, match=named) as raised:
            opened(url, dict(options), client)
        assert "c2VjcmV0" not in str(raised.value)


def test_an_etag_of_a_listing_is_one_of_a_condition() -> None:
    bucket = AzureBucket("container", {}, connect_timeout_s=1, read_timeout_s=1)
    assert [bucket._etag(told) for told in ("0x8D", '"0x8D"', None)] == ['"0x8D"', '"0x8D"', ""]


class Library:
    """Stands for the library's store: a batch is deleted whole, and those behind one that lacked a name are not."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)
        self.batches: list[int] = []

    async def delete_async(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), DELETES_AT_ONCE):
            batch = set(names[start : start + DELETES_AT_ONCE])
            self.batches.append(len(batch))
            gone, self.names = batch - self.names, self.names - batch
            if gone:
                raise FileNotFoundError(min(gone))


async def test_one_that_is_gone_does_not_keep_the_batches_behind_it_from_being_deleted() -> None:
    bucket = AzureBucket("container", {}, connect_timeout_s=1, read_timeout_s=1)
    names = [f"p/{number:03}" for number in range(600)]
    bucket._store = library = Library(names[1:])
    await bucket.delete_many(names)
    assert not library.names and library.batches == [256, 256, 88]
    await bucket.delete_many([])
    assert len(library.batches) == 3, "nothing to ask for"


async def test_a_server_that_is_not_there_is_said_so_without_secrets() -> None:
    bucket, _ = opened("az://container/p", {**OPTIONS, "endpoint_url": "http://127.0.0.1:9/ours"})
    assert isinstance(bucket, AzureBucket)
    await bucket.start()
    with pytest.raises(
        TierError, match=r"http://127\.0\.0\.1:9: connection refused \(tiers\.g4\.options\.endpoint_url"
    ):
        await bucket.create("p/x", bytearray(b"x"), Wall(0.0))
    await bucket.close()


@pytest.mark.long
def test_azurite_is_found_good(azurite: Azurite) -> None:
    g4 = Config.parse({"tiers": {"g4": {"url": f"{azurite.new_bucket()}/p", "options": azurite.options}}}).tiers.g4
    assert g4 is not None
    assert {level for _, level, _, _ in findings(g4)} == {"ok"}


@pytest.mark.long
async def test_azurite_passes_the_contract(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    async def untold(deltas: Deltas) -> None:
        """This server's clock is real, the contract's runs ahead of it."""

    monkeypatch.setattr(Deltas, "measure_skew", untold)
    clock, url = VirtualClock(), f"{azurite.new_bucket()}/some/prefix"
    await check_tier(lambda ns: ObjectTier(url, ns, clock=clock, stride=4, options=azurite.options), clock)


@pytest.mark.long
async def test_azurite_deletes_in_groups(azurite: Azurite) -> None:
    """A third of the names is gone: another replica sweeps, too."""
    bucket, _ = opened(f"{azurite.new_bucket()}/p", azurite.options)
    assert isinstance(bucket, AzureBucket)
    await bucket.start()
    names = [f"p/{number:03}" for number in range(600)]
    await asyncio.gather(*(bucket.create(name, bytearray(b"x"), Wall(0.0)) for name in names if int(name[2:]) % 3))
    await bucket.delete_many(names)
    assert [page async for page in bucket.list("p/")] == []
    await bucket.close()


@pytest.mark.long
async def test_what_azurite_refuses_names_the_setting(azurite: Azurite) -> None:
    other = {**azurite.options, "account_key": "b3RoZXI="}
    for url, options, named in (
        (azurite.new_bucket(), other, "account_key"),
        ("az://not-there", azurite.options, r"tiers\.g4\.url|no such bucket"),
    ):
        bucket, _ = opened(f"{url}/p", options)
        await bucket.start()  # type: ignore[attr-defined]
        with pytest.raises(TierError, match=named) as raised:
            await bucket.create("p/x", bytearray(b"x"), Wall(0.0))  # type: ignore[attr-defined]
        assert "b3RoZXI" not in str(raised.value)
