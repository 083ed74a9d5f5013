"""What a bucket can do, tried out on a few objects of its own, which are deleted again.

G4 stays right on a server that ignores conditions (every byte is checked), but replicas would overwrite and delete
one another's objects on it. So such a server is refused for shared use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from kvtier.clock import Clock
from kvtier.errors import CorruptError, TierError
from kvtier.tiers.bucket import Bucket, Stat

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
class Exam:
    """All traits in the order they were tried, and what was measured."""

    traits: tuple[Trait, ...]
    skew_s: float | None = None
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None

    @property
    def shareable(self) -> bool:
        """Whether several replicas may use it: everything that was tried worked."""
        return all(trait.ok is not False for trait in self.traits)


async def examine(bucket: Bucket, prefix: str, clock: Clock) -> Exam:
    """Try a started bucket below `prefix`, for at most EXAM_S. Never raises for what the server does."""
    name = f"{prefix}/exam-{uuid4().hex}" if prefix else f"exam-{uuid4().hex}"
    traits: list[Trait] = []
    figures: dict[str, float] = {}
    try:
        async with asyncio.timeout(EXAM_S):
            await _try_all(bucket, name, clock, traits, figures)
    except TimeoutError:
        traits.append(Trait("answers in time", False, f"not done after {EXAM_S:.0f} s"))
    except (TierError, CorruptError) as error:
        traits.append(Trait("serves", False, str(error)))
    finally:
        try:
            async with asyncio.timeout(5):
                await bucket.delete(name)
        except (TierError, TimeoutError):
            pass
    return Exam(tuple(traits), figures.get("skew"), figures.get("write"), figures.get("read"))


async def _try_all(
    bucket: Bucket, name: str, clock: Clock, traits: list[Trait], figures: dict[str, float]
) -> None:  # fmt: skip
    def note(trait: str, ok: bool | None, detail: str, needed: bool = True) -> None:
        traits.append(Trait(trait, ok, detail, needed))

    one, two = bytearray(b"one" * 1000), bytearray(b"two" * 1000)
    first = await bucket.create(name, one, clock.wall())
    note("writes", first is not None, "created an object" if first is not None else "the name is taken at once")
    there = await bucket.head(name)
    note("head", there is not None and there.size == len(one), "size and ETag" if there else "says it is not there")
    if there is None:
        return
    if there.modified is not None:
        figures["skew"] = clock.wall() - there.modified
    second = await bucket.create(name, two, clock.wall())
    note("create-only writes (If-None-Match)", second is None, _honoured(second is None), needed=False)
    current = await bucket.head(name) or there
    wrong = await bucket.replace(name, two, clock.wall(), '"00000000000000000000000000000000"')
    note("replacement of one version (If-Match)", wrong is None, _honoured(wrong is None), needed=False)
    current = await bucket.head(name) or current
    fits = await bucket.replace(name, two, clock.wall(), current.etag)
    note("replacement of the right version", fits is not None, "done" if fits else "refused", needed=False)
    part = bytearray(300)
    got = await bucket.read(name, 300, [memoryview(part)])
    note("ranged reads", got is not None and part == two[300:600], "right bytes" if got else "not there")
    await _try_uses(bucket, name, clock, note)
    await bucket.delete(name, '"00000000000000000000000000000000"')
    kept = await bucket.head(name)
    note("deletion of one version (If-Match)", kept is not None, _honoured(kept is not None), needed=False)
    names = [stat.name async for page in bucket.list(name.rpartition("-")[0]) for stat in page]
    note("lists", kept is None or name in names, "by prefix")
    await bucket.delete(name)
    note("deletes", await bucket.head(name) is None, "gone")
    await _measure(bucket, name, clock, figures)


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


async def _measure(bucket: Bucket, name: str, clock: Clock, figures: dict[str, float]) -> None:
    data = bytearray(PIECE_BYTES)
    for verb in ("write", "read"):
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            if verb == "write":
                await bucket.replace(name, data, clock.wall(), None)
            else:
                await bucket.read(name, 0, [memoryview(data)])
            best = min(best, time.perf_counter() - began)
        figures[verb] = PIECE_BYTES / best


def _honoured(yes: bool) -> str:
    return "honoured" if yes else "ignored"
