"""The tiers' changes as an engine's own KV events: what is known of blocks, whatever the form of the events.

A router reads no hash without its tokens. So a block is announced while it is known what it holds: of the latest
requests, and of what G3 kept from an earlier engine (`kvtier.connectors.announcer`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import attrgetter
from typing import Any

from kvtier.connectors.announcer import Announcer
from kvtier.connectors.contents import Passage
from kvtier.connectors.settings import Settings
from kvtier.errors import InvalidRequest
from kvtier.events import Events, Lost
from kvtier.identity.keys import BlockKey
from kvtier.manager.hierarchy import Hierarchy
from kvtier.units import shorten

TIERS = ("g2", "g3")
"""Announced by default. G4 is every replica's, so it is no reason to prefer one of them, and some routers count any
medium that they do not know as the GPU's."""
_NAMES = (*TIERS, "g4")
KNOWN_MAX = 1 << 17
_PARTS = 8


def tiers_announced(value: Any) -> tuple[str, ...]:
    """The connector's argument `event_tiers`. Raises InvalidRequest."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name in _NAMES for name in value):
        raise InvalidRequest(f"must be a list of {', '.join(_NAMES)}, got {shorten(value)}")
    return tuple(value)


def keeps_contents(settings: Settings) -> bool:
    """Whether G3 is to keep what its blocks hold, so that a warm one is announced. Not beside encrypted blocks."""
    own, config = settings.own, settings.config
    announced = config.tiers.g3 is not None and "g3" in own.get("event_tiers", TIERS)
    return bool(announced and config.security.data_keys is None and own.get("keep_contents", True))


@dataclass(frozen=True, slots=True, eq=False)
class KnownRun:
    """Consecutive blocks of one request, and their names from the first event on. `first` is the number of the first
    block among all that were remembered."""

    first: int
    passage: Passage
    session: str | None = None
    names: list[Any] = field(default_factory=list)


class _Known:
    """Runs by the numbers of their blocks."""

    def __init__(self) -> None:
        self.numbers: dict[BlockKey, int] = {}
        self.runs: deque[KnownRun] = deque()

    def add(self, run: KnownRun) -> None:
        """Numbers go on from the last run's."""
        keys = run.passage.keys
        self.runs.append(run)
        self.numbers.update(zip(keys, range(run.first, run.first + len(keys)), strict=True))

    def find(self, key: BlockKey) -> tuple[KnownRun, int] | None:
        """The run of a block, and its place in it."""
        number = self.numbers.get(key)
        if number is None or number < self.runs[0].first:  # the latter: it has been forgotten
            return None
        run = self.runs[bisect_right(self.runs, number, key=_first) - 1]
        return run, number - run.first


_first = attrgetter("first")


class _Latest:
    """The runs of the latest `blocks_max` blocks, or the latest one alone.

    An engine's step waits for each call, so none has the work of many: runs are forgotten one by one, as others come,
    and their names lie in parts, none of which takes long to grow or to be let go of."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._count = 0  # blocks ever added
        self._parts: deque[_Known] = deque()  # none is empty

    @property
    def parts(self) -> Iterable[_Known]:
        """The latest first."""
        return reversed(self._parts)

    def add(self, passage: Passage, session: str | None) -> None:
        """Know one more run, and forget those that it is one too many for."""
        run = KnownRun(self._count, passage, session)
        self._count += len(passage.keys)
        if not self._parts or _PARTS * (self._count - self._parts[-1].runs[0].first) > self._blocks_max:
            self._parts.append(_Known())
        self._parts[-1].add(run)
        while (oldest := self._parts[0].runs[0]) is not run and self._count - oldest.first > self._blocks_max:
            self._parts[0].runs.popleft()
            if not self._parts[0].runs:
                self._parts.popleft()

    def known(self, keys: Sequence[BlockKey]) -> int:
        """How many leading ones are known, and stay so while half of `blocks_max` come."""
        lasting = [part for part in self.parts if 2 * (self._count - part.runs[0].first) <= self._blocks_max]
        at, before = 0, -1
        while before < at < len(keys):
            before = at
            for part in lasting:
                at += len(list(takewhile(part.numbers.__contains__, islice(keys, at, None))))
        return at


class BlockEvents(ABC):
    """Turns tiers' changes into events. Used on the engine's thread; `events` may be written to on any."""

    def __init__(self, block_tokens: int, known_max: int, tiers: Collection[str]) -> None:
        """`tiers` are announced. What blocks hold is remembered of at most `known_max` or the latest request's, and of
        the last half as many at least."""
        self.events = Events()
        self._tiers = frozenset(tiers)
        self._block_tokens = block_tokens
        self._known_max = known_max
        self._latest = _Latest(known_max)
        self._told: deque[Passage] = deque()  # of blocks that are announced next; written to on any thread
        self._kept, self._kept_before = _Known(), _Known()  # those that were told of for the last two `take`s
        self._announcer: Announcer | None = None
        self._cleared = False

    def announcer(self, hierarchy: Hierarchy) -> Announcer:
        """One that writes down what requests hold from now on, and announces what an earlier engine's did."""
        self._announcer = announcer = Announcer(hierarchy, self._told.append, lambda: bool(self._told))
        return announcer

    def _remember(
        self,
        chain: Sequence[BlockKey],
        start: int,
        passage_of: Callable[[list[BlockKey], int], Passage],
        session: str | None,
        lasting: int,
    ) -> None:
        """Remember what the blocks of a request's chain hold, from `start` on: `passage_of` those from some depth on.
        Only its `lasting` first may lie on a disk."""
        keys = list(chain[start:])
        known, passage = self._latest.known(keys), None
        if known < len(keys):
            new = keys[known:]
            passage = passage_of(new, start + known)
            self._latest.add(passage, session)
        announcer, stop = self._announcer, min(lasting, len(chain))
        if announcer is not None and (first := announcer.described(chain, start, stop)) < stop:
            if passage is None or (first, stop) != (start + known, len(chain)):  # mostly it is the one that is known
                passage = passage_of(keys[first - start : stop - start], first)
            announcer.note(passage)

    def clear(self) -> None:
        """The engine has new weights: no block reported until now can be found any more."""
        self.events.take()
        self._told.clear()
        self._latest = _Latest(self._known_max)
        self._cleared = True

    def take(self) -> Iterable[Any]:
        """The engine's events since the last call. Where removals are missing, routers are to forget all blocks of this
        engine: they would send requests to it for ever for blocks that it does not have."""
        if self._cleared:
            self._cleared = False
            yield self._all_cleared()
        changes = self.events.take()  # first: who has a block announced tells of its passage, then reports the block
        self._learn()
        yield from self._take_own()
        for change in changes:
            if change.tier not in self._tiers:
                continue
            if isinstance(change, Lost):
                yield self._all_cleared()
                continue
            keys = self._announced(change.keys)
            if change.stored:
                yield from self._stored(keys, change.tier)
            elif keys:
                yield self._removed(keys, change.tier)

    def _learn(self) -> None:
        """Know what was told of. Each passage's blocks are reported before the next one is told of: so they are taken
        by now, or with the next call."""
        if not self._told:
            return
        self._kept, self._kept_before, count = _Known(), self._kept, 0
        while self._told:
            passage = self._told.popleft()
            self._hear(passage)
            self._kept.add(KnownRun(count, passage))
            count += len(passage.keys)

    def _stored(self, keys: Sequence[BlockKey], tier: str) -> Iterable[Any]:
        """One event per stretch of consecutive blocks of one request."""
        known = (*self._latest.parts, self._kept, self._kept_before)
        begin = 0
        while begin < len(keys):
            key = keys[begin]
            found = next((found for some in known if key in some.numbers and (found := some.find(key))), None)
            if found is None:
                begin += 1
                continue
            run, first = found
            count = _equal(keys, begin, run.passage.keys, first)
            begin, stop = begin + count, first + count
            if (made := self._made_of(run, first, stop, tier)) is not None:
                yield made

    def _names_of(self, run: KnownRun, first: int, stop: int) -> list[Any]:
        """Names of these blocks of a run: each tier has an event of its own for them."""
        if not run.names:
            run.names.extend(self._names(run.passage.keys))
        return run.names[first:stop]

    def _take_own(self) -> Iterable[Any]:
        """Events that come of no tier's change."""
        return ()

    def _hear(self, passage: Passage) -> None:  # noqa: B027  # most need nothing
        """Blocks of this passage may be announced next, though no request had it."""

    @abstractmethod
    def _names(self, keys: Sequence[BlockKey]) -> list[Any]:
        """Of blocks that are `_announced`, as events have them."""

    @abstractmethod
    def _announced(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Those of the blocks that may be told of at all: whose names in events no other block has."""

    @abstractmethod
    def _made_of(self, run: KnownRun, first: int, stop: int, tier: str) -> Any:
        """The event that these blocks of a run, which are `_announced`, were stored. None: no router could place
        them."""

    @abstractmethod
    def _removed(self, keys: Sequence[BlockKey], tier: str) -> Any:
        """The event that blocks have left a tier."""

    @abstractmethod
    def _all_cleared(self) -> Any:
        """The event that the engine has no block any more."""


def _equal(keys: Sequence[BlockKey], begin: int, others: list[BlockKey], first: int) -> int:
    """How many keys are equal one by one, from these places on."""
    count = min(len(keys) - begin, len(others) - first)
    if list(keys[begin : begin + count]) == others[first : first + count]:  # mostly
        return count
    return next(at for at in range(count) if keys[begin + at] != others[first + at])
