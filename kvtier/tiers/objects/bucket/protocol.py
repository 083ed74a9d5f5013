"""The interface that G4 needs of object storage. `open_bucket` (open.py) chooses the implementation:

    s3fs      S3 through s3fs (aiobotocore)
    obstore   S3, GCS, Azure through obstore
    combined  both: obstore, and s3fs for the requests that obstore lacks
    local     a local directory, through threaded
    fsspec    fsspec's in-memory file system, or any other fsspec file system, through threaded

Names are relative to the bucket. A bucket maps its library's exceptions to `Transient` (worth another attempt),
TierError (not), CorruptError (the object cannot be the one expected). No message carries a server's text, since that
may echo what was signed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, cast

from kvtier.errors import TierError
from kvtier.times import Wall

TIER = "g4"
LIST_PAGE = 1000
USED = "kvtier-used"
"""Object metadata: wall time of the last recorded use, in seconds, and a proof of it."""

USED_MAX_S = 2.0**40
PROOF_CHARS_MAX = 64


class RecordedUse(float):
    """Wall time of a recorded use, with a proof that a replica recorded it: hexadecimal digits, "" for none. `latest`:
    the server's stamps say that it was no later."""

    __slots__ = ("latest", "proof")
    proof: str
    latest: float

    def __new__(cls, wall_s: float, proof: str = "", latest: float = math.inf) -> RecordedUse:
        use = super().__new__(cls, wall_s)
        use.proof, use.latest = proof, latest
        return use


class Transient(TierError):
    """The request may succeed if it is made again."""


@dataclass(frozen=True, slots=True)
class Stat:
    """A server's description of an object.

    `size` in bytes, of the whole object. `etag` names this version of its bytes ("" if the server has no such
    thing). `used`: wall time of the last use recorded with it, None where none can be recorded.
    `modified`: the server's own stamp of this version, None if it has none that can be trusted.
    """

    name: str
    size: int
    etag: str = ""
    used: Wall | None = None
    modified: float | None = None


class Bucket(Protocol):
    """Objects by name. All verbs run on one event loop and may be cancelled at any await."""

    renewable: bool
    """Whether `renew` can work here; if not, the caller rewrites the object."""

    keeps_proof: bool
    """Whether a use comes back with the proof that it was recorded with."""

    async def start(self) -> None:
        """Prepare, without a request. Raises ConfigError or TierError."""

    async def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        """Make an object whose bytes are all there or none; None if the name is taken."""

    async def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
        """Overwrite the version `etag` (None: any version); None if another version is there."""

    async def head(self, name: str) -> Stat | None:
        """None if there is no such object."""

    async def read(self, name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        """Fill `into` with the bytes from `start` on; None if there is no such object. Raises CorruptError if the
        object ends before that; `clipped`: only if it ends at `start` or before, and of a shorter one (see `size`) the
        rest of `into` stays as it was. Nothing is written to `into` after this returns, raises or is cancelled."""

    async def renew(self, name: str, etag: str, used: Wall) -> Stat | None:
        """Record a use of this version; its new state, or None if it is not there any more."""

    async def delete(self, name: str, etag: str | None = None) -> bool:
        """Delete the version `etag` if the server can check that, else any version; False if it knows that nothing
        was deleted."""

    async def delete_many(self, names: Sequence[str]) -> None:
        """Delete up to LIST_PAGE objects; absent ones are ignored."""

    def list(self, prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        """Pages of objects whose name starts with `prefix` and sorts behind `after`, by name. `used` is None."""

    async def close(self) -> None:
        """Close connections. Idempotent."""


async def first_page(bucket: Bucket, prefix: str, after: str = "") -> list[Stat]:
    """The first page of a listing, and no request for a second; empty if nothing is there."""
    async with aclosing(bucket.list(prefix, after)) as pages:  # type: ignore[type-var]
        async for page in pages:
            return page
    return []


def use_text(used: float) -> str:
    """A use as an object's metadata. Pure."""
    proof = getattr(used, "proof", "")
    return f"{used:.6f} {proof}" if proof else f"{used:.6f}"


def recorded_use(metadata: Mapping[str, str], name: str = USED) -> Wall | None:
    """`Stat.used` by an object's metadata, of which `name` records it; None for what is no time, too. Pure."""
    try:
        text, _, proof = metadata[name].partition(" ")
        used = RecordedUse(float(text), proof[:PROOF_CHARS_MAX])
    except (KeyError, ValueError):
        return None
    return cast(Wall, used) if 0 <= used < USED_MAX_S else None


def clip(into: Sequence[memoryview], count: int) -> list[memoryview]:
    """Their first `count` bytes. Pure."""
    out = []
    for view in into:
        out.append(view[:count])
        count -= len(out[-1])
    return out


class Scatter:
    """Lays a body into buffers in order, without its first `skip` bytes: from chunks by `feed`, or received into
    `buffer` and counted by `advance`."""

    def __init__(self, into: Sequence[memoryview], skip: int = 0) -> None:
        self._views = deque(view for view in into if len(view))
        self._skip = skip

    @property
    def full(self) -> bool:
        return not self._views

    @property
    def buffer(self) -> memoryview:
        """Where the next bytes go; not if `full`."""
        return self._views[0]

    def advance(self, count: int) -> None:
        """`count` bytes were written to `buffer`."""
        rest = self._views.popleft()[count:]
        if len(rest):
            self._views.appendleft(rest)

    def feed(self, chunk: memoryview) -> memoryview:
        """The next bytes of the body; returns those past the end of the buffers."""
        dropped = min(self._skip, len(chunk))
        self._skip -= dropped
        chunk = chunk[dropped:]
        while len(chunk) and not self.full:
            count = min(len(chunk), len(self.buffer))
            self.buffer[:count] = chunk[:count]
            self.advance(count)
            chunk = chunk[count:]
        return chunk
