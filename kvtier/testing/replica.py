"""One replica's G4 over a bucket in memory, without a thread of its own: whoever has it gives it its turns."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from hashlib import blake2b

from kvtier.identity.keys import BlockKey
from kvtier.keyring import Keyring
from kvtier.retention.terms import Terms
from kvtier.testing.clock import SkewedClock
from kvtier.testing.payload import sample_namespace, seal
from kvtier.testing.virtual_bucket import VirtualBucket, VirtualServer
from kvtier.tiers.objects.background import Background
from kvtier.tiers.objects.bucket.open import BucketLimits
from kvtier.tiers.objects.bucket.retry import RetryingBucket
from kvtier.tiers.objects.names import ObjectNames
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.objects.sweep import Sweeper
from kvtier.tiers.objects.writer import ObjectWriter

NS = sample_namespace(4096)
_numbers = itertools.count()


class Replica:
    """Store, writer, sweeper and background work. `number`: tells the replicas of a server apart; another one each time
    where none is given. `ahead_s`: of its wall clock, before the server's. `latency_s`: of a read."""

    def __init__(
        self, server: VirtualServer, seed: int = 0, stride: int = 4, ahead_s: float = 0.0, latency_s: float = 0.0,
        keyring: Keyring | None = None, compress: bool = False, number: int | None = None,
    ) -> None:  # fmt: skip
        self.server = server
        self.clock = SkewedClock(server.clock, ahead_s) if ahead_s else server.clock
        self.bucket = VirtualBucket(server, latency_s)
        keyring = keyring or Keyring.public()
        limits = BucketLimits()
        name = blake2b(str(next(_numbers) if number is None else number).encode(), digest_size=4).hexdigest()
        self.store = ObjectStore(
            RetryingBucket(self.bucket, attempts=1, seed=seed), ObjectNames("p", NS.digest, keyring), keyring,
            NS.block_bytes, stride, self.clock, limits, compress=compress, replica=int(name, 16),
        )  # fmt: skip
        self.writer = ObjectWriter(self.store, keyring, self.clock, limits)
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
        await self.background._publish_and_record()
        await self.background._tidy_and_sweep()
        await self.background._learn_pins_and_deltas()

    async def walk(self) -> None:
        """Two whole walks of the sweeper, whatever place the first began at."""
        ends = 0
        while ends < 2:
            ends += await self.sweeper.page()
