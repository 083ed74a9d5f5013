"""A bucket in memory, by a virtual clock: sorted names, the server's stamps, requests counted by verb."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from kvtier.clock import Clock
from kvtier.errors import CorruptError
from kvtier.identity.keys import BlockKey
from kvtier.keyring import Keyring
from kvtier.retention.terms import Terms
from kvtier.testing import VirtualClock, sample_namespace, seal
from kvtier.tiers.objects.background import Background
from kvtier.tiers.objects.bucket.open import BucketLimits
from kvtier.tiers.objects.bucket.protocol import LIST_PAGE, Bucket, Scatter, Stat
from kvtier.tiers.objects.bucket.retry import RetryingBucket
from kvtier.tiers.objects.names import ObjectNames
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.objects.sweep import Sweeper
from kvtier.tiers.objects.writer import ObjectWriter
from kvtier.times import Wall

NS = sample_namespace(4096)


@dataclass
class _Object:
    data: bytes
    etag: str
    used: Wall
    modified: float


@dataclass
class VirtualServer:
    """What all replicas share. `stamps`: whether it tells when an object was written."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    stamps: bool = True
    objects: dict[str, _Object] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    versions: int = 0

    def put(self, name: str, data: bytes | bytearray, used: float = 0.0, modified: float | None = None) -> _Object:
        self.versions += 1
        if name not in self.objects:
            insort(self.names, name)
        at = self.clock.wall() if modified is None else modified
        self.objects[name] = _Object(bytes(data), f'"{self.versions}"', used, at)  # type: ignore[arg-type]
        return self.objects[name]

    def drop(self, name: str) -> None:
        if self.objects.pop(name, None) is not None:
            del self.names[bisect_left(self.names, name)]

    def under(self, part: str) -> list[str]:
        return [name for name in self.names if f"/{part}/" in name]

    def strides(self) -> int:
        return sum(len(name.rpartition("/")[2]) == 64 for name in self.names)


class VirtualBucket(Bucket):
    """One replica's client of the server. `latency_s`: real seconds per read."""

    renewable = True
    keeps_proof = True

    def __init__(self, server: VirtualServer, latency_s: float = 0.0) -> None:
        self.server = server
        self.latency_s = latency_s
        self.requests: Counter[str] = Counter()

    def _stat(self, name: str, there: _Object, listed: bool = False) -> Stat:
        modified = float(int(there.modified)) if self.server.stamps else None
        return Stat(name, len(there.data), there.etag, None if listed else there.used, modified)

    async def start(self) -> None:
        pass

    async def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        self.requests["put"] += 1
        return None if name in self.server.objects else self._stat(name, self.server.put(name, data, used))

    async def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
        self.requests["put"] += 1
        there = self.server.objects.get(name)
        if etag is not None and (there is None or there.etag != etag):
            return None
        return self._stat(name, self.server.put(name, data, used))

    async def head(self, name: str) -> Stat | None:
        self.requests["head"] += 1
        there = self.server.objects.get(name)
        return None if there is None else self._stat(name, there)

    async def read(self, name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        self.requests["get"] += 1
        await asyncio.sleep(self.latency_s)
        there = self.server.objects.get(name)
        if there is None:
            return None
        stop = start + sum(map(len, into))
        if len(there.data) < (start + 1 if clipped else stop):
            raise CorruptError("the object ends before that")
        Scatter(into).feed(memoryview(there.data)[start:stop])
        return self._stat(name, there)

    async def renew(self, name: str, etag: str, used: Wall) -> Stat | None:
        self.requests["copy"] += 1
        there = self.server.objects.get(name)
        if there is None or there.etag != etag:
            return None
        return self._stat(name, self.server.put(name, there.data, used))

    async def delete(self, name: str, etag: str | None = None) -> bool:
        self.requests["delete"] += 1
        there = self.server.objects.get(name)
        if there is None or (etag is not None and there.etag != etag):
            return False
        self.server.drop(name)
        return True

    async def delete_many(self, names: Sequence[str]) -> None:
        if names:
            self.requests["delete"] += 1
        for name in names:
            self.server.drop(name)

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        while True:
            self.requests["list"] += 1
            begin = max(bisect_left(self.server.names, prefix), bisect_right(self.server.names, after))
            some = self.server.names[begin : begin + LIST_PAGE]
            page = [self._stat(name, self.server.objects[name], True) for name in some if name.startswith(prefix)]
            if page:
                yield page
            if len(page) < LIST_PAGE:
                return
            after = page[-1].name

    async def close(self) -> None:
        pass


class SkewedClock:
    """Another clock, `ahead_s` seconds ahead of it by the wall."""

    def __init__(self, clock: Clock, ahead_s: float) -> None:
        self._clock = clock
        self.ahead_s = ahead_s

    def wall(self) -> Wall:
        return Wall(self._clock.wall() + self.ahead_s)

    def monotonic(self):  # type: ignore[no-untyped-def]
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


class Replica:
    """One replica's store, sweeper and background work, without a thread of its own."""

    def __init__(
        self, server: VirtualServer, seed: int = 0, stride: int = 4, ahead_s: float = 0.0, latency_s: float = 0.0,
        keyring: Keyring | None = None, compress: bool = False,
    ) -> None:  # fmt: skip
        import random

        self.server = server
        self.clock = SkewedClock(server.clock, ahead_s) if ahead_s else server.clock
        self.bucket = VirtualBucket(server, latency_s)
        keyring = keyring or Keyring.public()
        names = ObjectNames("p", NS.digest, keyring)
        retrying = RetryingBucket(self.bucket, attempts=1, seed=seed)
        self.store = ObjectStore(
            retrying, names, keyring, NS.block_bytes, stride, self.clock, BucketLimits(), compress=compress
        )
        self.writer = ObjectWriter(self.store, keyring, self.clock, BucketLimits())
        self.sweeper = Sweeper(self.store, self.clock, random.Random(seed))
        self.background = Background(self.store, self.sweeper, self.clock)

    async def write(self, chain: Sequence[BlockKey], ttl: float = 86400.0, max_age: float | None = None) -> None:
        """One stride, stored now."""
        terms = Terms("t", ttl=ttl, max_age=max_age)
        position = self.store.purges.position
        sealed = seal(list(chain), range(len(chain)), NS.block_bytes, self.clock.wall(), terms, position=position)
        assert (await self.writer.write(sealed)).durable

    async def turn(self) -> None:
        """What is due in the background, as the heartbeat has it done."""
        await self.background._publish_record_sweep()
        await self.background._learn_pins_and_deltas()

    async def walk(self) -> None:
        """Two whole walks of the sweeper, whatever place the first began at."""
        ends = 0
        while ends < 2:
            ends += await self.sweeper.page()
