"""The real G3 on a simulated drive, and what is to hold of its store at any moment."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.clock import Clock
from kvtier.errors import TierError
from kvtier.identity.keys import NAMESPACE_BYTES, BlockKey
from kvtier.identity.namespace import Namespace
from kvtier.sim.drive import Drive
from kvtier.sim.ledger import Wrong, bytes_of, name_of
from kvtier.tiers.disk.records import RESERVED, Entry
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Loaded, Miss, Target
from kvtier.times import Mono


class RealDisk(DiskTier):
    """G3 on a drive. The drive alone damages what was stored: a block that fails its check while the drive has given
    all that it was asked for is an error of the simulation."""

    def __init__(self, drive: Drive, capacity: int, namespace: Namespace, clock: Clock, quota: float = 0.0) -> None:
        super().__init__([drive.folder / "g3"], capacity, namespace, clock=clock, quota=quota)
        self._drive = drive

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        bad_reads = self._drive.bad_reads
        results = await super().read(chain, targets, deadline)
        if Miss.CORRUPT in results and self._drive.bad_reads == bad_reads:
            self._drive.threads.loop.errors.append("a block fails its check, and the drive has damaged nothing of it")
        return results

    async def compare(self) -> None:
        """Each block of the store's index, whosesoever, is durable as its key says it is, unless the drive broke its
        word. In no time. Raises Wrong."""
        store = self._opened
        index = store.index_in_use if store is not None else None
        if store is None or index is None:
            return
        try:
            with index.reading() as txn:
                rows = list(index.layout.entries(txn))
        except TierError:  # it is being closed
            return
        for name, raw in rows:
            entry, key = Entry.decode(name, raw), BlockKey(name[NAMESPACE_BYTES:])
            content = self._drive.content_of(store.slab.path_of(entry.segment))
            if not content.holds(bytes_of(key, entry.length), entry.offset):
                raise Wrong(f"block {name_of(key)} is in the index, and its bytes are not durable")

    def reserved(self) -> int:
        """Slots of the store that writes have, those of processes that ended included; -1 while it is out of use, or
        has not been opened: on a full volume it cannot be."""
        index = None if self._opened is None else self._store.index_in_use
        return -1 if index is None else len(index.rows(RESERVED))

    def bad_places(self) -> int:
        """Places of the store that are out of use."""
        return self._store.index.bad_places()
