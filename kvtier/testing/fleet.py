"""A fleet of replicas on one bucket, by the real code of G4 over a virtual bucket and clock."""

from __future__ import annotations

from functools import cache

from kvtier.identity.keys import BlockKey
from kvtier.keyring import Keyring
from kvtier.testing.payload import chain_of
from kvtier.testing.replica import NS, Replica
from kvtier.testing.virtual_bucket import VirtualServer

STEP_S = 10.0
"""Between two turns of a replica."""


class Fleet:
    """`count` replicas, each of which writes a unit of `blocks` every `every_s`. The same each time."""

    def __init__(self, count: int, every_s: float, blocks: int = 1) -> None:
        self.server = VirtualServer()
        self.blocks = blocks
        self.keyring = _public()
        self.replicas = [self._replica(number) for number in range(count)]
        self.every_s = every_s
        self.written: list[tuple[float, BlockKey, BlockKey]] = []  # when, first and last block
        self.deltas_max = 0  # in the bucket at the end of a step
        self._next = [every_s * index / count for index in range(count)]
        self._writes = [0] * count
        self._elapsed = 0.0

    async def step(self) -> None:
        """STEP_S of virtual time: all write and publish, then all learn."""
        for index, replica in enumerate(self.replicas):
            while self._next[index] <= self._elapsed:
                chain = chain_of(NS, self.blocks, seed=len(self.written))
                await replica.write(chain)
                self.written.append((self.server.clock.wall(), chain[0], chain[-1]))
                self._next[index] += self.every_s
                self._writes[index] += 1
            await replica.store.refresh()
            await replica.background._publish_and_record()
            await replica.background._tidy_and_sweep()
        for replica in self.replicas:
            await replica.background._learn_pins_and_deltas()
        self.deltas_max = max(self.deltas_max, len(self.server.under("delta")))
        self.server.clock.advance(STEP_S)
        self._elapsed += STEP_S

    async def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            await self.step()

    def end(self, count: int) -> None:
        """The first `count` replicas are gone."""
        for each in (self.replicas, self._next, self._writes):
            del each[:count]

    def newcomer(self) -> Replica:
        """A replica that knows nothing yet. It is no part of the fleet, and writes nothing."""
        return self._replica(len(self.replicas))

    def _replica(self, number: int) -> Replica:
        return Replica(self.server, number, stride=self.blocks, number=number, keyring=self.keyring)

    def requests(self) -> list[int]:
        """Of each replica so far, but for those that carry payload."""
        sent = (replica.bucket.requests.total() for replica in self.replicas)
        return [asked - written for asked, written in zip(sent, self._writes, strict=True)]

    def known(self, replica: Replica, since: float) -> float:
        """The share of units written since then that the replica's index has."""
        units = [(first, last) for at, first, last in self.written if at >= since]
        depth = self.blocks - 1
        return sum(replica.store.known(first, last, depth) is not None for first, last in units) / len(units)


def _public() -> Keyring:
    """The public keyring, which makes each name once: a thousand replicas ask for those of all units."""
    keyring = Keyring.public()
    keyring.name = cache(keyring.name)  # type: ignore[method-assign]
    return keyring
