"""A key store in a directory: one file per data key, which all processes and replicas share that share blocks.

    DIRECTORY/{name}.key     {"version": 1, "created": seconds, "wrapped": hexadecimal digits}
    DIRECTORY/LOCK           under flock while a key is made, wrapped anew or destroyed

Reading takes no lock: a file appears, changes and goes whole. A copy that a killed process left unfinished is removed
by the next change, so that a destroyed key has none left here. Backups and snapshots of the directory are copies, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier.errors import ConfigError, CorruptError, TierError, TierTimeout
from kvtier.keyring import WRAPPED_BYTES
from kvtier.tiers.data_keys import WrappedKey
from kvtier.tiers.fsync import sync_directory

FILE_BYTES_MAX = 4096
CREATED_MAX = 253_402_300_800.0
"""The year 10,000, which no calendar here has."""
LOCK_S = 5.0
"""The longest wait for another process that changes a key."""

_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)
_DRAFT = ".draft-"


class KeyDirectory:
    """A `kvtier.tiers.data_keys.KeyStore` in a directory of this user's own."""

    def __init__(self, path: Path) -> None:
        """Makes the directory (mode 0700) if its parent exists. Raises ConfigError if it cannot be used, or if others
        may use it."""
        self._path = path
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"security.data_keys: {path} cannot be used: {error.strerror}") from None
        if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"security.data_keys: {path} must be a directory of this user with mode 0700 (chmod 700)")

    def read(self, name: str) -> WrappedKey | None:
        file = self._file(name)
        with _refusing("read"):
            try:
                fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                return None
            with open(fd, "rb") as opened:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise CorruptError(f"{file} is no regular file")
                return _parse(opened.read(FILE_BYTES_MAX + 1), file)

    def create(self, name: str, key: WrappedKey) -> WrappedKey:
        with _refusing("create"), self._locked():
            there = self.read(name)
            if there is not None:
                return there
            self._write(name, key)
        return key

    def replace(self, name: str, change: Callable[[WrappedKey], WrappedKey]) -> bool:
        with _refusing("replace"), self._locked():
            there = self.read(name)
            if there is not None and (changed := change(there)) != there:
                self._write(name, changed)
        return there is not None

    def destroy(self, name: str) -> bool:
        """A file system may keep what was overwritten; the docs say what helps."""
        file = self._file(name)
        with _refusing("destroy"), self._locked():
            try:
                fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                return False
            try:
                os.write(fd, bytes(min(os.fstat(fd).st_size, FILE_BYTES_MAX)))
                os.fsync(fd)
            finally:
                os.close(fd)
            file.unlink()
            sync_directory(self._path)
        return True

    def names(self) -> Iterator[str]:
        for file in sorted(self._path.glob("*.key")):
            if _NAME.fullmatch(file.stem):
                yield file.stem

    def _file(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"a key's name has 32 hexadecimal digits, got {name[:40]!r}")
        return self._path / f"{name}.key"

    def _write(self, name: str, key: WrappedKey) -> None:
        draft = self._path / f"{_DRAFT}{secrets.token_hex(8)}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(json.dumps({"version": 1, "created": key.created, "wrapped": key.wrapped.hex()}).encode())
            file.flush()
            os.fsync(fd)
        draft.rename(self._file(name))
        sync_directory(self._path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among those who change keys. Raises TierTimeout after LOCK_S."""
        fd = os.open(self._path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            until = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise TierTimeout("keys", "lock", f"another process holds {self._path / 'LOCK'}") from None
                    time.sleep(0.01)
            for draft in self._path.glob(f"{_DRAFT}*"):
                draft.unlink(missing_ok=True)
            yield
        finally:
            os.close(fd)


@contextlib.contextmanager
def _refusing(verb: str) -> Iterator[None]:
    """An error of the file system as one of kvtier's."""
    try:
        yield
    except OSError as error:
        raise TierError("keys", verb, str(error)) from None


def _parse(raw: bytes, file: Path) -> WrappedKey:
    try:
        found = json.loads(raw)
        created, wrapped = found["created"], bytes.fromhex(found["wrapped"])
        right = found["version"] == 1 and isinstance(created, float) and 0 <= created < CREATED_MAX
    except (ValueError, KeyError, TypeError, RecursionError):
        right = False
    if not right or len(wrapped) != WRAPPED_BYTES:
        raise CorruptError(f"{file} is no key of version 1")
    return WrappedKey(created, wrapped)
