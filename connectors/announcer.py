"""Tells routers, after a restart, of the prefixes that G3 kept: writes down what blocks hold, and reads it again.

    requests  → `note` → every WRITE_S: pages        (kvtier.connectors.contents, kvtier.tiers.protocol.Describing)
    at start  → pages, the newest first → the blocks that G3 has, parents first → `tell`, and the tier's own events

A router knows a block only by its tokens and its parent, and a restarted engine has neither. Announced is what the tier
finds at that moment, and as many blocks as one step of the engine takes without a delay: the next ones wait for a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from kvtier.cache import Cache
from kvtier.connectors.contents import ContentPage, PackedPassage, Passage, described
from kvtier.errors import ClosedError, CorruptError, KVTierError, TierError
from kvtier.identity.keys import TENANT_BYTES, BlockKey, scope_of_key
from kvtier.manager.hierarchy import Hierarchy
from kvtier.supervisor import Unwatched
from kvtier.tiers.meter import Metered
from kvtier.tiers.protocol import Describing
from kvtier.times import Mono

log = logging.getLogger(__name__)

FIRST_S, LAST_S = 5.0, 1.0
"""For the tier's answer at the start, and at the end for what requests held lately."""
WRITE_S = 5.0
"""How long what a request held may wait to be written: an engine that is killed loses that."""
NOTED_MAX = 4096
"""Passages that wait to be written at most; more, and the oldest are dropped."""
ANNOUNCED_MAX = 1 << 18
"""Blocks that are read at most, the newest."""
DESCRIBED_MAX = 1 << 16
"""Blocks that are described before one of them is again; fewer where the tier is small."""
BATCH_BLOCKS, BATCH_S = 1024, 0.1
"""Announced at most within this time, and before the engine has taken the ones before."""
_TRIES = 4  # of a page, while tenants are purged
_LOOKUP_S = 10.0  # nobody waits for it
_PAUSE_MAX_S = 1.0  # between looks whether an idle engine has made a step, or the tier is in use again
_AGAIN_S = 10.0  # after the tier failed


class Announcer:
    """Of one cache. `note` is called on any thread, everything else on the cache's event loop."""

    def __init__(self, hierarchy: Hierarchy, tell: Callable[[Passage], object], waiting: Callable[[], bool]) -> None:
        """`tell` is called with passages, some of whose blocks the tier's subscriber is told of next; `waiting` says
        whether one was not taken yet."""
        self._hierarchy = hierarchy
        self._clock = hierarchy.clock
        self._tell, self._waiting = tell, waiting
        self._noted: deque[Passage] = deque(maxlen=NOTED_MAX)
        self._described = set[BlockKey]()  # lately; another set whenever some of it may be lost
        self._described_max = DESCRIBED_MAX
        self._page = ContentPage()
        self._purges = 0  # that the tier knew of at the last write; 0: not known
        self._purged: set[bytes] | None = set()  # tenants, since the batch that is written was noted; None: all may be
        self._writing = asyncio.Lock()
        self.announced = 0
        """Blocks."""

    async def start(self) -> None:
        """Write and announce in the background, until the cache closes."""
        await self.write()
        supervisor = self._hierarchy.supervisor
        supervisor.start("contents", self.write, Unwatched(), WRITE_S)
        supervisor.start("announcer", self.announce, Unwatched())

    def described(self, chain: Sequence[BlockKey], start: int, stop: int) -> int:
        """Up to which depth of start … stop the chain's blocks were noted lately: pages are overwritten, also those
        with a prefix that every prompt has."""
        return start + len(list(takewhile(self._described.__contains__, chain[start:stop])))

    def note(self, passage: Passage) -> None:
        """Write this down with the next page."""
        if len(self._described) + len(passage.keys) > self._described_max:
            self._described = set()
        self._described.update(passage.keys)
        self._noted.append(passage)

    # ── writing ─────────────────────────────────────────────────────────────────────────────────────────────

    async def write(self) -> None:
        """Write down what was noted. A tier that fails costs that."""
        async with self._writing:
            batch, found = self._drained(), self._hierarchy.describing()
            if found is None or not (batch or not self._purges):
                return
            try:
                self._purged, self._described_max = set(), _described_max(found[0])
                await self._write_page(found[1])
                await self._write(batch, found[1])
            except TierError as error:
                self._page, self._described = ContentPage(), set()
                log.debug("what blocks hold is not written down: %s", error)

    async def _write(self, batch: list[list[Passage]], verbs: Describing) -> None:
        for first, *others in batch:
            passage, begin = first.joined(*others), 0
            while begin < len(passage.keys) and not self._is_purged(passage.keys[0]):
                count = self._page.add(passage.part(begin, len(passage.keys)) if begin else passage)
                begin += count
                if not count:
                    await self._write_page(verbs)
                    self._page = ContentPage()
                await asyncio.sleep(0)
        await self._write_page(verbs)

    async def _write_page(self, verbs: Describing) -> None:
        """Write the page, without those of its tenants that were purged since it was begun."""
        page = self._page
        for _ in range(_TRIES):
            page.number, purges, tenants = await verbs.write_contents(page.number, page.parts, self._purges)
            if purges != self._purges or not purges:  # there was a purge, or nothing can be kept
                self._described = set()
            if purges == self._purges:
                return
            self._purges = purges
            self._purged = None if tenants is None or self._purged is None else self._purged.union(tenants)
            page.parts = [part for part in page.parts if not self._is_purged(part)]

    def _is_purged(self, named: bytes) -> bool:
        """Whether this key's or part's tenant was purged while this batch is written."""
        return self._purged is None or named[:TENANT_BYTES] in self._purged

    def _drained(self) -> list[list[Passage]]:
        """What was noted: passages that go on one from another, as a request's do, together."""
        out, by_end = list[list[Passage]](), dict[BlockKey, list[Passage]]()
        while self._noted:
            passage = self._noted.popleft()
            parent = BlockKey(scope_of_key(passage.keys[0]) + (passage.parent or b""))
            if (line := by_end.pop(parent, None)) is None:
                out.append(line := [])
            line.append(passage)
            by_end[passage.keys[-1]] = line
        return out

    # ── announcing ──────────────────────────────────────────────────────────────────────────────────────────

    async def announce(self) -> None:
        """Have the subscriber told of the blocks that the tier has of what is written down, as soon as there is one."""
        announced = set[BlockKey]()
        with contextlib.suppress(ClosedError):
            while True:
                found = self._hierarchy.describing()
                if found is not None and await self._announce_all(*found, announced):
                    return
                await asyncio.sleep(_PAUSE_MAX_S if found is None else _AGAIN_S)

    async def _announce_all(self, tier: Metered, verbs: Describing, announced: set[BlockKey]) -> bool:
        """Whether the tier has not failed. `announced` grows by what was."""
        since = 0
        try:
            newest = await self._read(verbs)
            for passage in parents_first(newest, await _ends(newest), announced):
                since += await self._announce(tier, passage, announced)
                if since >= BATCH_BLOCKS:
                    since = 0
                    await self._taken()
        except TierError as error:
            log.debug("what %s kept is not announced yet: %s", tier.name, error)
            return False
        if newest:
            log.info("announced %d blocks that %s kept", self.announced, tier.name)
        return True

    async def _read(self, verbs: Describing) -> list[PackedPassage]:
        """The newest passages first."""
        out, blocks = list[PackedPassage](), 0
        number, parts = await verbs.read_contents(0)
        while number and blocks < ANNOUNCED_MAX:
            for part in reversed(parts):
                with contextlib.suppress(CorruptError):  # of another release
                    out.append(described(part))
                    blocks += len(out[-1].keys)
            number, parts = await verbs.read_contents(number) if number > 1 else (0, [])
        return out

    async def _announce(self, tier: Metered, found: PackedPassage, announced: set[BlockKey]) -> int:
        """Announce a passage's blocks, as far as they are there, and were not announced."""
        keys = found.keys
        start = next((place for place, key in enumerate(keys) if key not in announced), len(keys))
        if start == len(keys):
            return 0
        if tier.resting:
            raise TierError(tier.name, "lookup", "out of service")

        def tell(count: int) -> None:
            self._tell(found.passage().part(start, start + count))

        try:
            here = await tier.announce(keys[start:], Mono(self._clock.monotonic() + _LOOKUP_S), tell)
        except CorruptError:
            return 0
        announced.update(keys[start : start + here])
        self.announced += here
        return here

    async def _taken(self) -> None:
        """Wait until the engine has taken what was announced."""
        pause_s = BATCH_S
        await asyncio.sleep(pause_s)
        while self._waiting():
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            await asyncio.sleep(pause_s)


def _described_max(tier: Metered) -> int:
    """A quarter of the blocks whose pages the tier keeps: other processes write some of them."""
    blocks = tier.usage().capacity_bytes // tier.block_bytes
    return min(DESCRIBED_MAX, blocks // 4) if blocks else DESCRIBED_MAX


def start_first(cache: Cache, announcer: Announcer) -> None:
    """Have it write and announce, before the cache has any request: what is noted before it knows of the purges until
    then is not written. Within FIRST_S."""
    with contextlib.suppress(TimeoutError, KVTierError):
        cache.submit(announcer.start()).result(FIRST_S)


def write_last(cache: Cache, announcer: Announcer) -> None:
    """Write down what was noted, before the cache is closed; within LAST_S."""
    with contextlib.suppress(TimeoutError, KVTierError):
        cache.submit(announcer.write()).result(LAST_S)


Ends = dict[BlockKey, PackedPassage]
"""By the key of a block that passages go on from: the newest passage that has it."""


async def _ends(newest: list[PackedPassage]) -> Ends:
    wanted = {passage.parent for passage in newest if passage.parent is not None}
    out = Ends()
    for passage in newest:
        for key in wanted.intersection(passage.keys):
            out.setdefault(key, passage)
        await asyncio.sleep(0)
    return out


def parents_first(newest: list[PackedPassage], ends: Ends, announced: set[BlockKey]) -> Iterator[PackedPassage]:
    """Each passage once, in this order, but after those that it goes on from. One that goes on from a block that is not
    `announced` by then, which the caller keeps, is left out: no router could place it."""
    done = set[int]()
    for passage in newest:
        line, following = list[PackedPassage](), passage
        while id(following) not in done:
            done.add(id(following))
            line.append(following)
            if following.parent is None or following.parent in announced:
                break
            following = ends.get(following.parent, following)
        for each in reversed(line):
            if each.parent is None or each.parent in announced:
                yield each
