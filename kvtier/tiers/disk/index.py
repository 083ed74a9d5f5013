"""The LMDB environment of a G3 store: opened with care, read at any time, written in one place.

Reads are transactions of microseconds on the caller's thread; none spans an I/O. Only `transact`, called on one
thread, takes the write lock, since another process may be stopped while it holds it.

The map has space for the smallest blocks that the capacity could be cut into, whatever blocks there are, so it grows
with the capacity only: what it costs is addresses, since the data file is sparse. What keeps the file small
is `pinned_by`: LMDB reuses a page only when no reader sees it any more, so while one process stands still inside a read
every commit appends, and before the file has grown much, blocks are refused.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier.errors import FormatError, TierError
from kvtier.tiers.disk.audit import audit
from kvtier.tiers.disk.bad_places import bad_places
from kvtier.tiers.disk.budget import Allowance, Balance, Debt, read_balance
from kvtier.tiers.disk.environment import opened_environment
from kvtier.tiers.disk.faults import Unusable, is_damage
from kvtier.tiers.disk.geometry import Geometry, geometry_in, reach_in
from kvtier.tiers.disk.layout import Layout
from kvtier.tiers.disk.memory import TxnMemory
from kvtier.tiers.disk.meta_pages import check_length
from kvtier.tiers.disk.owner import Owner, boot_offset_ns
from kvtier.tiers.disk.purge_log import ALL, PurgeLog
from kvtier.tiers.disk.purged import covering, purged_until
from kvtier.tiers.disk.records import (
    FIRST_FORMAT,
    FORMAT_KEY,
    FORMATS,
    GEOMETRY_KEY,
    NOTE_KEY,
    PURGED_KEY,
    RESERVED,
    RETAINED_KEY,
    SCOPED_BYTES,
    SHORT_FORMAT,
    SLOT_ALIGN,
    TIME,
    UUID_KEY,
    Counters,
    SlotReservation,
    rows,
)
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.fsync import sync_directory
from kvtier.times import Wall

if TYPE_CHECKING:
    import lmdb

T = TypeVar("T")

MAP_BYTES_MIN = 80 << 20
MAP_BYTES_PER_BLOCK = 2048  # an entry, its row in `order` and the unused part of B+tree pages are a third of this
UNUSED_BYTES_MIN, UNUSED_SHARE = 16 << 20, 2
"""While a reader stands still, blocks are stored until this and one UNUSED_SHARE-th of the used pages is unused, and
removed until twice that is; a purge is recorded in any case."""
STILL_TXNS = 8
"""A reader that began so many transactions ago stands still: a read takes microseconds."""
ROWS_PER_SLICE = 256
NAMES_PER_READ = 16


class Use(IntEnum):
    """What a transaction's pages are for, the least needed first."""

    PUT = 0
    DROP = 1
    PURGE = 2


def map_bytes_for(capacity_bytes: int) -> int:
    """Size of the map for a store of that capacity, whatever its blocks. Pure."""
    page = os.sysconf("SC_PAGESIZE")
    return -(-(MAP_BYTES_MIN + capacity_bytes // SLOT_ALIGN * MAP_BYTES_PER_BLOCK) // page) * page


class Index:
    """The open index of one store. All verbs are thread-safe but `transact` and `close`."""

    def __init__(self, path: Path, env: lmdb.Environment, owner: Owner, layout: Layout) -> None:
        self._path = path
        self.layout = layout
        self._env = env
        self.owner = owner
        self._memory = TxnMemory()
        self.demand = self._memory.demand
        self._gate = threading.Lock()
        self._closed = False
        self.on_damage: Callable[[Exception], None] = lambda error: None
        """Called, on any thread, when a reader meets records of which nothing can be made."""
        self.debt = Debt()
        self._boot_offset_s = boot_offset_ns() / 1e9  # of this process, for good
        self.purges = PurgeLog(path.parent / "PURGES")

    @classmethod
    def create(cls, path: Path, uuid: bytes, geometry: Geometry, map_bytes: int, owner: Owner) -> Index:
        """Make a new, empty index at `path`, which must not exist. The caller uses the store alone.

        Raises OSError or lmdb.Error.
        """
        draft = path.with_name(path.name + ".new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        env = opened_environment(draft, map_bytes)
        try:
            with env.begin(write=True) as txn:
                txn.put(FORMAT_KEY, SHORT_FORMAT.to_bytes(4, "little"))
                txn.put(UUID_KEY, uuid)
                txn.put(GEOMETRY_KEY, geometry.encode())
                # Releases before this format decode their own record before they look at the format, and refuse it.
                txn.put(Layout(FIRST_FORMAT).counters_key, Counters().encode())
                # A reservation or an entry of an earlier index must not be taken for one of this.
                txn.put(Layout(SHORT_FORMAT).counters_key, Counters(serial=secrets.randbits(62)).encode())
        finally:
            env.close()
        with (draft / "data.mdb").open("r+b") as file:
            file.truncate(map_bytes)
            os.fsync(file.fileno())
        sync_directory(draft)
        draft.rename(path)
        sync_directory(path.parent)
        return cls.attach(path, owner, alone=True)

    @classmethod
    def attach(cls, path: Path, owner: Owner, *, alone: bool, map_bytes: int = 0) -> Index:
        """Open an existing index. `alone`: no other process uses it, so its lock file can be made anew, and its map
        be enlarged to `map_bytes`.

        Raises Unusable for damage, FormatError for a foreign format, TierError if this process has it open, OSError or
        lmdb.Error for a fault of the machine.
        """
        import lmdb

        data = path / "data.mdb"
        check_length(data)
        if alone:
            (path / "lock.mdb").unlink(missing_ok=True)
            if data.stat().st_size < map_bytes:  # the file is as long as the map, so that all processes map as much
                os.truncate(data, map_bytes)
        try:
            env = opened_environment(path, data.stat().st_size)
        except lmdb.Error as error:
            if "already open" in str(error):
                detail = f"{path.parent} is open in this process already; a process opens a store once"
                raise TierError("g3", "open", detail) from None
            if is_damage(error):
                raise Unusable(str(error)) from None
            raise
        try:
            with env.begin() as txn:
                found = txn.get(FORMAT_KEY)
                if found is None or txn.get(UUID_KEY) is None:
                    raise Unusable("it has no format record")
                known = int.from_bytes(found, "little")
                if known not in FORMATS:  # its other records may lie elsewhere
                    raise FormatError(f"{path} is an index of format {known}, this version reads {FORMATS}")
                layout = Layout(known)
                if known < SHORT_FORMAT and txn.get(Layout(SHORT_FORMAT).counters_key) is not None:
                    raise Unusable(f"its format record says {known}, its other records are of a later one")
                Counters.decode(txn.get(layout.counters_key, default=b""))
                Geometry.decode(txn.get(GEOMETRY_KEY, default=b""))
                geometry_in(txn)
            env.reader_check()
        except BaseException as error:
            env.close()
            if isinstance(error, (lmdb.Error, struct.error)) and is_damage(error):
                raise Unusable(str(error)) from None
            raise
        return cls(path, env, owner, layout)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Any]:
        """A read transaction, to be ended within microseconds: it holds back the reuse of pages, and `close`."""
        import lmdb

        with self._gate:
            if self._closed:
                raise TierError("g3", "read index", "it is closed")
            try:
                with self._env.begin() as txn:
                    yield txn
            except Exception as error:
                if isinstance(error, (struct.error, lmdb.Error)) and is_damage(error):
                    self.on_damage(error)
                raise

    def can_be_read(self) -> bool:
        """Whether it can be: after a write of a meta page that failed LMDB refuses everything, until it is opened
        anew."""
        import lmdb

        try:
            with self.reading():
                return True
        except (lmdb.Error, TierError):
            return False

    def find(self, names: Sequence[bytes], *, faults_max: int | None = None) -> list[tuple[bytes | None, Wall]]:
        """Per name, its entry as it is stored (None where there is none) and the time of its scope's tombstone (-inf
        where there is none). Waits for the device where a page is not in memory: for at most about `faults_max` pages,
        then the answer ends early."""
        found: list[tuple[bytes | None, Wall]] = []
        scoped, until = b"", Wall("-inf")
        pending = self._pending_purges()  # first: one that is not there any more is in the index
        before, key = _page_faults(), self.layout.key
        for start in range(0, len(names), NAMES_PER_READ):  # cold pages keep no other reader waiting for long
            if faults_max is not None and _page_faults() - before > faults_max:
                break
            with self.reading() as txn:
                get = txn.get
                for name in names[start : start + NAMES_PER_READ]:
                    if name[:SCOPED_BYTES] != scoped:
                        scoped = name[:SCOPED_BYTES]
                        until = purged_until(txn, scoped)
                        if pending:
                            until = max(until, *(pending.get(one, until) for one in (*covering(scoped), ALL)))
                    found.append((get(key(name)), until))
        return found

    def _pending_purges(self) -> Mapping[bytes, Wall]:
        try:
            return self.purges.pending()
        except OSError as error:
            raise TierError("g3", "read purges", str(error)) from error

    def slices(self, prefix: bytes, look: Callable[[Any, list[tuple[bytes, bytes]]], None]) -> set[int]:
        """Call `look` with a read transaction and its rows, ROWS_PER_SLICE at a time, for all whose keys begin with
        `prefix`. Returns the ids of the transactions: one, if nothing was written meanwhile."""
        seen: set[int] = set()
        start = prefix
        while True:
            with self.reading() as txn:
                seen.add(txn.id())
                found = list(islice(rows(txn, prefix, start), ROWS_PER_SLICE))
                look(txn, found)
            if len(found) < ROWS_PER_SLICE:
                return seen
            start = found[-1][0] + b"\0"

    def rows(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """All rows whose keys begin with `prefix`, read in slices."""
        found: list[tuple[bytes, bytes]] = []
        self.slices(prefix, lambda _txn, some: found.extend(some))
        return found

    def uuid(self) -> bytes:
        """16 bytes that the store's parts share."""
        with self.reading() as txn:
            return bytes(txn.get(UUID_KEY))

    def geometry(self) -> Geometry:
        """How the capacity is cut into segments."""
        with self.reading() as txn:
            return geometry_in(txn)

    def reach(self) -> Geometry:
        """How far segments and their files may reach: beyond the capacity while the store shrinks."""
        with self.reading() as txn:
            return reach_in(txn)

    def usage(self) -> tuple[int, int]:
        """(blocks, slot bytes they occupy), of all namespaces."""
        with self.reading() as txn:
            counters = Counters.decode(txn.get(self.layout.counters_key))
        return counters.blocks, counters.slot_bytes

    def disk_bytes(self) -> int:
        """Bytes that the sparse data file occupies."""
        return 512 * (self._path / "data.mdb").stat().st_blocks

    def used_bytes(self) -> int:
        """Bytes of the pages that hold tables; the data file has unused ones, too."""
        with self.reading():
            return self._used_bytes()

    def _used_bytes(self) -> int:
        used = self._env.stat()
        return int(used["psize"] * (used["branch_pages"] + used["leaf_pages"] + used["overflow_pages"]))

    def has_reservations(self) -> bool:
        """Whether slots are being written to, or were when their owner died."""
        with self.reading() as txn:
            return next(rows(txn, RESERVED), None) is not None

    def has_dead_owners(self) -> bool:
        """Whether slots are reserved for owners that are dead, or a record of one cannot be read."""
        with self.reading() as txn:
            try:
                owners = {SlotReservation.decode(key, raw).owner for key, raw in rows(txn, RESERVED)}
            except struct.error:
                return True
        return not all(owner.alive(self.owner) for owner in owners)

    def bad_places(self) -> int:
        """How many places of the slab files are set aside."""
        with self.reading() as txn:
            return len(bad_places(txn))

    def tombstones(self, namespace: bytes) -> list[tuple[bytes, Wall]]:
        """(tenant, mark) of every purge in the namespace."""
        found = {scoped: until for scoped, until in self._pending_purges().items() if scoped != ALL}
        for key, raw in self.rows(PURGED_KEY + namespace):
            scoped = key[len(PURGED_KEY) :]
            found[scoped] = max(Wall(TIME.unpack(raw)[0]), found.get(scoped, Wall("-inf")))
        size = len(namespace)
        return [(scoped[size:], until) for scoped, until in found.items() if scoped.startswith(namespace)]

    def is_purged(self, scoped: bytes, until: Wall) -> bool:
        """Whether blocks of namespace ‖ scope with that mark are dead, by what is in the index."""
        with self.reading() as txn:
            return purged_until(txn, scoped) >= until

    def retained(self, namespace: bytes) -> dict[bytes, Wall]:
        """Keys of the namespace's retained blocks, and until when."""
        prefix = RETAINED_KEY + namespace
        return {key[len(prefix) :]: TIME.unpack(raw)[0] for key, raw in self.rows(prefix)}

    def read_notes(self, name: bytes) -> dict[bytes, bytes]:
        """Saved state whose namespace ‖ text begins with `name`, by that whole name."""
        return {key[len(NOTE_KEY) :]: bytes(raw) for key, raw in self.rows(NOTE_KEY + name)}

    def check(self) -> None:
        """Assert that the tables agree with one another. Reads them all, in slices."""
        audit(self)

    def pinned_by(self, use: Use) -> int | None:
        """The process that keeps unused pages from being used again, if that is so, and there are so many of them that
        none may be added for `use`."""
        with self.reading():
            info, used = self._env.info(), self._used_bytes()
            unused = (info["last_pgno"] + 1) * self._env.stat()["psize"] - used
            allowed = UNUSED_BYTES_MIN + used // UNUSED_SHARE
            if use is Use.PURGE or unused <= allowed * (2 if use is Use.DROP else 1):
                return None
            self._env.reader_check()
            return _standing_still(self._env.readers(), info["last_txnid"])

    def balance(self) -> Balance:
        """What was written, and what may be."""
        with self.reading() as txn:
            return read_balance(txn, self.layout.budget_key)

    def allowance(self, per_day: float, now_s: float) -> Allowance:
        """Of this process. `per_day`: bytes, 0 for no bound; `now_s`: CLOCK_BOOTTIME.

        A transaction pays for its own commit, as much as the last one wrote: nobody pays later for a process that is
        killed. The difference is owed, or paid back, with the next.
        """
        return self.debt.allowance(per_day, self.owner.boot, now_s - self._boot_offset_s)

    def transact(
        self,
        work: Callable[[WriteTxn], T],
        *,
        may_grow: Callable[[int], bool] = lambda part: True,
        per_day: float = 0.0,
        now_s: float = 0.0,
    ) -> T:
        """Run `work` in one durable write transaction; returns its result. Blocks for as long as another process holds
        the lock. Raises lmdb.Error or what `work` raises; then nothing of the transaction is visible.

        `per_day`, `now_s`: as in `allowance`.
        """
        allowance = self.allowance(per_day, now_s)
        with self.debt.paying(allowance):
            try:
                purges = dict(self.purges.pending())
                with self._env.begin(write=True) as lmdb_txn:
                    memory = self._memory
                    txn = WriteTxn(lmdb_txn, self.owner, self.layout, memory, purges, allowance, may_grow=may_grow)
                    result = work(txn)
                    txn.save()
            except BaseException:
                self._memory.floors.clear()  # they count with changes that were never made
                raise
            with contextlib.suppress(OSError, TierError):  # then they are written once more
                self.purges.settle(purges)
        return result

    def enlarge(self, map_bytes: int) -> None:
        """Have a map of that size at least. The caller uses the store alone, on the thread of `transact`. Raises
        OSError, lmdb.Error or MemoryError; the map is the old one then, or the index is closed."""
        data = self._path / "data.mdb"
        with self._gate:
            if self._closed or (before := data.stat().st_size) >= map_bytes:
                return
            try:
                with data.open("r+b") as file:  # first: what is mapped beyond a file's end is SIGBUS
                    file.truncate(map_bytes)
                    os.fsync(file.fileno())
                try:
                    self._env.set_mapsize(map_bytes)
                except BaseException:  # LMDB has no map now
                    self._close()
                    raise
            except BaseException:
                os.truncate(data, before)  # whoever opens it maps all of it
                raise

    def clear_dead_readers(self) -> None:
        """Clear the reader slots of processes that ended inside a read: they hold back the reuse of pages."""
        with self._gate:
            if not self._closed:
                self._env.reader_check()

    def close(self) -> None:
        """Idempotent. No `transact` may run."""
        with self._gate:
            self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._env.close()
            self.purges.close()


def _page_faults() -> int:
    """How often this thread has waited for a page from the device."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _standing_still(readers: str, last_txn: int) -> int | None:
    """The process id of a reader, by LMDB's table of them, whose transaction began long ago. Pure."""
    for line in readers.splitlines():
        pid, _, txn = [*line.split(), "", "", ""][:3]
        if pid.isdecimal() and txn.isdecimal() and last_txn - int(txn) > STILL_TXNS:
            return int(pid)
    return None
