"""Index of the objects that this replica wrote, read, probed or found in deltas. Hints only: a read decides.

Of the latest the whole header is kept, with which any block is read in one request; of all a packed hint (hints.py).
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice

from kvtier.identity.keys import SCOPE_BYTES, BlockKey, Scope, scope_of_key
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Depth
from kvtier.tiers.objects.frame import Frame
from kvtier.tiers.objects.hints import HINTS_MAX, WALK_MAX, UnitHint, UnitHints, prints_of
from kvtier.tiers.protocol import Miss
from kvtier.times import Mono, Wall

ENTRIES_MAX = 1 << 15
"""Headers, at about 4 KiB each with 16 blocks; fewer where an object may have more, down to 512. Past it the least
recently seen or used is dropped; its hint stays."""

ABSENT_MAX = 100_000


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One object as last seen. `life.last_use` includes uses by this replica that the bucket does not record yet;
    `renewed` is the recorded one. `seen`: monotonic time of the last proof that the object is there."""

    frame: Frame
    size: int
    etag: str
    life: Lifetime
    renewed: Wall
    seen: Mono

    @property
    def first(self) -> BlockKey:
        return self.frame.key(0)

    @property
    def last(self) -> BlockKey:
        return self.frame.key(len(self.frame.hashes) - 1)

    @property
    def blocks(self) -> int:
        return len(self.frame.hashes)

    @property
    def hint(self) -> UnitHint:
        """What is known of the object without its header."""
        frame, hashes = self.frame, self.frame.hashes
        return UnitHint(frame.scope, frame.depth, hashes[-1], prints_of(hashes), self.life, frame.position, self.size)

    def covers(self, life: Lifetime) -> bool:
        """Whether the object's stamps allow every use that `life` allows."""
        return all(any(old.covers(new) for old in self.life.stamps) for new in life.stamps)

    def holds(self, key: BlockKey, depth: int) -> bool:
        """Whether the block `key` at `depth` of its chain is in the object (a hash commits to all before it)."""
        index = depth - self.frame.depth
        return 0 <= index < self.blocks and self.frame.key(index) == key


class ObjectIndex:
    """Entries by first and by last block, and hints of the same and of more. Thread-safe; every verb takes
    microseconds."""

    def __init__(
        self, stride: int, fingerprint: Callable[[BlockKey], int], entries_max: int = ENTRIES_MAX,
        hints_max: int = HINTS_MAX,
    ) -> None:  # fmt: skip
        """`stride`: the most blocks of an object. `fingerprint`: eight bytes of the name of the object with this last
        block."""
        self._stride = stride
        self._hints = UnitHints(stride, fingerprint, hints_max)
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._entries_max = min(entries_max, 16 * ENTRIES_MAX // stride)
        self._by_last: OrderedDict[BlockKey, ObjectEntry] = OrderedDict()
        self._by_first: dict[BlockKey, dict[BlockKey, None]] = {}  # the last blocks, in order
        self._absent: OrderedDict[BlockKey, tuple[Mono, Miss]] = OrderedDict()
        self._unrecorded: set[BlockKey] = set()

    def put(self, entry: ObjectEntry) -> None:
        """Add or replace an entry. A use that the bucket does not record yet is kept. An object of another stride is
        not for this index: a hint has no room for more blocks, and lookups begin at multiples of the stride."""
        if entry.frame.depth % self._stride or entry.blocks > self._stride:
            return
        with self._lock:
            last = entry.last
            known = self._by_last.get(last)
            if known is not None:
                if last in self._unrecorded and known.frame.life.stamps == entry.frame.life.stamps:
                    newer = max(known.life.last_use, entry.life.last_use)
                    entry = replace(entry, life=known.life.join(entry.life, newer))
                self._remove(last)
            self._by_last[last] = entry
            self._by_first.setdefault(entry.first, {})[last] = None
            self._hints.put(entry.hint)
            self._absent.pop(last, None)
            while len(self._by_last) > self._entries_max:
                oldest = next(iter(self._by_last))
                self._remove(oldest)
                self._unrecorded.discard(oldest)

    def learn(self, hint: UnitHint) -> bool:
        """Add what another replica tells of an object, unless one that lives as long is known; whether it was added.
        What was written anew, since it had expired or was purged, takes the place of what is known."""
        with self._lock:
            known = self._by_last.get(hint.last) or self._hints.named(self._fingerprint(hint.last))
            if known is not None:
                position = known.position if isinstance(known, UnitHint) else known.frame.position
                before, now = (position, known.life.ends(Depth.G4)), (hint.position, hint.life.ends(Depth.G4))
                if before == now or before[0] > now[0] or before[1] > now[1]:
                    return False
                self._remove(hint.last)
                self._unrecorded.discard(hint.last)
            self._hints.put(hint)
            self._absent.pop(hint.last, None)
            return True

    def drop(self, last: BlockKey) -> None:
        """The object is not in the bucket any more."""
        with self._lock:
            self._remove(last)
            self._hints.drop(last)
            self._unrecorded.discard(last)

    def _remove(self, last: BlockKey) -> None:
        entry = self._by_last.pop(last, None)
        if entry is None:
            return
        same = self._by_first[entry.first]
        del same[last]
        if not same:
            del self._by_first[entry.first]

    def get(self, last: BlockKey) -> ObjectEntry | None:
        """The entry of the object whose last block is `last`."""
        with self._lock:
            return self._by_last.get(last)

    def named(self, fingerprint: int) -> UnitHint | None:
        """The object whose name has this fingerprint."""
        with self._lock:
            return self._hints.named(fingerprint)

    def find(self, first: BlockKey, key: BlockKey, depth: int) -> ObjectEntry | None:
        """The entry of the longest object that begins with the block `first` and holds `key` at `depth` of the chain,
        among the WALK_MAX latest with that first block and the one that ends with `key`."""
        with self._lock:
            best: ObjectEntry | None = None
            for last in islice(reversed(self._by_first.get(first, {})), WALK_MAX):
                entry = self._by_last[last]
                if entry.holds(key, depth) and (best is None or entry.blocks > best.blocks):
                    best = entry
            exact = self._by_last.get(key) if best is None else None
            return exact if exact is not None and exact.holds(key, depth) else best

    def find_hint(self, first: BlockKey, key: BlockKey, depth: int) -> UnitHint | None:
        """The same among the hints of objects that have no entry: a header leaves nothing to be guessed."""
        with self._lock:
            return self._hints.find(first, key, depth, but=self._by_last)

    def sample(self, rng: random.Random) -> UnitHint | None:
        """A random one; None if there are none."""
        with self._lock:
            return self._hints.sample(rng)

    def holding(self, keys: Iterable[BlockKey]) -> list[ObjectEntry]:
        """All entries that hold any of `keys`. Searches all of them, beside lookups: for administration."""
        wanted: dict[Scope, set[bytes]] = {}
        for key in keys:
            wanted.setdefault(scope_of_key(key), set()).add(key[SCOPE_BYTES:])
        with self._lock:
            entries = list(self._by_last.values())
        frames = ((entry, wanted.get(entry.frame.scope)) for entry in entries)
        return [entry for entry, hashes in frames if hashes and not hashes.isdisjoint(entry.frame.hashes)]

    def touch(self, keys: Iterable[BlockKey], wall_s: Wall) -> None:
        """Objects whose last block is among `keys` were used, with all their blocks: chains are used from their heads
        on. One of which only the first blocks were used is left as it is, or its last blocks would outlive their
        terms. An expired one is not revived."""
        with self._lock:
            for last in self._by_last.keys() & set(keys):
                entry = self._by_last[last]
                self._by_last[last] = replace(entry, life=entry.life.used(wall_s))
                self._by_last.move_to_end(last)
                self._unrecorded.add(last)

    def unrecorded(self) -> list[ObjectEntry]:
        """Entries with uses that the bucket does not record yet."""
        with self._lock:
            return [self._by_last[last] for last in self._unrecorded]

    def mark_recorded(self, last: BlockKey, used: Wall) -> None:
        """The object's uses until `used` are recorded in the bucket, or need not be."""
        with self._lock:
            entry = self._by_last.get(last)
            if entry is None or entry.life.last_use <= used:
                self._unrecorded.discard(last)

    def put_absent(self, last: BlockKey, until_mono_s: Mono, why: Miss = Miss.ABSENT) -> None:
        """A probe found nothing to serve there: `absence` says why until then."""
        with self._lock:
            self._absent[last] = (until_mono_s, why)
            self._absent.move_to_end(last)
            while len(self._absent) > ABSENT_MAX:
                self._absent.popitem(last=False)

    def absence(self, last: BlockKey, mono_s: Mono) -> Miss | None:
        """Why a recent probe found nothing to serve there; None if none did."""
        with self._lock:
            until, why = self._absent.get(last, (0.0, None))
            return why if until > mono_s else None

    def clear(self) -> None:
        with self._lock:
            self._by_last.clear()
            self._by_first.clear()
            self._hints.clear()
            self._absent.clear()
            self._unrecorded.clear()

    def totals(self) -> tuple[int, int]:
        """(blocks, bytes) of all objects known, their sizes rounded up to a KiB."""
        return self._hints.blocks, self._hints.bytes

    def check(self) -> None:
        """Assert the index's invariants."""
        with self._lock:
            self._hints.check(self._stride)
            entries = list(self._by_last.values())
            assert sum(len(same) for same in self._by_first.values()) == len(entries), "index halves disagree"
            for last, entry in self._by_last.items():
                assert entry.last == last and last in self._by_first[entry.first], "entry under another's name"
                assert entry.frame.depth % self._stride == 0 and entry.blocks <= self._stride, "entry is no stride"
            assert len(entries) <= self._entries_max and self._unrecorded <= set(self._by_last), "index past its bounds"
