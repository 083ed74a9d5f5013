"""Exit statuses of all commands, and the line that each error becomes. docs/operations.md shows MEANINGS."""

from __future__ import annotations

import errno
from enum import IntEnum
from typing import NamedTuple

from kvtier.errors import ConfigError, FormatError, IdentityError, InvalidRequest, KVTierError


class Exit(IntEnum):
    """Status with which the process ends."""

    DONE = 0
    FOUND = 1
    MISTAKE = 2
    MACHINE = 3
    DECLINED = 4
    DEFECT = 70
    INTERRUPTED = 130


MEANINGS = {
    Exit.DONE: "done; also where the reader of the output goes away (`head`)",
    Exit.FOUND: "a check found a problem, or what was to be deleted is not there",
    Exit.MISTAKE: "a mistake in the command line, or in a file or directory that it names; nothing was changed",
    Exit.MACHINE: "this machine or a server does not let it: a package is missing, a device is full, nobody answers",
    Exit.DECLINED: "not confirmed; nothing was changed",
    Exit.DEFECT: "a defect of kvtier, with a traceback on standard error",
    Exit.INTERRUPTED: "interrupted (Ctrl-C); SIGTERM and SIGHUP end it in the same way, and by the signal",
}

_MISTAKES = (ConfigError, FormatError, IdentityError, InvalidRequest)
_EXTRAS = {
    "aiofiles": "bench", "botocore": "kms", "cryptography": "crypto", "matplotlib": "bench", "obstore": "s3",
    "opentelemetry": "otel", "pyfuse3": "fuse", "s3fs": "s3", "safetensors": "transformers",
    "tokenizers": "transformers", "torch": "transformers", "transformers": "transformers", "zstandard": "codec",
}  # fmt: skip
"""Package that an optional part imports: the extra that installs it."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Declined(KVTierError):
    """A destructive command was not confirmed. Nothing was changed."""


class Ending(NamedTuple):
    """`status` and one line for people; `kind` is the error's class."""

    status: Exit
    kind: str
    line: str


def ending_of(error: BaseException) -> Ending:
    """How a command that raised `error` ends. Pure. Anything that is not foreseen is a DEFECT."""
    kind = type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return Ending(Exit.INTERRUPTED, kind, "interrupted")
    if isinstance(error, Declined):
        return Ending(Exit.DECLINED, kind, str(error))
    if isinstance(error, KVTierError):
        line = " ".join(str(error).splitlines())  # a file's name may have several
        return Ending(Exit.MISTAKE if isinstance(error, _MISTAKES) else Exit.MACHINE, kind, line)
    if isinstance(error, ImportError) and not (error.name or "kvtier").startswith("kvtier"):
        return Ending(Exit.MACHINE, kind, _missing(error.name or ""))
    if isinstance(error, MemoryError):
        return Ending(Exit.MACHINE, kind, "this machine has not enough memory for it; give it smaller sizes")
    if isinstance(error, OSError):
        return Ending(Exit.MACHINE, kind, " ".join(_os_error(error).splitlines()))
    return Ending(Exit.DEFECT, kind, f"{kind}: {error}; this is a defect of kvtier, please report it with the above")


def _missing(module: str) -> str:
    package = module.partition(".")[0]
    extra = _EXTRAS.get(package)
    name = f"'kvtier[{extra}]'" if extra else package
    return f"the package {package} cannot be imported: pip install {name}"


def _os_error(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in _FULL:
        reason += "; free space there, or name a directory on another device (temporary files: TMPDIR)"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason += "; give this user the right to it, or name another place"
    return f"{place}{reason}"
