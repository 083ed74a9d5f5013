"""Opening the index of a G3 store: attach to what can be used, make anew what cannot, touch nothing that is foreign."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import uuid
from collections.abc import Sequence
from pathlib import Path

from kvtier.errors import ConfigError, FormatError, TierError
from kvtier.tiers.disk.allocator import Geometry
from kvtier.tiers.disk.directory import Marker, move_aside, read_marker, write_marker
from kvtier.tiers.disk.index import Index, Unusable, map_bytes_for
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.disk.records import SLOT_ALIGN
from kvtier.tiers.disk.write_txn import WriteTxn

log = logging.getLogger(__name__)

SEGMENT_BYTES_MAX = 1 << 30
SEGMENT_BYTES_SMALL = 64 << 20  # below this a segment is cut smaller only if the capacity is


def open_index(parts: Sequence[Path], capacity: int, slot_bytes: int, owner: Owner, *, alone: bool) -> Index:
    """The index of a store whose lock the caller holds: what is there, or, if `alone`, a new one in its place.

    Raises FormatError for what must not be touched, ConfigError for the wrong paths, TierError where damage cannot
    be repaired because others use the store.
    """
    markers = [read_marker(part) for part in parts]
    for number, marker in enumerate(markers):
        if marker is not None and (marker.part != number or marker.parts != len(parts)):
            raise ConfigError(
                f"tiers.g3.path {parts[number]} is part {marker.part} of {marker.parts} of its store, "
                f"not {number} of {len(parts)}; give all paths of a store, in the same order"
            )
    known = {marker.uuid for marker in markers if marker is not None}
    if len(known) > 1:
        raise FormatError(f"{', '.join(map(str, parts))} belong to different stores")
    path = parts[0] / "index"
    needed = map_bytes_for(capacity // slot_bytes)
    index = None
    try:
        if path.exists() or not alone:
            index = Index.attach(path, owner, alone=alone, map_bytes=needed)
    except Unusable as error:
        if not alone:
            raise TierError("g3", "open", f"{path} is unusable and other processes use it: {error}") from None
        log.warning("g3: %s cannot be used: %s; moved to %s, the store starts empty", path, error, move_aside(path))
    name = next(iter(known), None)
    if index is not None:
        found = index.uuid().hex()
        if name is not None and name != found:
            index.close()
            raise FormatError(
                f"{path} belongs to the store {found}, but {parts[0]} to {name}; put the right index back, or remove it"
            )
        name = found
    name = name or uuid.uuid4().hex
    if alone:
        for number, part in enumerate(parts):
            if markers[number] is None:
                write_marker(part, Marker(name, number, len(parts)))
    if index is None:
        for part in parts:
            for file in (part / "slab").glob("*.slab"):
                with contextlib.suppress(IsADirectoryError):
                    file.unlink()
        segment = min(SEGMENT_BYTES_MAX, max(capacity // 16, SEGMENT_BYTES_SMALL), capacity) // slot_bytes * slot_bytes
        geometry = Geometry(capacity, max(segment, slot_bytes), len(parts))
        index = Index.create(path, bytes.fromhex(name), geometry, needed, owner)
    return index


def take_back(index: Index) -> bool:
    """Free the slots of dead owners. False: the index is damaged.

    A full or failing volume does not keep a store from being opened: it can be read, and the writer thread tries again.
    """
    import lmdb

    try:
        index.transact(WriteTxn.reclaim)
    except lmdb.Error as error:
        log.warning("g3: slots of ended processes are not free yet: %s", error)
    except Exception:  # whatever damaged records make of the code that reads them
        return False
    return True


def probe(parts: Sequence[Path]) -> None:
    """Write, sync and read a page in each part. Raises OSError."""
    for part in parts:
        path = part / "PROBE"
        page = secrets.token_bytes(SLOT_ALIGN)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.pwrite(fd, page, 0) != len(page):
                raise OSError(errno.EIO, "short write", str(path))
            os.fdatasync(fd)
            if os.pread(fd, SLOT_ALIGN, 0) != page:
                raise OSError(errno.EIO, "reads back other bytes than were written", str(path))
        finally:
            os.close(fd)
            path.unlink()
