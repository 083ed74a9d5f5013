"""Replicas of G4 on one directory or server, with a clock of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvtier.identity.keys import BlockKey
from kvtier.retention.terms import Terms
from kvtier.testing import VirtualClock, payload_of, sample_namespace, seal
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target

NS = sample_namespace(4096)
S = 4
"""Blocks per object."""


class Site:
    """A directory, a clock, and replicas on them, or on a server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = VirtualClock()
        self.tiers: list[ObjectTier] = []

    async def replica(self, url: str = "", **more: object) -> ObjectTier:
        url = url or f"file://{self.root}"
        tier = ObjectTier(url, NS, clock=self.clock, stride=S, seed=len(self.tiers), **more)  # type: ignore[arg-type]
        await tier.open()
        self.tiers.append(tier)
        return tier

    @property
    def deadline(self) -> float:
        return self.clock.monotonic() + 30

    async def store(
        self,
        tier: ObjectTier,
        chain: Sequence[BlockKey],
        terms: Terms | None = None,
        since: float | None = None,
        position: int | None = None,
    ) -> list[Stored]:
        now = self.clock.wall() if since is None else since
        terms = terms or Terms("day", ttl=86400)
        position = getattr(tier, "inner", tier).purge_log.position if position is None else position
        blocks = seal(chain, range(len(chain)), NS.block_bytes, now, terms, position=position)
        return await tier.write(blocks, self.deadline)

    async def read(
        self, tier: ObjectTier, chain: Sequence[BlockKey], wanted: Sequence[int] | None = None
    ) -> list[Loaded | Miss]:
        """Read, and compare every byte that is claimed to be right."""
        wanted = range(len(chain)) if wanted is None else wanted
        buffers = [bytearray(NS.block_bytes) for _ in wanted]
        targets = [Target(i, (memoryview(b),)) for i, b in zip(wanted, buffers, strict=True)]
        results = await tier.read(chain, targets, self.deadline)
        for index, buffer, result in zip(wanted, buffers, results, strict=True):
            assert not isinstance(result, Loaded) or buffer == payload_of(chain[index], NS.block_bytes), "wrong bytes"
        return results

    def objects(self) -> list[Path]:
        return sorted(p for p in self.root.rglob("*") if p.is_file() and not {"ctl"} & {*p.parts})

    def flip(self, path: Path, offset: int) -> None:
        times = path.stat()
        raw = bytearray(path.read_bytes())
        raw[offset] ^= 1
        path.write_bytes(raw)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
