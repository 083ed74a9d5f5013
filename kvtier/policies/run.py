"""Runs: stretches of a chain that were last referenced by the same request and have equal rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.terms import PRIORITY
from kvtier.times import Mono

LEVELS = 40
"""Reference counts above 2^19.5 are not told apart."""

SLACK = 64
"""Blocks taken by later requests that a run may still list, beyond as many as it has left."""

COMPARED_MAX = 8192
"""Blocks of a run that are compared one by one: 0.3 ms."""

Counts = Sequence[tuple[int, int]]
"""References by depth: (depth where they end, number), the numbers falling."""

ONCE: Counts = ((1, 1),)
"""Of a block alone, referenced once."""


def level_of(references: int) -> int:
    """Half powers of two in a reference count. Pure."""
    return min(LEVELS - 1, int(2 * log2(references) + 1e-9))


class Standing:
    """A run as one request left it, for the shadow caches: its rank then, and how much of it each of them holds."""

    __slots__ = ("gap_s", "last", "level", "shadow_ends")

    def __init__(self, level: int, last: Mono, gap_s: float) -> None:
        self.level = level
        self.last = last
        self.gap_s = gap_s
        self.shadow_ends: list[int] = []  # depth up to which each shadow holds it, and last where it begins


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


class Run:
    """Blocks of one chain, head first, that were last referenced by the same request and have equal rank.

    `blocks[0]` lies at depth `base`; `here[i]` is 1 while `blocks[i]` is resident and the run's. `live` counts the
    blocks that no later request took and that are not forgotten, `residents` those of them that are resident. They
    begin at depth `head`, and none is resident from depth `top` on. `torn`: the run has lost blocks behind one of its
    own, so these keys are no chains. Runs are numbered in the order in which they were referenced, the tail of a
    chain first. `grade` is where the run waits to give up its deepest resident, -1: nowhere. While the owner has
    suspended that block, `suspended` names it. `transits`: some of it may be at the eviction end.
    """

    __slots__ = ("base", "blocks", "counts", "gap_s", "grade", "head", "here", "last", "length", "level", "live",
                 "number", "priority", "residents", "scope", "standing", "suspended", "tick", "top", "torn",
                 "transits")  # fmt: skip

    def __init__(self, blocks: list[BlockKey], here: bytearray, base: int, tick: int, last: Mono) -> None:
        self.blocks = blocks
        self.here = here
        self.base = self.head = self.top = base
        self.tick = tick
        self.last = last
        self.live = len(blocks)
        self.residents = self.number = self.level = self.length = 0
        self.grade = -1
        self.priority = PRIORITY  # of its deepest resident
        self.scope: Scope | None = None  # where the order is kept by scope, too
        self.suspended: BlockKey | None = None
        self.counts: Counts = ()
        self.gap_s = 0.0  # between the last two references, as far as known
        self.standing: Standing | None = None
        self.torn = self.transits = False

    @property
    def end(self) -> int:
        """The depth behind its last block."""
        return self.base + len(self.blocks)

    def leaf(self) -> BlockKey:
        """The deepest resident; there is one. Lowers `top` to it."""
        place = self.top - self.base - 1
        if not self.here[place]:
            place = self.here.rfind(1, 0, place)
            self.top = self.base + place + 1
        return self.blocks[place]

    def place(self, key: BlockKey, depth: int) -> int:
        """Where in `blocks` one of its own is. `depth`: in its chain, as far as the caller knows; else O(blocks)."""
        place = depth - self.base
        return place if 0 <= place < len(self.blocks) and self.blocks[place] == key else self.blocks.index(key)

    def matching(self, keys: list[BlockKey], depth: int) -> int:
        """How many blocks from keys[depth] on are the run's own and equal, given that the first is. Of more than
        COMPARED_MAX only a few are compared: in chains, blocks that agree at one depth agree at all before it."""
        blocks, place = self.blocks, depth - self.base
        low, high = 1, min(len(blocks) - place, len(keys) - depth)
        first = 1 if high <= COMPARED_MAX else high - 1
        if blocks[place + first : place + high] == keys[depth + first : depth + high]:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            first = low if high - low <= COMPARED_MAX else middle - 1
            if blocks[place + first : place + middle] == keys[depth + first : depth + middle]:
                low = middle
            else:
                high = middle
        return low

    def renew(
        self, stretch: Stretch, keys: Sequence[BlockKey], kept: tuple[int, int], before: bytearray, after: bytearray
    ) -> None:
        """Become the run of `stretch`: of the own blocks keep depths kept[0] … kept[1]-1, in front of them and behind
        come others, whose residence is `before` and `after`."""
        first, last = kept[0] - self.base, kept[1] - self.base
        blocks, here = self.blocks, self.here
        if last < len(blocks):
            del blocks[last:], here[last:]
        if first:
            del blocks[:first], here[:first]
        if before:
            blocks[:0] = keys[stretch.start : kept[0]]
            here[:0] = before
        if after:
            blocks += keys[kept[1] : stretch.stop]
            here += after
        self.base = self.head = stretch.start
        self.live = len(blocks)
        self.transits = False

    def take_rank(self, stretch: Stretch, tick: int, last: Mono) -> None:
        """The rank that a request gives it; counts its residents."""
        self.tick, self.last = tick, last
        self.level, self.gap_s, self.length = stretch.level, stretch.gap_s, stretch.length
        self.counts, self.standing = stretch.counts, stretch.standing
        self.residents = self.here.count(1)
        self.top = self.base + self.here.rfind(1) + 1
        self.priority = PRIORITY
