"""Looking after a G3 store from outside: what is in it, is it whole, and what can go.

Works on a live store, beside the processes that use it, and on a dead one. Nothing here knows a namespace's model:
it goes by what the index says.
"""

from __future__ import annotations

import json
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvtier import checksum
from kvtier.clock import Clock
from kvtier.errors import CorruptError, TierError
from kvtier.identity.keys import NAMESPACE_BYTES, SCOPE_BYTES
from kvtier.retention.terms import Depth
from kvtier.tiers.disk.records import BLOCKS, RESERVED, SLOT_ALIGN, Entry, SlotReservation, rows
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.write_txn import FORMAT, NAMESPACE_KEY, WriteTxn

T = TypeVar("T")
CHUNK = 1024  # entries per transaction
READERS = 4
COMMIT_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0
DAMAGED_NAMES_MAX = 100

Progress = Callable[[int, int], None]
"""Called with (blocks done, blocks in all), now and then."""


@dataclass
class Findings:
    """What `verify` and `scrub` found. `damaged` names the first DAMAGED_NAMES_MAX blocks that failed, in short hex."""

    blocks: int = 0
    bytes: int = 0
    bad: int = 0
    raced: int = 0
    removed: int = 0
    unreadable: int = 0
    damaged: list[str] = field(default_factory=list)
    books: str = "in order"
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether nothing was wrong."""
        return self.bad == self.unreadable == 0 and self.books == "in order"


class Maintenance:
    """Made by `looking_after`. All verbs block; they may run for as long as reading the whole store takes."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def inspect(self) -> dict[str, Any]:
        """What the store holds, as plain values. Reads the index; no payload."""
        store, now = self._store, self._clock.wall()
        index = store.index
        blocks: Counter[bytes] = Counter()
        held: Counter[bytes] = Counter()
        expired: Counter[bytes] = Counter()
        scopes: dict[bytes, set[bytes]] = {}
        unreadable = 0
        for name, raw in self._entries():
            namespace = name[:NAMESPACE_BYTES]
            try:
                entry = Entry.decode(name, raw)
            except CorruptError:
                unreadable += 1
                continue
            blocks[namespace] += 1
            held[namespace] += entry.slot_class * SLOT_ALIGN
            expired[namespace] += not entry.life.servable(Depth.G3, now)
            scopes.setdefault(namespace, set()).add(name[NAMESPACE_BYTES : NAMESPACE_BYTES + SCOPE_BYTES])
        with index.reading() as txn:
            fields = {key[len(NAMESPACE_KEY) :]: json.loads(raw) for key, raw in rows(txn, NAMESPACE_KEY)}
            writers = {SlotReservation.decode(key, raw).owner for key, raw in rows(txn, RESERVED)}
        used, size = index.usage()
        geometry = store.geometry
        return {
            "paths": [str(part) for part in store.parts],
            "format": FORMAT,
            "uuid": index.uuid().hex(),
            "capacity_bytes": geometry.capacity,
            "segment_bytes": geometry.segment_bytes,
            "slab_file_bytes": sum(path.lstat().st_size for path in self._files()),
            "index_bytes": index.disk_bytes(),
            "blocks": used,
            "bytes": size,
            "unreadable_entries": unreadable,
            "writing_processes": sum(owner.alive(store.owner) for owner in writers),
            "dead_writers": sum(not owner.alive(store.owner) for owner in writers),
            "namespaces": [
                {
                    "digest": digest.hex(),
                    "blocks": blocks[digest],
                    "bytes": held[digest],
                    "expired": expired[digest],
                    "scopes": len(scopes.get(digest, ())),
                    "purges": len(index.tombstones(digest)),
                    "fields": fields.get(digest),
                }
                for digest in sorted({*fields, *blocks})
            ],
        }

    def verify(self, progress: Progress = lambda done, total: None) -> Findings:
        """Check the books and read every block against its digest. Changes nothing."""
        return self._read_all(progress, remove=False, bytes_per_s=None)

    def scrub(self, progress: Progress = lambda done, total: None, *, bytes_per_s: float | None = None) -> Findings:
        """Like `verify`, at most `bytes_per_s` fast, and delete what is damaged."""
        return self._read_all(progress, remove=True, bytes_per_s=bytes_per_s)

    def gc(self) -> dict[str, int]:
        """Free what dead writers reserved, and delete blocks that are expired or purged. Returns counts."""
        now = self._clock.wall()
        counts = {"reclaimed_slots": self._transact(WriteTxn.reclaim), "deleted_blocks": 0}
        following: bytes | None = b""
        while following is not None:
            deleted, following = self._transact(partial(_sweep, start=following, now=now))
            counts["deleted_blocks"] += deleted
        return counts

    def _read_all(self, progress: Progress, *, remove: bool, bytes_per_s: float | None) -> Findings:
        found = Findings()
        began = time.monotonic()
        try:
            self._store.index.check()
        except Exception as error:  # whatever damaged records make of the code that reads them
            found.books = f"{type(error).__name__}: {error}"
        total, _size = self._store.index.usage()
        local = threading.local()
        with ThreadPoolExecutor(READERS, thread_name_prefix="kvtier-care") as pool:
            chunk: list[tuple[bytes, bytes]] = []
            for item in [*self._entries(), None]:
                if item is not None:
                    chunk.append(item)
                if chunk and (item is None or len(chunk) == 4 * READERS):
                    verdicts = pool.map(lambda one: self._whole(one[0], one[1], local), chunk)
                    for (name, raw), verdict in zip(chunk, verdicts, strict=True):
                        self._note(found, name, raw, verdict, remove=remove)
                    chunk.clear()
                    progress(found.blocks, max(total, found.blocks))
                    if bytes_per_s:
                        time.sleep(max(0.0, found.bytes / bytes_per_s - (time.monotonic() - began)))
        found.seconds = round(time.monotonic() - began, 3)
        return found

    def _whole(self, name: bytes, raw: bytes, local: threading.local) -> int | Exception:
        """Length of a block that is what its entry says, else why not."""
        try:
            entry = Entry.decode(name, raw)
            padded = entry.slot_class * SLOT_ALIGN
            if len(getattr(local, "buffer", b"")) < padded:
                local.buffer = mmap.mmap(-1, padded)
            view = memoryview(local.buffer)[:padded]
            with self._store.moving():
                self._store.slab.read(entry.segment, entry.slot * padded, [view])
            if not checksum.matches(entry.digest, [view[: entry.length]]):
                raise CorruptError("the payload does not match its digest")
            return entry.length
        except (CorruptError, OSError) as error:
            return error

    def _note(self, found: Findings, name: bytes, raw: bytes, verdict: int | Exception, *, remove: bool) -> None:
        found.blocks += 1
        if isinstance(verdict, int):
            found.bytes += verdict
            return
        if self._overtaken(name, raw):
            found.raced += 1
            return
        found.unreadable += not isinstance(verdict, CorruptError)
        found.bad += isinstance(verdict, CorruptError)
        if len(found.damaged) < DAMAGED_NAMES_MAX:
            found.damaged.append(f"{name.hex()[:16]}…{name.hex()[-16:]}: {verdict}")
        if remove and isinstance(verdict, CorruptError):
            found.removed += self._transact(lambda ledger: ledger.condemn(name, raw))

    def _overtaken(self, name: bytes, raw: bytes) -> bool:
        """Whether the entry is another write's by now, or gone."""
        with self._store.index.reading() as txn:
            current = txn.get(BLOCKS + name)
        if current is None:
            return True
        try:
            return Entry.decode(name, current).serial != Entry.decode(name, raw).serial
        except CorruptError:
            return bool(current != raw)

    def _entries(self) -> Iterator[tuple[bytes, bytes]]:
        """All names and raw entries, in chunks of one short read transaction each."""
        start = BLOCKS
        while True:
            with self._store.index.reading() as txn:
                chunk = [item for item, _ in zip(rows(txn, BLOCKS, start), range(CHUNK), strict=False)]
            for key, raw in chunk:
                yield key[len(BLOCKS) :], raw
            if len(chunk) < CHUNK:
                return
            start = chunk[-1][0] + b"\0"

    def _files(self) -> Iterator[Path]:
        for part in self._store.parts:
            yield from (part / "slab").glob("*.slab")

    def _transact(self, work: Callable[[WriteTxn], T]) -> T:
        job = self._store.submit(work)
        try:
            result: T = job.future.result(COMMIT_TIMEOUT_S)
        except TimeoutError:
            job.future.cancel()
            raise TierError("g3", "commit", f"another process held the index for {COMMIT_TIMEOUT_S} s") from None
        return result


def _sweep(ledger: WriteTxn, start: bytes, now: float) -> tuple[int, bytes | None]:
    def doomed(name: bytes, entry: Entry) -> bool:
        return not entry.life.servable(Depth.G3, now) or ledger.is_purged(name, entry)

    return ledger.drop_range(start, b"", CHUNK, doomed)


@contextmanager
def looking_after(paths: Sequence[Path], clock: Clock, *, capacity: int | None = None) -> Iterator[Maintenance]:
    """A caretaker of the store at `paths`, which must exist. With `capacity` the store is resized first, which
    nobody else may use meanwhile. Raises FormatError, ConfigError or TierError."""
    store = Store.visit(paths, capacity=capacity)
    try:
        yield Maintenance(store, clock)
    finally:
        store.release(CLOSE_TIMEOUT_S)
