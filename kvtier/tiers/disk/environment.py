"""The LMDB environment of a G3 index, as every process opens it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lmdb

READERS_MAX = 1024
LOCK_BYTES = 64 * (READERS_MAX - 1) + 192
"""Of LMDB's table of readers, as LMDB makes it."""


def opened_environment(path: Path, map_bytes: int) -> lmdb.Environment:
    """The environment in this folder, which is durable commit by commit. Raises OSError or lmdb.Error."""
    import lmdb

    _allocate_lock(path)
    return lmdb.open(
        str(path),
        map_size=map_bytes,
        subdir=True,
        readonly=False,
        metasync=True,
        sync=True,
        map_async=False,
        mode=0o600,
        create=True,
        readahead=True,
        writemap=False,  # a full volume would be SIGBUS
        meminit=True,
        max_readers=READERS_MAX,
        max_dbs=0,
        max_spare_txns=4,
        lock=True,
    )


def _allocate_lock(path: Path) -> None:
    """Have the table of readers on the volume, where LMDB would make a sparse one and write to it through its map: a
    full volume would be SIGBUS. Raises OSError."""
    fd = os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(fd).st_size < LOCK_BYTES:
            os.posix_fallocate(fd, 0, LOCK_BYTES)
    finally:
        os.close(fd)
