"""G2: blocks in host RAM, found by key.

Only READY slots are in the index; `kvtier.tiers.host.slot` draws a slot's life. The tier holds no lock of its own: its
owner calls it under one lock (`kvtier.manager`), so that lookup and pin are one critical section.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from kvtier.errors import ClosedError
from kvtier.events import Notify
from kvtier.identity.keys import BlockKey, Scope, scope_of_key, tenant_of
from kvtier.policies.no_order import NoOrder
from kvtier.policies.policy import Policy
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import PRIORITY, PRIORITY_MAX, Depth
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.index import SlotIndex
from kvtier.tiers.host.pins import Hold, SlotPins
from kvtier.tiers.host.quota import Quota
from kvtier.tiers.host.scope_marks import ScopeMarks
from kvtier.tiers.host.slot import Slot, SlotState
from kvtier.tiers.protocol import Miss
from kvtier.times import Wall

_EPOCH = Wall(0)
_ANY_TIME, _NEVER = Wall("inf"), Wall("-inf")

SLICE_NS = 1_000_000
"""Thread CPU time of one slice of `drop_where`."""
_SLICE_SLOTS = 32  # between two looks at it


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
        self._slots: list[Slot] = []
        self._free: deque[Slot] = deque()
        self._marks = ScopeMarks(0)
        self._filling: dict[BlockKey, Slot] = {}
        self.index = SlotIndex()
        self._retained: set[BlockKey] = set()  # READY, and removed from the policy
        self._priorities: Counter[int] = Counter()  # of READY slots
        self._tombstones: dict[Scope, Wall] = {}
        self._purging: Counter[Scope] = Counter()  # whose purged blocks are still being dropped
        self._made_max = _ANY_TIME  # later blocks are still being dropped
        self._dropping = False  # whether either is under way: lookups look closer then
        self.quota = Quota(None)
        self.notify: Notify | None = None  # called with blocks that become visible or cease to be
        self.on_lost: Callable[[BlockKey, Miss], None] | None = None  # called with each block that is evicted, and why
        self.evictions = 0
        self.stale_messages = 0
        self.quarantined = 0
        self.pins = SlotPins()
        self._ended = False  # closed, after it was open
        policy.attach(lambda key: self.index[key].priority, scoped=bool(quota))

    def open(self) -> None:
        """Allocate the arena, once. Raises ConfigError when memory is short of one block, ClosedError after `close`."""
        if self._ended:
            raise ClosedError("a closed cache is not opened again; open another")
        self.arena.open()
        self._slots = [Slot(number, self.arena) for number in range(self.arena.slots)]
        self._free, self._marks = deque(self._slots), ScopeMarks(len(self._slots))
        if self._share:
            self.quota = Quota(max(1, int(self._share * len(self._slots))))

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return len(self._slots)

    @property
    def capacity_bytes(self) -> int:
        return self.arena.capacity_bytes

    def peek(self, key: BlockKey, wall_s: Wall) -> Miss | None:
        """None if a READY block of this name may be served at `wall_s`, else why not. Changes nothing."""
        slot = self.index.parts[key[-1]].get(key)
        if slot is not None:
            if self._dropping and self._is_gone(slot):
                return Miss.PURGED
            return None if slot.expires_at >= wall_s else Miss.EXPIRED
        return Miss.PENDING if key in self._filling else Miss.ABSENT

    def busy(self) -> bool:
        """Whether some slot is pinned, being filled or quarantined, and so becomes evictable by itself."""
        return bool(self.pins.slots or self._filling)

    @property
    def pinned(self) -> int:
        """How many READY blocks are pinned."""
        return self.pins.slots - self.quarantined

    def prefix(self, chain: Sequence[BlockKey], wall_s: Wall) -> int:
        """How many leading blocks of `chain` are READY and alive at `wall_s`. Changes nothing."""
        parts, dropping, count = self.index.parts, self._dropping, 0
        for key in chain:
            slot = parts[key[-1]].get(key)
            if slot is None or slot.expires_at < wall_s or (dropping and self._is_gone(slot)):
                break
            count += 1
        return count

    def pin(self, key: BlockKey, wall_s: Wall, used_wall_s: Wall | None = None) -> Slot | None:
        """Exempt a READY block that is alive at `wall_s` from eviction; None if there is none. Undo with `unpin`.

        `used_wall_s`: the time of the use, which renews the block; None where it is moved in the background, which is
        no use of it.
        """
        slot = self.index.parts[key[-1]].get(key)
        if slot is None or slot.expires_at < wall_s or (self._dropping and self._is_gone(slot)):
            return None
        self.pins.add(slot)
        if used_wall_s is not None:
            slot.use(used_wall_s)
        return slot

    def pin_leading(self, keys: Iterable[BlockKey], wall_s: Wall, used_wall_s: Wall) -> list[Hold]:
        """`pin` for the leading `keys`, up to the first that has no such block."""
        gone = self._is_gone if self._dropping else None
        return self.pins.add_leading(self.index.parts, keys, wall_s, used_wall_s, gone)

    def unpin(self, slot: Slot, generation: int) -> None:
        """`unpin_all` for one."""
        self.unpin_all(((slot, generation),))

    def unpin_all(self, holds: Iterable[Hold]) -> None:
        """Undo one `pin` of each. A slot that was dropped meanwhile is freed with its last. Stale: counted, ignored."""
        waiting, stale = self.pins.drop(holds)
        self.stale_messages += stale
        for slot in waiting:
            if slot.state is SlotState.QUARANTINED:
                self.quarantined -= 1
                self._release(slot)
            elif slot.key is not None:
                self.policy.resume(slot.key)

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
        """A FILLING slot for `key`, the caller's until `commit` or `abort`.

        Takes a free slot, else evicts the policy's choice among blocks that are neither pinned nor `exempt`: the lowest
        priority first, and none above `priority`. With `insist` the policy may choose, but not refuse, and any priority
        gives way. Blocks that have expired at `wall_s` have none. A scope at its quota gives up a block of its own.
        None when the key is READY or FILLING already, or nothing may be evicted: then nothing has changed.
        """
        if key in self._filling or (key in self.index.parts[key[-1]] and not self.drop_dead(key, None)):
            return None
        full = self.quota.full(key)
        if full or not self._free:
            victim = self._victim(key, index, exempt, insist, priority, scope_of_key(key) if full else None, wall_s)
            if victim is None:
                self.quota.refused += full
                return None
            self.evictions += 1
            if self.on_lost is not None:
                slot = self.index.parts[victim[-1]][victim]
                self.on_lost(victim, Miss.EXPIRED if slot.expires_at < wall_s else Miss.EVICTED)
            self.drop(victim)
        slot = self._free.popleft()
        slot.state, slot.key, slot.index, slot.priority = SlotState.FILLING, key, index, priority
        self._marks.set(slot.number, key)
        self._filling[key] = slot
        self.quota.take(key)
        return slot

    def _victim(
        self,
        newcomer: BlockKey,
        depth: int,
        exempt: Callable[[BlockKey], bool] | None,
        insist: bool,
        priority: int,
        scope: Scope | None,
        wall_s: Wall,
    ) -> BlockKey | None:
        pinned: list[Slot] = []

        def movable(key: BlockKey) -> bool:
            slot = self.index.parts[key[-1]][key]
            if slot.pins:
                pinned.append(slot)
                return False
            if (exempt and exempt(key)) or (slot.priority > limit and slot.expires_at >= wall_s):
                return False
            return scope is None or scope_of_key(key) == scope

        limits: Sequence[int] = (priority,)
        if len(self._priorities) > 1:
            limits = sorted({min(level, priority) for level in self._priorities})
        for limit in limits:
            victim = self.policy.victim(newcomer, movable, depth=depth, scope=scope, priority_max=limit)
            if pinned:
                self._suspend(pinned)
            if victim is not None:
                return victim
        for limit in [*sorted(self._priorities), PRIORITY_MAX] if insist else ():
            victim = self.policy.victim(None, movable, scope=scope, priority_max=limit)
            if pinned:
                self._suspend(pinned)
            if victim is not None:
                return victim
        return None

    def _suspend(self, pinned: list[Slot]) -> None:
        """Have the policy leave these blocks out until their last unpin; empties the list."""
        for slot in pinned:
            slot.suspended = True
            assert slot.key is not None
            self.policy.suspend(slot.key)
        pinned.clear()

    def commit(
        self,
        slot: Slot,
        generation: int,
        life: Lifetime | None = None,
        digest: bytes | None = None,
        priority: int | None = None,
    ) -> bool:
        """Publish a FILLING slot's block; `life` None: the one it was stamped with; `priority` None: that of `reserve`.

        False if it must not be seen: the generation is stale (counted), or its scope was purged since the block was
        made (the slot is free again). There is no other way to become visible in G2. `tell` follows.
        """
        if slot.generation != generation or slot.state is not SlotState.FILLING or slot.key is None:
            self.stale_messages += 1
            return False
        del self._filling[slot.key]
        if life is not None:
            slot.life = life
        if self._tombstones and self._is_purged(slot):
            self._release(slot)
            return False
        if priority is not None:
            slot.priority = priority
        slot.state, slot.digest = SlotState.READY, digest
        self.index.parts[slot.key[-1]][slot.key] = slot
        self._priorities[slot.priority] += 1
        self.policy.insert(slot.key, slot.index)
        if slot.priority != PRIORITY:
            self.policy.regrade(slot.key)
        return True

    def tell(self, slots: Sequence[Slot]) -> None:
        """Notify of blocks that were just committed, under the same lock."""
        if self.notify is not None:
            self.notify([slot.key for slot in slots if slot.key is not None], True)

    def abort(self, slot: Slot, generation: int, *, in_flight: bool = False) -> None:
        """Give up a FILLING slot. With `in_flight` a copy may still write to it: it is quarantined until `unpin`.
        Stale: counted, ignored."""
        if slot.generation != generation or slot.state is not SlotState.FILLING or slot.key is None:
            self.stale_messages += 1
            return
        del self._filling[slot.key]
        if in_flight:
            slot.state = SlotState.QUARANTINED
            self.pins.add(slot)  # the writer's
            self.quarantined += 1
        else:
            self._release(slot)

    def drop(self, key: BlockKey) -> bool:
        """Take a READY block out of the index. Its slot is freed at once or with its last pin. False: there is none."""
        slot = self.index.parts[key[-1]].pop(key, None)
        if slot is None:
            return False
        self.policy.remove(key, slot.index)
        self._retained.discard(key)
        self._count_out(slot.priority)
        if self.notify is not None:
            self.notify((key,), False)
        if slot.pins:
            slot.state = SlotState.QUARANTINED
            self.quarantined += 1
        else:
            self._release(slot)
        return True

    def _count_out(self, priority: int) -> None:
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]

    def raise_priority(self, slot: Slot, priority: int) -> None:
        """Let a READY block have the priority of a further request, where that is higher."""
        if priority > slot.priority:
            self._count_out(slot.priority)
            slot.priority = priority
            self._priorities[priority] += 1
            assert slot.key is not None
            self.policy.regrade(slot.key)

    def retain(self, keys: Iterable[BlockKey]) -> None:
        """Exempt these blocks, as far as they are READY, from eviction until `release_retained`. Idempotent."""
        for key in keys:
            if key in self.index and key not in self._retained:
                self._retained.add(key)
                self.policy.remove(key, self.index[key].index)

    def release_retained(self, keys: Iterable[BlockKey]) -> None:
        """Undo `retain`; keys that are not retained are ignored."""
        for key in keys:
            if key in self._retained:
                self._retained.remove(key)
                self.policy.insert(key, self.index[key].index)
                if self.index[key].priority != PRIORITY:
                    self.policy.regrade(key)

    @property
    def retained(self) -> int:
        """How many blocks are retained."""
        return len(self._retained)

    def drop_dead(self, key: BlockKey, wall_s: Wall | None) -> bool:
        """Drop a READY block that may not be served any more: it is being dropped, or has expired at `wall_s`."""
        slot = self.index[key]
        expired = wall_s is not None and slot.expires_at < wall_s
        return (expired or (self._dropping and self._is_gone(slot))) and self.drop(key)

    def drop_where(self, matches: Callable[[Slot], bool], among: Collection[Scope] | None = None) -> Iterator[int]:
        """Drop the READY blocks that match, `among` the blocks of these scopes (None: all), in slices: each step takes
        at most SLICE_NS or so under the owner's lock, which it may release in between, and gives how many went. The
        last is followed by the end of the iteration. Blocks that arrive meanwhile may go too."""
        slots, dropped, began = self._slots, 0, time.thread_time_ns()
        for part in self._marks.find(among, _SLICE_SLOTS):
            for slot in map(slots.__getitem__, part):
                if slot.state is SlotState.READY and matches(slot) and slot.key is not None:
                    dropped += self.drop(slot.key)
            if time.thread_time_ns() - began > SLICE_NS:
                yield dropped
                dropped, began = 0, time.thread_time_ns()
        yield dropped

    def refuse_made_after(self, wall_s: Wall) -> Iterator[int]:
        """Blocks that carry a later use or stamp are misses from now on: the clock that made it was wrong. Returns the
        slices in which they are dropped, which the owner has to run to the end."""
        self._made_max, self._dropping = min(wall_s, self._made_max), True
        return self._drop_later_than(wall_s)

    def _drop_later_than(self, wall_s: Wall) -> Iterator[int]:
        yield from self.drop_where(lambda slot: max(slot.last_use, slot.life.born) > wall_s)
        if self._made_max == wall_s:
            self._made_max, self._dropping = _ANY_TIME, bool(self._purging)

    def apply_tombstones(self, tombstones: Mapping[Scope, Wall]) -> Iterator[int]:
        """Blocks of these scopes' tenants that were made until the given times are misses from now on, and none is
        admitted again. Returns the slices in which they are dropped, which the owner has to run to the end."""
        news = {tenant_of(scope): before for scope, before in tombstones.items() if before > self.purged_until(scope)}
        self._tombstones.update(news)
        if not news or not self.index:
            return iter(())
        self._purging.update(news.keys())
        self._dropping = True
        return self._drop_purged(news)

    def _drop_purged(self, scopes: Collection[Scope]) -> Iterator[int]:
        yield from self.drop_where(lambda slot: slot.key is not None and self._is_purged(slot), scopes)
        self._purging.subtract(scopes)
        self._purging = +self._purging
        self._dropping = bool(self._purging) or self._made_max < _ANY_TIME

    def _is_gone(self, slot: Slot) -> bool:
        return max(slot.last_use, slot.life.born) > self._made_max or self._is_purged(slot)

    @property
    def tombstones(self) -> Mapping[Scope, Wall]:
        """Those that are known."""
        return self._tombstones

    def filling(self) -> list[BlockKey]:
        """The blocks whose slots are FILLING."""
        return list(self._filling)

    def forget_tombstones(self, tombstones: Mapping[Scope, Wall]) -> None:
        """Forget these, unless their blocks are still being dropped. The owner admits no more what they refuse."""
        for scope, before in tombstones.items():
            if self._tombstones.get(scope) == before and scope not in self._purging:
                del self._tombstones[scope]

    def purged_until(self, scope: Scope) -> Wall:
        """The time of the tombstone of the scope's tenant; -inf: none is known."""
        return self._tombstones.get(tenant_of(scope), _NEVER)

    def _is_purged(self, slot: Slot) -> bool:
        assert slot.key is not None
        return slot.life.born <= self._tombstones.get(tenant_of(slot.key), _NEVER)

    def _release(self, slot: Slot) -> None:
        assert slot.key is not None
        self.quota.give(slot.key)
        slot.state, slot.key, slot.digest, slot.stamps, slot.suspended = SlotState.FREE, None, None, (), False
        slot.generation += 1
        self._free.append(slot)

    def check(self) -> None:
        """Assert the invariants: slots conserved, index and states agree, policy orders exactly the residents."""
        by_state = {state: [s for s in self._slots if s.state is state] for state in SlotState}
        assert len(self._free) == len(by_state[SlotState.FREE]), "free queue and free slots differ"
        assert len(self._filling) == len(by_state[SlotState.FILLING]), "filling index and filling slots differ"
        assert len(self.index) == len(by_state[SlotState.READY]), "index and ready slots differ"
        assert self.quarantined == len(by_state[SlotState.QUARANTINED]), "quarantine count is off"
        assert all(self.index[s.key] is s for s in by_state[SlotState.READY] if s.key is not None)
        assert all(s.pins == 0 and s.key is None for s in by_state[SlotState.FREE]), "a free slot is pinned or named"
        assert self.pins.slots == sum(s.pins > 0 for s in self._slots), "pinned slots are miscounted"
        assert all(s.pins >= 1 for s in by_state[SlotState.QUARANTINED]), "a quarantined slot without a pin"
        assert self._retained <= self.index.keys(), "a block is retained that is not here"
        self.policy.check(set(self.index) - self._retained)
        assert self._priorities == Counter(slot.priority for slot in self.index.values()), "priorities are miscounted"
        self.quota.check([slot.key for slot in self._slots if slot.key is not None])

    def close(self) -> None:
        """Forget every block and give the memory back. Pins and slots that are still out are void: their `unpin`,
        `commit` and `abort` are stale."""
        self._ended = self._ended or bool(self._slots)
        for slot in self._filling.values():
            slot.generation += 1
        for slot in self._slots:
            if slot.pins:
                slot.generation, slot.pins = slot.generation + 1, 0
        self.pins.slots = self.quarantined = 0
        self._slots, self.index, self._filling = [], SlotIndex(), {}
        self._retained, self._priorities, self.policy = set(), Counter(), NoOrder()
        self._free.clear()
        self.arena.close()
