"""A tier in a dict: the reference that real tiers are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

from kvtier import checksum
from kvtier.clock import Clock
from kvtier.errors import ClosedError
from kvtier.identity.keys import NAMESPACE_BYTES, TENANT_BYTES, BlockKey, Scope, tenant_of
from kvtier.identity.namespace import Namespace
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.marks import is_ahead, mark_of
from kvtier.retention.terms import Depth
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Usage
from kvtier.times import Mono, Wall


@dataclass(frozen=True, slots=True)
class _Entry:
    payload: bytes
    digest: bytes
    life: Lifetime
    index: int
    position: int = 0


@dataclass
class MemoryStore:
    """The durable part of a MemoryTier: share one between two tiers to model a restart or a second replica."""

    entries: dict[bytes, _Entry]
    tombstones: dict[bytes, Wall]
    retained: dict[bytes, Wall] = field(default_factory=dict)
    notes: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> MemoryStore:
        return cls({}, {})

    def damage(self, name: bytes, offset: int = 0) -> None:
        """Flip one bit of a stored payload, leaving its digest."""
        entry = self.entries[name]
        payload = bytearray(entry.payload)
        payload[offset] ^= 1
        self.entries[name] = replace(entry, payload=bytes(payload))


class MemoryTier:
    """A tier over a MemoryStore. Evicts by (last use, −depth) when `capacity_blocks` is reached."""

    def __init__(
        self,
        namespace: Namespace,
        clock: Clock,
        *,
        store: MemoryStore | None = None,
        name: str = "g3",
        depth: Depth = Depth.G3,
        stride: int = 1,
        capacity_blocks: int = 0,
    ) -> None:
        self.name = name
        self.depth = depth
        self.block_bytes = namespace.block_bytes
        self.stride = stride
        self.store = store if store is not None else MemoryStore.empty()
        self._namespace = namespace.digest
        self._clock = clock
        self._capacity_blocks = capacity_blocks
        self._opened = False

    async def open(self) -> None:
        self._opened = True

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        self._usable()
        return [self._why_not(chain[index]) for index in wanted]

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        return self.peek(chain, wanted)

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        self._usable()
        return [self._read_one(chain[target.index], target) for target in targets]

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        self._usable()
        return [self._write_one(block) for block in blocks]

    def touch(self, keys: Sequence[BlockKey], wall_s: Wall) -> None:
        self._usable()
        for key in keys:
            entry = self.store.entries.get(self._namespace + key)
            if entry is not None:
                self.store.entries[self._namespace + key] = replace(entry, life=entry.life.used(wall_s))

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        self._usable()
        if keys is None:
            names = [name for name in self.store.entries if name.startswith(self._namespace)]
        else:
            names = [self._namespace + key for key in keys if self._namespace + key in self.store.entries]
        for name in names:
            del self.store.entries[name]
            self.store.retained.pop(name, None)
        return len(names)

    async def purge(self, scope: Scope, before: Wall) -> int:
        self._usable()
        prefix = self._namespace + tenant_of(scope)
        self.store.tombstones[prefix] = max(before, self.store.tombstones.get(prefix, before))
        start = prefix[: len(self._namespace) + TENANT_BYTES]
        now = self._clock.wall()
        matching = [
            name
            for name, entry in self.store.entries.items()
            if name.startswith(start) and (self._purged(name) or is_ahead(mark_of(entry.life, entry.position), now))
        ]
        for name in matching:
            del self.store.entries[name]
        return len(matching)

    async def tombstones(self) -> Mapping[Scope, Wall]:
        self._usable()
        return {
            Scope(prefix[len(self._namespace) :]): before
            for prefix, before in self.store.tombstones.items()
            if prefix.startswith(self._namespace)
        }

    async def retain(self, keys: Sequence[BlockKey], until: Wall, served: Wall | None = None) -> list[bool]:
        self._usable()
        now, done = self._clock.wall(), []
        for key in keys:
            here = self._why_not(key) is None
            done.append(here)
            if here:
                name = self._namespace + key
                entry = self.store.entries[name]
                if served is not None:
                    life = entry.life.extend_until(served, self.depth, now)
                    self.store.entries[name] = replace(entry, life=life)
                self.store.retained[name] = until
        return done

    async def release_retained(self, keys: Sequence[BlockKey], untils: Sequence[Wall] | None = None) -> None:
        self._usable()
        for key, until in zip(keys, untils or repeat(Wall("inf")), strict=False):
            if self.store.retained.get(name := self._namespace + key, Wall("inf")) <= until:
                self.store.retained.pop(name, None)

    async def retained(self) -> Mapping[BlockKey, Wall]:
        self._usable()
        cut = len(self._namespace)
        kept = self.store.retained.items()
        return {BlockKey(name[cut:]): until for name, until in kept if name.startswith(self._namespace)}

    async def drop_made_after(self, time: Wall) -> int:
        self._usable()
        entries = self.store.entries
        matching = [n for n, e in entries.items() if max(e.life.last_use, *(s.created for s in e.life.stamps)) > time]
        return await self.evict(
            [BlockKey(name[len(self._namespace) :]) for name in matching if name.startswith(self._namespace)]
        )

    async def write_note(self, name: str, value: bytes | None) -> None:
        self._usable()
        if value is None:
            self.store.notes.pop(name, None)
        else:
            self.store.notes[name] = value

    async def read_notes(self, prefix: str) -> Mapping[str, bytes]:
        self._usable()
        return {name: value for name, value in self.store.notes.items() if name.startswith(prefix)}

    async def flush(self, deadline: Mono) -> None:
        self._usable()

    def usage(self) -> Usage:
        count = len(self.store.entries)
        return Usage(count, count * self.block_bytes, self._capacity_blocks * self.block_bytes)

    def check(self) -> None:
        if self._capacity_blocks:
            assert len(self.store.entries) <= self._capacity_blocks, "more blocks than the capacity"

    async def close(self, deadline: Mono) -> None:
        self._opened = False

    def _usable(self) -> None:
        if not self._opened:
            raise ClosedError(f"{self.name} is closed")

    def _purged(self, name: bytes) -> bool:
        entry = self.store.entries.get(name)
        return entry is not None and mark_of(entry.life, entry.position) <= self._purged_until(name[NAMESPACE_BYTES:])

    def _purged_until(self, scope: bytes) -> Wall:
        return self.store.tombstones.get(self._namespace + tenant_of(scope), Wall("-inf"))

    def _why_not(self, key: BlockKey) -> Miss | None:
        entry = self.store.entries.get(self._namespace + key)
        if entry is None:
            return Miss.ABSENT
        if self._purged(self._namespace + key):
            return Miss.PURGED
        return None if entry.life.servable(self.depth, self._clock.wall()) else Miss.EXPIRED

    def _read_one(self, key: BlockKey, target: Target) -> Loaded | Miss:
        why_not = self._why_not(key)
        if why_not is not None:
            return why_not
        entry = self.store.entries[self._namespace + key]
        start = 0
        for piece in target.into:
            piece[:] = entry.payload[start : start + len(piece)]
            start += len(piece)
        if start != len(entry.payload) or not checksum.matches(entry.digest, target.into):
            del self.store.entries[self._namespace + key]
            return Miss.CORRUPT
        return Loaded(entry.digest, entry.life)

    def _write_one(self, block: Sealed) -> Stored:
        name = self._namespace + block.key
        purged = mark_of(block.life, block.position) <= self._purged_until(block.key)
        if purged or not block.life.servable(self.depth, self._clock.wall()):
            return Stored.REFUSED
        entry = self.store.entries.get(name)
        if entry is not None and not self._purged(name):
            self.store.entries[name] = replace(entry, life=entry.life.join(block.life, self._clock.wall()))
            return Stored.PRESENT
        if self._capacity_blocks and len(self.store.entries) >= self._capacity_blocks:
            now = self._clock.wall()
            loose = [n for n in self.store.entries if self.store.retained.get(n, now) <= now]
            if not loose:
                return Stored.FULL
            del self.store.entries[min(loose, key=lambda n: self._coldness(self.store.entries[n]))]
        payload = b"".join(block.pieces)
        self.store.entries[name] = _Entry(payload, block.digest, block.life, block.index, block.position)
        return Stored.STORED

    @staticmethod
    def _coldness(entry: _Entry) -> tuple[float, int]:
        return entry.life.last_use, -entry.index
