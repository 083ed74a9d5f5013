"""The catalogue: deltas merged by windows of time, so that a reader asks for one object per window.

    {prefix}/ctl/{ns}/catalogue/{level}/{window hex}-{digits}     the deltas of one window by writers whose names
                                                                  begin with `digits`; `level` is their number

A window is WINDOW_S long. Where it has more deltas than FAN_IN, those of writers with the same first digit are merged
first, then these sixteen; so nobody reads more than some FAN_IN objects for one merge. Each level takes a poll, ten
seconds in which nobody learns of the window; a thousand replicas need one below the top. The object at level 0 has the
whole window. Who merges is chosen by rendezvous hash among these writers; who comes next takes over after two windows,
and so on, then anybody. Merged objects are created, never replaced. The bytes are a delta's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Set
from hashlib import blake2b

from kvtier.clock import Clock
from kvtier.errors import CorruptError
from kvtier.tiers.objects.bucket.protocol import Bucket, Stat
from kvtier.tiers.objects.names import ObjectNames
from kvtier.tiers.objects.signed import Signer

WINDOW_S = 30.0
CLOSE_S = 10.0
"""How long after its end a window is merged: its last deltas are on their way."""

FAN_IN = 64
"""Deltas that one merge reads, about."""

DIGITS_MAX = 3
TAIL_WINDOWS = 10
"""Windows back that may still be merged; what is not then stays in its deltas."""

REPLICA_WINDOWS = 4
"""Windows back in which a replica that writes has written."""

TAKEOVER_S = 2 * WINDOW_S
MERGES_MAX = 2
"""Merges per poll."""

READS_AT_ONCE = 8
MERGED_BYTES_MAX = 16 << 20


def window_of(name: str) -> int:
    """The window of a delta, by its name. Pure."""
    return stamp_us(name) // int(WINDOW_S * 1e6)


def stamp_us(name: str) -> int:
    """The time in a delta's name, 0 if there is none. Pure."""
    try:
        return int(name.rpartition("/")[2].partition("-")[0], 16)
    except ValueError:
        return 0


def writer_of(name: str) -> str:
    """The replica in a delta's name. Pure."""
    return name.rpartition("-")[2]


def rank(replica: str, writers: Set[str], node: str) -> int:
    """The replica's place among `writers` for the work `node`, by rendezvous hash; behind all if it is none of them."""
    if replica not in writers:
        return len(writers)

    def weight(each: str) -> bytes:
        return blake2b(f"{each} {node}".encode(), digest_size=8).digest()

    ours = weight(replica)
    return sum(weight(each) < ours for each in writers)


def by_digits(writers: Iterable[str], count: int) -> dict[str, set[str]]:
    """The writers by the first `count` digits of their names, in the digits' order. Pure."""
    groups: dict[str, set[str]] = {}
    for writer in sorted(writers):
        groups.setdefault(writer[:count], set()).add(writer)
    return groups


class Catalogue:
    """One replica's view of the tail of deltas and of merged windows. Lives on the tier's event loop."""

    def __init__(
        self, bucket: Bucket, names: ObjectNames, signer: Signer, clock: Clock, replica: str,
        join: Callable[[list[bytes]], Awaitable[bytearray]],
    ) -> None:  # fmt: skip
        """`join`: the bodies of several deltas as one."""
        self._bucket = bucket
        self._signer = signer
        self._names = names
        self._clock = clock
        self._replica = replica
        self._join = join
        self._deltas: dict[int, dict[str, Stat]] = {}
        self._writers: dict[int, set[str]] = {}  # of these
        self.merged: dict[int, Stat] = {}  # window → the object that has all of it

    def count_replicas(self) -> int:
        """Distinct writers in the last windows, at least one."""
        oldest = self._window_now() - REPLICA_WINDOWS
        tail = (writers for window, writers in self._writers.items() if window >= oldest)
        return max(1, len(set[str]().union(*tail)))

    def lone(self) -> list[str]:
        """Deltas that are a window of their own, too old to be merged with others."""
        oldest = self._window_now() - TAIL_WINDOWS
        return [name for window, names in self._deltas.items() if window < oldest and len(names) == 1 for name in names]

    def note(self, delta: Stat) -> None:
        """A listing had this delta."""
        window = window_of(delta.name)
        self._deltas.setdefault(window, {})[delta.name] = delta
        self._writers.setdefault(window, set()).add(writer_of(delta.name))

    def deltas_of(self, window: int) -> dict[str, Stat]:
        """The noted deltas of a window."""
        return self._deltas.get(window, {})

    async def list_merged(self, keep_s: float) -> list[int]:
        """Learn which windows of the last `keep_s` were merged; returns those that are new. Raises TierError."""
        now = self._window_now()
        oldest = now - int(keep_s / WINDOW_S)
        for gone in [window for window in self.merged if window < oldest]:
            del self.merged[gone]
        for gone in [window for window in self._deltas if window < now - 2 * TAIL_WINDOWS]:
            del self._deltas[gone], self._writers[gone]
        after = max(oldest, now - 2 * TAIL_WINDOWS if self.merged else oldest, 0)
        new = []
        top = f"{self._names.merged}0/"
        async for page in self._bucket.list(top, f"{top}{after:010x}"):
            for stat in page:
                window = self._parse(stat.name)
                fits = stat.size <= MERGED_BYTES_MAX and window not in self.merged
                if fits and window is not None and oldest <= window <= now:
                    self.merged[window] = stat
                    new.append(window)
        return new

    def _window_now(self) -> int:
        return int(self._clock.wall() // WINDOW_S)

    @staticmethod
    def _parse(name: str) -> int | None:
        try:
            return int(name.rpartition("/")[2].partition("-")[0], 16)
        except ValueError:
            return None

    def _name(self, window: int, digits: str) -> str:
        return f"{self._names.merged}{len(digits)}/{window:010x}-{digits}"

    async def merge_due(self) -> None:
        """Do the merges that are this replica's, at most MERGES_MAX. Raises TierError."""
        wall_s, done = self._clock.wall(), 0
        for window in sorted(self._deltas):
            late_s = wall_s - (window + 1) * WINDOW_S - CLOSE_S
            deltas = self._deltas[window]
            if window in self.merged or late_s < 0 or len(deltas) < 2 or late_s > TAIL_WINDOWS * WINDOW_S:
                continue
            done += await self._merge_window(window, deltas, late_s, MERGES_MAX - done)
            if done >= MERGES_MAX:
                return

    async def _merge_window(self, window: int, deltas: dict[str, Stat], late_s: float, most: int) -> int:
        """Merge what is this replica's of one window; returns how many merges that were."""
        writers = self._writers[window]
        depth = 0
        while depth < DIGITS_MAX and len(deltas) > FAN_IN * 16**depth:
            depth += 1
        have: dict[str, Stat] | None = None
        done = 0
        for level in range(depth, -1, -1):
            for digits, group in by_digits(writers, level).items():
                name = self._name(window, digits)
                if late_s < rank(self._replica, group, name) * TAKEOVER_S:
                    continue
                if have is None:
                    have = await self._parts(window, depth)
                if name in have:
                    continue
                if level == depth:
                    parts = [stat for each, stat in deltas.items() if writer_of(each).startswith(digits)]
                else:
                    wanted = {self._name(window, writer[: level + 1]) for writer in group}
                    parts = [have[each] for each in wanted if each in have]
                    if len(parts) < len(wanted) and late_s < 2 * TAKEOVER_S:
                        continue
                await self._merge(name, parts)
                done += 1
                if done >= most:
                    return done
        return done

    async def _parts(self, window: int, depth: int) -> dict[str, Stat]:
        """The merged objects of a window that are there, but for level 0, which is known not to be."""
        found: dict[str, Stat] = {}
        for level in range(1, depth + 1):
            start = f"{self._names.merged}{level}/{window:010x}-"
            async for page in self._bucket.list(start):
                found |= {stat.name: stat for stat in page}
        return found

    async def _merge(self, name: str, parts: list[Stat]) -> None:
        bodies: list[bytes] = []
        total = 0
        for start in range(0, len(parts), READS_AT_ONCE):
            some = parts[start : start + READS_AT_ONCE]
            for body in await asyncio.gather(*(self._body(stat) for stat in some)):
                if total + len(body) <= MERGED_BYTES_MAX:
                    bodies.append(body)
                    total += len(body)
        if bodies:
            merged = await self._join(bodies)
            await self._bucket.create(name, self._signer.sign(name, merged), self._clock.wall())

    async def _body(self, stat: Stat) -> bytes:
        raw = bytearray(min(stat.size, MERGED_BYTES_MAX))
        try:
            there = await self._bucket.read(stat.name, 0, [memoryview(raw)])
            return self._signer.open(stat.name, raw) if there is not None else b""
        except CorruptError:
            return b""

    async def sweep(self, before_s: float) -> None:
        """Delete what was merged of windows that ended before `before_s`. Raises TierError."""
        limit = int(before_s // WINDOW_S)
        async for page in self._bucket.list(self._names.merged):
            old = [stat.name for stat in page if (self._parse(stat.name) or 0) < limit]
            await self._bucket.delete_many(old)
