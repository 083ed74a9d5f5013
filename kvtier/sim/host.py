"""One machine: its clock, its disk and its way to the bucket, which outlive the process on it that runs a cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier.cache import AsyncCache
from kvtier.config import Config
from kvtier.identity.namespace import Namespace
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.sim.drive import Drive, DriveFault
from kvtier.sim.kernel import Kernel
from kvtier.sim.ledger import Wrong
from kvtier.sim.link import Link, LinkFaults
from kvtier.sim.neighbour import Neighbour, Offers
from kvtier.sim.real_disk import RealDisk
from kvtier.testing.clock import SkewedClock
from kvtier.testing.faults import Fault, FaultyTier
from kvtier.testing.memory import MemoryStore, MemoryTier
from kvtier.testing.virtual_bucket import VirtualServer
from kvtier.tiers.disk.records import SLOT_ALIGN, slot_class
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Tier

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


class Host:
    """`process` runs on it, 0: none. `cache`: its cache, None while it starts or is down. With a kernel and a folder G3
    is the real one, on a drive of the machine's."""

    def __init__(
        self, number: int, clock: SkewedClock, server: VirtualServer, rng: random.Random, kernel: Kernel | None = None,
        folder: Path | None = None, disk_blocks: int = 0,
    ) -> None:  # fmt: skip
        self.number = number
        self.disk_blocks = disk_blocks
        """G3's capacity from the next process on; 0: no bound."""
        self.clock = clock
        self.process = 0
        self.cache: AsyncCache | None = None
        self.disk = MemoryStore.empty()
        self.drive: Drive | None = None
        self.real: RealDisk | None = None
        self.neighbour: Neighbour | None = None
        self._offers = Offers()
        self._kernel = kernel
        self._capacity = self._bound = self._largest = 0
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

    def boot(self, process: int, config: Config, namespace: Namespace, heard: Callable[[str], None]) -> AsyncCache:
        """A closed cache over what the machine's stores hold. No other process runs."""
        self.process = process
        clock = TrustedClock(self.clock)
        tiers: list[Tier] = []
        if config.tiers.g3 is not None and self.drive is not None:
            slot_bytes = slot_class(namespace.block_bytes) * SLOT_ALIGN
            self._capacity = capacity = (self.disk_blocks or BLOCKS_MAX) * slot_bytes
            self._bound, self._largest = max(capacity, self._bound), max(capacity, self._largest)
            self.neighbour = Neighbour(self.drive, capacity, clock, self._offers)
            self.real = RealDisk(self.drive, capacity, namespace, clock, config.retention.quota or 0.0)
            tiers.append(self.real)
        elif config.tiers.g3 is not None:
            self._memory = MemoryTier(namespace, clock, store=self.disk, capacity_blocks=self.disk_blocks)
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

    def check_disk(self) -> None:
        """Raises Wrong where the files of G3, those of a process that was killed included, are larger than its capacity
        and any earlier one that they have had since."""
        size = self.disk_bytes()
        if size > self._bound:
            raise Wrong(f"the files of G3 on host {self.number} are larger than its capacity")
        if size <= self._capacity:
            self._bound = self._capacity

    def disk_excess(self) -> int:
        """Bytes of these files beyond the capacity, which a store has while it shrinks."""
        return max(0, self.disk_bytes() - self._capacity)

    def disk_bytes(self) -> int:
        """Of a real G3's files."""
        return self.drive.slab_bytes() if self.drive is not None else 0

    def disk_reserved(self) -> int:
        """`RealDisk.reserved`, 0 where there is none."""
        return self.real.reserved() if self.real is not None else 0

    def lose_power(self) -> None:
        """Its process was killed by that. The model of a disk loses nothing."""
        if self.drive is not None:
            self.drive.lose_power()
            self._bound = self._largest  # a file that was cut may have its length again, until G3 is opened

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
