"""G2: blocks in host RAM, found by key.

Only READY slots are in the index; `kvtier.tiers.host.slot` draws a slot's life. The tier holds no lock of its own: its
owner calls it under one lock (`kvtier.manager`), so that lookup and pin are one critical section.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from kvtier.errors import ClosedError
from kvtier.events import Notify
from kvtier.identity.key_map import KeyMap
from kvtier.identity.key_parts import KeyParts
from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.policies.no_order import NoOrder
from kvtier.policies.policy import Policy
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import PRIORITY, PRIORITY_MAX, Depth
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.index import SlotIndex
from kvtier.tiers.host.pins import Hold, Holds, SlotPins
from kvtier.tiers.host.priorities import Priorities
from kvtier.tiers.host.quota import Quota
from kvtier.tiers.host.refusals import Refusals
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.host.slot_table import FILLING, QUARANTINED, READY, SlotTable
from kvtier.tiers.host.slots_in_use import SLICE_NS, SlotsInUse
from kvtier.tiers.host.victims import Victims
from kvtier.tiers.protocol import Miss
from kvtier.times import Wall

_EPOCH, _NO_END = Wall(0), Wall("inf")

_SLICE_SLOTS = 16  # between two looks at it


class HostTier:
    """Fixed slots in an arena, an index of READY blocks, and a policy that chooses which leave.

    The tier reports arrivals and departures to `policy`; its owner reports references, and has it trained.
    """

    name = "g2"
    depth = Depth.G2

    def __init__(self, arena: Arena, policy: Policy, quota: float = 0.0) -> None:
        """`quota`: the share of the slots that one scope may have; 0: all."""
        self.block_bytes = arena.piece_bytes * arena.ranks
        self.arena = arena
        self.policy: Policy = policy
        self._share = quota
        self.refusals = Refusals(self._lay_out(0))
        self._retained = KeyMap[None]()  # READY, and removed from the policy
        self._priorities = Priorities()  # of READY slots
        self.quota = Quota(0.0, 0)
        self.notify: Notify | None = None  # called with blocks that become visible or cease to be
        self.on_lost: Callable[[BlockKey, Miss], None] | None = None  # called with each block that is evicted, and why
        self.evictions = self.stale_messages = self.quarantined = 0
        self._ended = False  # closed, after it was open

    def open(self) -> None:
        """Allocate the arena, once. Raises ConfigError when memory is short of one block, ClosedError after `close`."""
        if self._ended:
            raise ClosedError("a closed cache is not opened again; open another")
        self.arena.open()
        self.refusals.table = self._lay_out(self.arena.slots)
        index = self.index  # of this policy: whoever is at work with both goes on when `vacate` has taken them away
        self.policy.attach(lambda key: index[key].priority, scoped=bool(self._share))
        self.quota = Quota(self._share, self.capacity)

    def _lay_out(self, slots: int) -> SlotTable:
        """Have so many slots, all FREE. Whoever has an earlier one goes on seeing the old table."""
        self._table = SlotTable(self.arena, slots)
        self._free = deque(range(slots))  # numbers of slots, as in `index.parts`
        self.in_use = SlotsInUse(slots, self._free)
        self._filling = KeyParts().dicts  # slots of FILLING blocks
        self.index, self.pins = SlotIndex(self._table), SlotPins(self._table)
        return self._table

    @property
    def capacity(self) -> int:
        """Slots that may be used: those of the arena, until `resize`."""
        return self.in_use.capacity

    @property
    def capacity_bytes(self) -> int:
        return self.capacity * self.arena.slot_bytes * self.arena.ranks

    def resize(self, slots: int) -> None:
        """Use so many of the arena's slots, and of these a scope its share. The owner has `in_use` follow."""
        self.in_use.capacity = slots
        self.quota.resize(slots)
        self.policy.resize(slots)

    def evict_coldest(self, scope: Scope | None, wall_s: Wall) -> bool:
        """Free the slot of the coldest block, `scope`'s if one is given. False: all of them are pinned or retained."""
        victims = Victims(self._table, self.index.parts, self.policy, self._priorities.levels, None, wall_s)
        gone = victims.evict((None,), 0, insist=False, priority=PRIORITY_MAX, scope=scope)
        self._evicted(gone, wall_s)
        return bool(gone)

    def peek(self, key: BlockKey, wall_s: Wall) -> Miss | None:
        """None if a READY block of this name may be served at `wall_s`, else why not. Changes nothing."""
        number = self.index.parts[key[-1]].get(key)
        if number is not None:
            if self.refusals.dropping and self.refusals.covers(number):
                return Miss.PURGED
            return Miss.EXPIRED if self._table.has_ended(number, wall_s) else None
        return Miss.PENDING if key in self._filling[key[-1]] else Miss.ABSENT

    def busy(self) -> bool:
        """Whether some slot is pinned, being filled or quarantined, and so becomes evictable by itself."""
        return bool(self.pins.slots or any(self._filling))

    @property
    def pinned(self) -> int:
        """How many READY blocks are pinned."""
        return self.pins.slots - self.quarantined

    def prefix(self, chain: Sequence[BlockKey], wall_s: Wall) -> int:
        """How many leading blocks of `chain` are READY and alive at `wall_s`. Changes nothing."""
        return len(self.index.leading(chain, wall_s, self._refused()))

    def _refused(self) -> Callable[[int], bool] | None:
        """Which slots have blocks that are here and may not be served, while there may be some."""
        return self.refusals.covers if self.refusals.dropping else None

    def pin(self, key: BlockKey, wall_s: Wall, used_wall_s: Wall | None = None) -> Slot | None:
        """Exempt a READY block that is alive at `wall_s` from eviction; None if there is none. Undo with `unpin`.

        `used_wall_s`: the time of the use, which renews the block; None where it is moved in the background, which is
        no use of it.
        """
        number, table = self.index.parts[key[-1]].get(key), self._table
        if number is None or self._is_over(number, wall_s):
            return None
        self.pins.pin(number)
        if used_wall_s is not None:
            table.use(number, used_wall_s)
        return Slot(number, table)

    def pin_leading(self, keys: Sequence[BlockKey], wall_s: Wall, used_wall_s: Wall) -> Holds:
        """`pin` for the leading `keys`, up to the first that has no such block."""
        return self.pins.add_all(self.index.leading(keys, wall_s, self._refused()), used_wall_s)

    def unpin(self, slot: Slot, generation: int) -> None:
        """`unpin_all` for one."""
        self.unpin_all(((slot, generation),))

    def unpin_all(self, holds: Iterable[Hold]) -> None:
        """Undo one `pin` of each. A slot that was dropped meanwhile is freed with its last. Stale: counted, ignored."""
        waiting, stale = self.pins.drop(holds)
        self.stale_messages += stale
        table = self._table
        for number in waiting:
            if table.states[number] == QUARANTINED:
                self.quarantined -= 1
                self._release(number)
            else:
                self.policy.resume(table.keys[number])

    def reserve(
        self,
        key: BlockKey,
        index: int,
        exempt: Callable[[BlockKey], bool] | None = None,
        *,
        insist: bool = False,
        priority: int = PRIORITY,
        wall_s: Wall = _EPOCH,
    ) -> Slot | None:
        """`reserve_leading` for one block at depth `index`. None: it is READY or FILLING already, or nothing may be
        evicted."""
        self.find(key)  # drops one that is refused
        numbers, _ = self.reserve_leading((key,), index, exempt, insist=insist, priority=priority, wall_s=wall_s)
        return Slot(numbers[0], self._table) if numbers else None

    def reserve_leading(
        self,
        keys: Sequence[BlockKey],
        depth: int,
        exempt: Callable[[BlockKey], bool] | None,
        *,
        insist: bool,
        priority: int,
        wall_s: Wall,
    ) -> tuple[list[int], bool]:
        """FILLING slots for the leading `keys`, which lie at `depth` and below, up to the first that is READY or
        FILLING: their numbers, the caller's until `commit` or `abort`, and whether there was room for all of these.

        Takes free slots, else evicts the policy's choice among blocks that are neither pinned nor `exempt`: the lowest
        priority first, and none above `priority`. With `insist` the policy may choose, but not refuse, and any priority
        gives way. Blocks that have expired at `wall_s` have none. A scope at its quota gives up a block of its own.
        A block for which nothing may be evicted changes nothing.
        """
        parts, filling, free, quota = self.index.parts, self._filling, self._free, self.quota
        limited, numbers, room, victims = quota.limited, list[int](), True, None
        for at, key in enumerate(keys):
            if key in parts[key[-1]] or key in filling[key[-1]]:
                break
            full = limited and quota.full(key)
            if full or not free:
                if victims is None:
                    levels = self._priorities.levels
                    victims = Victims(self._table, parts, self.policy, levels, exempt, wall_s)
                wanting = keys[at : at + 1] if limited else self.index.absent(keys[at:], filling)
                scope = scope_of_key(key) if full else None
                gone = victims.evict(wanting, depth + at, insist=insist, priority=priority, scope=scope)
                if not gone:
                    quota.refused += full
                    room = False
                    break
                self._evicted(gone, wall_s)
            if limited:
                quota.take(key)
            filling[key[-1]][key] = number = free.popleft()
            numbers.append(number)
        self._table.take(numbers, keys, depth, priority)
        return numbers, room

    def _evicted(self, victims: Sequence[BlockKey], wall_s: Wall) -> None:
        """These were taken from the policy for others."""
        parts, ended = self.index.parts, self._table.has_ended
        numbers = [parts[key[-1]].pop(key) for key in victims]
        self.evictions += len(victims)
        if self.on_lost is not None:
            for key, number in zip(victims, numbers, strict=True):
                self.on_lost(key, Miss.EXPIRED if ended(number, wall_s) else Miss.EVICTED)
        self._left(victims, numbers)

    def commit(
        self,
        slot: Slot,
        generation: int,
        life: Lifetime | None = None,
        digest: bytes | None = None,
        priority: int | None = None,
    ) -> bool:
        """Describe and publish a FILLING slot's block.

        False if it must not be seen: the generation is stale (counted), or its scope was purged since the block was
        made (the slot is free again). There is no other way to become visible in G2. `tell` follows.
        """
        slot.describe(generation, life, digest, priority)
        return bool(self.commit_all(((slot, generation),)))

    def commit_all(self, holds: Iterable[Hold], latest: Wall = _NO_END) -> list[Slot]:
        """`commit` for several, as they are described. Returns those that are seen: none with a time after `latest`."""
        table, seen, keys, numbers = self._table, list[Slot](), list[BlockKey](), list[int]()
        states, generations, names, filling = table.states, table.generations, table.keys, self._filling
        parts, refused = self.index.parts, self.refusals.at_commit(latest)
        for slot, generation in holds:
            number = slot.number
            if slot.table is not table or states[number] != FILLING or generations[number] != generation:
                self.stale_messages += 1
                continue
            key = names[number]
            del filling[key[-1]][key]
            if refused is not None and refused(number):
                self._release(number)
                continue
            states[number] = READY
            parts[key[-1]][key] = number
            seen.append(slot)
            keys.append(key)
            numbers.append(number)
        self.index.added(len(keys))
        depths, priorities = table.depths, [table.priorities[number] for number in numbers]
        self._priorities.take(priorities)
        self.policy.insert_all(keys, [depths[number] for number in numbers])
        if priorities.count(PRIORITY) < len(keys):
            for key, priority in zip(keys, priorities, strict=True):
                if priority != PRIORITY:
                    self.policy.regrade(key)
        return seen

    def tell(self, slots: Sequence[Slot]) -> None:
        """Notify of blocks that were just committed, under the same lock."""
        if self.notify is not None:
            names = self._table.keys  # each is there: nobody has had the lock since
            self.notify([names[slot.number] for slot in slots], True)

    def _is_filling(self, slot: Slot, generation: int) -> bool:
        """Whether this generation of a slot is FILLING; else a message about it is stale."""
        number, table = slot.number, self._table
        filling = slot.table is table and table.states[number] == FILLING
        return filling and table.generations[number] == generation

    def abort(self, slot: Slot, generation: int, *, in_flight: bool = False) -> None:
        """Give up a FILLING slot. With `in_flight` a copy may still write to it: it is quarantined until `unpin`.
        Stale: counted, ignored."""
        if not self._is_filling(slot, generation):
            self.stale_messages += 1
            return
        key = self._table.keys[number := slot.number]
        del self._filling[key[-1]][key]
        if in_flight:
            self._table.states[number], self._table.waiting[number] = QUARANTINED, True
            self.pins.pin(number)  # the writer's
            self.quarantined += 1
        else:
            self._release(number)

    def drop(self, key: BlockKey) -> bool:
        """Take a READY block out of the index. Its slot is freed at once or with its last pin. False: there is none."""
        number = self.index.parts[key[-1]].pop(key, None)
        if number is None:
            return False
        self.policy.remove(key, self._table.depths[number])
        self._left((key,), (number,))
        return True

    def _left(self, keys: Sequence[BlockKey], numbers: Sequence[int]) -> None:
        """Blocks have left the index and the policy."""
        table = self._table
        pins, states, priorities = table.pins, table.states, table.priorities
        if self._retained:
            self._retained.drop_all(keys)
        self._priorities.give([priorities[number] for number in numbers])
        if self.notify is not None:
            self.notify(keys, False)
        for number in numbers:
            if pins[number]:
                states[number], table.waiting[number] = QUARANTINED, True
                self.quarantined += 1
            else:
                self._release(number)

    def raise_priority(self, slot: Slot, priority: int) -> None:
        """Let a READY block have the priority of a further request, where that is higher."""
        if priority > slot.priority:
            self._priorities.give((slot.priority,))
            self._table.priorities[slot.number] = priority
            self._priorities.take((priority,))
            self.policy.regrade(self._table.keys[slot.number])

    def retain(self, keys: Iterable[BlockKey]) -> None:
        """Exempt these blocks, as far as they are READY, from eviction until `release_retained`. Idempotent."""
        for key in keys:
            slot = self.index.get(key)
            if slot is not None and key not in self._retained:
                self._retained[key] = None
                self.policy.remove(key, slot.index, returns=True)

    def release_retained(self, keys: Iterable[BlockKey]) -> None:
        """Undo `retain`; keys that are not retained are ignored."""
        for key in keys:
            if key in self._retained:
                del self._retained[key]
                self.policy.insert(key, (slot := self.index[key]).index)
                if slot.priority != PRIORITY:
                    self.policy.regrade(key)

    @property
    def retained(self) -> Collection[BlockKey]:
        """The blocks that are retained."""
        return self._retained

    def find(self, key: BlockKey, wall_s: Wall = _EPOCH) -> int | None:
        """The number of a READY block's slot. A block that may not be served any more is dropped, and not found: it is
        being dropped, or has expired at `wall_s`."""
        number = self.index.parts[key[-1]].get(key)
        if number is not None and self._is_over(number, wall_s):
            self.drop(key)
            return None
        return number

    def _is_over(self, number: int, wall_s: Wall) -> bool:
        """Whether the READY block in a slot may not be served any more."""
        return self._table.has_ended(number, wall_s) or (self.refusals.dropping and self.refusals.covers(number))

    def find_leading(self, keys: Sequence[BlockKey], wall_s: Wall) -> list[int]:
        """`find` for the leading `keys`, up to the first that is not found."""
        numbers = self.index.leading(keys, wall_s, self._refused())
        if len(numbers) < len(keys):
            self.find(keys[len(numbers)], wall_s)
        return numbers

    def drop_where(
        self,
        matches: Callable[[int], bool],
        among: Collection[Scope] | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> Iterator[int]:
        """Drop READY blocks whose slots match, `among` those of these scopes (None: all), in slices: each step takes
        at most SLICE_NS or so under the owner's lock, which it may release in between, and gives how many went. The
        last is followed by `then` and the end of the iteration. Blocks that arrive meanwhile may go too."""
        table, dropped, began = self._table, 0, time.thread_time_ns()
        for part in table.marks.find(among, _SLICE_SLOTS):
            for number in part:
                if table.states[number] == READY and matches(number):
                    dropped += self.drop(table.keys[number])
            if time.thread_time_ns() - began > SLICE_NS:
                yield dropped
                dropped, began = 0, time.thread_time_ns()
        yield dropped
        then()

    def refuse_made_after(self, wall_s: Wall) -> Iterator[int]:
        """Blocks that carry a later use or stamp are misses from now on: the clock that made it was wrong. Returns the
        slices in which they are dropped, which the owner has to run to the end."""
        self.refusals.begin_later_than(wall_s)
        later = partial(self.refusals.end_later_than, wall_s)
        return self.drop_where(lambda number: self.refusals.made(number) > wall_s, then=later)

    def apply_tombstones(self, tombstones: Mapping[Scope, Wall]) -> Iterator[int]:
        """Blocks of these scopes' tenants that were made until the given times are misses from now on, and none is
        admitted again. Returns the slices in which they are dropped, which the owner has to run to the end."""
        news = self.refusals.purge(tombstones)
        if not news or not self.index:
            return iter(())
        self.refusals.begin(news.keys())
        return self.drop_where(self.refusals.has_purged, news, then=partial(self.refusals.end, news))

    def filling(self) -> list[BlockKey]:
        """The blocks whose slots are FILLING."""
        return [key for part in self._filling for key in part]

    def _release(self, number: int) -> None:
        if self.quota.limited:
            self.quota.give(self._table.keys[number])
        self._table.free(number)
        self._free.append(number)

    def check(self) -> None:
        """Assert the invariants: slots conserved, index and states agree, policy orders exactly the residents."""
        table, ready = self._table, {key: number for part in self.index.parts for key, number in part.items()}
        filling = {key: number for part in self._filling for key, number in part.items()}
        table.check([*self._free, *self.in_use.unused], filling, ready)
        quarantined, pinned = table.states.count(QUARANTINED), sum(pins > 0 for pins in table.pins)
        assert (self.quarantined, self.pins.slots) == (quarantined, pinned), "slots are miscounted"
        assert self._retained.keys() <= self.index.keys(), "a block is retained that is not here"
        self.policy.check(ready.keys() - self._retained.keys())
        self._priorities.check(table.priorities[number] for number in ready.values())
        self.quota.check([key for key in table.keys if key is not None])

    def vacate(self) -> object:
        """Forget every block, for good. Pins and slots that are still out are void: their `unpin`, `commit` and `abort`
        are stale. Returns what it had, for the owner to drop when it has released its lock, and then closes the arena:
        a million blocks take a tenth of a second."""
        self._ended = self._ended or bool(self._table)
        self.quarantined = 0
        tables = self._table, self.index, self._filling, self._free, self._retained, self.policy
        self._retained, self._priorities, self.policy = KeyMap(), Priorities(), NoOrder()
        self.refusals.table = self._lay_out(0)
        return tables
