"""The state of a paged block pool: which slot holds which block, its users, and the order of eviction.

    allocate ──► in use, unnamed ──confirm──► in use, named ──free──► free, still named and hittable ──┐
       ▲              └──────────free──► head of the queue                    ▲         └──pin──► in use, named
       └──────────────────────── head of the queue ◄──────────────────────────┴──── oldest first ◄─────┘

Eviction is lazy: a freed block keeps its name until its slot is handed out, and slots are handed out least
recently freed first. A chain is freed tail first, so children leave before their parents. The free queue is
an OrderedDict: a doubly linked list in C, with removal from the middle in O(1).

No bytes, no torch, no clock of its own: the caller passes times and moves the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvtier.errors import CapacityError, ConfigError, InvalidRequest
from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Depth
from kvtier.tiers.device.dirty import Dirty, DirtyList
from kvtier.times import Mono, Wall

_RENEW_S = 1.0  # uses closer together than this renew a block's ttl only once


class BlockPool:
    """`blocks` slots, numbered from 0. One owner thread; nothing here blocks or waits.

    A slot has a reference count and at most one name. Slots that the caller got from `allocate` or `pin` are its to
    read, and to write if they came from `allocate`, until it passes them to `free`.

    `horizon` is how many of the slots that are handed out next `pick` looks at; `dirty_max_age_s` is how long a
    block may stay dirty outside it.
    """

    def __init__(self, blocks: int, *, horizon: int = 0, dirty_max_age_s: float = 5.0) -> None:
        if blocks < 1:
            raise ConfigError(f"a pool has at least 1 block, got {blocks}")
        self.blocks = blocks
        self.horizon = horizon
        self.dirty_max_age_s = dirty_max_age_s
        self.evicted = 0  # named blocks whose slot was handed out
        self.spill_lost = 0  # of these, blocks that no lower tier had
        self.on_lost: Callable[[Sequence[BlockKey]], None] | None = None  # called with blocks that no lower tier had
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._index: dict[BlockKey, int] = {}
        self._refs = [0] * blocks
        self._keys: list[BlockKey | None] = [None] * blocks
        self._lives: list[Lifetime | None] = [None] * blocks
        self._ends = [Wall(0)] * blocks  # when the block dies if it is never used again
        self._dirty = DirtyList()
        self._copying: dict[int, int] = {}  # slot → offload copies that read it

    # --- slots ---------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` slots with unspecified bytes, evicting the blocks that were freed longest ago.

        The caller owns one reference to each. Raises CapacityError, with nothing changed, when fewer are free; a
        free slot that an offload copy still reads does not count.
        """
        if count < 0 or count > self.free_blocks:
            raise CapacityError(f"{count} blocks wanted, {self.free_blocks} of {self.blocks} can be handed out")
        pop = self._free.popitem
        slots = [pop(False)[0] for _ in range(count)]
        if self._copying:
            slots = self._without_copying(slots, count)
        refs, keys, index = self._refs, self._keys, self._index
        resident = len(index)
        for slot in slots:
            refs[slot] = 1
            key = keys[slot]
            if key is not None:
                del index[key]
                keys[slot] = None
        self.evicted += resident - len(index)
        if self._dirty:
            lost = self._dirty.discard(slots)
            self.spill_lost += len(lost)
            if lost and self.on_lost is not None:
                self.on_lost(lost)
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Give back one reference to each of `slots`, which are in chain order: head first.

        A block without users stays hittable; its slot goes to the end of the queue, tail of the chain first.
        Slots without a name go to the head of it. Raises InvalidRequest, with nothing changed, for a slot that
        has no reference to give back.
        """
        refs, keys, queue = self._refs, self._keys, self._free
        if len(set(slots)) != len(slots) or min(map(refs.__getitem__, slots), default=1) < 1:
            raise InvalidRequest(f"slots {list(slots)!r}: each must be in use and named once")
        for slot in reversed(slots):
            left = refs[slot] - 1
            refs[slot] = left
            if not left:
                queue[slot] = None
                if keys[slot] is None:
                    queue.move_to_end(slot, last=False)

    @property
    def free_blocks(self) -> int:
        """How many slots `allocate` can hand out now."""
        if not self._copying:
            return len(self._free)
        return len(self._free) - sum(1 for slot in self._copying if not self._refs[slot])

    def _without_copying(self, slots: list[int], count: int) -> list[int]:
        """Replace the slots that a copy still reads by the next ones; the former stay first in the queue."""
        copying, queue = self._copying, self._free
        busy = [slot for slot in slots if slot in copying]
        slots = [slot for slot in slots if slot not in copying]
        while len(slots) < count:
            slot = queue.popitem(False)[0]
            (busy if slot in copying else slots).append(slot)
        for slot in reversed(busy):
            queue[slot] = None
            queue.move_to_end(slot, last=False)
        return slots

    # --- names ---------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[BlockKey], wall_s: Wall) -> list[int]:
        """The slots of the longest prefix of `keys` that is here and may be served at `wall_s`.

        Changes nothing and promises nothing: the next `allocate` may take the slots.
        """
        slots: list[int] = []
        append, find, ends = slots.append, self._index.get, self._ends
        for key in keys:
            slot = find(key)
            if slot is None or ends[slot] < wall_s:
                break
            append(slot)
        return slots

    def pin(self, keys: Sequence[BlockKey], wall_s: Wall, used_wall_s: Wall | None = None) -> list[int]:
        """`match`, and one reference to each slot found: they stay as they are until passed to `free`.

        Counts as a use of the blocks at `used_wall_s` (None: `wall_s`).
        """
        slots, used = self.match(keys, wall_s), wall_s if used_wall_s is None else used_wall_s
        refs, lives, queue = self._refs, self._lives, self._free
        fresh = used - _RENEW_S
        for slot in slots:
            if not refs[slot]:
                del queue[slot]
            refs[slot] += 1
            life = lives[slot]
            if life is not None and life.last_use < fresh:
                self._renew(slot, life.used(used))
        return slots

    def confirm(
        self,
        slots: Sequence[int],
        chain: Sequence[BlockKey],
        life: Lifetime,
        *,
        first: int = 0,
        dirty_since: Mono | None = None,
    ) -> None:
        """The step that filled `slots` has completed: slots[i] holds the block chain[first + i], whole.

        From now on they are hittable. `life` is joined with the terms that a block here carries already. With
        `dirty_since` they are new to the tiers below and wait on the dirty list; without, they came from there. Where
        another slot holds a block's name, that slot keeps it and this one stays unnamed. `chain` is kept by reference
        and must not change. Raises InvalidRequest, with nothing changed, for a slot that is not in use or that holds
        another block.
        """
        keys, refs, index, lives, ends = self._keys, self._refs, self._index, self._lives, self._ends
        if len(chain) < first + len(slots) or min(map(refs.__getitem__, slots), default=1) < 1:
            raise InvalidRequest(f"{len(slots)} slots in use and as many keys from {first} on are needed")
        names = chain[first : first + len(slots)]
        if any(keys[slot] is not None and keys[slot] != key for slot, key in zip(slots, names, strict=True)):
            raise InvalidRequest("a slot holds another block; allocate a new one")
        death = life.ends(Depth.G1)
        add = self._dirty.add
        for depth, (slot, key) in enumerate(zip(slots, names, strict=True), first):
            holder = index.get(key)
            if holder is not None and holder != slot and ends[holder] < life.last_use:
                self._unname(holder)
                holder = None
            if holder is None:
                index[key] = slot
                keys[slot] = key
                lives[slot] = life
                ends[slot] = death
                if dirty_since is not None:
                    add(slot, chain, depth, dirty_since)
            else:
                self._extend(holder, chain, depth, life, dirty_since)

    def _extend(
        self, slot: int, chain: Sequence[BlockKey], depth: int, life: Lifetime, dirty_since: Mono | None
    ) -> None:
        """Join a further request's terms with those of a block that is here; they may allow deeper tiers."""
        old = self._lives[slot]
        assert old is not None
        if old is life:
            return
        wanted = old.join(life, life.last_use)
        self._renew(slot, wanted)
        deeper = max(s.ceiling for s in wanted.stamps) > max(s.ceiling for s in old.stamps)
        key = chain[depth]
        if deeper and dirty_since is not None and slot not in self._copying and key not in self._dirty:
            # The slot's name becomes the object in this chain, since `holds` compares identity.
            del self._index[key]
            self._index[key] = slot
            self._keys[slot] = key
            self._dirty.add(slot, chain, depth, dirty_since)

    def _renew(self, slot: int, life: Lifetime) -> None:
        self._lives[slot] = life
        self._ends[slot] = life.ends(Depth.G1)

    def life(self, slot: int) -> Lifetime | None:
        """The terms on the block in `slot`; None for an unnamed slot."""
        return self._lives[slot] if self._keys[slot] is not None else None

    def evict(self, keys: Iterable[BlockKey] | None = None) -> int:
        """Drop the names in `keys` (None: all). Users of a dropped block keep its slot; no lookup finds it.

        Returns how many were here.
        """
        found = map(self._index.get, self._index if keys is None else keys)
        slots = [slot for slot in found if slot is not None]
        self._dirty.discard(slots)
        for slot in slots:
            self._unname(slot)
        return len(slots)

    def purge(self, scope: Scope) -> int:
        """`evict` every block of `scope`."""
        return self.evict([key for key in self._index if key.startswith(scope)])

    def drop_made_after(self, wall_s: Wall) -> int:
        """`evict` every block with a use or a stamp later than this time: a wrong clock made it."""
        lives = ((key, self._lives[slot]) for key, slot in self._index.items())
        return self.evict([key for key, life in lives if life is not None and max(life.last_use, life.born) > wall_s])

    def _unname(self, slot: int) -> None:
        key = self._keys[slot]
        assert key is not None
        del self._index[key]
        self._keys[slot] = None
        self._dirty.discard((slot,))
        if not self._refs[slot]:
            self._free.move_to_end(slot, last=False)

    # --- offload -------------------------------------------------------------------------------------------

    def pick(self, limit: int, mono_s: Mono, *, ahead: int | None = None) -> list[Dirty]:
        """Take up to `limit` dirty blocks to copy out: first those in the eviction horizon, then those dirty for
        longer than `dirty_max_age_s` at `mono_s`; ancestors before descendants. `ahead` is the length of
        the horizon where it must differ, as before a large `allocate`.

        The copy holds a reference: the slots keep their bytes and their place in the queue until `copies_done`.
        """
        picked = self._dirty.pick(
            islice(self._free, self.horizon if ahead is None else ahead), limit, mono_s - self.dirty_max_age_s
        )
        for dirty in picked:
            self._copying[dirty.slot] = self._copying.get(dirty.slot, 0) + 1
        return picked

    def clean_ahead(self, count: int) -> int:
        """How many of the next `count` slots `allocate` can hand out before the first whose block is dirty."""
        if not self._dirty:
            return min(count, self.free_blocks)
        clean = 0
        for slot in self._free:
            if clean == count or self._dirty.at(slot):
                break
            clean += slot not in self._copying
        return clean

    def holds(self, dirty: Dirty) -> bool:
        """Whether the slot still carries this very block: ask before committing a copy of it."""
        return self._keys[dirty.slot] is dirty.key

    def copies_done(self, picked: Sequence[Dirty], *, again_since: Mono | None = None) -> None:
        """The copies of `picked` have ended, and read these slots no more.

        With `again_since` they did not arrive: the blocks are dirty again, where the slot still holds them.
        """
        for dirty in picked:
            left = self._copying.pop(dirty.slot) - 1
            if left:
                self._copying[dirty.slot] = left
            if again_since is not None and self.holds(dirty):
                self._dirty.add(dirty.slot, dirty.chain, dirty.depth, again_since)

    # --- facts ---------------------------------------------------------------------------------------------

    @property
    def resident(self) -> int:
        """How many blocks can be found by name."""
        return len(self._index)

    @property
    def dirty(self) -> int:
        """How many blocks no lower tier has and no copy is under way for."""
        return len(self._dirty)

    def check(self) -> None:
        """Assert every invariant. Reads the whole pool."""
        everyone = range(self.blocks)
        assert all(refs >= 0 for refs in self._refs)
        assert set(self._free) == {s for s in everyone if not self._refs[s]}, "free queue and reference counts disagree"
        named = {s for s in everyone if self._keys[s] is not None}
        assert set(self._index.values()) == named and len(self._index) == len(named), "index and slots disagree"
        assert all(self._keys[slot] is key for key, slot in self._index.items()), "a name is not its slot's object"
        assert all(self._lives[slot] is not None for slot in named)
        queue = [slot in named for slot in self._free]
        assert queue == sorted(queue), "a slot without a name waits behind one with a name"
        self._dirty.check()
        for dirty in self._dirty:
            assert self.holds(dirty), "a dirty block is not in its slot"
        assert all(count > 0 and slot in everyone for slot, count in self._copying.items())
