"""Faults of a tier by rule, on demand and from a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.terms import Depth
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Tier, Usage
from kvtier.times import Mono, Wall

_OPTIONAL = frozenset(
    {"drop_made_after", "pin", "pins", "read_notes", "release_retained", "retain", "retained", "unpin", "write_note"}
)
_VERBS = _OPTIONAL | {"*", "close", "evict", "flush", "lookup", "open", "peek", "purge", "read", "tombstones", "write"}
_KINDS = frozenset({"crash", "drop", "error", "hang", "linger", "scribble", "slow"})


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of calls of `verb` ("read", "write", "lookup", "*" …).

    `kind`: "error" raises TierError, "crash" raises a bare OSError, "hang" never returns, "slow" waits `seconds`
    first, "linger" afterwards, "drop" answers ABSENT / FAILED without the tier, "scribble" damages bytes after their
    check. `rate` of calls are hit, drawn from the tier's seed; after `times` hits (None: never) the fault is over.
    Raises ValueError for a verb or kind that does not exist, which would never strike.
    """

    verb: str
    kind: str
    rate: float = 1.0
    times: int | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.verb not in _VERBS or self.kind not in _KINDS:
            known = f"verbs: {', '.join(sorted(_VERBS))}; kinds: {', '.join(sorted(_KINDS))}"
            raise ValueError(f"no fault {self.kind!r} of {self.verb!r}; {known}")


class FaultyTier:
    """Wraps a tier and applies faults to its verbs. `faults` may change at any time; clear it to heal."""

    def __init__(self, inner: Tier, faults: Sequence[Fault] = (), seed: int = 0) -> None:
        self.inner = inner
        self.faults = list(faults)
        self.hits: dict[Fault, int] = {}
        self.name = inner.name
        self.depth: Depth = inner.depth
        self.block_bytes = inner.block_bytes
        self.stride = inner.stride
        self._random = random.Random(seed)

    def __getattr__(self, verb: str) -> Any:
        """The verbs of `Retaining`, `Pinning` and `Notebook`, where the tier has them, under faults of that verb."""
        if verb not in _OPTIONAL:
            raise AttributeError(verb)
        work = getattr(self.inner, verb)

        async def faulted(*args: Any) -> Any:
            await self._inject(verb)
            return await work(*args)

        return faulted

    def _draw(self, verb: str) -> Fault | None:
        for fault in self.faults:
            if fault.verb not in (verb, "*") or self._random.random() >= fault.rate:
                continue
            if fault.times is not None and self.hits.get(fault, 0) >= fault.times:
                continue
            self.hits[fault] = self.hits.get(fault, 0) + 1
            return fault
        return None

    async def _inject(self, verb: str) -> Fault | None:
        fault = self._draw(verb)
        if fault is None:
            return None
        if fault.kind == "error":
            raise TierError(self.name, verb, "injected")
        if fault.kind == "crash":
            raise OSError(5, f"injected into {verb}")
        if fault.kind == "hang":
            await self._hang()
        if fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
        return fault

    async def _hang(self) -> None:
        """For ever. A subclass may end it when the tier heals."""
        await asyncio.Event().wait()

    async def open(self) -> None:
        await self._inject("open")
        await self.inner.open()

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        fault = self._draw("peek")
        if fault is not None and fault.kind in ("error", "crash"):
            raise TierError(self.name, "peek", "injected")
        if fault is not None and fault.kind == "drop":
            return [Miss.ABSENT] * len(wanted)
        return self.inner.peek(chain, wanted)

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        fault = await self._inject("lookup")
        if fault is not None and fault.kind == "drop":
            return [Miss.ABSENT] * len(wanted)
        return await self.inner.lookup(chain, wanted, deadline)

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        fault = await self._inject("read")
        if fault is not None and fault.kind == "drop":
            return [Miss.ABSENT] * len(targets)
        results = await self.inner.read(chain, targets, deadline)
        if fault is not None and fault.kind == "linger":
            await asyncio.sleep(fault.seconds)
        if fault is not None and fault.kind == "scribble":
            for target in targets:
                target.into[0][0] ^= 1
        return results

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        fault = await self._inject("write")
        if fault is not None and fault.kind == "drop":
            return [Stored.FAILED] * len(blocks)
        return await self.inner.write(blocks, deadline)

    def touch(self, keys: Sequence[BlockKey], wall_s: Wall) -> None:
        self.inner.touch(keys, wall_s)

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        await self._inject("evict")
        return await self.inner.evict(keys)

    async def purge(self, scope: Scope, before: Wall) -> int:
        await self._inject("purge")
        return await self.inner.purge(scope, before)

    async def tombstones(self) -> Mapping[Scope, Wall]:
        await self._inject("tombstones")
        return await self.inner.tombstones()

    async def flush(self, deadline: Mono) -> None:
        await self._inject("flush")
        await self.inner.flush(deadline)

    def usage(self) -> Usage:
        return self.inner.usage()

    def check(self) -> None:
        self.inner.check()

    async def close(self, deadline: Mono) -> None:
        """A fault strikes when the tier is closed: by contract it gives back all it has, whatever fails."""
        await self.inner.close(deadline)
        await self._inject("close")


@contextmanager
def verification_off() -> Iterator[None]:
    """Let every payload pass its check: the negative control that shows a comparison can fail."""
    with mock.patch("kvtier.checksum.matches", lambda digest, pieces: True):
        yield
