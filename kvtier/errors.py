"""Every error that kvtier raises on purpose.

    KVTierError
    ├── ConfigError            the YAML file, a preset or an argument of `kvtier.open` is wrong
    ├── InvalidRequest         a key, buffer, retention class or time-out of one call is wrong
    ├── IdentityError          a namespace field is missing, unknown or cannot be determined
    ├── CapacityError          every block that could be evicted is pinned; nothing was changed
    ├── ClosedError            the cache is closed, or was opened in another process or on another event loop
    ├── FormatError            a directory, file or object is of a foreign format or version
    ├── CorruptError           bytes failed a check (never reaches an engine: it becomes a miss)
    └── TierError              a tier could not do its work (never reaches an engine either)
        ├── TierTimeout        it did not do so within the deadline
        ├── TierFull           it has no space, or its volume has none
        └── TierUnavailable    the machine does not let it be opened now; later it may

A miss is not an error. `TierError` and `CorruptError` are turned into misses in one place, the guard of each lower
tier; a caller sees a mistake of its own (`ConfigError`, `InvalidRequest`, `IdentityError`, `ClosedError`), or a folder
that must not be touched (`FormatError`).
"""

from __future__ import annotations


class KVTierError(Exception):
    """Root of the tree. The message names the field or object at fault and what to do about it."""


class ConfigError(KVTierError):
    """A configuration value is wrong; the message names the key, the value and the remedy."""


class InvalidRequest(KVTierError, ValueError):
    """One call's argument is wrong; nothing was changed by the call."""


class IdentityError(KVTierError):
    """A namespace cannot be named with certainty, so its bytes must not be shared."""


class CapacityError(KVTierError):
    """No slot can be freed because all are in use; nothing was changed by the call."""


class ClosedError(KVTierError):
    """The handle was closed, or belongs to the process that forked this one, or to another event loop."""


class FormatError(KVTierError):
    """A store was written by a foreign format, version or owner; it is left untouched."""


class CorruptError(KVTierError):
    """Bytes did not pass their check."""


class TierError(KVTierError):
    """A tier failed at `operation`; `tier` is its name (g1 … g4)."""

    def __init__(self, tier: str, operation: str, detail: str) -> None:
        super().__init__(f"{tier}: {operation}: {detail}")
        self.tier = tier
        self.operation = operation


class TierTimeout(TierError):
    """A tier did not answer within its deadline."""


class TierFull(TierError):
    """A tier, or the volume below it, has no space left."""


class KeyUnavailable(TierError):
    """A tenant's data key cannot be had now, for which no tier is to blame: its blocks are not stored, others' are."""


class TierUnavailable(TierError):
    """A tier cannot be opened now, for a fault of the machine that the message names. It was left as it is: opened
    later, it has what it held."""
