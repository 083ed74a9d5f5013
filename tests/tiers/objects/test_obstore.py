"""S3 through obstore, beside what the contract asks of every bucket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.tiers.objects.bucket import obstore
from kvtier.tiers.objects.bucket.obstore import ObstoreBucket

DATA = bytes(range(200))


class Store:
    """The library's store of one object. `whole`: how often the server ignores the range, which the library refuses."""

    def __init__(self, whole: int) -> None:
        self.whole = whole
        self.asked: list[bool] = []  # whether a range was

    async def get_async(self, name: str, options: dict[str, Any] | None = None) -> Any:
        start, stop = (options or {}).get("range", (0, len(DATA)))
        self.asked.append(options is not None)
        if options and self.whole:
            self.whole -= 1
            raise RuntimeError("Generic S3 error: Received non-partial response when range requested")

        async def stream(**_: Any) -> AsyncIterator[bytes]:
            yield DATA[start:stop]

        meta = {"size": len(DATA), "e_tag": '"1"', "last_modified": datetime.now(UTC)}
        return SimpleNamespace(
            meta=meta, range=(start, stop), attributes={}, stream=lambda **how: stream(**how).__aiter__()
        )


async def test_ranges_are_asked_for_again_though_the_server_ignored_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole object for each header is forty times the traffic, for as long as the process lives."""
    now = asyncio.get_running_loop().time()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    bucket, store = ObstoreBucket("b", {}, connect_timeout_s=1, read_timeout_s=1), Store(whole=1)
    bucket._store = store
    for _ in range(4):
        into = bytearray(10)
        assert await bucket.read("name", 5, [memoryview(into)]) is not None and into == DATA[5:15]
        now += obstore.REST_S / 2
    assert store.asked == [True, False, False, True, True]
