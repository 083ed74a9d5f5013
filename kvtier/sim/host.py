"""One machine: its clock, its disk and its way to the bucket, which outlive the process on it that runs a cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from kvtier.cache import AsyncCache
from kvtier.config import Config
from kvtier.identity.namespace import Namespace
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.sim.link import Link, LinkFaults
from kvtier.testing.clock import SkewedClock
from kvtier.testing.faults import Fault, FaultyTier
from kvtier.testing.memory import MemoryStore, MemoryTier
from kvtier.testing.virtual_bucket import VirtualServer
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Tier


class _Disk(FaultyTier):
    """A FaultyTier whose calls that hang go on when it heals: a read or a write has to end some time."""

    def __init__(self, inner: Tier, seed: int) -> None:
        super().__init__(inner, seed=seed)
        self._hanging: list[asyncio.Future[None]] = []

    async def _hang(self) -> None:
        self._hanging.append(healed := asyncio.get_running_loop().create_future())
        await healed

    def heal(self) -> None:
        """Every call is answered from now on, those that hang included."""
        self.faults.clear()
        for healed in self._hanging:
            if not healed.done():
                healed.set_result(None)
        self._hanging.clear()


class Host:
    """`process` runs on it, 0: none. `cache`: its cache, None while it starts or is down."""

    def __init__(self, number: int, clock: SkewedClock, server: VirtualServer, rng: random.Random) -> None:
        self.number = number
        self.clock = clock
        self.process = 0
        self.cache: AsyncCache | None = None
        self.disk = MemoryStore.empty()
        self.faults: list[Fault] = []
        self.link_faults = LinkFaults()
        self._server = server
        self._rng = rng
        self._link: Link | None = None
        self._memory: MemoryTier | None = None
        self._disk: _Disk | None = None

    def boot(
        self, process: int, config: Config, namespace: Namespace, disk_blocks: int, heard: Callable[[str], None]
    ) -> AsyncCache:
        """A closed cache over what the machine's stores hold. No other process runs."""
        self.process = process
        clock = TrustedClock(self.clock)
        tiers: list[Tier] = []
        if config.tiers.g3 is not None:
            self._memory = MemoryTier(namespace, clock, store=self.disk, capacity_blocks=disk_blocks)
            self._disk = _Disk(self._memory, seed=self._rng.getrandbits(32))
            self._disk.faults = self.faults
            tiers.append(self._disk)
        if config.tiers.g4 is not None:
            stride = config.tiers.g4.stride
            self._link = Link(self._server, self.link_faults, random.Random(self._rng.getrandbits(32)), heard)
            tiers.append(
                ObjectTier(
                    "sim", namespace, clock=clock, bucket=self._link, seed=self._rng.getrandbits(32),
                    stride=None if stride == "auto" else stride,
                )
            )  # fmt: skip
        return AsyncCache(config, namespace, clock, tiers)

    def cut_off(self) -> None:
        """Its process is being killed: nothing of it reaches a device any more."""
        if self._link is not None:
            self._link.dead = True
        if self._memory is not None:
            self._memory.store = MemoryStore.empty()

    def heal(self) -> None:
        """Disk and bucket answer again."""
        self.faults.clear()
        if self._disk is not None:
            self._disk.heal()
        self.link_faults.kind = ""
