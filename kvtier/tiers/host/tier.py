"""G2: blocks in host RAM, found by key.

Only READY slots are in the index (`kvtier.tiers.host.slot`).
The tier holds no lock of its own: its owner calls it under one lock (`kvtier.manager.manager`), which is what makes
lookup and pin one critical section.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.events import Notify
from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.policies.policy import Policy
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import PRIORITY, Depth
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.quota import Quota
from kvtier.tiers.host.slot import Slot, SlotState
from kvtier.tiers.protocol import Miss

PRIORITY_MAX = 100


class HostTier:
    """Fixed slots in an arena, an index of READY blocks, and a policy that chooses who leaves."""

    name = "g2"
    depth = Depth.G2

    def __init__(self, arena: Arena, policy: Policy, quota: float = 0.0) -> None:
        """`quota`: the share of the slots that one scope may have; 0: all."""
        self.block_bytes = arena.piece_bytes * arena.ranks
        self.arena = arena
        self.policy = policy
        self._share = quota
        self._slots: list[Slot] = []
        self._free: deque[Slot] = deque()
        self._filling: dict[BlockKey, Slot] = {}
        self.index: dict[BlockKey, Slot] = {}
        self._retained: set[BlockKey] = set()  # READY, and not the policy's
        self._priorities: Counter[int] = Counter()  # of READY slots
        self._tombstones: dict[Scope, float] = {}
        self.quota = Quota(0, self.block_bytes)
        self.notify: Notify | None = None  # hears of blocks that become visible or cease to be
        self.on_lost: Callable[[BlockKey, Miss], None] | None = None  # hears which blocks left for others, and why
        self.evictions = 0
        self.stale_messages = 0
        self.quarantined = 0

    def open(self) -> None:
        """Allocate the arena. Raises ConfigError when memory is short of one block."""
        self.arena.open()
        self._slots = [Slot(number, self.arena.pieces(number)) for number in range(self.arena.slots)]
        self._free = deque(self._slots)
        if self._share:
            self.quota = Quota(max(1, int(self._share * len(self._slots))) * self.block_bytes, self.block_bytes)

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return len(self._slots)

    @property
    def capacity_bytes(self) -> int:
        return self.arena.capacity_bytes

    def over_quota(self, key: BlockKey) -> bool:
        """Whether the block's scope has as many slots as it may."""
        return self._share > 0 and self.quota.full(key)

    def peek(self, key: BlockKey, now: float) -> Miss | None:
        """None if a READY block of this name may be served at wall time `now`, else why not. Changes nothing."""
        slot = self.index.get(key)
        if slot is not None:
            return None if slot.expires_at >= now else Miss.EXPIRED
        return Miss.PENDING if key in self._filling else Miss.ABSENT

    def busy(self) -> bool:
        """Whether some slot is pinned, being filled or quarantined, and so may become evictable by itself. O(n)."""
        return any(slot.pins or slot.state is SlotState.FILLING for slot in self._slots)

    def prefix(self, chain: Sequence[BlockKey], now: float) -> int:
        """How many leading blocks of `chain` are READY and alive. Changes nothing."""
        find = self.index.get
        count = 0
        for key in chain:
            slot = find(key)
            if slot is None or slot.expires_at < now:
                break
            count += 1
        return count

    def pin(self, key: BlockKey, now: float, used: float | None = None) -> Slot | None:
        """Protect a READY block that is alive at wall time `now`; None if there is none. Undo with `unpin`.

        `used`: the wall time of the use, which renews the block; None where a block is moved in the background, which
        is no use of it.
        """
        slot = self.index.get(key)
        if slot is None or slot.expires_at < now:
            return None
        slot.pins += 1
        if used is not None:
            slot.use(used)
        return slot

    def unpin(self, slot: Slot, generation: int) -> None:
        """Undo one `pin`. A slot that was dropped meanwhile is freed with its last pin. Stale: counted, ignored."""
        if slot.generation != generation or slot.pins < 1:
            self.stale_messages += 1
            return
        slot.pins -= 1
        if slot.pins == 0 and slot.state is SlotState.QUARANTINED:
            self.quarantined -= 1
            self._release(slot)

    def reserve(
        self,
        key: BlockKey,
        index: int,
        keep: Callable[[BlockKey], bool] | None = None,
        *,
        insist: bool = False,
        priority: int = PRIORITY,
        now: float = 0.0,
    ) -> Slot | None:
        """A FILLING slot for `key`, the caller's until `commit` or `abort`.

        Takes a free slot, else evicts the policy's choice among unpinned blocks that `keep` does not claim, those of
        the lowest priority first and none above `priority`; with `insist` the policy may choose, but not refuse, and
        any priority gives way. What has expired at wall time `now` has none. A scope at its quota gives up a block of
        its own.
        None when the key is READY or FILLING already, or nothing may be evicted: then nothing has changed.
        """
        if key in self.index or key in self._filling:
            return None
        full = self.over_quota(key)
        if full or not self._free:
            victim = self._victim(key, keep, insist, priority, scope_of_key(key) if full else None, now)
            if victim is None:
                self.quota.refused += full
                return None
            self.evictions += 1
            if self.on_lost is not None:
                self.on_lost(victim, Miss.EXPIRED if self.index[victim].expires_at < now else Miss.EVICTED)
            self.drop(victim)
        slot = self._free.popleft()
        slot.state, slot.key, slot.index, slot.priority = SlotState.FILLING, key, index, priority
        self._filling[key] = slot
        if self._share:
            self.quota.take(key)
        return slot

    def _victim(
        self,
        newcomer: BlockKey,
        keep: Callable[[BlockKey], bool] | None,
        insist: bool,
        priority: int,
        scope: Scope | None,
        now: float,
    ) -> BlockKey | None:
        def movable(key: BlockKey) -> bool:
            slot = self.index[key]
            if slot.pins or (keep and keep(key)) or (slot.priority > limit and slot.expires_at >= now):
                return False
            return scope is None or scope_of_key(key) == scope

        levels = sorted(self._priorities) if len(self._priorities) > 1 else [priority]
        limit = priority
        for limit in levels:
            limit = min(limit, priority)
            if (victim := self.policy.victim(newcomer, movable)) is not None:
                return victim
        for limit in [*levels, PRIORITY_MAX] if insist else ():  # noqa: B007
            if (victim := self.policy.victim(None, movable)) is not None:
                return victim
        return None

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
        made (the slot is free again). Every block that becomes visible in G2 passes here.
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
        self.index[slot.key] = slot
        self._priorities[slot.priority] += 1
        self.policy.insert(slot.key)
        if self.notify is not None:
            self.notify((slot.key,), True)
        return True

    def abort(self, slot: Slot, generation: int, *, in_flight: bool = False) -> None:
        """Give up a FILLING slot. With `in_flight`, somebody may still write to it: it is quarantined until
        `acknowledge`. Stale: counted, ignored."""
        if slot.generation != generation or slot.state is not SlotState.FILLING or slot.key is None:
            self.stale_messages += 1
            return
        del self._filling[slot.key]
        if in_flight:
            slot.state = SlotState.QUARANTINED
            slot.pins += 1  # the writer's, taken back by `acknowledge`
            self.quarantined += 1
        else:
            self._release(slot)

    def acknowledge(self, slot: Slot, generation: int) -> None:
        """The last writer of a quarantined slot is done."""
        self.unpin(slot, generation)

    def drop(self, key: BlockKey) -> bool:
        """Take a READY block out of the index. Its memory is freed at once, or with its last pin. True if it was
        there."""
        slot = self.index.pop(key, None)
        if slot is None:
            return False
        self.policy.remove(key)
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
        """A request of a higher priority wants a READY block, too."""
        if priority > slot.priority:
            self._count_out(slot.priority)
            slot.priority = priority
            self._priorities[priority] += 1

    def retain(self, keys: Iterable[BlockKey]) -> None:
        """Let these blocks, as far as they are READY, be evicted for nobody while they are here; idempotent."""
        for key in keys:
            if key in self.index and key not in self._retained:
                self._retained.add(key)
                self.policy.remove(key)

    def release_retained(self, keys: Iterable[BlockKey]) -> None:
        """Undo `retain`; keys that are not held are ignored."""
        for key in keys:
            if key in self._retained:
                self._retained.remove(key)
                self.policy.insert(key)

    @property
    def retained(self) -> int:
        """Blocks that nobody may evict."""
        return len(self._retained)

    def drop_made_after(self, time: float) -> int:
        """Drop the blocks that carry a use or stamp later than this: the clock that made it was wrong."""
        doomed = [key for key, slot in self.index.items() if max(slot.last_use, slot.life.born) > time]
        return sum(self.drop(key) for key in doomed)

    def apply_tombstones(self, tombstones: Mapping[Scope, float]) -> int:
        """Drop the blocks of these scopes that were made before the given wall times, and let none of them in again.
        Returns how many went."""
        news = {scope: t for scope, t in tombstones.items() if self.is_newer_tombstone(scope, t)}
        if not news:
            return 0
        self._tombstones.update(news)
        doomed = [key for key, slot in self.index.items() if scope_of_key(key) in news and self._is_purged(slot)]
        return sum(self.drop(key) for key in doomed)

    def is_newer_tombstone(self, scope: Scope, before: float) -> bool:
        """Whether this tombstone is news."""
        return before > self._tombstones.get(scope, -1.0)

    def _is_purged(self, slot: Slot) -> bool:
        assert slot.key is not None
        return slot.life.born <= self._tombstones.get(scope_of_key(slot.key), -1.0)

    def reference(self, chain: Sequence[BlockKey], resident: int, now: float) -> None:
        """A request named `chain`, whose first `resident` blocks are here: renew their order of eviction."""
        self.policy.reference(chain, resident, now)

    def chain_stored(self, chain: Sequence[BlockKey], resident: int, now: float) -> None:
        """All of `chain` that is coming has been committed: a reference, unless the request was one already."""
        self.policy.chain_stored(chain, resident, now)

    def train(self) -> None:
        """Let the policy do what no request has to wait for."""
        self.policy.train()

    def _release(self, slot: Slot) -> None:
        assert slot.key is not None
        if self._share:
            self.quota.give(slot.key)
        slot.state, slot.key, slot.digest, slot.stamps = SlotState.FREE, None, None, ()
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
        assert all(s.pins >= 1 for s in by_state[SlotState.QUARANTINED]), "a quarantined slot that nobody holds"
        assert self._retained <= self.index.keys(), "a block is held that is not here"
        self.policy.check(set(self.index) - self._retained)
        assert self._priorities == Counter(slot.priority for slot in self.index.values()), "priorities are miscounted"
        self.quota.check([slot.key for slot in self._slots if slot.key is not None])

    def close(self) -> None:
        """Forget every block and give the memory back."""
        self._slots, self.index, self._filling = [], {}, {}
        self._free.clear()
        self.arena.close()
