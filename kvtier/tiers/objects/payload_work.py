"""Making and checking the payloads of one namespace's units, on threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.encryption import DataKey
from kvtier.keyring import Keyring
from kvtier.retention.lifetime import Lifetime
from kvtier.tiers.objects.compression import coded
from kvtier.tiers.objects.encryption import UnitEncryption
from kvtier.tiers.objects.frame import Frame
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.payload import is_right, make_unit, verify_blocks
from kvtier.tiers.objects.payload_threads import PayloadThreads
from kvtier.tiers.protocol import Loaded, Miss, Pieces, Sealed, Target


class PayloadWork:
    """Lives on the tier's event loop. A verb that is cancelled returns when nothing uses the caller's memory any more,
    milliseconds later."""

    def __init__(
        self, namespace: bytes, block_bytes: int, keyring: Keyring, encryption: UnitEncryption, compress: bool
    ) -> None:
        """`compress`: blocks are coded where that saves enough."""
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._keyring = keyring
        self._encryption = encryption
        self._compress = compress
        self._reading, self._writing = PayloadThreads("read"), PayloadThreads("write")

    async def make(self, blocks: Sequence[Sealed], life: Lifetime, key: DataKey | None) -> tuple[Frame, bytearray]:
        """A unit of these blocks, encrypted if there is a `key` (kvtier.tiers.objects.payload.make_unit)."""
        size = len(blocks) * self._block_bytes
        stored = await self._writing.run(coded(blocks), size) if self._compress else ()
        units = (make_unit(self._namespace, blocks, life, self._keyring, key, stored) for _ in range(1))
        return (await self._writing.run(units, size))[0]

    async def verify(
        self, entry: ObjectEntry, targets: Sequence[Target], stored: Mapping[int, Pieces]
    ) -> dict[int, Loaded | Miss]:
        """Check what was read, and fill the targets (kvtier.tiers.objects.payload.verify_blocks). Returns the results
        by depth, why for all where there is no key to decrypt with."""
        cipher = await self._encryption.cipher_of(entry.frame)
        if isinstance(cipher, Miss):
            return {target.index: cipher for target in targets}
        found = verify_blocks(entry, targets, stored, self._keyring, self._encryption, cipher)
        return dict(await self._reading.run(found, len(targets) * self._block_bytes))

    async def is_right(self, entry: ObjectEntry, unit: memoryview) -> bool:
        """Whether all blocks of the object with these bytes are right, which stay as they are."""
        cipher = await self._encryption.cipher_of(entry.frame)
        if isinstance(cipher, Miss):
            return False

        def one(index: int) -> bool:
            stored = unit[slice(*entry.frame.span(index, index + 1))]
            if cipher is not None:
                return self._encryption.is_right(entry.frame, cipher, index, stored)
            return is_right(entry.frame, self._keyring, index, (stored,))

        return all(await self._writing.run(map(one, range(entry.blocks)), entry.size))

    def close(self) -> None:
        """Let the threads end. They start again with the next work."""
        self._reading.close()
        self._writing.close()
