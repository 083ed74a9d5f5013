"""Random histories of a fleet that purges, by the real caches over one virtual bucket: partitions, restarts, late
writes, clocks days apart. One seed is one history."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import kvtier
from kvtier.errors import KVTierError, TierError
from kvtier.identity.keys import scope_of
from kvtier.testing import chain_of, payloads_of, sample_namespace
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.objects.bucket.protocol import TIER, Stat, Transient
from kvtier.tiers.protocol import Tier
from kvtier.times import Wall
from tests.tiers.objects.support.inline import inline_tier
from tests.tiers.objects.support.virtual_bucket import SkewedClock, VirtualBucket, VirtualServer

NS = sample_namespace(4096)
STRIDE = 2
BOUND_S = 60.0
TENANTS = ("t", "u")
DAY_S = 86_400.0
T = TypeVar("T")


class Line(VirtualBucket):
    """One replica's way to the server. `cut`: nothing gets through. `late`: writes are not answered, and land when the
    world says so."""

    def __init__(self, server: VirtualServer, rng: random.Random, landing: list[tuple[str, bytes, Wall]]) -> None:
        super().__init__(server)
        self.rng, self.landing = rng, landing
        self.cut = self.late = False

    async def _through(self) -> None:
        for _ in range(self.rng.randrange(3)):
            await asyncio.sleep(0)
        if self.cut:
            raise Transient(TIER, "request", "cut")

    async def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        await self._through()
        if self.late:
            self.landing.append((name, bytes(data), used))
            raise Transient(TIER, "put", "no answer")
        return await super().create(name, data, used)

    async def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
        await self._through()
        return await super().replace(name, data, used, etag)

    async def head(self, name: str) -> Stat | None:
        await self._through()
        return await super().head(name)

    async def read(self, name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        await self._through()
        return await super().read(name, start, into, clipped)

    async def renew(self, name: str, etag: str, used: Wall) -> Stat | None:
        await self._through()
        return await super().renew(name, etag, used)

    async def delete(self, name: str, etag: str | None = None) -> bool:
        await self._through()
        return await super().delete(name, etag)

    async def delete_many(self, names: Sequence[str]) -> None:
        await self._through()
        await super().delete_many(names)

    async def list(self, prefix: str, after: str = ""):  # type: ignore[no-untyped-def]
        await self._through()
        async for page in super().list(prefix, after):
            yield page
            await self._through()


class Chain:
    """A chain of one tenant, and when the purge returned that covers all its writes; None: none has."""

    def __init__(self, tenant: str, seed: int) -> None:
        self.tenant = tenant
        self.keys = chain_of(NS, 2 * STRIDE, seed, scope_of(tenant))
        self.purged_at: float | None = None


class Member:
    """One replica, over restarts. `folder`: of its G3; None: it has none."""

    def __init__(self, world: World, number: int, folder: Path | None) -> None:
        self.world, self.number, self.folder = world, number, folder
        self.line = Line(world.server, world.rng, world.landing)
        self.clock = SkewedClock(world.server.clock, 0.0)
        self.cache: kvtier.AsyncCache | None = None
        self.learned_at = float("-inf")  # when the last look at the log began that ended well

    async def start(self) -> None:
        config = kvtier.Config.parse(
            {
                "tiers": {"g2": {"capacity": 16 * 4096}, "g4": {"url": "memory://none/x", "stride": STRIDE}},
                "security": {"purge": self.world.mode, "purge_bound": f"{BOUND_S:.0f}s"},
            }
        )
        g4, _ = inline_tier(NS, self.world.server, STRIDE, bucket=self.line, clock=self.clock, seed=self.number)
        tiers: list[Tier] = [g4]
        if self.folder is not None:
            tiers.insert(0, DiskTier([self.folder], 1 << 20, NS, clock=self.clock))
        self.cache = kvtier.aopen(config, NS, clock=self.clock, tiers=tiers)
        await self.cache.__aenter__()

    async def stop(self) -> None:
        cache, self.cache = self.cache, None
        if cache is not None:
            await cache.close()

    async def learn(self) -> None:
        """What housekeeping does."""
        assert self.cache is not None
        began = self.world.now
        manager = self.cache.manager
        await manager._purger.sync()
        log = manager.hierarchy.purge_log()
        if log is not None and log.read_at >= began and not self.line.cut:
            self.learned_at = began

    async def put(self, chain: Chain) -> None:
        assert self.cache is not None
        await self.cache.put(chain.keys, payloads_of(chain.keys, 4096))
        await self.cache.flush(timeout=5)

    async def get(self, chain: Chain) -> int:
        """How many blocks are served, their bytes compared."""
        assert self.cache is not None
        async with self.cache.get(chain.keys) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain.keys[: len(hit)], 4096)
            return len(hit)


class World:
    """`mode`: security.purge."""

    def __init__(self, seed: int, mode: str, root: Path | None) -> None:
        self.rng = random.Random(seed)
        self.mode = mode
        self.server = VirtualServer()
        self.landing: list[tuple[str, bytes, Wall]] = []
        self.chains: list[Chain] = []
        self.purges = self.served = self.checked = 0
        self.log: list[str] = []
        folders = [root / str(number) if root is not None and number < 2 else None for number in range(3)]
        self.members = [Member(self, number, folder) for number, folder in enumerate(folders)]

    @property
    def now(self) -> float:
        return self.server.clock.monotonic()

    async def run(self, steps: int) -> None:
        """Raises AssertionError, with the history, where a purged byte is served too late."""
        try:
            for member in self.members:
                member.clock.ahead_s = self._skew()
                await member.start()
            for _ in range(steps):
                await self._step()
            await self._settle()
        finally:
            for member in self.members:
                await member.stop()

    def _skew(self) -> float:
        return self.rng.choice([0.0, 0.0, 5.0, -5.0, 250.0, -3600.0, 2 * DAY_S, -2 * DAY_S])

    async def _step(self) -> None:
        steps = [self._put, self._put, self._get, self._get, self._purge, self._wait, self._wait, self._learn]
        steps += [self._cut, self._late, self._land, self._restart, self._jump, self._evict, self._beside]
        await self.rng.choice(steps)()

    async def _settle(self) -> None:
        """All is reachable again, what is late lands, and the bound passes."""
        for member in self.members:
            member.line.cut = member.line.late = False
        await self._land()
        for _ in range(3):
            self.server.clock.advance(BOUND_S / 2)
            for member in self.members:
                await self._guarded("learn", member.learn())
        for chain in self.chains:
            for member in self.members:
                await self._look(member, chain)

    def _member(self) -> Member:
        return self.rng.choice(self.members)

    async def _guarded(self, what: str, work: Coroutine[Any, Any, T]) -> bool:
        """Whether it ended without an error of a tier."""
        self.log.append(f"{self.now:.1f} {what}")
        try:
            await work
            return True
        except (KVTierError, TierError):
            self.log[-1] += " failed"
            return False

    # -- steps ------------------------------------------------------------------------------------------------------

    async def _put(self) -> None:
        chain, member = Chain(self.rng.choice(TENANTS), len(self.chains)), self._member()
        self.chains.append(chain)
        await self._guarded(f"{member.number} puts {len(self.chains) - 1} of {chain.tenant}", member.put(chain))

    async def _get(self) -> None:
        if self.chains:
            await self._look(self._member(), self.rng.choice(self.chains))

    async def _look(self, member: Member, chain: Chain) -> None:
        self.log.append(f"{self.now:.1f} {member.number} gets {self.chains.index(chain)}")
        due, was = self._must_miss(member, chain), self.now
        found = await member.get(chain)
        self.served += found
        if due:
            self.checked += 1
            history = "\n".join(self.log)
            assert not found, f"{found} blocks served at {was}, purged at {chain.purged_at}:\n{history}"

    def _must_miss(self, member: Member, chain: Chain) -> bool:
        if chain.purged_at is None:
            return False
        if self.mode == "strict":
            return self.now > chain.purged_at + BOUND_S
        return member.learned_at > chain.purged_at

    async def _purge(self) -> None:
        tenant, member = self.rng.choice(TENANTS), self._member()
        covered = [chain for chain in self.chains if chain.tenant == tenant and chain.purged_at is None]
        assert member.cache is not None
        if await self._guarded(f"{member.number} purges {tenant}", member.cache.purge(tenant)):
            self.purges += 1
            for chain in covered:
                chain.purged_at = self.now

    async def _beside(self) -> None:
        """Two or three at once."""
        steps = [self._put, self._get, self._purge, self._learn]
        await asyncio.gather(*(self.rng.choice(steps)() for _ in range(self.rng.randint(2, 3))))

    async def _wait(self) -> None:
        self.server.clock.advance(self.rng.choice([0.5, 5.0, 15.0, 25.0, 46.0, 61.0, 70.0]))
        if self.rng.random() < 0.5:
            for member in self.members:
                await self._guarded(f"{member.number} learns", member.learn())

    async def _learn(self) -> None:
        member = self._member()
        await self._guarded(f"{member.number} learns", member.learn())

    async def _cut(self) -> None:
        member = self._member()
        member.line.cut = not member.line.cut
        self.log.append(f"{self.now:.1f} {member.number} cut: {member.line.cut}")

    async def _late(self) -> None:
        member = self._member()
        member.line.late = not member.line.late
        self.log.append(f"{self.now:.1f} {member.number} late: {member.line.late}")

    async def _land(self) -> None:
        self.log.append(f"{self.now:.1f} {len(self.landing)} writes land")
        self.rng.shuffle(self.landing)
        for name, data, used in self.landing:
            if name not in self.server.objects:
                self.server.put(name, data, used)
        self.landing.clear()

    async def _restart(self) -> None:
        member = self._member()
        self.log.append(f"{self.now:.1f} {member.number} restarts")
        await member.stop()
        member.clock.ahead_s = self._skew()
        await member.start()

    async def _evict(self) -> None:
        """So that what is below is read."""
        member = self._member()
        assert member.cache is not None
        await self._guarded(f"{member.number} evicts", member.cache.evict("g2"))

    async def _jump(self) -> None:
        member = self._member()
        member.clock.ahead_s = self._skew()
        self.log.append(f"{self.now:.1f} {member.number} is {member.clock.ahead_s} s ahead")
