"""One machine: its clock, its disk and its way to the bucket, which outlive the process on it that runs a cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.cache import AsyncCache
from kvtier.clock import Clock
from kvtier.config import Config
from kvtier.identity.keys import BlockKey
from kvtier.identity.namespace import Namespace
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.sim.drive import Drive, DriveFault
from kvtier.sim.kernel import Kernel
from kvtier.sim.link import Link, LinkFaults
from kvtier.sim.neighbour import Neighbour
from kvtier.testing.clock import SkewedClock
from kvtier.testing.faults import Fault, FaultyTier
from kvtier.testing.memory import MemoryStore, MemoryTier
from kvtier.testing.virtual_bucket import VirtualServer
from kvtier.tiers.disk.records import SLOT_ALIGN, slot_class
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Target, Tier
from kvtier.times import Mono

BLOCKS_MAX = 256
"""Of a real disk where the history says that there is no bound."""


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


class _RealDisk(DiskTier):
    """G3 on a drive. What it made durable is damaged by nothing but the drive: a block that fails its check while the
    drive has done no such thing is an error of the simulation."""

    def __init__(self, drive: Drive, capacity: int, namespace: Namespace, clock: Clock, quota: float) -> None:
        super().__init__([drive.folder / "g3"], capacity, namespace, clock=clock, quota=quota)
        self._drive = drive

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        results = await super().read(chain, targets, deadline)
        if Miss.CORRUPT in results and self._drive.honest:
            self._drive.threads.loop.errors.append("a block on a drive that damaged nothing fails its check")
        return results


class Host:
    """`process` runs on it, 0: none. `cache`: its cache, None while it starts or is down. With a kernel and a folder G3
    is the real one, on a drive of the machine's."""

    def __init__(
        self, number: int, clock: SkewedClock, server: VirtualServer, rng: random.Random, kernel: Kernel | None = None,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.number = number
        self.clock = clock
        self.process = 0
        self.cache: AsyncCache | None = None
        self.disk = MemoryStore.empty()
        self.drive: Drive | None = None
        self.neighbour: Neighbour | None = None
        self._kernel = kernel
        self._capacity = 0
        if kernel is not None and folder is not None:
            self.drive = Drive(folder, kernel.threads, random.Random(rng.getrandbits(32)))
            kernel.add(self.drive)
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
        if config.tiers.g3 is not None and self.drive is not None:
            slot_bytes = slot_class(namespace.block_bytes) * SLOT_ALIGN
            self._capacity = (disk_blocks or BLOCKS_MAX) * slot_bytes
            quota = config.retention.quota or 0.0
            self.neighbour = Neighbour(self.drive.folder / "g3", self._capacity, clock)
            tiers.append(_RealDisk(self.drive, self._capacity, namespace, clock, quota))
        elif config.tiers.g3 is not None:
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
        if self._kernel is not None and self.drive is not None:
            self._kernel.kill(self.process, self.drive)

    def disk_is_within_bounds(self) -> bool:
        """Whether the files of G3, those of a process that was killed included, are no larger than its capacity."""
        return self.drive is None or self.drive.slab_bytes() <= self._capacity

    def lose_power(self) -> None:
        """Its process was killed by that. The model of a disk loses nothing."""
        if self.drive is not None:
            self.drive.lose_power()

    def break_disk(self, args: Mapping[str, Any]) -> None:
        """The disk fails from now on, in one way."""
        if self.drive is not None:
            self.drive.break_(DriveFault(args["on"], args["kind"], args["rate"]))
        else:
            self.faults[:] = [Fault(args["on"], args["kind"], args["rate"], seconds=0.1)]

    def damage_disk(self, rng: random.Random, block_bytes: int) -> None:
        """A bit flips in a block."""
        if self.drive is not None:
            self.drive.damage()
        elif entries := sorted(self.disk.entries):
            self.disk.damage(rng.choice(entries), rng.randrange(block_bytes))

    def heal(self, *, wholly: bool = False) -> None:
        """Disk and bucket answer again; `wholly`: bad pages of the disk, too."""
        self.faults.clear()
        if self._disk is not None:
            self._disk.heal()
        if self.drive is not None and wholly:
            self.drive.mend_pages()
        if self.drive is not None:
            self.drive.heal()
        self.link_faults.kind = ""
