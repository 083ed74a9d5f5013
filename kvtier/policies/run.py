"""Runs: stretches of a chain that were last referenced by the same request and have equal rank."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import log2

import msgspec

from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.terms import PRIORITY
from kvtier.times import Mono

LEVELS = 40
"""Reference counts above 2^19.5 are not told apart."""

SLACK = 64
"""Blocks taken by later requests that a run may still list, beyond as many as it has left."""

COMPARED_MAX = 8192
"""Depth of a chain up to which its blocks are compared with those of runs one by one: 0.3 ms."""

RUN_BLOCKS = 2048
"""Blocks of a run, at most, where these are a chain: one that grows or gives up a part is copied, 0.1 ms. Longer
stretches of equal rank are several runs, one behind the other."""

HERE, AWAY = 1, 2
"""A block of a run that is resident, and one that the policy need not order for now but that is to return."""

Counts = Sequence[tuple[int, int]]
"""References by depth: (depth where they end, number), the numbers falling."""

ONCE: Counts = ((1, 1),)
"""Of a block alone, referenced once."""

_PRINT_BYTES = array("I").itemsize


def level_of(references: int) -> int:
    """Half powers of two in a reference count. Pure."""
    return min(LEVELS - 1, int(2 * log2(references) + 1e-9))


class Standing(msgspec.Struct, gc=False, eq=False):
    """A run as one request left it, for the shadow caches: its rank then, and the depth where it begins now in those;
    -1: none of them has seen it. Refers to no other of its kind: the garbage collector need not look at it."""

    level: int
    last: Mono
    gap_s: float
    base: int = -1
    number: int = 0  # in the order in which the shadows had them


class Stretch:
    """Depths start … stop-1 of a request, which get equal rank. `counts` of its blocks where the policy needs them."""

    __slots__ = ("counts", "gap_s", "length", "level", "standing", "start", "stop")

    def __init__(self, start: int, stop: int, length: int, level: int = 0, counts: Counts = ()) -> None:
        self.start = start
        self.stop = stop
        self.length = length  # blocks of the request
        self.level = level
        self.counts = counts
        self.gap_s = 0.0
        self.standing: Standing | None = None

    def part(self, start: int, stop: int) -> Stretch:
        """A part of it, of the same rank; for the shadows it is no part of its own."""
        part = Stretch(start, stop, self.length, self.level, self.counts)
        part.gap_s, part.standing = self.gap_s, self.standing
        return part


class Run(msgspec.Struct, gc=False, eq=False):
    """Blocks of one chain, head first, that were last referenced by the same request and have equal rank.

    `blocks` are named: `blocks[0]` lies at depth `base`, and `here[i]` says whether `blocks[i]` is resident and the
    run's (1), is to return (AWAY), or neither (0). Behind them follow blocks of which only a print is remembered, 4
    bytes of the hash of their names: `prints`, the deepest first. `live` counts the blocks of both that no later
    request took and that are not forgotten, `residents` those of them that are resident. They begin at depth `head`,
    and none is resident from depth `top` on. `torn`: the run has lost blocks behind one of its own, so these keys are
    no chains; it has no prints. Runs are numbered in the order in which they were referenced, the tail of a chain
    first; `ident` stays. `grade` is where the run waits to give up its deepest resident, -1: nowhere. While the owner
    has suspended that block, `suspended` names it. `transits`: some of it may be at the eviction end. A million
    blocks are some 50,000 of these, which refer to none of their kind: the garbage collector does not look at them.
    """

    blocks: tuple[BlockKey, ...]
    here: bytearray
    base: int
    tick: int
    last: Mono
    prints: bytearray = msgspec.field(default_factory=bytearray)  # _PRINT_BYTES each
    head: int = 0
    top: int = 0
    live: int = 0
    residents: int = 0
    away: int = 0
    ident: int = 0
    age: int = 0  # runs are forgotten in ascending order
    number: int = 0
    named_at: int = 0
    level: int = 0
    length: int = 0
    grade: int = -1
    priority: int = PRIORITY  # of its deepest resident
    scope: Scope | None = None  # where the order is kept by scope, too
    suspended: BlockKey | None = None
    counts: Counts = ()
    gap_s: float = 0.0  # between the last two references, as far as known
    standing: Standing | None = None
    mark: int | None = None  # print by which the memory finds it
    torn: bool = False
    transits: bool = False
    fading: bool = False

    def __post_init__(self) -> None:
        self.head = self.top = self.base
        self.live = len(self.blocks)

    @property
    def end(self) -> int:
        """The depth behind its last block."""
        return self.base + len(self.blocks) + self.unnamed

    @property
    def unnamed(self) -> int:
        """How many blocks have only prints."""
        return len(self.prints) // _PRINT_BYTES

    @property
    def named_end(self) -> int:
        """The depth behind its last named block."""
        return self.base + len(self.blocks)

    def leaf(self) -> BlockKey:
        """The deepest resident; there is one. Lowers `top` to it."""
        place = self.top - self.base - 1
        if self.here[place] != HERE:
            place = self.here.rfind(HERE, 0, place)
            self.top = self.base + place + 1
        return self.blocks[place]

    def place(self, key: BlockKey, depth: int) -> int:
        """Where in `blocks` one of its own is. `depth`: in its chain, as far as the caller knows; else O(blocks)."""
        place = depth - self.base
        return place if 0 <= place < len(self.blocks) and self.blocks[place] == key else self.blocks.index(key)

    def has_at(self, key: BlockKey, depth: int) -> bool:
        """Whether this is the block that the run lists at `depth`."""
        place = depth - self.base
        if not 0 <= place < len(self.blocks) + self.unnamed:
            return False
        return self.blocks[place] == key if place < len(self.blocks) else self.print_at(depth) == print_of(key)

    def alike(self, keys: Sequence[BlockKey | None], depth: int) -> int:
        """How many of these, at `depth` and below, are named blocks of the run. The first is."""
        place = depth - self.base
        if place < 0 or self.blocks[place : place + len(keys)] != tuple(keys):
            return 1
        return len(keys)

    def matching(self, keys: list[BlockKey], depth: int) -> int:
        """How many blocks from keys[depth] on are the run's own and equal, given that the first is. Of a long run that
        goes on behind COMPARED_MAX only the last is compared: in chains, blocks that agree at one depth agree at all
        before it. What may become another run's is compared whole, if these are no chains: a part of a run, and one
        that is short enough to be taken together with others."""
        low, high = 1, min(self.end, len(keys)) - depth
        whole = depth + high == self.end and high > RUN_BLOCKS // 2
        first = high - 1 if whole and depth + high > COMPARED_MAX else 1
        if self._equal(keys, depth + first, depth + high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if self._equal(keys, depth + low, depth + middle):
                low = middle
            else:
                high = middle
        return low

    def _equal(self, keys: list[BlockKey], start: int, stop: int) -> bool:
        """Whether these depths, all of them the run's, have the same blocks in `keys`."""
        named = min(stop, self.named_end)
        if start < named:
            if self.blocks[start - self.base : named - self.base] != tuple(keys[start:named]):
                return False
            start = named
        return start >= stop or self._prints_at(start, stop) == prints_of(keys[start:stop])

    def _prints_at(self, start: int, stop: int) -> bytearray:
        end = self.end
        return self.prints[_PRINT_BYTES * (end - stop) : _PRINT_BYTES * (end - start)]

    def print_at(self, depth: int) -> int:
        """The print of a block that is not named."""
        return memoryview(self.prints).cast("I")[self.end - depth - 1]

    def forget_prints(self, blocks: int) -> None:
        """Forget the last so many blocks, which have no names."""
        del self.prints[: _PRINT_BYTES * blocks]

    def places(self, keys: Sequence[BlockKey], depth: int, count: int) -> Sequence[int]:
        """Where in `blocks` these of its own are."""
        if count == 1:
            return (self.place(keys[depth], depth),)
        place = depth - self.base
        if place >= 0 and self.blocks[place : place + count] == tuple(keys[depth : depth + count]):
            return range(place, place + count)
        places = {key: place for place, key in enumerate(self.blocks)}
        return [places[key] for key in keys[depth : depth + count]]

    def residence(self, depth: int, count: int) -> bytes | bytearray:
        """`here` at depths of a chain."""
        if depth == self.base and count == len(self.here):
            return self.here
        here = self.here[depth - self.base : depth - self.base + count]
        return here if len(here) == count else here + bytes(count - len(here))

    def name(self, keys: Sequence[BlockKey], stop: int) -> None:
        """Blocks up to depth `stop` are named again: they may come back."""
        count = stop - self.named_end
        self.blocks += tuple(keys[stop - count : stop])
        self.here += bytes(count)
        del self.prints[len(self.prints) - _PRINT_BYTES * count :]

    def fade(self, blocks: int) -> tuple[BlockKey, ...]:
        """Of the last so many named blocks, none of them here, remember only the prints. Returns their names."""
        cut = len(self.blocks) - blocks
        gone = self.blocks[cut:]
        self.blocks = self.blocks[:cut]
        del self.here[cut:]
        self.prints += prints_of(gone)
        self.top = min(self.top, self.named_end)  # a block that is not named is not resident
        return gone

    def cut(self, blocks: int) -> None:
        """Forget the first so many that are listed."""
        named = min(blocks, len(self.blocks))
        self.blocks = self.blocks[named:]
        del self.here[:named]
        if blocks > named:
            del self.prints[len(self.prints) - _PRINT_BYTES * (blocks - named) :]
        self.base += blocks

    def renew(
        self, stretch: Stretch, keys: Sequence[BlockKey], kept: tuple[int, int], before: bytearray, after: bytearray
    ) -> None:
        """Become the run of `stretch`: of the own blocks keep depths kept[0] … kept[1]-1, in front of them and behind
        come others, whose residence is `before` and `after`. Its blocks are named."""
        first, last = kept[0] - self.base, kept[1] - self.base
        blocks, here = self.blocks, self.here
        if last < len(blocks):
            blocks = blocks[:last]
            del here[last:]
        if first:
            blocks = blocks[first:]
            del here[:first]
        if before:
            blocks = tuple(keys[stretch.start : kept[0]]) + blocks
            here[:0] = before
        if after:
            blocks += tuple(keys[kept[1] : kept[1] + len(after)])
            here += after
        self.blocks = blocks
        self.base = self.head = stretch.start
        self.live = len(blocks)
        self.transits = False

    def rank(self) -> Stretch:
        """The rank that it has, for another run of the same request. That one is no part of what the shadows hold."""
        stretch = Stretch(self.base, self.end, self.length, self.level, self.counts)
        stretch.gap_s = self.gap_s
        return stretch

    def take_rank(self, stretch: Stretch, tick: int, last: Mono) -> None:
        """The rank that a request gives it; counts its residents."""
        self.tick, self.last = tick, last
        self.level, self.gap_s, self.length = stretch.level, stretch.gap_s, stretch.length
        self.counts, self.standing = stretch.counts, stretch.standing
        self.residents, self.away = self.here.count(HERE), self.here.count(AWAY)
        self.top = self.base + self.here.rfind(HERE) + 1
        self.priority = PRIORITY


def runs_for(blocks: int) -> int:
    """As many runs at most take so many blocks that are named step by step. Pure."""
    return 2 * blocks // RUN_BLOCKS + 1 if blocks else 0


def print_of(key: BlockKey) -> int:
    """What is remembered of a block that has no name. Where 40,000 requests are remembered, one in 100,000 new ones
    begins with a block that has the print of a known one's first; then that block counts as remembered, and no other:
    the next prints differ."""
    return hash(key) & 0xFFFF_FFFF


def prints_of(keys: Sequence[BlockKey]) -> bytes:
    """The prints of these blocks, the last first."""
    return array("I", [hash(key) & 0xFFFF_FFFF for key in reversed(keys)]).tobytes()
