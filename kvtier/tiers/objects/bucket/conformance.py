"""Probes which requests a bucket supports, with a few objects of its own, which are deleted again.

On a server that ignores conditions G4 never serves wrong bytes (each is checked), but replicas overwrite and delete
one another's objects. So `kvtier doctor` refuses it for shared use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from kvtier.clock import Clock
from kvtier.errors import CorruptError, TierError
from kvtier.tiers.objects.bucket.protocol import Bucket, Stat

PIECE_BYTES = 8 << 20
SKEW_MAX_S = 60.0
PROBE_S = 60.0


@dataclass(frozen=True, slots=True)
class Trait:
    """One request that was tried. `ok`: None if it could not be tried. `needed`: G4 cannot work without it."""

    name: str
    ok: bool | None
    detail: str
    needed: bool = True


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """All traits in the order they were tried, the clock's skew, and bytes per second with `parallel` requests."""

    traits: tuple[Trait, ...]
    skew_s: float | None = None
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    parallel: int = 1


async def probe_conformance(bucket: Bucket, prefix: str, clock: Clock, parallel: int = 1) -> ConformanceReport:
    """Try a started bucket below `prefix`, for at most PROBE_S; its speed with `parallel` requests at once. A server's
    failure is a trait, never an exception."""
    name = f"{prefix}/exam-{uuid4().hex}" if prefix else f"exam-{uuid4().hex}"
    draft = _Draft()
    try:
        async with asyncio.timeout(PROBE_S):
            await _try_all(bucket, name, clock, draft)
            pieces = [f"{name}-{number}" for number in range(parallel)]
            await _measure(bucket, pieces, clock, draft.figures)
    except TimeoutError:
        draft.add(draft.trying, False, f"not finished within {PROBE_S:.0f} s")
    except (TierError, CorruptError) as error:
        draft.add(draft.trying, False, str(error))
    finally:
        try:
            async with asyncio.timeout(5):
                for each in (name, *(f"{name}-{number}" for number in range(parallel))):
                    await bucket.delete(each)
        except (TierError, TimeoutError):
            pass
    figures = draft.figures
    return ConformanceReport(
        tuple(draft.traits), figures.get("skew"), figures.get("write"), figures.get("read"), parallel
    )


class _Draft:
    """The traits and figures so far, and the one being tried, which an unexpected failure counts against."""

    def __init__(self) -> None:
        self.traits: list[Trait] = []
        self.figures: dict[str, float] = {}
        self.trying = "reachable"

    def add(self, trait: str, ok: bool | None, detail: str, needed: bool = True) -> None:
        self.traits.append(Trait(trait, ok, detail, needed))


async def _try_all(bucket: Bucket, name: str, clock: Clock, draft: _Draft) -> None:
    one, two = bytearray(b"one" * 1000), bytearray(b"two" * 1000)
    no_version = '"00000000000000000000000000000000"'
    await bucket.head(name)
    draft.add("reachable", True, "answers")
    draft.trying = "writes"
    first = await bucket.create(name, one, clock.wall())
    draft.add("writes", first is not None, "created an object" if first is not None else "the name is taken at once")
    draft.trying = "head"
    there = await bucket.head(name)
    found = there is not None and there.size == len(one)
    draft.add("head", found, "size and ETag" if there else "says it is not there")
    if there is None:
        return
    if there.modified is not None:
        draft.figures["skew"] = clock.wall() - there.modified
    draft.trying = "create-only writes (If-None-Match)"
    second = await bucket.create(name, two, clock.wall())
    draft.add(draft.trying, second is None, _honoured(second is None), needed=False)
    draft.trying = "replacement of one version (If-Match)"
    wrong = await bucket.replace(name, two, clock.wall(), no_version)
    draft.add(draft.trying, wrong is None, _honoured(wrong is None), needed=False)
    current = await bucket.head(name) or there
    fits = await bucket.replace(name, two, clock.wall(), current.etag)
    draft.add("replacement of the right version", fits is not None, "done" if fits else "refused", needed=False)
    draft.trying = "ranged reads"
    part = bytearray(300)
    got = await bucket.read(name, 300, [memoryview(part)])
    draft.add(draft.trying, got is not None and part == two[300:600], "right bytes" if got else "not there")
    await _try_renewal(bucket, name, clock, draft)
    draft.trying = "deletion of one version (If-Match)"
    await bucket.delete(name, no_version)
    kept = await bucket.head(name)
    draft.add(draft.trying, kept is not None, _honoured(kept is not None), needed=False)
    draft.trying = "lists"
    names = [stat.name async for page in bucket.list(name.rpartition("-")[0]) for stat in page]
    draft.add("lists", kept is None or name in names, "by prefix")
    draft.trying = "deletes"
    await bucket.delete(name)
    draft.add("deletes", await bucket.head(name) is None, "gone")
    draft.trying = "throughput"


async def _try_renewal(bucket: Bucket, name: str, clock: Clock, draft: _Draft) -> None:
    """Whether a use can be recorded by a copy onto itself; if not, each renewal rewrites the object."""
    there = await bucket.head(name)
    if there is None or not bucket.renewable:
        draft.add("renewal without rewriting", None, "not with this client: each renewal rewrites the object", False)
        return
    used = clock.wall() - 7
    renewed: Stat | None = None
    try:
        renewed = await bucket.renew(name, there.etag, used)
    except TierError as error:
        draft.add("renewal without rewriting", False, str(error), False)
        return
    again = await bucket.head(name)
    ok = renewed is not None and again is not None and again.used is not None and abs(again.used - used) < 1
    draft.add("renewal without rewriting", ok, "a copy onto itself keeps the use" if ok else "the use is lost", False)


async def _measure(bucket: Bucket, pieces: Sequence[str], clock: Clock, figures: dict[str, float]) -> None:
    """Bytes per second each way, all pieces at once, the better of two rounds."""
    data, into = bytearray(PIECE_BYTES), [bytearray(PIECE_BYTES) for _ in pieces]
    for verb in ("write", "read"):
        best = float("inf")
        for _ in range(2):
            began = time.perf_counter()
            if verb == "write":
                await asyncio.gather(*(bucket.replace(piece, data, clock.wall(), None) for piece in pieces))
            else:
                reads = zip(pieces, into, strict=True)
                await asyncio.gather(*(bucket.read(piece, 0, [memoryview(buffer)]) for piece, buffer in reads))
            best = min(best, time.perf_counter() - began)
        figures[verb] = len(pieces) * PIECE_BYTES / best


def _honoured(yes: bool) -> str:
    return "honoured" if yes else "ignored"
