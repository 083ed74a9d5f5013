"""Brings blocks up into G2: locate → plan → reserve → read → verify (the tier does) → commit.

A load is a task of its own: whoever waits for it may give up at a deadline, the slots stay FILLING until the
tier has let go of their memory, and what then arrives verified is kept. Two requests for one block share a load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvtier.errors import ClosedError
from kvtier.identity.key_map import KeyMap
from kvtier.identity.keys import BlockKey
from kvtier.manager.given_up import GivenUpLoads, Load
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.lease import Promotion
from kvtier.manager.locate import Locator
from kvtier.manager.outcomes import LoadOutcome, Outcomes
from kvtier.manager.plan import Costs, Plan, Planning, Where
from kvtier.manager.slices import MOVED_BLOCKS, SLICE_BLOCKS, in_strides, slices
from kvtier.manager.traced import traced_plan
from kvtier.retention.terms import PRIORITY
from kvtier.retention.trusted_clock import Reading
from kvtier.supervisor import end_tasks
from kvtier.tiers.host.pins import Hold, Holds
from kvtier.tiers.host.slot import Slot, SlotState
from kvtier.tiers.meter import Metered
from kvtier.tiers.protocol import Loaded, Miss, Target
from kvtier.times import Mono, Wall

GRACE_S = 1.0
"""How long `close` still waits for loads that nobody waits for."""

LOADS_AT_ONCE = 16
"""Of one request: more would be ahead of other requests' in the tier's queue, and might end in one turn of the loop."""

_SMOOTHING = 0.2
_BLOCK_S_MAX = 3600.0  # to compute one block


class Promoter:
    """Look-ups, plans and loads under way. Runs on one event loop; slots change under the hierarchy's lock."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._host, self._lock, self._clock = hierarchy.host, hierarchy.lock, hierarchy.clock
        self._turns = hierarchy.turns
        self.given_up = GivenUpLoads(hierarchy)
        self.locate = Locator(hierarchy, self.given_up.stuck).locate
        self._under_way = KeyMap[Load]()
        self._compute_s_per_block: float | None = None
        self._closed = False

    # ── planning ────────────────────────────────────────────────────────────────────────────────────────────

    @traced_plan
    async def plan(self, where: Sequence[Where], slots: int, costs: Costs | None = None) -> Plan:
        """`make_plan`, in slices."""
        planning = Planning(slots, self._host.name, costs)
        for first in range(0, len(where), SLICE_BLOCKS):
            if first:
                await self._turns.next()
            planning.add(where[first : first + SLICE_BLOCKS])
        return planning.plan()

    def computed(self, blocks: float, seconds: float) -> None:
        """The engine computed this many blocks in this time: the estimate that loading is weighed against. A time of 0
        is one that the clock could not tell: no estimate. Nor is one that no engine takes: the mean would keep it."""
        sample = seconds / max(blocks, 1e-9)
        if not 0 < sample < _BLOCK_S_MAX:
            return
        old = self._compute_s_per_block
        self._compute_s_per_block = sample if old is None else old + _SMOOTHING * (sample - old)

    def costs(self) -> Costs | None:
        """What blocks cost to compute, and to load from each tier that was read lately; None: nothing was computed."""
        if self._compute_s_per_block is None:
            return None
        known = {name: tier.estimate() for name, tier in self._hierarchy.lower.items()}
        return Costs(self._compute_s_per_block, {name: cost for name, cost in known.items() if cost is not None})

    # ── bringing up ─────────────────────────────────────────────────────────────────────────────────────────

    async def promote(
        self, chain: Sequence[BlockKey], start: int, deadline: Mono, time: Reading, *, referenced: bool
    ) -> Promotion:
        """Bring the longest prefix that pays off into G2 and pin its blocks from `start` on, by `deadline`; late blocks
        are misses. `referenced`: the policy knows of this request already.

        Works in slices. At each yield every Slot in `found` is pinned once, in the generation it was found in; nothing
        else is relied on. So a block that was evicted or purged since it was located ends the hit, a purge of a pinned
        one takes effect when it is released, and a cancellation undoes exactly the pins in `found` and `holds`.
        """
        where = await self.locate(chain, deadline, start)
        plan = await self.plan(where, start + self._host.capacity, self.costs())
        found, holds = Outcomes(), list[Holds]()
        try:
            await self._pin_resident(chain, where, range(start, plan.hit), time, found)
            if not referenced:  # before the loads, so that the policy knows for which request it evicts
                for _ in self._hierarchy.reference_steps(chain, start + len(found)):
                    await self._turns.next()
            await self._load(chain, plan.loads, deadline, found)
            for first in range(start, plan.hit, SLICE_BLOCKS):
                if first > start:
                    await self._turns.next()
                if not self._take(range(first, min(first + SLICE_BLOCKS, plan.hit)), where, time, found, holds):
                    break
            await self._turns.next()
            pinned = Holds.joined(holds)
            await self._turns.next()
        except BaseException:
            self._hierarchy.release(Holds.joined(holds)[::-1])
            self._undo(found)
            raise
        if self._hierarchy.unproven:  # since the beginning
            self._hierarchy.release(pinned[::-1])
            pinned, plan = (), replace(plan, hit=start, miss=Miss.UNPROVEN)
        hit, miss = start + len(pinned), plan.miss
        if hit < plan.hit:
            outcome = found.get(hit, Miss.EVICTED)
            miss = outcome if isinstance(outcome, Miss) else Miss.EVICTED
        self._undo(found)
        return Promotion(pinned, where[start:hit], miss)

    async def _pin_resident(
        self,
        chain: Sequence[BlockKey],
        where: Sequence[Where],
        depths: range,
        time: Reading,
        found: Outcomes,
    ) -> None:
        """Pin the blocks that were located in G2, as far as they still are."""
        for part in slices(depths):
            if part[0] > depths[0]:
                await self._turns.next()
            with self._lock:
                for index in part:
                    if where[index] == self._host.name:
                        slot = self._host.pin(chain[index], time.serve, time.stamp)
                        if slot is not None:
                            found[index] = slot

    def _take(
        self,
        depths: range,
        where: Sequence[Where],
        time: Reading,
        found: Outcomes,
        holds: list[Holds],
    ) -> bool:
        """Move pins from `found` to `holds`, up to the first block that was not had. Whether all were."""
        table, numbers, loaded = self._host.index.table, list[int](), list[int]()
        for index in depths:
            slot = found.get(index)
            if not isinstance(slot, Slot) or slot.table is not table:  # or the cache was closed
                break
            numbers.append(slot.number)
            if where[index] != self._host.name:
                loaded.append(slot.number)
        with self._lock:
            table.use_all(loaded, time.stamp)
            held = np.array(numbers, np.intp)
            holds.append(Holds(table, held, table.columns.generations[held]))
            found.forget(depths[: len(numbers)])
        return len(numbers) == len(depths)

    def _undo(self, found: Outcomes) -> None:
        """Undo the pins of these outcomes, which nobody else may change any more."""
        self._hierarchy.release((slot, slot.generation) for slot in found.pinned())

    async def load(self, chain: Sequence[BlockKey], loads: Mapping[str, Sequence[int]], deadline: Mono) -> Outcomes:
        """Bring the blocks at `loads[tier]` of `chain` into G2; answers for each by `deadline`.

        Every Slot in the result is pinned once, which the caller undoes, and not renewed: that is for who serves it.
        Past the bound of abandoned loads nothing is started: NO_ROOM. A load that is shared with an earlier request and
        came too late for that one is tried again for this one.
        """
        found = Outcomes()
        try:
            await self._load(chain, loads, deadline, found)
        except BaseException:
            self._undo(found)
            raise
        return found

    async def _load(
        self,
        chain: Sequence[BlockKey],
        loads: Mapping[str, Sequence[int]],
        deadline: Mono,
        found: Outcomes,
    ) -> None:
        """`load` into `found`, whose pins are the caller's at every yield."""
        while loads:
            late = await self._load_once(chain, loads, deadline, found)
            if self._clock.monotonic() >= deadline:
                break
            loads = late

    async def _load_once(
        self,
        chain: Sequence[BlockKey],
        loads: Mapping[str, Sequence[int]],
        deadline: Mono,
        found: Outcomes,
    ) -> Mapping[str, Sequence[int]]:
        """Set the outcome of each load; returns those that came too late for the earlier requests they are shared with.

        A task per slice. At each yield a block is in `_under_way`, where a request for it shares the load, or its
        outcome is in `found`, or it has not been looked at. What a task has read is pinned for its result: that goes to
        `found`, or is undone once it is given up.
        """
        mine: list[tuple[str, Load, list[tuple[int, Slot]]]] = []
        shared: list[tuple[Load, str, list[int]]] = []
        stop = len(chain)  # the first block that there is no slot for: later ones are of no use without it
        try:
            for name, indices in loads.items():
                for part in in_strides(indices, self._hierarchy.lower[name].stride):
                    await self._turns.next()
                    if part[0] > stop:
                        found.update(dict.fromkeys(part, Miss.NO_ROOM))
                        continue
                    before = [mine[-LOADS_AT_ONCE][1]] if len(mine) >= LOADS_AT_ONCE else []
                    if not await self.given_up.wait(before, deadline):
                        found.update(dict.fromkeys(part, Miss.LATE))
                        continue
                    joined, reserved = self._reserve(name, chain, part, found)
                    shared += ((load, name, depths) for load, depths in joined.items())
                    if reserved:
                        load = self._start(name, chain, reserved, deadline)
                        mine.append((name, load, reserved))
                    stop = min([stop, *(index for index in part if found.get(index) is Miss.NO_ROOM)])
            await self.given_up.wait([load for _, load, _ in mine], deadline)
            await self.given_up.wait((load for load, _, _ in shared), deadline, shared=True)
            while mine:
                name, load, reserved = mine[-1]
                if load.done() and not load.cancelled():
                    found.update(load.result())
                else:
                    self._give_up(name, load, chain, reserved)
                    found.update({index: Miss.LATE for index, _ in reserved})
                mine.pop()
                await self._turns.next()
        except BaseException:
            for name, load, reserved in mine:
                self._give_up(name, load, chain, reserved)
            raise
        late: dict[str, list[int]] = {}
        for load, name, depths in shared:
            await self._turns.next()
            self._join(chain, load, depths, found)
            if again := [index for index in depths if found[index] is Miss.LATE]:
                late.setdefault(name, []).extend(again)
        return late

    def _reserve(
        self, name: str, chain: Sequence[BlockKey], depths: Sequence[int], found: Outcomes
    ) -> tuple[dict[Load, list[int]], list[tuple[int, Slot]]]:
        """Returns the depths that earlier requests load, and FILLING slots for the others; in `found` are the outcomes
        of those that turned up meanwhile, or have no slot."""
        joined: dict[Load, list[int]] = {}
        reserved: list[tuple[int, Slot]] = []
        at, clogged = 0, self._hierarchy.is_clogged(self._hierarchy.lower[name])
        barred = Miss.BREAKER if self._closed else Miss.NO_ROOM if clogged else None
        stuck = self.given_up.stuck(name)
        with self._lock:
            while at < len(depths):
                index = depths[at]
                under_way, late = self._under_way.get(key := chain[index]), stuck is not None and stuck(key)
                if not (barred or late) and self.take_over(key):
                    continue
                if under_way is not None and not self.given_up.is_stuck(under_way):
                    joined.setdefault(under_way, []).append(index)
                elif barred is not None:
                    found[index] = barred
                elif late and self._host.find(key) is None:  # it would be another read that is stuck
                    found[index] = Miss.LATE
                elif slots := self._reserve_leading(chain, depths[at:] if stuck is None else depths[at : at + 1]):
                    reserved += zip(depths[at:], slots, strict=False)
                    at += len(slots) - 1
                elif isinstance(slot := self._turned_up(chain[index], index), Slot) and slot.state is SlotState.FILLING:
                    reserved.append((index, slot))
                else:
                    found[index] = Miss.LATE if slot is Miss.PENDING else slot
                at += 1
        return joined, reserved

    def is_stuck(self, key: BlockKey) -> bool:
        """Whether the load that fills this block is stuck. Under the lock; on any thread."""
        load = self._under_way.get(key)
        return load is not None and self.given_up.is_stuck(load)

    def take_over(self, key: BlockKey) -> bool:
        """Have a block be absent that a load fills, if that is stuck; whether it is. The load keeps the slot. Under the
        lock; on any thread."""
        if stuck := self.is_stuck(key):
            self.given_up.take_over(self._under_way.pop(key), key)
        return stuck

    def _reserve_leading(self, chain: Sequence[BlockKey], depths: Sequence[int]) -> list[Slot]:
        """FILLING slots for the first of these blocks, as far as they lie one behind the other, and none is here. Under
        the lock."""
        first = depths[0]
        stop = next((at for at, index in enumerate(depths) if index != first + at), len(depths))
        keys, table = chain[first : first + stop], self._host.index.table
        numbers, _ = self._host.reserve_leading(keys, first, None, insist=True, priority=PRIORITY, wall_s=Wall(0))
        return [Slot(number, table) for number in numbers]

    def _turned_up(self, key: BlockKey, index: int) -> LoadOutcome:
        """The READY slot, pinned, of a block that turned up meanwhile; a FILLING one if it may not be served; or why
        neither. Under the lock."""
        slot = self._host.reserve(key, index, insist=True)
        if slot is not None:
            return slot
        why = self._host.peek(key, self._clock.wall())
        if why is Miss.ABSENT:
            return Miss.NO_ROOM
        if why is Miss.EXPIRED:
            self._host.drop(key)
            return self._host.reserve(key, index, insist=True) or Miss.NO_ROOM
        return self._host.pin(key, self._clock.wall()) or why or Miss.EVICTED

    def _join(self, chain: Sequence[BlockKey], load: Load, depths: Sequence[int], found: Outcomes) -> None:
        """Set the outcomes of blocks that an earlier request was loading."""
        result = load.result() if load.done() and not load.cancelled() and load.exception() is None else Outcomes()
        with self._lock:
            now = self._clock.wall()
            for index in depths:
                key = chain[index]
                outcome: LoadOutcome = self._host.pin(key, now) or self._host.peek(key, now) or Miss.EVICTED
                if outcome is Miss.ABSENT and load.done():
                    loaded = result.get(index)
                    outcome = loaded if isinstance(loaded, Miss) else Miss.EVICTED
                found[index] = Miss.LATE if outcome is Miss.PENDING else outcome

    def _start(
        self, name: str, chain: Sequence[BlockKey], reserved: Sequence[tuple[int, Slot]], deadline: Mono
    ) -> Load:
        load = self._hierarchy.supervisor.spawn(self._read(self._hierarchy.lower[name], chain, reserved, deadline))
        with self._lock:
            self._under_way.set_all((chain[index] for index, _ in reserved), load)
        generations = [slot.generation for _, slot in reserved]

        def ended(load: Load) -> None:
            """Free the slots of a load that was cancelled before its first step."""
            if any(self._under_way.get(chain[index]) is load for index, _ in reserved):
                reads = zip(reserved, generations, [Miss.LATE] * len(reserved), strict=True)
                now = self._hierarchy.now().stamp
                self._end_reads(chain, list(reads), now, now, in_flight=False)

        load.add_done_callback(ended)
        return load

    async def _read(
        self, tier: Metered, chain: Sequence[BlockKey], reserved: Sequence[tuple[int, Slot]], deadline: Mono
    ) -> Outcomes:
        """Fill reserved slots; every one of them is READY and pinned, or free again, when this returns."""
        generations, began = [slot.generation for _, slot in reserved], self._hierarchy.now().stamp
        results: Sequence[Loaded | Miss] = [Miss.ERROR] * len(reserved)
        in_flight, outcomes = False, Outcomes()

        def ending() -> Iterator[None]:
            for part in slices(list(zip(reserved, generations, results, strict=True)), MOVED_BLOCKS):
                outcomes.update(self._end_reads(chain, part, self._hierarchy.latest(), began, in_flight=in_flight))
                yield

        steps = ending()
        try:
            await self._turns.next()
            try:
                targets = [Target(index, slot.pieces) for index, slot in reserved]
                results = await tier.read(chain, targets, deadline)
            except asyncio.CancelledError:
                in_flight = True  # the tier was cut off: its threads may still write to the slots
                raise
            except ClosedError:
                raise
            except Exception as error:  # a tier's own failures are answers: this is ours, and costs a miss
                self._hierarchy.supervisor.failures.record(f"{tier.name} load", error, tier.breaker)
            await self._turns.next()
            for _ in steps:
                await self._turns.next()
        except BaseException:
            for _ in steps:
                pass
            self._undo(outcomes)
            raise
        return outcomes

    def _end_reads(
        self,
        chain: Sequence[BlockKey],
        reads: Sequence[tuple[tuple[int, Slot], int, Loaded | Miss]],
        latest: Wall,
        began: Wall,
        *,
        in_flight: bool,
    ) -> dict[int, LoadOutcome]:
        """Publish and pin what was read into these slots, of these generations, and free the others."""
        outcomes, filled, others = dict[int, LoadOutcome](), list[Hold](), list[Hold]()
        with self._lock:
            for (index, slot), generation, result in reads:
                if slot.state is SlotState.QUARANTINED:  # another load has the block
                    outcomes[index] = Miss.LATE
                    others.append((slot, generation))
                    continue
                self._under_way.pop(chain[index], None)
                if isinstance(result, Loaded):
                    slot.describe(generation, result.life.dated_by(began), result.digest, result.priority)
                    filled.append((slot, generation))
                else:
                    self._host.abort(slot, generation, in_flight=in_flight)
                    outcomes[index] = result
            seen = self._host.commit_all(filled, latest)
            self._host.pins.pin_all(numbers := {slot.number for slot in seen})
            self._host.tell(seen)
        if not in_flight:
            self._hierarchy.release(others)
        for (index, slot), _, _ in reads:
            outcomes.setdefault(index, slot if slot.number in numbers else Miss.PURGED)
        return outcomes

    @property
    def overdue(self) -> int:
        """FILLING slots of loads that nobody waits for any more."""
        return sum(tier.overdue for tier in self._hierarchy.lower.every()) - self.given_up.taken

    def _give_up(self, name: str, load: Load, chain: Sequence[BlockKey], reserved: Sequence[tuple[int, Slot]]) -> None:
        """Nobody waits for this load from a tier into these slots any more."""
        slots = {chain[index]: (slot, slot.generation) for index, slot in reserved}
        self.given_up.add(self._hierarchy.lower[name], load, slots)

    async def close(self, deadline: Mono) -> None:
        """Begin no load any more. Wait for those under way, and no longer than GRACE_S for those that were given up,
        then cancel them. One that does not end then is abandoned: its tier keeps the memory that it reads into."""
        self._closed = True
        given_up = self.given_up.running()
        with self._lock:  # a put may take blocks over
            tasks = {*self._under_way.values(), *given_up}
        await self.given_up.wait(tasks - given_up, deadline)
        await self.given_up.wait(given_up, min(deadline, self._clock.monotonic() + GRACE_S))
        await end_tasks(tasks, deadline - self._clock.monotonic())
