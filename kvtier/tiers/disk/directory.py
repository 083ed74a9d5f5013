"""The directories of a G3 store: the marker of each, and the lock of the processes that use the store.

    PART/STORE.json     {"kind": "kvtier-g3", "format": 1, "uuid": …, "part": i, "parts": n}
    PART/slab/          segment files (kvtier.tiers.disk.slab)
    PART 0/LOCK         open-file-description lock: shared by every user, exclusive while one opens alone;
                        its text names the boot and the pid namespace of the users
    PART 0/index/       the LMDB environment (kvtier.tiers.disk.index)

LMDB recognizes dead readers by their process id, so all users must live in one pid namespace and on one kernel.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError, FormatError, TierUnavailable
from kvtier.tiers.disk.faults import MISTAKES
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.fsync import sync_directory

log = logging.getLogger(__name__)

KIND = "kvtier-g3"
FORMAT = 1
"""Of the directory; the index has one of its own."""
# Neither file locks nor shared memory maps can be trusted there.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "gpfs", "lustre",
        "nfs", "nfs4", "ocfs2", "smb3", "smbfs",
    }
)  # fmt: skip
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Marker:
    """STORE.json."""

    uuid: str
    part: int
    parts: int

    def encode(self) -> bytes:
        fields = {"kind": KIND, "format": FORMAT, "uuid": self.uuid, "part": self.part, "parts": self.parts}
        return json.dumps(fields).encode() + b"\n"


def read_marker(part: Path) -> Marker | None:
    """PART/STORE.json; None if there is none or it is garbage. Raises FormatError if it is foreign."""
    try:
        raw: Any = json.loads((part / "STORE.json").read_bytes()[:4096])
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or "kind" not in raw:
        return None
    if raw["kind"] != KIND:
        raise FormatError(f"{part} holds a store of kind {raw['kind']!r}, not {KIND!r}; choose another directory")
    if raw.get("format") != FORMAT:
        raise FormatError(
            f"{part} is a store of format {raw.get('format')}, this version reads format {FORMAT}; "
            "choose another directory, or remove this one if no other version needs it"
        )
    try:
        return Marker(str(raw["uuid"]), int(raw["part"]), int(raw["parts"]))
    except (KeyError, TypeError, ValueError):
        return None


def write_marker(part: Path, marker: Marker) -> None:
    """Durably, all or nothing."""
    draft = part / "STORE.json.new"
    with draft.open("wb") as file:
        file.write(marker.encode())
        file.flush()
        os.fsync(file.fileno())
    draft.replace(part / "STORE.json")
    sync_directory(part)


def prepare(parts: Sequence[Path]) -> None:
    """Make sure that the directories exist and are local; warn of one that others may write to.

    Raises ConfigError naming a path that can never do, OSError for a fault of the machine.
    """
    for part in parts:
        try:
            made = _make(part)
            _make(part / "slab")
        except OSError as error:
            if error.errno not in MISTAKES:
                raise
            raise ConfigError(
                f"tiers.g3.path {part}: {error.strerror}; give a directory, or the name of one to be made"
            ) from None
        if made:
            with contextlib.suppress(PermissionError):  # a parent that cannot be listed cannot be synced
                sync_directory(part.parent)
        elif mode := stat.S_IMODE(part.stat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
            log.warning(
                "g3: %s can be written to by %s, who could put foreign blocks into it; chmod 700 %s",
                part, "others" if mode & stat.S_IWOTH else "its group", part,
            )  # fmt: skip
        _refuse_remote(part)
    _refuse_twice(parts)


def check(parts: Sequence[Path]) -> None:
    """Raise ConfigError naming a path that `prepare` would refuse. Leaves no change behind."""
    for part in parts:
        place = part if part.exists() else part.parent
        if not place.exists():  # a disk that is not mounted, say: a fault of the machine, which may pass
            continue
        if not place.is_dir():
            raise ConfigError(f"tiers.g3.path {part}: {place} is no directory; give one, or the name of one to be made")
        _refuse_remote(place)


def _refuse_twice(parts: Sequence[Path]) -> None:
    """One directory has one marker, and so is one part."""
    seen: dict[tuple[int, int], Path] = {}
    for part in parts:
        found = part.stat()
        if first := seen.get((found.st_dev, found.st_ino)):
            raise ConfigError(f"tiers.g3.path {part} is the same directory as {first}; name each once")
        seen[found.st_dev, found.st_ino] = part


def _refuse_remote(part: Path) -> None:
    kind = file_system_of(part)
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigError(
            f"tiers.g3.path {part} is on the network file system {kind}; G3 needs a local disk "
            "(for shared storage use tiers.g4)"
        )


def _make(folder: Path) -> bool:
    """Whether the directory had to be made. Raises OSError."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise
        return False
    return True


def file_system_of(path: Path) -> str:
    """The type of the file system that `path` is on, as /proc/self/mountinfo names it; "" if not found."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            return right.split()[0]
    return ""


def users_of(part: Path) -> int | None:
    """The PID namespace of the processes that use the store of `part` now; None where nobody does, or where that cannot
    be seen. Takes no lock and changes nothing."""
    try:
        fd = os.open(part / "LOCK", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        # Would a write lock be refused?
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
        text = os.pread(fd, 4096, 0).split()
        return int(text[1]) if kind != fcntl.F_UNLCK and len(text) == 2 else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


class DirectoryLock:
    """The lock of a store: shared by the processes that use it, or exclusive to one."""

    def __init__(self, part: Path) -> None:
        self._path = part / "LOCK"
        self._fd = -1

    @property
    def held(self) -> bool:
        """Whether this process has it, shared or exclusively."""
        return self._fd >= 0

    def acquire(self, me: Owner, timeout_s: float) -> bool:
        """Take the lock, waiting while another user is opening alone. True: exclusively, False: shared.

        With `timeout_s` 0 it is taken exclusively or not at all. Raises TierError after `timeout_s`, or if the present
        users live in another pid namespace; OSError for a fault of the machine. Holds nothing then.
        """
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            return self._acquire(f"{me.boot.hex()} {me.pid_namespace}\n".encode(), timeout_s)
        except BaseException:
            self.release()
            raise

    def _acquire(self, text: bytes, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while True:
            if self._set(fcntl.F_WRLCK):
                self._sign(text)
                return True
            if timeout_s and self._set(fcntl.F_RDLCK):
                if os.pread(self._fd, 4096, 0) != text:
                    raise TierUnavailable(
                        "g3",
                        "open",
                        f"{self._path.parent} is in use by a process of another pid namespace; share the pid namespace "
                        "(hostPID, shareProcessNamespace), or give each container its own directory",
                    )
                return False
            if time.monotonic() > end:
                raise TierUnavailable(
                    "g3", "open", f"{self._path} is held exclusively by another process for {timeout_s} s"
                )
            time.sleep(_POLL_S)

    def _sign(self, text: bytes) -> None:
        """Make `text` the file's content. Writes over what is there, so that a full volume need not be in the way."""
        if os.pread(self._fd, 4096, 0) != text:
            if os.pwrite(self._fd, text, 0) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            os.ftruncate(self._fd, len(text))

    def share(self) -> None:
        """From exclusive to shared. Atomic: no other process can be alone in between."""
        self._set(fcntl.F_RDLCK)

    def try_exclusive(self) -> bool:
        """From shared to exclusive, if no other process uses the store. Never blocks."""
        return self._set(fcntl.F_WRLCK)

    def release(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _set(self, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True


def is_there(path: Path) -> bool:
    """Whether the name exists, whatever it names. Raises OSError where that cannot be told."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def move_aside(index: Path) -> Path:
    """Rename a damaged index, replacing one that was moved aside earlier. Returns where it is now."""
    aside = index.with_name(index.name + ".damaged")
    if aside.exists():
        shutil.rmtree(aside)
    index.rename(aside)
    sync_directory(index.parent)
    return aside
