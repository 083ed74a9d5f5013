"""Faults of the machine, told apart from damage and from mistakes.

A fault (no descriptors, no memory, no permission, a volume that is full, read-only or not mounted, a device that fails)
says nothing about a store's bytes: the store is left as it is and opened later. Only structure that is wrong, such as a
record that cannot be decoded, is evidence of damage.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import CorruptError, KVTierError, TierUnavailable

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
MEDIUM = frozenset({errno.EIO, errno.EREMOTEIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN})
"""What the kernel answers where a place on a medium cannot be read or written."""
MISTAKES = frozenset({errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL})
"""What it answers to a path that can never be a directory."""

_DECODING = (
    AssertionError,
    AttributeError,
    CorruptError,
    LookupError,
    OverflowError,
    TypeError,
    ValueError,
    struct.error,
)


class Unusable(Exception):
    """The index cannot be used as it is; a new one must take its place. The text says why."""


def is_damage(error: BaseException) -> bool:
    """Whether `error`, raised while an index was read, is evidence that its structure is wrong. Pure."""
    import lmdb

    structural = (
        lmdb.BadChecksumError, lmdb.CorruptedError, lmdb.IncompatibleError, lmdb.InvalidError, lmdb.PageNotFoundError,
        lmdb.VersionMismatchError,
    )  # fmt: skip
    return isinstance(error, (*structural, *_DECODING, Unusable)) and not isinstance(error, MemoryError)


def is_suspicious(error: BaseException) -> bool:
    """Whether the index must be checked before it is used again: it may have been left half written. Pure."""
    import lmdb

    return isinstance(error, lmdb.PanicError) or not isinstance(error, (lmdb.Error, OSError, MemoryError))


@contextmanager
def unavailable(path: Path) -> Iterator[None]:
    """A fault of the machine inside becomes a TierUnavailable that names `path` and the fault."""
    try:
        yield
    except KVTierError:
        raise
    except Exception as error:
        import lmdb

        if not isinstance(error, (OSError, MemoryError, ImportError, lmdb.Error)):
            raise
        where = getattr(error, "filename", None) or path
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise TierUnavailable("g3", "open", f"{where}: {reason}; nothing was changed") from error
