"""The state of all slots of G2, column by column.

A million blocks are a dozen arrays, not a million objects: 68 bytes per slot, none of which the garbage collector has
to look at. (Arrays of references are NumPy's, which it does not enter; keys and stamps refer to nothing else.)
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import repeat
from math import inf
from operator import is_

import numpy as np
from numpy.typing import NDArray

from kvtier.checksum import DIGEST_BYTES
from kvtier.identity.keys import BlockKey
from kvtier.retention.lifetime import Lifetime, Stamp
from kvtier.retention.terms import PRIORITY, Depth, Terms
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.scope_marks import ScopeMarks
from kvtier.times import Wall

MANY = 48
"""From so many slots on NumPy's columns are quicker than one by one."""


KINDS_MAX = 1 << 16
"""Names of retention classes."""

LOOK_S = 1.0
"""Between two looks for the first end of all blocks."""


class SlotState(IntEnum):
    FREE = 0
    FILLING = 1
    READY = 2
    QUARANTINED = 3


FREE, FILLING, READY, QUARANTINED = map(int, SlotState)
"""As in a table's column: to look up an enumeration's member and compare it takes 0.1 µs."""


class Columns:
    """Columns of a table as NumPy sees them, over the same memory: for work on many slots at once."""

    __slots__ = ("expires", "generations", "last_uses", "mixed", "pins", "states", "waiting")

    def __init__(self, table: SlotTable) -> None:
        self.states, self.waiting, self.pins, self.generations, self.last_uses, self.expires, self.mixed = (
            np.asarray(memoryview(column))
            for column in (
                table.states, table.waiting, table.pins, table.generations, table.last_uses, table.expires, table.mixed
            )
        )  # fmt: skip


class SlotTable:
    """One entry per slot in each column, by slot number. Owned by the HostTier, which alone changes `states`, `keys`,
    `depths`, `pins`, `waiting` and `generations`; `Slot` is the view of one row."""

    __slots__ = (
        "_ends_after",
        "_looked",
        "_numbers",
        "arena",
        "columns",
        "depths",
        "digests",
        "expires",
        "generations",
        "keys",
        "kinds",
        "last_uses",
        "marks",
        "mixed",
        "names",
        "pins",
        "priorities",
        "sealed",
        "stamps",
        "states",
        "waiting",
    )  # fmt: skip

    def __init__(self, arena: Arena, slots: int = 0) -> None:
        self.arena = arena
        self.states = bytearray(slots)  # SlotState: FREE
        self.generations = array("I", bytes(4 * slots))  # modulo 2^32: a message is not late by as many
        self.pins = array("I", bytes(4 * slots))
        self.waiting = bytearray(slots)  # for its last unpin: QUARANTINED, or the policy leaves it out until then
        self.keys: NDArray[np.object_] = np.full(slots, None, object)  # of blocks, None where it is FREE
        self.depths = array("I", bytes(4 * slots))  # of the block in its chain
        self.priorities = bytearray([PRIORITY]) * slots
        self.kinds = array("H", bytes(2 * slots))  # retention class that it was stored under: a place in `names`
        self.last_uses = array("d", bytes(8 * slots))
        self.stamps: NDArray[np.object_] = np.full(slots, None, object)  # None: ()
        self.mixed = bytearray(slots)  # whether its life has another number of stamps than one
        self.expires = array("d", [inf]) * slots  # no later than its end, which a use puts off; inf where it is FREE
        self._ends_after = inf  # no block ends before
        self._looked = -inf  # when that was last found out
        self.sealed = bytearray(slots)  # whether there is a digest
        self.digests = bytearray(DIGEST_BYTES * slots)
        self.marks = ScopeMarks(slots)
        self.names = [""]
        self._numbers = {"": 0}
        self.columns = Columns(self)

    def __len__(self) -> int:
        return len(self.states)

    def kind_of(self, name: str) -> int:
        """The number of a retention class, known or new; that of no name where there are more than a column can tell
        apart: a caller may make one up for each request."""
        number = self._numbers.get(name)
        if number is None:
            if len(self.names) >= KINDS_MAX:
                return 0
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def take(self, numbers: Sequence[int], keys: Iterable[BlockKey], depth: int, priority: int) -> None:
        """These slots, until now FREE, are FILLING with the leading `keys`, which lie at `depth` and below."""
        states, names, depths, priorities = self.states, self.keys, self.depths, self.priorities
        for number, key in zip(numbers, keys, strict=False):
            states[number], names[number], depths[number], priorities[number] = FILLING, key, depth, priority
            depth += 1
        self.marks.set(numbers, keys)

    def stamp_all(self, numbers: Iterable[int], kind: int, life: Lifetime, ends: Wall) -> None:
        """`stamp` for several, stored under the class `kind`."""
        kinds, last_uses, stamps, expires = self.kinds, self.last_uses, self.stamps, self.expires
        last_use, own = life.last_use, life.stamps
        self._ends_after = min(self._ends_after, ends)
        for number in numbers:
            kinds[number], last_uses[number], stamps[number], expires[number] = kind, last_use, own, ends
            self.mixed[number] = len(own) != 1

    def stamp(self, number: int, life: Lifetime, ends: Wall) -> None:
        """Set a life whose end in G2 is known: computed once for all blocks of a request."""
        self.last_uses[number], self.stamps[number], self.expires[number] = life.last_use, life.stamps, ends
        self.mixed[number] = len(life.stamps) != 1
        self._ends_after = min(self._ends_after, ends)

    def life(self, number: int) -> Lifetime:
        """Terms and last use, as they leave RAM with the block."""
        return Lifetime(Wall(self.last_uses[number]), self.stamps[number] or ())

    def extend(self, number: int, terms: Terms, wall_s: Wall) -> bool:
        """Add a request's terms and renew the idle clock. True if they allow more than the block was allowed before.
        The caller has checked that the block has not expired."""
        stamps: tuple[Stamp, ...] = self.stamps[number] or ()
        if len(stamps) == 1 and self._is_covered(stamps, terms):
            self.use(number, wall_s)
            return False
        life = self.life(number).add(terms, wall_s)
        self.stamp(number, life, life.ends(Depth.G2))
        return life.stamps != stamps

    @staticmethod
    def _is_covered(stamps: tuple[Stamp, ...], terms: Terms) -> bool:
        """Whether a block with this one stamp is allowed no more by `terms`."""
        (only,) = stamps
        unbounded = terms.max_age is None and only.max_age is None
        return unbounded and only.ttl == terms.ttl and only.ceiling == terms.ceiling

    def use(self, number: int, wall_s: Wall) -> None:
        """Renew the idle clock. The caller has checked that the block has not expired."""
        if self.mixed[number]:
            life = self.life(number).used(wall_s)
            self.stamp(number, life, life.ends(Depth.G2))
        elif wall_s > self.last_uses[number]:  # else another thread read the clock earlier, or it was set back
            self.last_uses[number] = wall_s

    def use_all(self, numbers: Iterable[int], wall_s: Wall) -> None:
        """`use` for several."""
        last_uses, mixed = self.last_uses, self.mixed
        for number in numbers:
            if mixed[number]:
                self.use(number, wall_s)
            elif last_uses[number] < wall_s:
                last_uses[number] = wall_s

    def use_many(self, numbers: NDArray[np.intp], wall_s: Wall) -> None:
        """`use_all`, quicker for many."""
        columns = self.columns
        if columns.mixed[numbers].any():
            self.use_all(numbers.tolist(), wall_s)
        else:
            columns.last_uses[numbers] = np.maximum(columns.last_uses[numbers], wall_s)

    def ends(self, number: int) -> Wall:
        """When a block dies if it is never used again."""
        self.expires[number] = ends = self.life(number).ends(Depth.G2)
        return ends

    def has_ended(self, number: int, wall_s: Wall) -> bool:
        """Whether a block has expired at `wall_s`."""
        return self.expires[number] < wall_s and self.ends(number) < wall_s

    def alive(self, numbers: Sequence[int], wall_s: Wall) -> int:
        """How many leading ones of these slots have not expired at `wall_s`."""
        if wall_s <= self._ends_after or self._none_ended(wall_s):
            return len(numbers)
        if len(numbers) >= MANY:
            suspects = np.flatnonzero(self.columns.expires[np.array(numbers, np.intp)] < wall_s).tolist()
        else:
            suspects = range(len(numbers))
        return next((at for at in suspects if self.has_ended(numbers[at], wall_s)), len(numbers))

    def _none_ended(self, wall_s: Wall) -> bool:
        """Whether no block at all has ended. Looks at every slot, half a millisecond for a million, once per LOOK_S."""
        if len(self) and abs(wall_s - self._looked) >= LOOK_S:
            self._looked, self._ends_after = wall_s, float(self.columns.expires.min())
        return wall_s <= self._ends_after

    def extend_all(self, numbers: Sequence[int], terms: Terms, wall_s: Wall) -> list[int]:
        """`extend` for several. Returns those that are allowed more than before."""
        if len(numbers) >= MANY:
            at = np.array(numbers, np.intp)
            stamps = self.stamps[at].tolist()
            own = stamps[0]
            if own and len(own) == 1 and self._is_covered(own, terms) and all(map(is_, stamps, repeat(own))):
                self.use_many(at, wall_s)
                return []
        return self._extend_few(numbers, terms, wall_s)

    def _extend_few(self, numbers: Iterable[int], terms: Terms, wall_s: Wall) -> list[int]:
        """Blocks that were stored together have one life, of which the end is computed once."""
        stamps, last_uses, covered, longer = self.stamps, self.last_uses, None, list[int]()
        own, last, first, grew = None, -inf, 0, False
        for number in numbers:
            before, used = stamps[number], last_uses[number]
            if before is covered and before is not None:
                if used < wall_s:
                    last_uses[number] = wall_s
                continue
            if before is None or before is not own or used != last:
                own, last, first, grew = before, used, number, self.extend(number, terms, wall_s)
                if stamps[number] is before and not self.mixed[number]:
                    covered = before
            else:
                last_uses[number], stamps[number] = last_uses[first], stamps[first]
                self.expires[number], self.mixed[number] = self.expires[first], self.mixed[first]
            if grew:
                longer.append(number)
        return longer

    def extend_until(self, untils: Mapping[int, Wall], wall_s: Wall) -> None:
        """Let blocks be served until a time each, by the slot, as deep as they may be now (`Lifetime.extend_until`).
        Those that lie one behind the other are mostly of one life: it is computed once."""
        facts: tuple[float, object, Wall] | None = None
        longer, ends = Lifetime(wall_s), wall_s
        for number, until in untils.items():
            own = self.last_uses[number], self.stamps[number], until
            if facts is None or own[1] is not facts[1] or own[::2] != facts[::2]:
                facts, life = own, self.life(number)
                ceiling = life.ceiling(wall_s)
                longer = life if ceiling is None else life.extend_until(until, ceiling, wall_s)
                ends = longer.ends(Depth.G2)
            self.stamp(number, longer, ends)

    def seal(self, number: int, digest: bytes | None) -> None:
        """Set the digest of the block's bytes; None: it is not known."""
        self.sealed[number] = digest is not None
        if digest is not None:
            self.digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)] = digest

    def describe(
        self, number: int, generation: int, life: Lifetime | None, digest: bytes | None, priority: int | None
    ) -> None:
        """`Slot.describe`."""
        if self.states[number] == FILLING and self.generations[number] == generation:
            if life is not None:
                self.stamp(number, life, life.ends(Depth.G2))
            if priority is not None:
                self.priorities[number] = priority
            self.seal(number, digest)

    def free(self, number: int) -> None:
        """Forget the block: what was said about this generation of the slot is stale from now on."""
        self.states[number] = self.waiting[number] = self.sealed[number] = 0
        self.keys[number] = self.stamps[number] = None
        self.expires[number] = inf
        self.generations[number] = (self.generations[number] + 1) & 0xFFFF_FFFF

    def quarantined(self) -> list[BlockKey]:
        """Blocks that are gone but for their bytes: somebody has them pinned, perhaps to write them to another tier."""
        keys, number = list[BlockKey](), -1
        while (number := self.states.find(QUARANTINED, number + 1)) >= 0:
            keys.append(self.keys[number])
        return keys

    def check(self, free: Collection[int], filling: Mapping[BlockKey, int], ready: Mapping[BlockKey, int]) -> None:
        """Assert that slots are conserved: each is in one of these, or QUARANTINED under a pin. O(n)."""
        by_state = {SlotState.FREE: free, SlotState.FILLING: filling.values(), SlotState.READY: ready.values()}
        for state, numbers in by_state.items():
            assert self.states.count(state) == len(numbers), "a state and its index differ"
            assert all(self.states[number] == state for number in numbers), "a state and its index differ"
        for key, number in [*filling.items(), *ready.items()]:
            assert self.keys[number] == key, "a slot has another block than its index says"
        assert not any(self.pins[n] or self.keys[n] or self.waiting[n] for n in free), "a free slot is pinned or named"
        gone = (n for n, state in enumerate(self.states) if state == SlotState.QUARANTINED)
        assert all(self.pins[n] and self.waiting[n] for n in gone), "a quarantined slot without a pin"
        assert self._ends_after <= min(self.expires, default=inf), "a block ends before the first does"
