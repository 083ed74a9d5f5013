"""Maintenance of a G3 store: inspect, verify, scrub, collect garbage.

Works on a store in use, beside the processes that use it, and on one that is not. Goes by the index alone; knows no
namespace's model.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from kvtier import checksum
from kvtier.clock import Clock
from kvtier.errors import CorruptError, TierError
from kvtier.identity.keys import NAMESPACE_BYTES, SCOPE_BYTES
from kvtier.retention.terms import Depth
from kvtier.tiers.disk.class_report import class_report
from kvtier.tiers.disk.diagnosis import Ailment, diagnose
from kvtier.tiers.disk.group_commit import BLOCKS_PER_JOB_MAX, CommitJob
from kvtier.tiers.disk.index import Use
from kvtier.tiers.disk.own_thread import on_own_thread
from kvtier.tiers.disk.records import (
    FORMAT_KEY,
    NAMESPACE_KEY,
    ORDER,
    RESERVED,
    Entry,
    SlotReservation,
    is_encrypted,
    order_parts,
    same_write,
)
from kvtier.tiers.disk.slot_health import is_place_fault
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.trials import Dropped
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.times import Wall

T = TypeVar("T")
CHUNK = 1024  # entries per read transaction
READERS = 4
NICENESS = 10
COMMIT_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0
SHRINK_TIMEOUT_S, SHRINK_POLL_S = 30.0, 0.01
DAMAGED_NAMES_MAX = 100

MaintenanceProgress = Callable[[int, int], None]
"""Called with (blocks done, blocks in all) after some blocks each."""


@dataclass
class Findings:
    """Result of `verify` and `scrub`. `bad`: blocks that differ from their digests; `unreadable`: those whose slots the
    device cannot read; `encrypted`: those that were read, and that only who has their key can check. `damaged` names
    the first DAMAGED_NAMES_MAX blocks that failed, in short hex; `books` is the check of the index."""

    blocks: int = 0
    bytes: int = 0
    bad: int = 0
    raced: int = 0
    removed: int = 0
    unreadable: int = 0
    encrypted: int = 0
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

    @property
    def capacity(self) -> int:
        """Of the store, in bytes."""
        return self._store.geometry.capacity

    def inspect(self) -> dict[str, Any]:
        """The store's contents, as plain values. Reads the index; no payload."""
        store, wall_s = self._store, self._clock.wall()
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
            held[namespace] += entry.slot_bytes
            expired[namespace] += not entry.life.servable(Depth.G3, wall_s)
            scopes.setdefault(namespace, set()).add(name[NAMESPACE_BYTES : NAMESPACE_BYTES + SCOPE_BYTES])
        fields = self.namespaces()
        writers = {SlotReservation.decode(key, raw).owner for key, raw in index.rows(RESERVED)}
        used, size = index.usage()
        balance = index.balance()
        geometry = store.geometry
        return {
            "paths": [str(part) for part in store.parts],
            "format": int.from_bytes(index.rows(FORMAT_KEY)[0][1], "little"),
            "uuid": index.uuid().hex(),
            "capacity_bytes": geometry.capacity,
            "reach_bytes": index.reach().capacity,
            "segment_bytes": geometry.segment_bytes,
            "slab_file_bytes": sum(file.lstat().st_size for part in store.parts for file in part.glob("slab/*.slab")),
            "index_bytes": index.disk_bytes(),
            "written_bytes": balance.written,
            "stored_bytes": balance.stored,
            "write_amplification": round(balance.amplification, 3),
            "blocks": used,
            "bytes": size,
            "unreadable_entries": unreadable,
            "bad_places": index.bad_places(),
            "writing_processes": sum(owner.alive(store.owner) for owner in writers),
            "dead_writers": sum(not owner.alive(store.owner) for owner in writers),
            "classes": class_report(index),
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

    def diagnose(self) -> list[Ailment]:
        """What ails the store, and what helps."""
        return list(diagnose(self._store.index))

    def verify(
        self, progress: MaintenanceProgress = lambda done, total: None, *, bytes_per_s: float | None = None
    ) -> Findings:
        """Check the index and read every block against its digest, at most `bytes_per_s` fast. Changes nothing."""
        return self._read_all_apart(progress, remove=False, bytes_per_s=bytes_per_s)

    def scrub(
        self, progress: MaintenanceProgress = lambda done, total: None, *, bytes_per_s: float | None = None
    ) -> Findings:
        """Like `verify`, at most `bytes_per_s` fast, and delete the damaged blocks."""
        return self._read_all_apart(progress, remove=True, bytes_per_s=bytes_per_s)

    def namespaces(self) -> dict[bytes, Any]:
        """Digest → fields of every namespace that the store was used with."""
        rows_of = self._store.index.rows(NAMESPACE_KEY)
        return {key[len(NAMESPACE_KEY) :]: _fields(raw) for key, raw in rows_of}

    def count(self, prefix: bytes) -> int:
        """Blocks whose full names begin with `prefix`, such as a namespace's digest ‖ a tenant."""
        return sum(1 for _ in self._entries(prefix))

    def beyond(self, capacity: int) -> int:
        """Blocks that lie beyond `capacity` bytes, which a change to it deletes, as the store is now."""
        geometry = replace(self._store.geometry, capacity=capacity)
        places = (order_parts(key) for key, _ in self._store.index.rows(ORDER))
        return sum(slot >= geometry.slots_of(segment, slot_class) for slot_class, _rank, segment, slot in places)

    def shrink(self) -> int:
        """Wait until the store is as small as its capacity. Returns how many blocks left for that. Raises TierError
        where something keeps it from becoming smaller; it goes on when it is next used."""
        shrink, seen, since = self._store.shrink, -1, time.monotonic()
        while shrink.active:
            self._transact(lambda txn: None)  # and the next step beside it
            if shrink.steps != seen:
                seen, since = shrink.steps, time.monotonic()
            elif time.monotonic() - since > SHRINK_TIMEOUT_S:
                detail = "blocks are written beyond the new capacity, or files cannot be cut; it goes on later"
                raise TierError("g3", "resize", detail)
            time.sleep(SHRINK_POLL_S)
        return shrink.evicted

    def due(self) -> dict[str, int]:
        """The counts of a `gc` now. Deletes nothing."""
        wall_s, index = self._clock.wall(), self._store.index
        owners = [SlotReservation.decode(key, raw).owner for key, raw in index.rows(RESERVED)]
        counts = {"reclaimed_slots": sum(not owner.alive(self._store.owner) for owner in owners), "deleted_blocks": 0}
        entries = self._entries()
        while chunk := list(islice(entries, CHUNK)):
            counts["deleted_blocks"] += self._transact(partial(_unservable, entries=chunk, wall_s=wall_s))
        return counts

    def gc(self) -> dict[str, int]:
        """Free the slots of dead writers, and delete blocks that are expired or purged. Returns counts."""
        wall_s = self._clock.wall()

        def delete(txn: WriteTxn) -> tuple[int, bytes | None]:
            return txn.drop_range(
                start, b"", BLOCKS_PER_JOB_MAX, lambda name, entry: not txn.is_servable(name, entry, wall_s)
            )

        counts = {"reclaimed_slots": self._transact(WriteTxn.reclaim), "deleted_blocks": 0}
        following: bytes | None = b""
        while following is not None:
            start = following
            deleted, following = self._transact(delete)
            counts["deleted_blocks"] += deleted
        return counts

    def _read_all_apart(self, progress: MaintenanceProgress, *, remove: bool, bytes_per_s: float | None) -> Findings:
        """`_read_all`, on threads that get the processor when writers and readers of the store do not want it."""

        def work() -> Findings:
            _step_back()
            return self._read_all(progress, remove=remove, bytes_per_s=bytes_per_s)

        return on_own_thread("kvtier-care", work).result()  # not in a pool, which would outlast an interrupt

    def _read_all(self, progress: MaintenanceProgress, *, remove: bool, bytes_per_s: float | None) -> Findings:
        found = Findings()
        began = time.monotonic()
        try:
            self._store.index.check()
        except Exception as error:  # damaged records make any code fail that reads them
            found.books = f"{type(error).__name__}: {error}"
        total, _size = self._store.index.usage()
        local = threading.local()
        with ThreadPoolExecutor(READERS, "kvtier-care", _step_back) as pool:
            entries = self._entries()
            while chunk := list(islice(entries, 4 * READERS)):
                results = pool.map(lambda one: self._read(one[0], one[1], local), chunk)
                for (name, raw), result in zip(chunk, results, strict=True):
                    self._record(found, name, raw, result, remove=remove)
                progress(found.blocks, max(total, found.blocks))
                if bytes_per_s:
                    time.sleep(max(0.0, found.bytes / bytes_per_s - (time.monotonic() - began)))
        found.seconds = round(time.monotonic() - began, 3)
        return found

    def _read(self, name: bytes, raw: bytes, local: threading.local) -> int | Exception:
        """Length of a block that matches its entry, else why it does not."""
        try:
            entry = Entry.decode(name, raw)
            if len(getattr(local, "buffer", b"")) < entry.slot_bytes:
                local.buffer = mmap.mmap(-1, entry.slot_bytes)
            view = memoryview(local.buffer)[: entry.slot_bytes]
            with self._store.moving():
                self._store.slab.read(entry.segment, entry.offset, [view])
            if entry.encryption is None and not checksum.matches(entry.digest, [view[: entry.length]]):
                raise CorruptError("the payload does not match its digest")
            return entry.length
        except (CorruptError, OSError) as error:
            return error

    def _record(self, found: Findings, name: bytes, raw: bytes, result: int | Exception, *, remove: bool) -> None:
        found.blocks += 1
        if isinstance(result, int):
            found.bytes += result
            found.encrypted += is_encrypted(raw)
            return
        ((current, _),) = self._store.index.find([name])
        if current is None or not same_write(name, raw, current):  # removed or replaced while it was read
            found.raced += 1
            return
        found.unreadable += not isinstance(result, CorruptError)
        found.bad += isinstance(result, CorruptError)
        if len(found.damaged) < DAMAGED_NAMES_MAX:
            found.damaged.append(f"{name.hex()[:16]}…{name.hex()[-16:]}: {result}")
        if remove:
            found.removed += self._remove(name, raw, result)

    def _remove(self, name: bytes, raw: bytes, why: Exception) -> bool:
        """Remove a block that failed its check, or whose slot fails once more, alone. Whether that was done."""
        if isinstance(why, CorruptError):
            return self._transact(lambda txn: txn.delete_corrupt(name, raw))
        if not is_place_fault(why):
            return False

        def read_again() -> None:
            if isinstance(error := self._read(name, raw, threading.local()), OSError):
                raise error

        outcomes = self._store.alone(Entry.decode(name, raw).segment, [read_again], self._clock)
        if outcomes is None or not is_place_fault(outcomes[0]):
            return False
        (outcome,) = self._wait(self._store.drop_unreadable([(name, raw)], self._clock.wall()))
        return outcome is not Dropped.RACED and outcome is not Dropped.TOO_MANY

    def _entries(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Names that begin with `prefix` and raw entries, in chunks of one short read transaction each."""
        start = b""
        while True:
            with self._store.index.reading() as txn:
                chunk = list(islice(self._store.index.layout.entries(txn, prefix, start), CHUNK))
            yield from chunk
            if len(chunk) < CHUNK:
                return
            start = chunk[-1][0] + b"\0"

    def _transact(self, work: Callable[[WriteTxn], T]) -> T:
        return self._wait(self._store.submit(work, Use.DROP, BLOCKS_PER_JOB_MAX))

    def _wait(self, job: CommitJob[T]) -> T:
        try:
            return job.future.result(COMMIT_TIMEOUT_S)
        except TimeoutError:
            job.future.cancel()
            raise TierError("g3", "commit", f"another process held the index for {COMMIT_TIMEOUT_S} s") from None


def _fields(raw: bytes) -> dict[str, Any]:
    """A namespace's fields; none where the row is damaged."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _step_back() -> None:
    """Give this thread less of the processor than others; Linux has a niceness for each."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def _unservable(txn: WriteTxn, entries: Sequence[tuple[bytes, bytes]], wall_s: Wall) -> int:
    """How many of these blocks are expired or purged, or have unreadable entries. Changes nothing."""
    count = 0
    for name, raw in entries:
        try:
            count += not txn.is_servable(name, Entry.decode(name, raw), wall_s)
        except CorruptError:
            count += 1
    return count


@contextmanager
def looking_after(paths: Sequence[Path], clock: Clock, *, capacity: int | None = None) -> Iterator[Maintenance]:
    """Maintenance of the store at `paths`, which must exist. With `capacity`, in bytes, the store gets that first, for
    which no other process may use it; `shrink` waits until it is as small. Raises FormatError, ConfigError or
    TierError."""
    store = Store.visit(paths, capacity_bytes=capacity)
    try:
        yield Maintenance(store, clock)
    finally:
        store.release(CLOSE_TIMEOUT_S)
