"""Listings of an S3 server that does not list as it should: what is left out may be a purge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import TierError
from kvtier.tiers.objects.bucket.s3fs import S3Bucket

NAMES = [f"log/{number:04}" for number in range(25)]
PAGE = 10


class Client:
    """Lists NAMES. `ignores`: the parameters that it does not know."""

    def __init__(self, ignores: Sequence[str], tells_token: bool) -> None:
        self.ignores = ignores
        self.tells_token = tells_token

    async def list_objects_v2(self, **asked: Any) -> dict[str, Any]:
        known = {name: value for name, value in asked.items() if name not in self.ignores}
        after = known.get("ContinuationToken", known.get("StartAfter", ""))
        rest = [name for name in NAMES if name > after]
        answer = {"Contents": [{"Key": name, "Size": 1} for name in rest[:PAGE]], "IsTruncated": len(rest) > PAGE}
        if self.tells_token and answer["IsTruncated"]:
            answer["NextContinuationToken"] = rest[PAGE - 1]
        return answer


async def listed(ignores: Sequence[str] = (), tells_token: bool = True, after: str = "") -> list[str]:
    bucket = S3Bucket("b", {}, SystemClock(), connections=1, connect_timeout_s=1, read_timeout_s=1)
    bucket._client, bucket._extra = Client(ignores, tells_token), defaultdict(dict)
    return [stat.name async for page in bucket.list("log/", after) for stat in page]


@pytest.mark.parametrize("tells_token", [True, False])
@pytest.mark.parametrize("after", ["", NAMES[4]])
async def test_a_listing_without_a_token_goes_on_by_name(tells_token: bool, after: str) -> None:
    assert await listed((), tells_token, after) == [name for name in NAMES if name > after]


@pytest.mark.parametrize("tells_token", [True, False])
async def test_a_listing_that_does_not_go_on_is_an_error(tells_token: bool) -> None:
    for after in ("", NAMES[4], NAMES[14]):
        with pytest.raises(TierError, match="begins again"):
            await listed(("ContinuationToken", "StartAfter"), tells_token, after)
