"""Opens a G3 store: uses the index that is there, replaces one that is damaged, and touches nothing that is foreign."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError, FormatError, TierError, TierUnavailable
from kvtier.tiers.disk.damage_mark import is_marked, mark, unmark
from kvtier.tiers.disk.directory import DirectoryLock, Marker, is_there, move_aside, read_marker, write_marker
from kvtier.tiers.disk.faults import Unusable, is_damage
from kvtier.tiers.disk.geometry import Geometry
from kvtier.tiers.disk.index import Index, map_bytes_for
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.disk.slab import Slab, SystemCalls
from kvtier.tiers.disk.write_txn import WriteTxn

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 5.0
SEGMENT_BYTES_MAX = 1 << 30
SEGMENT_BYTES_SMALL = 64 << 20  # below this a segment is cut smaller only if the capacity is


@dataclass(frozen=True, slots=True)
class Opened:
    """An open store. The receiver closes the index, then releases the lock."""

    parts: list[Path]
    lock: DirectoryLock
    index: Index


def attach(parts: Sequence[Path], capacity_bytes: int, slot_bytes: int) -> Opened:
    """Open the store in these directories, or create it, and give it this capacity if no other process uses it.

    Takes back the slots of dead owners; replaces an index that is damaged. Blocks, for seconds at most. Raises
    ConfigError, FormatError or TierError; OSError, MemoryError or lmdb.Error for a fault of the machine, which changes
    nothing.
    """
    with _locked(parts) as (lock, owner, alone), contextlib.ExitStack() as undo:
        index = _checked_index(parts, capacity_bytes, slot_bytes, owner, alone=alone, damaged=False)
        undo.callback(lambda: index.close())
        with contextlib.suppress(OSError):  # then the first purge makes it
            index.purges.prepare()
        if alone and not _take_back(index):
            index.close()
            index = _replace_index(parts, capacity_bytes, slot_bytes, owner)
        if alone:
            _resize(parts, index, capacity_bytes)
            _cut(parts, index)
            lock.share()
        elif capacity_bytes != index.geometry().capacity:
            log.warning(
                "g3: %s has a capacity of %d bytes, not %d, for as long as others use it",
                parts[0], index.geometry().capacity, capacity_bytes,
            )  # fmt: skip
        undo.pop_all()
        return Opened(list(parts), lock, index)


def visit(parts: Sequence[Path], capacity_bytes: int | None) -> Opened:
    """Open a store that exists, as it is: nothing is created or repaired. With `capacity_bytes` it is resized, which no
    other process may use it for. Blocks. Raises FormatError, ConfigError or TierError."""
    markers = [read_marker(part) for part in parts]
    for part, marker in zip(parts, markers, strict=True):
        if marker is None:
            raise FormatError(f"{part} is not a G3 store: it has no readable STORE.json")
    _store_of(parts, markers)
    with _locked(parts) as (lock, owner, alone):
        if capacity_bytes is not None and not alone:
            raise TierError("g3", "resize", f"{parts[0]} is in use by another process; stop it first")
        index = Index.attach(parts[0] / "index", owner, alone=alone)
        with contextlib.ExitStack() as undo:
            undo.callback(index.close)
            if capacity_bytes is not None:
                _resize(parts, index, capacity_bytes)
                _cut(parts, index)
            undo.pop_all()
        lock.share()
        return Opened(list(parts), lock, index)


@contextlib.contextmanager
def _locked(parts: Sequence[Path]) -> Iterator[tuple[DirectoryLock, Owner, bool]]:
    """The store's lock, its holder and whether the lock is exclusive. If the body raises, the lock is released."""
    owner = Owner.current()
    lock = DirectoryLock(parts[0])
    alone = lock.acquire(owner, LOCK_TIMEOUT_S)
    try:
        yield lock, owner, alone
    except BaseException as error:
        lock.release()
        if isinstance(error, Unusable):
            raise TierUnavailable("g3", "open", f"the index of {parts[0]} is unusable now: {error}") from None
        raise


def rejoin(
    parts: Sequence[Path], lock: DirectoryLock, uuid_: bytes, capacity_bytes: int, slot_bytes: int, *, damaged: bool
) -> Index:
    """The index of a store that was out of use here, opened again with a new owner. `damaged`: its tables are checked.

    The lock is shared afterwards. Raises Unusable if the index is damaged, or thought to be, and others use it: then
    the lock is given up, as the others give it up, until one of them has repaired the index. Raises else what
    `open_index` raises.
    """
    try:
        alone = lock.try_exclusive() if lock.held else _lock_again(parts[0], lock)
        try:
            index = _checked_index(parts, capacity_bytes, slot_bytes, Owner.current(), alone=alone, damaged=damaged)
        finally:
            lock.share()
    except Unusable:
        lock.release()
        raise
    if index.uuid() != uuid_:
        index.close()
        raise TierUnavailable("g3", "open", f"{parts[0]} is another store now; close the tier and open it")
    return index


def _lock_again(part: Path, lock: DirectoryLock) -> bool:
    """Take the lock that was given up for a repair. Whether it is exclusive; while the mark is there it must be."""
    try:
        return lock.acquire(Owner.current(), 0.0 if is_marked(part) else LOCK_TIMEOUT_S)
    except TierError as error:
        raise Unusable(str(error)) from None


def _checked_index(
    parts: Sequence[Path], capacity_bytes: int, slot_bytes: int, owner: Owner, *, alone: bool, damaged: bool
) -> Index:
    """The index, checked where it may be damaged: replaced by a new one if `alone`, else marked."""
    marked = is_marked(parts[0])
    if marked and not alone:
        raise Unusable("it is damaged, and is repaired once all processes have let go of it")
    try:
        index = open_index(parts, capacity_bytes, slot_bytes, owner, alone=alone)
        try:
            if marked or damaged:
                index.check()
        except Exception as error:
            index.close()
            if not is_damage(error):
                raise
            if not alone:
                raise Unusable(f"it is damaged, and other processes use it: {error}") from None
            log.warning("g3: %s is damaged: %s", parts[0], error)
            index = _replace_index(parts, capacity_bytes, slot_bytes, owner)
    except Unusable:
        mark(parts[0])
        raise
    if marked:
        try:
            unmark(parts[0])
        except BaseException:
            index.close()
            raise
    return index


def _replace_index(parts: Sequence[Path], capacity_bytes: int, slot_bytes: int, owner: Owner) -> Index:
    """A new index instead of a damaged one. The caller uses the store alone."""
    log.warning("g3: %s: its damaged index is moved to %s", parts[0], move_aside(parts[0] / "index"))
    return open_index(parts, capacity_bytes, slot_bytes, owner, alone=True)


def open_index(parts: Sequence[Path], capacity_bytes: int, slot_bytes: int, owner: Owner, *, alone: bool) -> Index:
    """The index of a store whose lock the caller holds: the existing one or, if `alone`, a new one in its place.

    Raises FormatError for what must not be touched, ConfigError for the wrong paths, Unusable for damage that cannot be
    repaired because other processes use the store, OSError or lmdb.Error for a fault of the machine.
    """
    markers = [read_marker(part) for part in parts]
    known = _store_of(parts, markers)
    path = parts[0] / "index"
    map_bytes = map_bytes_for(capacity_bytes)
    index = None
    try:
        if is_there(path) or not alone:
            index = Index.attach(path, owner, alone=alone, map_bytes=map_bytes)
    except Unusable as error:
        if not alone:
            raise
        log.warning("g3: %s cannot be used: %s; moved to %s, the store starts empty", path, error, move_aside(path))
    name = known or (index.uuid().hex() if index is not None else uuid.uuid4().hex)
    if index is not None and name != index.uuid().hex():
        found = index.uuid().hex()
        index.close()
        raise FormatError(
            f"{path} belongs to the store {found}, but {parts[0]} to {name}; put the right index back, or remove it"
        )
    try:
        _check_mounts(parts, markers, index)
    except BaseException:
        if index is not None:
            index.close()
        raise
    if alone:
        for number, part in enumerate(parts):
            if markers[number] is None:
                write_marker(part, Marker(name, number, len(parts)))
    return index or _create_index(parts, capacity_bytes, slot_bytes, name, owner)


def _check_mounts(parts: Sequence[Path], markers: Sequence[Marker | None], index: Index | None) -> None:
    """Raise TierUnavailable where a part of a store that was whole once is empty: its volume is not mounted.

    A new store's markers are written in order, before its index is made.
    """
    last = max((number for number, marker in enumerate(markers) if marker is not None), default=0)
    whole = len(parts) if index is not None else last
    for part in parts[:whole]:
        if is_there(part / "STORE.json") or (index is not None and part == parts[0]):
            continue
        if next((part / "slab").iterdir(), None) is None:
            raise TierUnavailable(
                "g3",
                "open",
                f"{part} is empty, but another path is part of a store: mount its volume, or remove all",
            )


def _store_of(parts: Sequence[Path], markers: Sequence[Marker | None]) -> str | None:
    """The uuid that the markers name, if any. Raises ConfigError or FormatError where they contradict the paths."""
    for number, marker in enumerate(markers):
        if marker is not None and (marker.part != number or marker.parts != len(parts)):
            raise ConfigError(
                f"tiers.g3.path {parts[number]} is part {marker.part} of {marker.parts} of its store, "
                f"not {number} of {len(parts)}; give all paths of a store, in the same order"
            )
    known = {marker.uuid for marker in markers if marker is not None}
    if len(known) > 1:
        raise FormatError(f"{', '.join(map(str, parts))} belong to different stores")
    return next(iter(known), None)


def _create_index(parts: Sequence[Path], capacity_bytes: int, slot_bytes: int, name: str, owner: Owner) -> Index:
    """A new, empty index; segment files of an earlier one are removed."""
    for part in parts:
        for file in (part / "slab").glob("*.slab"):
            with contextlib.suppress(IsADirectoryError):
                file.unlink()
    segment_bytes = min(SEGMENT_BYTES_MAX, max(capacity_bytes // 16, SEGMENT_BYTES_SMALL), capacity_bytes)
    geometry = Geometry(capacity_bytes, max(segment_bytes // slot_bytes, 1) * slot_bytes, len(parts))
    map_bytes = map_bytes_for(capacity_bytes)
    return Index.create(parts[0] / "index", bytes.fromhex(name), geometry, map_bytes, owner)


def _take_back(index: Index) -> bool:
    """Free the slots of dead owners. False: the index is damaged.

    A full or failing volume does not keep a store from being opened: it can be read, and the writer thread tries again.
    """
    import lmdb

    try:
        index.transact(WriteTxn.reclaim)
    except Exception as error:
        if is_damage(error):
            return False
        if not isinstance(error, lmdb.Error):
            raise
        log.warning("g3: slots of ended processes are not free yet: %s", error)
    return True


def _resize(parts: Sequence[Path], index: Index, capacity_bytes: int) -> None:
    """Give a store that no other process uses another capacity. Where it is smaller, the store shrinks from now on."""

    def resize(txn: WriteTxn) -> None:
        txn.reclaim()
        txn.resize(capacity_bytes)

    if capacity_bytes != index.geometry().capacity:
        index.transact(resize)
    if capacity_bytes < (reach := index.reach().capacity):
        log.warning("g3: %s shrinks, while it is used, from %d bytes to %d", parts[0], reach, capacity_bytes)


def _cut(parts: Sequence[Path], index: Index) -> None:
    """Cut the files that an interrupted change of the capacity left longer than any block can need."""
    slab = Slab(parts, index.reach().size_of, SystemCalls())
    slab.remove_drafts()
    for _ in slab.cut():
        pass
