"""What a bucket can do, tried out on a few objects of its own, which are deleted again.

G4 stays right on a server that ignores conditions (every byte is checked), but replicas would overwrite and delete
one another's objects on it. So such a server is refused for shared use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import uuid4

from kvtier.clock import Clock
from kvtier.errors import CorruptError, TierError
from kvtier.tiers.objects.bucket.protocol import Bucket, Stat

PIECE_BYTES = 8 << 20
SKEW_MAX_S = 60.0
EXAM_S = 60.0


@dataclass(frozen=True, slots=True)
class Trait:
    """One thing that was tried. `ok`: None if it could not be tried. `needed`: without it there is no G4 at all."""

    name: str
    ok: bool | None
    detail: str
    needed: bool = True


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """All traits in the order they were tried, and what was measured."""

    traits: tuple[Trait, ...]
    skew_s: float | None = None
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    parallel: int = 1

    @property
    def shareable(self) -> bool:
        """Whether several replicas may use it: everything that was tried worked."""
        return all(trait.ok is not False for trait in self.traits)


async def examine(bucket: Bucket, prefix: str, clock: Clock, parallel: int = 1) -> ConformanceReport:
    """Try a started bucket below `prefix`, for at most EXAM_S, its speed with `parallel` requests at once. Never raises
    for what the server does."""
    name = f"{prefix}/exam-{uuid4().hex}" if prefix else f"exam-{uuid4().hex}"
    notes = _Notes()
    try:
        async with asyncio.timeout(EXAM_S):
            await _try_all(bucket, name, clock, notes)
            pieces = [f"{name}-{number}" for number in range(parallel)]
            await _measure(bucket, pieces, clock, notes.figures)
    except TimeoutError:
        notes.add(notes.trying, False, f"no end of it within {EXAM_S:.0f} s")
    except (TierError, CorruptError) as error:
        notes.add(notes.trying, False, str(error))
    finally:
        try:
            async with asyncio.timeout(5):
                for each in (name, *(f"{name}-{number}" for number in range(parallel))):
                    await bucket.delete(each)
        except (TierError, TimeoutError):
            pass
    figures = notes.figures
    return ConformanceReport(
        tuple(notes.traits), figures.get("skew"), figures.get("write"), figures.get("read"), parallel
    )


class _Notes:
    """What was found so far, and what is being tried: whatever fails unexpectedly failed at that."""

    def __init__(self) -> None:
        self.traits: list[Trait] = []
        self.figures: dict[str, float] = {}
        self.trying = "reachable"

    def add(self, trait: str, ok: bool | None, detail: str, needed: bool = True) -> None:
        self.traits.append(Trait(trait, ok, detail, needed))


async def _try_all(bucket: Bucket, name: str, clock: Clock, notes: _Notes) -> None:
    one, two = bytearray(b"one" * 1000), bytearray(b"two" * 1000)
    nobody = '"00000000000000000000000000000000"'
    await bucket.head(name)
    notes.add("reachable", True, "answers")
    notes.trying = "writes"
    first = await bucket.create(name, one, clock.wall())
    notes.add("writes", first is not None, "created an object" if first is not None else "the name is taken at once")
    notes.trying = "head"
    there = await bucket.head(name)
    found = there is not None and there.size == len(one)
    notes.add("head", found, "size and ETag" if there else "says it is not there")
    if there is None:
        return
    if there.modified is not None:
        notes.figures["skew"] = clock.wall() - there.modified
    notes.trying = "create-only writes (If-None-Match)"
    second = await bucket.create(name, two, clock.wall())
    notes.add(notes.trying, second is None, _honoured(second is None), needed=False)
    notes.trying = "replacement of one version (If-Match)"
    wrong = await bucket.replace(name, two, clock.wall(), nobody)
    notes.add(notes.trying, wrong is None, _honoured(wrong is None), needed=False)
    current = await bucket.head(name) or there
    fits = await bucket.replace(name, two, clock.wall(), current.etag)
    notes.add("replacement of the right version", fits is not None, "done" if fits else "refused", needed=False)
    notes.trying = "ranged reads"
    part = bytearray(300)
    got = await bucket.read(name, 300, [memoryview(part)])
    notes.add(notes.trying, got is not None and part == two[300:600], "right bytes" if got else "not there")
    await _try_uses(bucket, name, clock, notes.add)
    notes.trying = "deletion of one version (If-Match)"
    await bucket.delete(name, nobody)
    kept = await bucket.head(name)
    notes.add(notes.trying, kept is not None, _honoured(kept is not None), needed=False)
    notes.trying = "lists"
    names = [stat.name async for page in bucket.list(name.rpartition("-")[0]) for stat in page]
    notes.add("lists", kept is None or name in names, "by prefix")
    notes.trying = "deletes"
    await bucket.delete(name)
    notes.add("deletes", await bucket.head(name) is None, "gone")
    notes.trying = "throughput"


async def _try_uses(bucket: Bucket, name: str, clock: Clock, note: Callable[..., None]) -> None:
    """Whether a use can be recorded: by a copy onto itself, else each renewal rewrites the object."""
    there = await bucket.head(name)
    if there is None or not bucket.renewable:
        note("renewal without rewriting", None, "not with this client: each renewal rewrites the object", False)
        return
    used = clock.wall() - 7
    renewed: Stat | None = None
    try:
        renewed = await bucket.renew(name, there.etag, used)
    except TierError as error:
        note("renewal without rewriting", False, str(error), False)
        return
    again = await bucket.head(name)
    ok = renewed is not None and again is not None and again.used is not None and abs(again.used - used) < 1
    note("renewal without rewriting", ok, "a copy onto itself keeps the use" if ok else "the use is lost", False)


async def _measure(bucket: Bucket, pieces: Sequence[str], clock: Clock, figures: dict[str, float]) -> None:
    """Bytes per second each way, all pieces at once, the better of two times."""
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
