"""Confirmation: which blocks of vLLM's pool hold KV that may be stored.

A block is *confirmed* once the step that filled it has completed, and no failed load touched it or an earlier block
of its request. vLLM names blocks when it plans a step, before anything is computed; it leaves blocks of failed
loads, and what was computed after them, under valid names; and it frees named blocks of aborted requests while
their forward still runs. So a name found in the pool is no evidence, and this module has its own:

    step planned     → `cover`, `plan`: spans of tokens, which are reported when they complete a block
    step completed   → `complete`: spans that continue trusted tokens make them grow, and full blocks are confirmed
    load failed      → `fail`: nothing planned until now counts for the requests it touched

A confirmed block is remembered by its number together with the pool's name *object*: once the pool hands the block
out again the object is another, even for equal content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple, Protocol

from kvtier.identity.keys import BlockKey
from kvtier.retention.ranges import ChainTerms
from kvtier.retention.terms import Depth

Token = object
"""Names one use of a block, until the pool hands it out again: the pool's name object, compared by identity."""


_EVER = 1 << 62
"""Later than any step."""


class Chain(list[BlockKey]):
    """A request's keys, head first; grows at its end. `terms` are the request's."""

    __slots__ = ("terms",)

    def __init__(self, keys: Iterable[BlockKey], terms: ChainTerms) -> None:
        super().__init__(keys)
        self.terms = terms


@dataclass(slots=True, eq=False)
class Track:
    """One request as far as its blocks go. Owned by the Confirmer between `start` and `finish`."""

    name: str
    request: Any  # the engine's object
    chain: Chain
    adapter: str = ""  # name of the one that it is computed with
    table: list[int] = field(default_factory=list)
    trusted: int = 0  # leading tokens whose KV is computed or loaded, completed, and right
    reach: int = 0  # `trusted`, and the drafts that were planned behind it
    load_begin: int = 0  # tokens load_begin … loaded-1 were brought by a load
    loaded: int = 0
    confirmed: int = 0  # leading blocks that `complete` has reported
    storable: bool = True  # whether its blocks may be stored, and how many of them
    storable_blocks: int = 1 << 62
    drafts: bool = False  # whether its steps are planned with draft tokens
    prompt_tokens: int = 0  # of a session, with the turns before
    life: int = 0  # changes when the engine takes all blocks away
    lost: bool = False  # the table is not known until the engine gives all of it again
    void_until: int = -1  # steps up to this one do not count
    open: int = -1  # tokens open … planned-1 were planned, one stretch, and are not in a span yet; -1: none were
    planned: int = -1
    due: int = -1  # tokens with which the next block is full; less than any where the next step must be looked at

    @property
    def computed(self) -> bool:
        """Whether something of it was computed, or is planned to be, since it has its blocks."""
        return self.open >= 0 or self.trusted > 0

    @property
    def lasting(self) -> int:
        """How many of its leading blocks may lie on a disk, by its own terms."""
        return self.storable_blocks if self.storable and self.chain.terms.ceiling >= Depth.G3 else 0


class _Unnamed(NamedTuple):
    """The token of a block without a name: its request, as long as that has its blocks."""

    track: Track
    life: int


class Span(NamedTuple):
    """Tokens begin … end-1 of a request are computed when a step has run."""

    track: Track
    life: int
    begin: int
    end: int


class Confirmed(NamedTuple):
    """Blocks of the track's chain from depth `start` on lie in these block numbers, under these tokens."""

    track: Track
    start: int
    blocks: list[int]
    tokens: list[Token]
    found: bool  # the request found them in the pool, confirmed for another


class BlockNames(Protocol):
    """The pool's names of its blocks."""

    def tokens_of(self, blocks: Sequence[int]) -> list[Token | None]:
        """The current name object of each block; None where it has none."""

    def naming(self, tokens: Sequence[Token | None], keys: Sequence[BlockKey]) -> int:
        """How many leading tokens are names of these keys, one by one."""


class Confirmer:
    """See the module. Pure state of one scheduler; not thread-safe; never blocks.

    Without prefix caching there are no `names`, and a block belongs to its track as long as the track's life lasts.
    """

    def __init__(self, block_tokens: int, names: BlockNames | None) -> None:
        self.block_tokens = block_tokens
        self._names = names
        self._tracks: dict[str, Track] = {}
        self._steps: deque[tuple[int, list[Span]]] = deque()
        self._spans: list[Span] = []  # of the step that is being planned
        self._tokens: dict[int, tuple[Token, str]] = {}  # by confirmed block, with the adapter that filled it
        self._last = -1

    def start(self, track: Track) -> None:
        self._tracks[track.name] = track

    def get(self, name: str) -> Track | None:
        return self._tracks.get(name)

    def finish(self, name: str) -> None:
        """The engine is done with the request. Its spans under way still count when they complete."""
        self._tracks.pop(name, None)

    def place(self, track: Track, table: Sequence[int]) -> list[int]:
        """The engine gave the request this whole block table. Returns confirmed blocks that hold something else now."""
        track.lost = False
        if track.table and track.table != list(table[: len(track.table)]):
            self.displace(track)
        stale = self.extend(track, table[len(track.table) :])
        # Room for blocks to come, while the table is being written anyway: else the first block that is appended would
        # move all of it, and a step has many requests that append one.
        track.table.append(0)
        track.table.pop()
        return stale

    def extend(self, track: Track, blocks: Sequence[int]) -> list[int]:
        """The engine appended blocks to the request's table. Returns confirmed blocks that hold something else now."""
        if track.lost:
            return []
        track.table.extend(blocks)
        known = [block for block in blocks if block in self._tokens]
        if not known:
            return []
        lasting = self.lasting(known, [self._tokens[block][0] for block in known])
        stale = [block for block, lasts in zip(known, lasting, strict=True) if not lasts]
        for block in stale:
            del self._tokens[block]
        return stale

    def displace(self, track: Track) -> None:
        """The engine took all blocks away (preemption): what was planned before does not count."""
        track.table = []
        track.trusted = track.reach = track.load_begin = track.loaded = track.confirmed = 0
        track.life += 1
        track.open = track.due = -1

    def back(self, track: Track, begin: int) -> bool:
        """Whether a step that computes from token `begin` on goes behind what was planned before."""
        return track.open >= 0 and begin < track.planned

    def lose(self) -> None:
        """What the engine planned was not followed to its end: no table is known, and nothing in one counts."""
        for track in self._tracks.values():
            self.displace(track)
            track.lost = True

    def rename(self, track: Track, count: int) -> list[int]:
        """The engine named the request's blocks anew, but for the first `count`. The track gets another chain: copies
        under way go on under the old one. Returns blocks that were confirmed under other names."""
        track.chain = Chain(track.chain[:count], track.chain.terms)
        others = track.table[count : track.confirmed]
        for block in others:
            self._tokens.pop(block, None)
        track.confirmed = min(track.confirmed, count)
        return others

    def spoil(self, track: Track) -> None:
        """Nothing that is computed of the request from now on is right, nor what was not confirmed until now."""
        track.void_until = _EVER
        track.trusted = min(track.trusted, track.confirmed * self.block_tokens)
        track.storable_blocks = min(track.storable_blocks, track.confirmed)

    def follow_turns(self, track: Track, prompt_tokens: int) -> None:
        """Of another prompt it is a session's next turn. Where the last one ended within drafts that were right, vLLM
        counts those behind its end as computed, and takes their KV for that of the next turn's first tokens."""
        if prompt_tokens != track.prompt_tokens and track.drafts:
            self.spoil(track)
        track.prompt_tokens = prompt_tokens

    def passing(
        self, names: Sequence[str], blocks: Sequence[Any], begins: Sequence[int], counts: Iterable[int]
    ) -> Iterator[tuple[Track, Any, int, int]]:
        """Cover requests (columns: name, new blocks or none, first token, tokens) that go on computing inside a block.
        Yields all others, which the caller covers: the track, its new blocks, begin and end. In every step this is
        called for every request, so it does no more than it must."""
        tracks = map(self._tracks.get, names)
        for track, new, begin, count in zip(tracks, blocks, begins, counts, strict=True):
            if track is None:
                continue
            end = begin + count
            if new is None and end < track.due and track.open <= begin <= track.planned:
                track.planned = end
            else:
                yield track, new, begin, end

    def cover(self, track: Track, begin: int, end: int) -> None:
        """The step that is being planned computes tokens begin … end-1 of a request.

        Called per request and step, so it does next to nothing unless a block gets full: stretches that continue one
        another make one span. The first of a stretch is a span by itself, since what it builds upon must be looked at
        when it completes; later it may have been repaired.
        """
        if track.lost:
            return
        if track.open <= begin <= track.planned and track.open >= 0:
            track.planned = end
            if end < track.due:
                return
            begin = track.open
        self._spans.append(Span(track, track.life, begin, end))
        track.open = track.planned = end
        track.due = (end // self.block_tokens + 1) * self.block_tokens

    def plan(self, step: int) -> None:
        """The spans covered since the last call are a step. Steps are numbered ascending and complete in this order."""
        self._last = step
        self._steps.append((step, self._spans))
        self._spans = []

    def fail(self, blocks: Iterable[int], waiting: Collection[int] = ()) -> None:
        """A load left these blocks without content: distrust them and what was computed after them. Those in `waiting`
        belong to requests that wait for their loads: nobody has computed after them."""
        bad = set(blocks)
        for block in bad:
            self._tokens.pop(block, None)
        bad.difference_update(waiting)
        if not bad:
            return
        under_way = [span.track for spans in (*(spans for _, spans in self._steps), self._spans) for span in spans]
        for track in {id(track): track for track in [*self._tracks.values(), *under_way]}.values():
            index = next((i for i, block in enumerate(track.table) if block in bad), None)
            if index is not None:
                tokens = index * self.block_tokens
                track.trusted, track.loaded = min(track.trusted, tokens), min(track.loaded, tokens)
                track.reach = min(track.reach, tokens)
                track.confirmed = min(track.confirmed, index)
                track.void_until = max(track.void_until, self._last)
                track.open = track.due = -1

    def forget(self) -> None:
        """Nothing that was computed until now counts, nor what the planned steps compute: the weights are others."""
        self._tokens.clear()
        under_way = [span.track for spans in (*(spans for _, spans in self._steps), self._spans) for span in spans]
        for track in {id(track): track for track in [*self._tracks.values(), *under_way]}.values():
            track.trusted = track.reach = track.load_begin = track.loaded = track.confirmed = 0
            track.void_until = max(track.void_until, self._last)
            track.open = track.due = -1

    def complete(self, step: int, known: Callable[[Track], int]) -> list[Confirmed]:
        """Everything up to `step` has run. `known(track)` are the tokens whose KV a completed step can have left:
        neither the last sampled one, which was never an input, nor refused drafts. Returns what is newly confirmed,
        heads before tails."""
        fresh: list[Confirmed] = []
        while self._steps and self._steps[0][0] <= step:
            number, spans = self._steps.popleft()
            for span in spans:
                track = span.track
                tokens = known(track) if span.life == track.life else 0
                if span.life == track.life and number > track.void_until:  # `known` may find out that it is void
                    self._grow(span, tokens, fresh)
        return fresh

    def _grow(self, span: Span, known: int, fresh: list[Confirmed]) -> None:
        track = span.track
        if track.reach < span.begin:
            self._trust_head(track, span.begin, fresh)
            track.reach = max(track.reach, track.trusted)
        if track.reach < span.begin:
            return  # computed after something that is not known to be right
        track.trusted = max(track.trusted, min(span.end, known))
        # A step that is planned before drafts of the last one are refused computes from further ahead than planned.
        track.reach = max(track.reach, span.end if track.drafts else track.trusted)
        self._confirm(track, fresh)
        first, full = span.begin // self.block_tokens, span.end // self.block_tokens
        if track.drafts and (known < full * self.block_tokens or first <= track.confirmed < full):
            # The block is not full yet, or has no name yet: the pool names blocks that drafts filled when it plans the
            # next step. Look at that step, too.
            track.due = -1

    def _trust_head(self, track: Track, begin: int, fresh: list[Confirmed]) -> None:
        """Extend trust over blocks that were found: confirmed for other requests, then loaded for this one."""
        size = self.block_tokens
        start = track.trusted // size
        tokens: list[Token] = []
        for block in track.table[start : min(begin // size, len(track.chain))]:
            token = self.token(block, track.adapter)
            if token is None:
                break
            tokens.append(token)
        index = start + len(tokens)
        if tokens:
            fresh.append(Confirmed(track, start, track.table[start:index], tokens, True))
        track.trusted = max(track.trusted, index * size)
        track.confirmed = max(track.confirmed, index)  # confirmed, and reported, for another request
        if track.load_begin <= track.trusted < track.loaded:
            track.trusted = track.loaded
            self._confirm(track, fresh)

    def _confirm(self, track: Track, fresh: list[Confirmed]) -> None:
        start, stop = track.confirmed, min(track.trusted // self.block_tokens, len(track.chain))
        blocks = track.table[start:stop]
        if not blocks:
            return
        tokens: list[Any]
        if self._names is None:
            tokens = [_Unnamed(track, track.life)] * len(blocks)
        else:
            tokens = self._names.tokens_of(blocks)
            count = self._names.naming(tokens, track.chain[start:stop])
            del blocks[count:], tokens[count:]
            self._tokens.update(zip(blocks, zip(tokens, repeat(track.adapter)), strict=True))
        if blocks:
            fresh.append(Confirmed(track, start, blocks, tokens, False))
            track.confirmed += len(blocks)

    def lasting(self, blocks: Sequence[int], tokens: Sequence[Any]) -> list[bool]:
        """Of each block, whether it still is in the use in which it was confirmed."""
        if self._names is None:
            return [token.track.life == token.life for token in tokens]
        return list(map(is_, self._names.tokens_of(blocks), tokens))

    def lasts(self, block: int, token: Token) -> bool:
        """The same for one block."""
        return self.lasting((block,), (token,))[0]

    def token(self, block: int, adapter: str = "") -> Token | None:
        """The token under which the block was confirmed for a request with this adapter, if that use lasts. vLLM names
        blocks by an adapter's name and path, which one that is loaded anew may have had before."""
        token, filler = self._tokens.get(block, (None, adapter))
        if filler != adapter:
            return None
        return token if token is not None and self.lasts(block, token) else None

    def under_way(self, step: int) -> bool:
        """Whether some step up to this one has not completed."""
        return bool(self._steps) and self._steps[0][0] <= step

    def check(self) -> None:
        """Assert that confirmed blocks are trusted and in the table, and that steps are in order."""
        numbers = [number for number, _ in self._steps]
        assert numbers == sorted(numbers), "steps out of order"
        for track in self._tracks.values():
            assert track.confirmed * self.block_tokens <= track.trusted, "a block is confirmed and not trusted"
            assert track.confirmed <= len(track.table), "more blocks confirmed than held"
